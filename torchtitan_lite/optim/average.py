"""An exponential moving average of the weights (`optim.ema_decay`).

After step n it is the weighted mean of the weights after steps 1 to n, with weight decay^(n - i) for step i. So the
initial weights have no effect, and an update needs only the step number.

The average is a further entry of each parameter's optimizer state, a DTensor like the parameter. So it is sharded,
saved, resharded and loaded like a moment, and `plan` counts it.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.optim.guarded import GuardedOptimizer

KEY = "ema"


def keep_average(optimizer: GuardedOptimizer, decay: float) -> None:
    """Update the averages at the end of each `optimizer.step`.

    Where `found_inf` is 1, nothing changes. `update` sets `step_number`; without `update`, each step adds 1.
    """
    optimizer.defaults["ema_decay"] = decay
    plain = optimizer.step
    optimizer.step_number = 0

    @torch.no_grad()
    def step(self: GuardedOptimizer, closure: Any = None) -> Any:
        result = plain(closure)
        self.step_number += 1
        # 1 in the first step, 1 - decay in the limit
        share = (1 - decay) / (1 - decay**self.step_number)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if KEY not in state:
                    state[KEY] = parameter.detach().clone()
                # not lerp: it rounds the last elements of a shard differently
                mean, weight = own_part(state[KEY])[0], own_part(parameter)[0]
                moved = weight if share == 1 else (weight - mean).mul_(share).add_(mean)
                mean.copy_(moved if self.found_inf is None else torch.where(self.found_inf != 0, mean, moved))
        return result

    # must be a method: torch's learning-rate schedulers wrap it
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


@contextlib.contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the parameters by their averages within this block. Copies one parameter at a time."""
    _swap(optimizer)
    try:
        yield
    finally:
        _swap(optimizer)


@torch.no_grad()
def _swap(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        mean, weight = own_part(state[KEY])[0], own_part(parameter)[0]
        kept = weight.clone()
        weight.copy_(mean)
        mean.copy_(kept)


@contextlib.contextmanager
def as_saved(optimizer: torch.optim.Optimizer, saved: bool) -> Iterator[None]:
    """Give the optimizer state averages only if the checkpoint has them, while the checkpoint is loaded.

    Afterwards, a new average starts from the loaded weights, and an average that the config no longer asks for is
    dropped.
    """

    def change(add: bool) -> None:
        for parameter, state in optimizer.state.items():  # torch's functions replace the dicts
            if add:
                state[KEY] = parameter.detach().clone()
            else:
                del state[KEY]

    change(saved)
    yield
    change(not saved)
