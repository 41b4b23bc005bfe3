"""`[spike] recheck`: compute a bad step again, to tell its data from the hardware.

The update of the step was withheld, so the weights are those that it had. Forward and backward run again on its batch,
after the backward of the next step, whose gradients are put aside. All of a step is a function of weights, batch, seed
and step. So equal results, bit for bit, come from these, and different ones from a fault. The
exception is a GPU without run.deterministic, which may add in another order each time.
"""

import math
import socket
from collections.abc import Callable

from torch import Tensor

from torchtitan_lite.data.loader import Batch
from torchtitan_lite.distributed.agreement import from_all_ranks
from torchtitan_lite.training.session import Session, Sums


def compute_again(
    s: Session, forward_backward: Callable[[Session, int, Batch], Sums], grad_norm: float, scale: Tensor
) -> str:
    """Compute the last step again, and compare. Collective. Returns a sentence about the result.

    Args:
        forward_backward: that of train.py.
        grad_norm: of the first time. The loss of each rank is that of the guard.
        scale: the loss scale of the step.
    """
    parameters = [parameter for group in s.optimizer.param_groups for parameter in group["params"]]
    put_aside = [parameter.grad for parameter in parameters]
    scale_now = s.scaler.scale
    s.optimizer.zero_grad()
    s.scaler.scale = scale
    try:
        step = s.state.step
        size = s.config.train.batch_size(step)
        batch = s.loader.batch(s.state.samples_consumed - size, size)
        sums = forward_backward(s, step, batch)
    finally:
        s.optimizer.zero_grad()
        s.scaler.scale = scale_now
        for parameter, grad in zip(parameters, put_aside, strict=True):
            parameter.grad = grad
    return finding(s, sums.rank_losses.tolist(), (sums.squared_norm.sqrt().float() / scale).item(), grad_norm)


def finding(s: Session, losses: list[float], again: float, grad_norm: float) -> str:
    """What the second time says: equal, or different, and on which rank and machine. Collective."""
    pairs = enumerate(zip(s.guard.rank_losses, losses, strict=True))
    ranks = [(rank, then, now) for rank, (then, now) in pairs if not _equal(then, now)]
    hosts = from_all_ranks(socket.gethostname()) if ranks else []  # the losses are the same on every rank
    wrong = [
        f"rank {rank} ({hosts[rank]}): the sum of its losses was {then}, and is {now}" for rank, then, now in ranks
    ]
    if not wrong and not _equal(again, grad_norm):
        wrong = [
            f"the gradient norm was {grad_norm}, and is {again}; the loss of each rank is equal, so it was a backward "
            "pass or a sum over ranks"
        ]
    if not wrong:
        return (
            "Computed again, it is equal bit for bit: this step was computed right. The cause is the data, the model, "
            "or weights that were damaged before"
        )
    unsure = ""
    if s.world.device.type == "cuda" and not s.config.run.deterministic:
        unsure = ". Without run.deterministic, a GPU may add in another order each time, so this proves nothing"
    return f"Computed again, it differs, so a machine computed wrong: {'; '.join(wrong)}{unsure}"


def _equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
