"""`python -m torchtitan_lite.migrate`: see torchtitan_lite.tools.migrate_accelerate."""

from torchtitan_lite.tools.migrate_accelerate import main

if __name__ == "__main__":
    raise SystemExit(main())
