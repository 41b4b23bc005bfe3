"""`python -m torchtitan_lite.generate`: see torchtitan_lite.tools.generate."""

import sys

from torchtitan_lite.tools.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
