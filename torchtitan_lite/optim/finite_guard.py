"""Keeping NaN, infinity and copies that have gone apart out of the parameters and out of checkpoints."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.distributed.initialize import local_rows
from torchtitan_lite.distributed.names import optimizer_tensors, own_tensors
from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.errors import DivergedError, NonFiniteError
from torchtitan_lite.optim.grad_scaler import GradScaler


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


def require_equal_copies(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """With HSDP, hold the copies of parameters and optimizer state against each other, bit for bit.

    A checkpoint holds one copy: without this a bit that flipped in another rank's memory would never be seen.

    Raises:
        DivergedError: on every rank; it names the tensors, and the ranks whose copies differ from the first copy.
    """
    first_parameter = next(model.parameters())
    mesh = first_parameter.device_mesh if isinstance(first_parameter, DTensor) else None
    if mesh is None or "dp_replicate" not in (mesh.mesh_dim_names or ()):
        return
    content = own_tensors(model) | optimizer_tensors(model, optimizer)
    tensors = {name: local_rows(tensor)[0] for name, tensor in content.items() if tensor.ndim}
    # one flipped bit changes the sum of the bit patterns
    sums = torch.stack([_bits(rows).sum() for rows in tensors.values()])
    first = sums.clone()
    group = mesh.get_group("dp_replicate")
    dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
    differs = (sums != first).float()
    ranks = torch.zeros(dist.get_world_size(), device=differs.device)
    ranks[dist.get_rank()] = differs.any().float()
    if sum_over_ranks(ranks).any():
        sum_over_ranks(differs)
        names = [name for name, bad in zip(tensors, differs.tolist(), strict=True) if bad]
        raise DivergedError(
            f"step {step}: copies of the model differ: rank {', '.join(str(r) for r, bad in enumerate(ranks) if bad)} "
            f"against the first copy, in {len(names)} tensors, the first is {names[0]}. A bit flipped in memory, or "
            "ranks went apart. Nothing was saved; the same command goes on from the newest checkpoint"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class FiniteGuard:
    """Withholds an update on the device, and tells the host one step later.

    Fused AdamW leaves parameters, moments and step counts alone where its `found_inf` is 1. The host's copy of the
    verdict is read while the device already works on the next step, so that a healthy run never waits for it. SGD has
    no such form for DTensors: there the host waits for the verdict, and skips the update itself.

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
        self.leaving = False  # whether a rank was asked to leave; as `skipped`, known one step late
        self._fused = bool(optimizer.defaults.get("fused"))
        self._device = optimizer.param_groups[0]["params"][0].device
        self._pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def update(self, step: int, bad_ranks: Tensor, grad_norm: Tensor, leaving: Tensor) -> None:
        """Step the optimizer, unless anything is not finite. Call `raise_if_bad` for the step before first.

        Args:
            step: its number.
            bad_ranks: (world_size,), not 0 for each rank whose own loss is not finite; equal on all ranks.
            grad_norm: (), the global norm of the gradients.
            leaving: (), how many ranks were asked to leave; equal on all ranks.
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
        verdict = torch.cat([bad_ranks, torch.stack([bad_norm.float(), self.scaler.scale, leaving])])
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
        *bad_ranks, bad_norm, scale, leaving = verdict.tolist()
        self.leaving |= bool(leaving)
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
