"""`python -m torchtitan_lite.plan`: see torchtitan_lite.tools.plan."""

import sys

from torchtitan_lite.tools.plan import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
