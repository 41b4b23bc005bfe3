"""Frozen parameters, and parameter groups by weight decay and learning rate."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torchtitan_lite.config.patterns import first_match, unused
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.errors import ConfigError, shortened


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern. Call it before sharding.

    Raises:
        ConfigError: a pattern matches no parameter, or no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    # each pattern separately, because patterns may overlap
    wrong = [message for pattern in patterns for message in unused("optim.freeze", names, [pattern], field="")]
    if wrong:
        raise ConfigError("\n  ".join(wrong))
    for name in names:
        if first_match(name, patterns) is not None:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"optim.freeze = {shortened(list(patterns))} leaves no parameter to train")


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Group parameters by weight decay and `lr_factor`. [[optim.groups]] override the defaults; only matrices decay.

    With muon, the key `muon` marks the groups of block matrices.
    """
    chosen: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    untied = dict(model.named_parameters())  # without the head, if it is tied to the embeddings
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
            decay, factor = decay / scale, factor * scale  # keeps lr * decay
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
