"""train.py, with one flipped bit in a product of a rank: an entry of `ranks`.

FLIP="rank:step:where": "forward" flips a bit of a layer's output, "backward" one of a gradient, "update" one of a
parameter after the optimizer's step.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

import train
from torchtitan_lite.distributed.sharding import local_rows


def main(argv: Sequence[str]) -> int:
    rank, step, where = os.environ["FLIP"].split(":")
    if os.environ.get("RANK", "0") == rank:
        _install(int(step), where)
    return train.main(argv)


def _install(step: int, where: str) -> None:
    honest = train.train_step

    def train_step(s: Any, number: int) -> Any:
        if number != step:
            return honest(s, number)
        print(f"FLIP at step {step}: {where}", flush=True)
        if where == "update":
            result = honest(s, number)
            _flip(local_rows(s.model.get_parameter("output.weight"))[0].detach())
            return result
        done: list[bool] = []

        def once(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            if where == "forward" and not done:
                _flip(output.detach())
            elif where == "backward" and not done:
                output.register_hook(lambda gradient: _flipped(gradient))
            done.append(True)

        with s.model.layers[-1].register_forward_hook(once):
            return honest(s, number)

    setattr(train, "train_step", train_step)  # noqa: B010


def _flip(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(torch.int32)[(0,) * tensor.ndim] ^= 1 << 22


def _flipped(gradient: torch.Tensor) -> torch.Tensor:
    copy = gradient.clone()
    _flip(copy)
    return copy
