"""`python -m torchtitan_lite.status`: see torchtitan_lite.tools.status."""

from torchtitan_lite.tools.status import main

if __name__ == "__main__":
    raise SystemExit(main())
