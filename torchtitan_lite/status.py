"""`python -m torchtitan_lite.status`: see torchtitan_lite.tools.status."""

import sys

from torchtitan_lite.tools.status import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
