"""train.py or `evaluate`, whose figures have each document's bits and bytes: for benchmarks/learning.py.

python -m benchmarks.learning_train train|evaluate OPTIONS...
"""

import math
import runpy
import sys
from pathlib import Path
from typing import Any

from torchtitan_lite.tools.evaluation import tables
from torchtitan_lite.tools.evaluation.documents import Scores

ROOT = Path(__file__).parent.parent


def documents() -> None:
    """Add each document's bits and bytes to the figures of `evaluate`."""
    given = tables.figures

    def figures(scores: Scores) -> dict[str, Any]:
        bits = (scores.nats / math.log(2)).round(3)
        return {**given(scores), "bits": bits.tolist(), "bytes": scores.n_bytes.round(3).tolist()}

    tables.figures = figures


if __name__ == "__main__":
    program, *options = sys.argv[1:]
    documents()
    sys.path.insert(0, str(ROOT))
    file = {"train": ROOT / "train.py", "evaluate": ROOT / "torchtitan_lite" / "evaluate.py"}[program]
    sys.argv = [str(file), *options]
    runpy.run_path(sys.argv[0], run_name="__main__")
