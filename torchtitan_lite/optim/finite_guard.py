"""The guard against updates that are not finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_lite.errors import NonFiniteError
from torchtitan_lite.optim.grad_scaler import GradScaler


class HostCopy:
    """A small tensor on its way to the host: copied without waiting, and read later."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = pinned.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """The values, once they are here."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.flatten().tolist()


class FiniteGuard:
    """Withholds an update on the device, and tells the host one step later.

    Fused AdamW leaves parameters, moments and step counts alone where its `found_inf` is 1. The host reads its copy of
    the result while the device already works on the next step, so that a healthy run never waits for it. SGD has no
    such form for DTensors: there the host waits for the result, and skips the update itself.

    With float16 a gradient that is not finite under a finite loss is an overflow: the step is skipped and counted, and
    the scale of the loss is halved. Otherwise it is an error.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: GradScaler, max_skipped: int = 0, skipped: Sequence[int] = ()
    ) -> None:
        """
        Args:
            max_skipped: so many steps in a row may be skipped before it is an error.
            skipped: the steps that were skipped before a resume.
        """
        self.optimizer = optimizer
        self.scaler = scaler
        self.max_skipped = max_skipped
        self.skipped = list(skipped)  # steps whose update was withheld, without float16's overflows
        self._fused = bool(optimizer.defaults.get("fused"))
        self._device = optimizer.param_groups[0]["params"][0].device
        self._pending: tuple[int, HostCopy] | None = None

    def update(self, step: int, bad_ranks: Tensor, grad_norm: Tensor) -> None:
        """Step the optimizer, unless anything is not finite. Call `check` for the step before first.

        Args:
            step: its number.
            bad_ranks: (world_size,), not 0 for each rank whose own loss is not finite; equal on all ranks.
            grad_norm: (), the global norm of the gradients.
        """
        bad_norm = ~grad_norm.isfinite().to(bad_ranks.device)
        bad = (bad_ranks != 0).any() | bad_norm
        if self._fused:
            # read by the fused kernel, which runs where the parameters are: on the host with cpu_offload
            self.optimizer.found_inf = bad.float().to(self._device)  # type: ignore[attr-defined]
        if self._fused or not bad:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.scaler.update(bad)
        self._pending = step, HostCopy(torch.cat([bad_ranks, torch.stack([bad_norm.float(), self.scaler.scale])]))

    def check(self) -> None:
        """Check the step of the last `update`, once.

        Raises:
            NonFiniteError: it was bad; the error names the step and the ranks. All ranks raise alike.
        """
        if self._pending is None:
            return
        step, result = self._pending
        self._pending = None
        *bad_ranks, bad_norm, scale = result.read()
        ranks = [str(rank) for rank, bad in enumerate(bad_ranks) if bad]
        if not ranks and not bad_norm:
            return
        if ranks:
            what = f"the loss is not finite on rank {', '.join(ranks)}"
        elif not self.scaler.enabled:
            what = "the gradient norm is not finite, though the loss of every rank is"
        else:
            self.scaler.skipped_steps += 1
            if scale >= self.scaler.min_scale:
                return
            what = f"gradients overflow float16 still, with the loss scaled by {scale:g} (grad_scaler.min_scale)"
        if not self.scaler.enabled or ranks:
            self.skipped.append(step)
            in_a_row = self.skipped[-self.max_skipped - 1 :] == list(range(step - self.max_skipped, step + 1))
            if not in_a_row:
                return
        raise NonFiniteError(
            f"step {step}: {what}. The update was withheld, nothing was saved since. "
            "A lower optim.lr, more optim.warmup_steps or a smaller optim.max_norm may help"
        )
