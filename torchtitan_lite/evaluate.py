"""`python -m torchtitan_lite.evaluate`: see torchtitan_lite.tools.evaluation.evaluate."""

import sys

from torchtitan_lite.tools.evaluation.evaluate import main

if __name__ == "__main__":
    main(sys.argv[1:])
