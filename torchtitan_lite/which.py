"""`python -m torchtitan_lite.which`: see torchtitan_lite.tools.which."""

from torchtitan_lite.tools.which import main

if __name__ == "__main__":
    raise SystemExit(main())
