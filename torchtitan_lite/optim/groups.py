"""Frozen parameters; parameter groups by weight decay and learning rate, and what a load must not change of them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.config.patterns import first_match
from torchtitan_lite.config.schema import OptimConfig


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern. Call it before sharding."""
    for name, parameter in model.named_parameters():
        if first_match(name, patterns) is not None:
            parameter.requires_grad_(False)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Group parameters by weight decay and `lr_factor`. [[optim.groups]] override the defaults; only matrices decay.

    With muon, the key `muon` marks the groups of block matrices.
    """
    chosen: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    parameters = dict(model.named_parameters())  # without the head, if it is tied to the embeddings
    embeddings = ["value_embeddings.weight"] + ["tok_embeddings.weight"] * ("output.weight" in parameters)
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    for name, parameter in trained.items():
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        factor = config.muon_embedding_lr_factor if config.name == "muon" and name in embeddings else 1.0
        i = first_match(name, [group.match for group in config.groups])
        if i is not None:
            group = config.groups[i]
            decay = decay if group.weight_decay is None else group.weight_decay
            factor *= group.lr_factor
        by_muon = config.name == "muon" and is_matrix_of_block(name, parameter)
        if parameter.ndim == 2 and name.startswith(("layers.", "output.")):
            scale = scale_of(getattr(model, "width", 1.0), by_muon)
            decay, factor = decay / scale, factor * scale  # keeps lr * decay
        chosen.setdefault((decay, factor, by_muon), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        | ({"muon": by_muon} if config.name == "muon" else {})
        for (decay, factor, by_muon), parameters in chosen.items()
    ]


def is_matrix_of_block(name: str, parameter: Tensor) -> bool:
    """Return whether Muon orthogonalises it. Convolution weights are excluded: each row filters one channel."""
    return parameter.ndim > 1 and name.startswith("layers.") and ".conv_" not in name


def scale_of(width: float, by_muon: bool) -> float:
    """Return muP's learning-rate multiplier for a matrix. A step then changes outputs equally at every width.

    Source: Yang et al., 2022, table 3; the same argument holds for Muon.

    Args:
        width: model.dim / model.mup_base_dim.
    """
    if by_muon:  # an orthogonal update preserves norms, but is multiplied by 0.2 sqrt(max(M, N))
        return width**-0.5
    return width**-1.0  # AdamW changes each weight by about lr, and the weights per output grow with the width


# --- around a load ----------------------------------------------------------------------------------------------


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each group's hyperparameters, which come from the config and which a load must not change."""
    return [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]


@contextlib.contextmanager
def kept_hyperparameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the hyperparameters afterwards: torch loads the saved ones, with lists for tuples."""
    ours = hyperparameters(optimizer)
    yield
    for group, values in zip(optimizer.param_groups, ours, strict=True):
        group.update(values)
