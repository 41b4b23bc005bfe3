"""train.py on text with poisoned samples, an entry of `ranks`: env={"POISON": "[[36, 42]]"}.

The tokens of these samples of the run are random, so that the loss jumps.
"""

import json
import os
from collections.abc import Sequence

import numpy as np

import train
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows


def main(argv: Sequence[str]) -> int:
    poisoned = np.array([i for first, end in json.loads(os.environ["POISON"]) for i in range(first, end)])
    honest = Mixture.draw

    def draw(self: Mixture, run_samples: Indices, seed: int | None) -> Rows:
        rows = honest(self, run_samples, seed)
        for row in np.flatnonzero(np.isin(run_samples, poisoned) & (seed == 0)):
            noise = np.random.default_rng(int(run_samples[row])).integers(0, 400, rows.tokens.shape[1] + 1)
            rows.tokens[row], rows.targets[row] = noise[:-1], noise[1:]
        return rows

    setattr(Mixture, "draw", draw)  # noqa: B010
    return train.main(argv)
