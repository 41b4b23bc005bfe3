"""AdamW, the learning rate of a step, and the guard that keeps NaN out of the parameters."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config import OptimConfig
from torchtitan_lite.distributed import sum_over_ranks
from torchtitan_lite.errors import NonFiniteError
from torchtitan_lite.init import local_rows


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over a sharded model: decay for matrices, none for biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of `step` (1-based): linear warm-up, then a cosine down to min_lr_ratio at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to a global norm of at most max_norm.

    Returns:
        the norm before, over all ranks, () float32, on the device: reading it would make the host wait.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
    verdict is read while the device already works on the next step, so that a healthy run never waits for it.
    """

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self.optimizer = optimizer
        self._pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def judge(self, step: int, bad_ranks: Tensor, grad_norm: Tensor) -> None:
        """Withhold the coming update if anything is not finite. Call `raise_if_bad` for the step before first.

        Args:
            step: of the coming update.
            bad_ranks: (world_size,), not 0 for each rank whose own loss is not finite; equal on all ranks.
            grad_norm: (), the global norm of the gradients.
        """
        verdict = torch.cat([bad_ranks != 0, ~grad_norm.isfinite().reshape(1)])
        self.optimizer.found_inf = verdict.any().float()  # type: ignore[attr-defined]  # read by torch's fused AdamW
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
