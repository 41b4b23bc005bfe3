"""train.py on text with poisoned samples, an entry of `ranks`: env={"POISON": "[[36, 42]]"}.

The tokens of these samples of the run are random, so that the loss jumps. FLIP="rank:step" flips a high bit in a
product of this rank's forward pass, once: its loss jumps without a reason in the data. KILL="rank:step" kills this
rank at this step after a rewind, STOP="rank:step" asks it to stop. DAMAGE=file cuts a byte off this file at step 16.
"""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows


def main(argv: Sequence[str]) -> int:
    poison()
    rank = os.environ.get("RANK", "0")
    hit = {key: os.environ.get(key, "").split(":") for key in ("FLIP", "KILL", "STOP")}
    at = {key: int(where[1]) for key, where in hit.items() if where[0] == rank}
    damaged = Path(os.environ.get("DAMAGE", "/nowhere"))
    honest, done = train.train_step, list[bool]()

    def flip(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        if not done:
            values = output.detach().view(-1)
            values.view(torch.int32)[values.abs().argmin()] ^= 1 << 30  # times 2^128
        done.append(True)

    def train_step(s: Any, number: int) -> Any:
        if number == 16 and rank == "0" and damaged.exists():
            os.truncate(damaged, damaged.stat().st_size - 1)
        if number == at.get("KILL") and s.state.jumps:
            print(f"KILLED at step {number}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if number == at.get("STOP") and not s.state.jumps:
            os.kill(os.getpid(), signal.SIGTERM)
        if number != at.get("FLIP") or done:
            return honest(s, number)
        print(f"FLIP at step {number}", flush=True)
        with s.model.norm.register_forward_hook(flip):
            return honest(s, number)

    setattr(train, "train_step", train_step)  # noqa: B010
    return train.main(argv)


def poison() -> None:
    """Put random tokens in place of the samples in POISON."""
    poisoned = np.array([i for first, end in json.loads(os.environ.get("POISON", "[]")) for i in range(first, end)])
    honest = Mixture.draw

    def draw(self: Mixture, run_samples: Indices, seed: int | None) -> Rows:
        rows = honest(self, run_samples, seed)
        for row in np.flatnonzero(np.isin(run_samples, poisoned) & (seed == int(os.environ.get("SEED", "0")))):
            noise = np.random.default_rng(int(run_samples[row])).integers(0, 400, rows.tokens.shape[1] + 1)
            rows.tokens[row], rows.targets[row] = noise[:-1], noise[1:]
        return rows

    setattr(Mixture, "draw", draw)  # noqa: B010
