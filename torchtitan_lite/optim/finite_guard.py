"""The guard against updates that are not finite, on the device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_lite.errors import NonFiniteError
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.guarded import GuardedOptimizer

MIN_SCALE = 1.0  # float16: an overflow with a loss scale below it stops the run


class HostCopy:
    """A small tensor, copied to the host without waiting and read later."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = pinned.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """Wait for the copy, and return the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.flatten().tolist()


def too_many(skipped: Sequence[int], most: int) -> bool:
    """Whether the last of these steps are more than `most` in a row."""
    return list(skipped[-most - 1 :]) == list(range(skipped[-1] - most, skipped[-1] + 1))


class FiniteGuard:
    """Skips a bad update on the device, and reports it one step later.

    Where `optimizer.found_inf` is 1, a step changes nothing. The host reads the result during the next step, so a
    healthy run never waits.

    With float16, infinite gradients of a finite loss are an overflow: the step is skipped and counted, and the loss
    scale is halved. Without float16 they are an error.
    """

    def __init__(
        self, optimizer: GuardedOptimizer, scaler: GradScaler, max_skipped: int = 0, skipped: Sequence[int] = ()
    ) -> None:
        """
        Args:
            max_skipped: this many steps in a row may be skipped; one more is an error.
            skipped: the steps that were skipped before the resume.
        """
        self.optimizer = optimizer
        self.scaler = scaler
        self.max_skipped = max_skipped
        self.skipped = list(skipped)  # the skipped steps, without float16's overflows
        self.rank_losses: list[float] = []  # the summed loss of each rank in the last checked step
        self._device = optimizer.param_groups[0]["params"][0].device
        self._pending: tuple[int, HostCopy] | None = None

    def update(self, step: int, rank_losses: Tensor, grad_norm: Tensor, suspect: Tensor | None = None) -> None:
        """Step the optimizer if loss and gradients are finite. Call `check` for the previous step first.

        Args:
            rank_losses: (world_size,), the summed loss of each rank; equal on all ranks.
            grad_norm: (), global.
            suspect: () bool, of SpikeGuard; where it is true, the update is withheld too.
        """
        bad_norm = ~grad_norm.isfinite().to(rank_losses.device)
        bad = ~rank_losses.isfinite().all() | bad_norm
        withheld = bad if suspect is None else bad | suspect
        self.optimizer.found_inf = withheld.float().to(self._device)  # with cpu_offload, the parameters are on the host
        self.optimizer.step_number = step - 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scaler.update(bad)
        self._pending = step, HostCopy(torch.cat([rank_losses, torch.stack([bad_norm.float(), self.scaler.scale])]))

    def check(self) -> None:
        """Check the result of the last `update`, once.

        Raises:
            NonFiniteError: on every rank; it names the step and the ranks.
        """
        if self._pending is None:
            return
        step, result = self._pending
        self._pending = None
        *self.rank_losses, bad_norm, scale = result.read()
        ranks = [str(rank) for rank, loss in enumerate(self.rank_losses) if not math.isfinite(loss)]
        if not ranks and not bad_norm:
            return
        overflow = self.scaler.enabled and not ranks
        if overflow:
            self.scaler.skipped_steps += 1
            if scale >= MIN_SCALE:
                return
            what = f"gradients still overflow float16 with a loss scale of {scale:g}"
        else:
            what = "the gradient norm is not finite, though the loss of every rank is"
            if ranks:
                what = f"the loss is not finite on rank {', '.join(ranks)}"
            self.skipped.append(step)
            if not too_many(self.skipped, self.max_skipped):
                return  # not yet too many in a row
        raise NonFiniteError(
            f"step {step}: {what}. The update was withheld, and nothing has been saved since. "
            "A lower optim.lr, more optim.warmup_steps or a smaller optim.max_norm may help"
        )
