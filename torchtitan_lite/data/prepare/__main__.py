"""`python -m torchtitan_lite.data.prepare`."""

import sys

from torchtitan_lite.data.prepare.cache import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
