"""`python -m torchtitan_lite.plan`: see torchtitan_lite.tools.estimate.command."""

from torchtitan_lite.tools.estimate.command import main as main

if __name__ == "__main__":
    raise SystemExit(main())
