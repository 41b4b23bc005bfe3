"""`python -m torchtitan_lite.report`: see torchtitan_lite.tools.report.report."""

from torchtitan_lite.tools.report.report import main

if __name__ == "__main__":
    raise SystemExit(main())
