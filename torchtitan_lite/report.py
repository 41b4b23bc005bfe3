"""`python -m torchtitan_lite.report`: see torchtitan_lite.tools.report.report."""

import sys

from torchtitan_lite.tools.report.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
