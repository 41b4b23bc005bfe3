"""Keeping NaN and infinity out of the parameters and out of checkpoints."""

import torch
from torch import Tensor, nn

from torchtitan_lite.distributed import sum_over_ranks
from torchtitan_lite.errors import NonFiniteError
from torchtitan_lite.init import local_rows


def require_finite(model: nn.Module, step: int) -> None:
    """
    Raises:
        NonFiniteError: on every rank, if a parameter is not finite on any: it must not be saved.
    """
    finite = [local_rows(parameter)[0].isfinite().all() for parameter in model.parameters()]
    bad = (~torch.stack(finite)).float()
    if sum_over_ranks(bad).any():
        names = [name for (name, _), flag in zip(model.named_parameters(), bad.tolist(), strict=True) if flag]
        raise NonFiniteError(
            f"step {step}: {len(names)} parameters are not finite, the first is {names[0]}. They were not saved. "
            "Older checkpoints are untouched; a lower optim.lr may help"
        )


class FiniteGuard:
    """Withholds an update on the device, and tells the host one step later.

    Fused AdamW leaves parameters, moments and step counts alone where its `found_inf` is 1. The host's copy of the
    verdict is read while the device already works on the next step, so that a healthy run never waits for it. SGD has
    no such form for DTensors: there the host waits for the verdict, and skips the update itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._fused = bool(optimizer.defaults.get("fused"))
        self._pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def update(self, step: int, bad_ranks: Tensor, grad_norm: Tensor) -> None:
        """Step the optimizer, unless anything is not finite. Call `raise_if_bad` for the step before first.

        Args:
            step: its number.
            bad_ranks: (world_size,), not 0 for each rank whose own loss is not finite; equal on all ranks.
            grad_norm: (), the global norm of the gradients.
        """
        verdict = torch.cat([bad_ranks != 0, ~grad_norm.isfinite().reshape(1)])
        if self._fused:
            self.optimizer.found_inf = verdict.any().float()  # type: ignore[attr-defined]  # read by the fused kernel
        if self._fused or not verdict.any():
            self.optimizer.step()
        self.optimizer.zero_grad()
        if verdict.is_cuda:
            copy = torch.empty(verdict.shape, dtype=verdict.dtype, pin_memory=True).copy_(verdict, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = step, copy, event
        else:
            self._pending = step, verdict, None

    def raise_if_bad(self) -> None:
        """
        Raises:
            NonFiniteError: the last judged step was bad; it names the step and the ranks. All ranks raise alike.
        """
        if self._pending is None:
            return
        step, verdict, copied = self._pending
        if copied is not None:
            copied.synchronize()
        self._pending = None
        if verdict.any():
            ranks = verdict[:-1].nonzero().flatten().tolist()
            what = (
                f"the loss is not finite on rank {', '.join(map(str, ranks))}"
                if ranks
                else ("the gradient norm is not finite, though the loss of every rank is")
            )
            raise NonFiniteError(
                f"step {step}: {what}. The update was withheld, nothing was saved since. "
                "A lower optim.lr, more optim.warmup_steps or a smaller optim.max_norm may help"
            )
