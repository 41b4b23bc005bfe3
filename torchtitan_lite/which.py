"""`python -m torchtitan_lite.which`: see torchtitan_lite.tools.which."""

import sys

from torchtitan_lite.tools.which import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
