"""`python -m torchtitan_lite.evaluate`: see torchtitan_lite.tools.evaluation.evaluate."""

from torchtitan_lite.tools.evaluation.evaluate import main

if __name__ == "__main__":
    main()
