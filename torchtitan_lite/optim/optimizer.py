"""The optimizer, its parameter groups, and the learning-rate schedule."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.patterns import first_match, unused
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.config.sections.optim import OPTIMIZERS
from torchtitan_lite.errors import ConfigError, shortened
from torchtitan_lite.optim.guarded import SGD, AdamW, GuardedOptimizer, HostGuarded, multiply_gradients


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern. Call it before sharding.

    Raises:
        ConfigError: a pattern matches no parameter, or no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    # one at a time: patterns may overlap
    wrong = [message for pattern in patterns for message in unused("optim.freeze", names, [pattern], field="")]
    if wrong:
        raise ConfigError("\n  ".join(wrong))
    for name in names:
        if first_match(name, patterns) is not None:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"optim.freeze = {shortened(list(patterns))} leaves no parameter to train")


def build_optimizer(model: nn.Module, config: OptimConfig) -> GuardedOptimizer:
    """The optimizer that the config names, for a sharded model.

    Raises:
        ConfigError: a pattern of [[optim.groups]] matches no parameter.
    """
    optimizer: GuardedOptimizer = OPTIMIZERS[config.name].load()(parameter_groups(model, config), config)
    if config.ema_decay:
        from torchtitan_lite.optim.average import keep_average

        keep_average(optimizer, config.ema_decay)
    if isinstance(optimizer, HostGuarded):
        make_state(optimizer)  # a checkpoint has it, even if float16 skipped every step so far
    return optimizer


def adamw(groups: list[dict[str, Any]], config: OptimConfig) -> GuardedOptimizer:
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def sgd(groups: list[dict[str, Any]], config: OptimConfig) -> GuardedOptimizer:
    return SGD(groups, lr=config.lr, momentum=0.9)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Parameters by weight decay and `lr_factor`. [[optim.groups]] override the defaults; only matrices decay.

    With muon, a group's key `muon` tells the matrices of the blocks from the others.
    """
    chosen: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    untied = dict(model.named_parameters())  # without the head if it is the embeddings
    patterns = [group.match for group in config.groups]
    for name in names:
        parameter = model.get_parameter(name)
        decay, factor = config.weight_decay if parameter.ndim > 1 else 0.0, 1.0
        embeds = name == "value_embeddings.weight" or (name == "tok_embeddings.weight" and "output.weight" in untied)
        if config.name == "muon" and embeds:
            factor = config.muon_embedding_lr_factor
        i = first_match(name, patterns)
        if i is not None:
            group = config.groups[i]
            decay = decay if group.weight_decay is None else group.weight_decay
            factor *= group.lr_factor
        by_muon = config.name == "muon" and is_matrix_of_block(name, parameter)
        if parameter.ndim == 2 and name.startswith(("layers.", "output.")):
            scale = scale_of(getattr(model, "width", 1.0), by_muon)
            decay, factor = decay / scale, factor * scale  # rate times decay stays
        chosen.setdefault((decay, factor, by_muon), []).append(parameter)
    wrong = list(unused("optim.groups", names, patterns))
    if wrong:
        raise ConfigError("\n  ".join(wrong))
    return [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        | ({"muon": by_muon} if config.name == "muon" else {})
        for (decay, factor, by_muon), parameters in chosen.items()
    ]


def is_matrix_of_block(name: str, parameter: Tensor) -> bool:
    """Whether Muon orthogonalises it. A convolution's weights are no matrix: each row filters one channel by itself."""
    return parameter.ndim > 1 and name.startswith("layers.") and ".conv_" not in name


def scale_of(width: float, by_muon: bool) -> float:
    """What muP multiplies a matrix's rate by: a step then changes its outputs by as much at every width.

    Source: Yang et al., 2022, table 3; for Muon, the same argument.

    Args:
        width: model.dim / model.mup_base_dim.
    """
    if by_muon:  # an orthogonal update keeps sizes, but is multiplied by 0.2 sqrt(max(M, N))
        return width**-0.5
    return width**-1.0  # AdamW changes each weight by about the rate, and an output sums `width` times as many of them


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of `step` (1-based): linear warm-up, then the schedule down to min_lr_ratio."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = min((step - config.warmup_steps) / max(steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * done))
    elif config.schedule == "linear":
        height = 1 - done
    elif config.schedule == "wsd":
        height = min((steps - step) / max(config.decay_ratio * steps, 1), 1.0)
    else:
        return config.lr * (config.step_gamma ** ((step - 1) // config.step_every) if config.schedule == "step" else 1)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of each group: `rate` times its lr_factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate an optimizer's state before its first step, for a load to fill.

    A step with zero gradients and a rate of 0 leaves every parameter unchanged, bit for bit. The state's values (such
    as the step count) are wrong and have to be overwritten.
    """
    with kept_hyperparameters(optimizer):
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0  # SGD's momentum would begin with the decay
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group. They come from the config, and a load must not change them."""
    return [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]


@contextlib.contextmanager
def kept_hyperparameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the hyperparameters back afterwards: torch loads saved ones, with lists for tuples."""
    ours = hyperparameters(optimizer)
    yield
    for group, values in zip(optimizer.param_groups, ours, strict=True):
        group.update(values)


def squared_norm(model: nn.Module, copies: int) -> Tensor:
    """This rank's part of the squared gradient norm, () float64. The parts of all ranks add up to it.

    Args:
        copies: so many ranks hold the same shards (HSDP).
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in grads])
    return norm.double().square() / copies  # the square of a float32 may need a float64


def clip_gradients(optimizer: torch.optim.Optimizer, norm: Tensor, max_norm: float, scale: Tensor) -> None:
    """Divide the gradients by the loss scale, and scale them down from `norm` (without that scale) to max_norm.

    AdamW and Muon only store the factor here. Their next step applies it while it reads the gradients, which saves a
    pass over them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / scale  # as torch.nn.utils.clip_grad_norm_
    factor = factor.to(parameters[0].device)  # the host with cpu_offload
    if isinstance(optimizer, GuardedOptimizer):
        optimizer.multiply_gradients(factor)
    else:  # one of a user of the API
        multiply_gradients(parameters, factor)
