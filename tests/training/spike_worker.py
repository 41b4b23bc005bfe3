"""train.py on text with poisoned samples, an entry of `ranks`: env={"POISON": "[[36, 42]]"}.

The tokens of these samples of the run are random, so that the loss jumps. FLIP="rank:step" flips a high bit in a
product of this rank's forward pass, once: its loss jumps without a reason in the data. KILL="rank:step" kills this
rank at this step after a rewind. DAMAGE=file cuts a byte off this file at step 16.
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
    if "FLIP" in os.environ:
        rank, step = os.environ["FLIP"].split(":")
        if os.environ.get("RANK", "0") == rank:
            _flip_at(int(step))
    if "KILL" in os.environ:
        rank, step = os.environ["KILL"].split(":")
        if os.environ.get("RANK", "0") == rank:
            _kill_at(int(step))
    if "DAMAGE" in os.environ and os.environ.get("RANK", "0") == "0":
        _damage(Path(os.environ["DAMAGE"]))
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


def _damage(file: Path) -> None:
    honest = train.train_step

    def train_step(s: Any, number: int) -> Any:
        if number == 16 and file.exists():
            os.truncate(file, file.stat().st_size - 1)
        return honest(s, number)

    setattr(train, "train_step", train_step)  # noqa: B010


def _kill_at(step: int) -> None:
    honest = train.train_step

    def train_step(s: Any, number: int) -> Any:
        if number == step and s.state.jumps:
            print(f"KILLED at step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(s, number)

    setattr(train, "train_step", train_step)  # noqa: B010


def _flip_at(step: int) -> None:
    honest, done = train.train_step, list[bool]()

    def train_step(s: Any, number: int) -> Any:
        if number != step or done:
            return honest(s, number)
        print(f"FLIP at step {step}", flush=True)

        def once(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            if not done:
                values = output.detach().view(-1)
                values.view(torch.int32)[values.abs().argmin()] ^= 1 << 30  # times 2^128
            done.append(True)

        with s.model.norm.register_forward_hook(once):
            return honest(s, number)

    setattr(train, "train_step", train_step)  # noqa: B010
