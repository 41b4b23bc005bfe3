"""The optimizer, the learning-rate schedule, and clipping."""

import math
import pkgutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.config.sections.optim import OPTIMIZERS
from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.optim.groups import kept_hyperparameters, parameter_groups
from torchtitan_lite.optim.guarded import SGD, AdamW, GuardedOptimizer, HostGuarded


def build_optimizer(model: nn.Module, config: OptimConfig) -> GuardedOptimizer:
    """Build the optimizer of [optim] for a sharded model.

    Raises:
        ConfigError: optim.name builds something else.
    """
    optimizer: GuardedOptimizer = pkgutil.resolve_name(OPTIMIZERS[config.name].build)(
        parameter_groups(model, config), config
    )
    if not isinstance(optimizer, GuardedOptimizer):
        raise ConfigError(
            f"optim.name: {config.name} builds a {type(optimizer).__name__}. It should be a GuardedOptimizer, which "
            "clips and withholds an update that is not finite; docs/extending.md has an example"
        )
    if config.ema_decay:
        from torchtitan_lite.optim.average import keep_average

        keep_average(optimizer, config.ema_decay)
    balance: Any = getattr(model, "balance", None)  # of experts
    if balance is not None:
        optimizer.register_step_post_hook(lambda optimizer, *_: balance(sum_over_ranks, optimizer.found_inf))
    if isinstance(optimizer, HostGuarded):
        make_state(optimizer)  # so that a checkpoint has it even if float16 skipped every step so far
    return optimizer


def adamw(groups: list[dict[str, Any]], config: OptimConfig) -> GuardedOptimizer:
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def sgd(groups: list[dict[str, Any]], config: OptimConfig) -> GuardedOptimizer:
    return SGD(groups, lr=config.lr, momentum=0.9)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of `step` (1-based): linear warm-up, then the schedule."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "step":
        return config.lr * config.step_gamma ** ((step - 1) // config.step_every)
    done = min((step - config.warmup_steps) / max(steps - config.warmup_steps, 1), 1.0)
    left = {  # from 1 down to 0, which stands for min_lr_ratio
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "wsd": min(max(steps - step, 0) / max(config.decay_ratio * steps, 1), 1.0),
    }
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left[config.schedule])


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate an optimizer's state before its first step, for a load to fill.

    A step with zero gradients and a learning rate of 0 leaves every parameter unchanged, bit for bit. The state's
    values (such as the step count) are wrong and must be overwritten.
    """
    with kept_hyperparameters(optimizer):
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0  # otherwise SGD's momentum would start with the decay
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def gradient_norms(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return the norm of this rank's part of each gradient, () float32."""
    grads = {p: own_part(p.grad)[0] for p in model.parameters() if p.grad is not None}
    return dict(zip(grads, torch._foreach_norm([*grads.values()]) if grads else (), strict=True))


def squared_norm(norms: Mapping[nn.Parameter, Tensor], replicas: int) -> Tensor:
    """Return this rank's part of the squared gradient norm, () float64. The sum over all ranks is the whole.

    Args:
        norms: from `gradient_norms`.
        replicas: dp_replicate, the number of HSDP replicas.
    """
    # as torch.nn.utils.get_total_norm, bit for bit
    norm = torch.linalg.vector_norm(torch.stack([*norms.values()] or [torch.zeros(())]))
    return norm.double().square() / replicas  # the square of a float32 may need a float64


def clip_factor(norm: Tensor, max_norm: float, scale: Tensor) -> Tensor:
    """Return the factor, () float32, that unscales gradients and clips them to a norm of at most `max_norm`.

    Args:
        norm: () float32, the gradient norm without the loss scale.
        scale: () float32, the loss scale.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) / scale  # as torch.nn.utils.clip_grad_norm_
