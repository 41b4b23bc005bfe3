"""`python -m torchtitan_lite.rouge`: see torchtitan_lite.tools.evaluation.rouge."""

import sys

from torchtitan_lite.tools.evaluation.rouge import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
