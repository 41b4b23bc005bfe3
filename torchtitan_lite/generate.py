"""`python -m torchtitan_lite.generate`: see torchtitan_lite.tools.generate."""

from torchtitan_lite.tools.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
