"""Frozen parameters, parameter groups by weight decay and learning rate, what a load keeps of them, norms by block."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.config.patterns import first_match
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.optim.guarded import GuardedOptimizer


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
        # each row of a convolution filters one channel, so Muon does not orthogonalise it
        is_matrix_of_block = parameter.ndim > 1 and name.startswith("layers.") and ".conv_" not in name
        by_muon = config.name == "muon" and is_matrix_of_block
        if parameter.ndim == 2 and name.startswith(("layers.", "output.")):
            scale = scale_of(getattr(model, "width", 1.0), by_muon)
            decay, factor = decay / scale, factor * scale  # keeps lr * decay
        chosen.setdefault((decay, factor, by_muon), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        | ({"muon": by_muon} if config.name == "muon" else {})
        for (decay, factor, by_muon), parameters in chosen.items()
    ]


def scale_of(width: float, by_muon: bool) -> float:
    """Return muP's learning-rate multiplier for a matrix. A step then changes outputs equally at every width.

    Source: Yang et al., 2022, table 3; the same argument holds for Muon.

    Args:
        width: model.dim / model.mup_base_dim.
    """
    # Muon's orthogonal update preserves norms, but is multiplied by 0.2 sqrt(max(M, N)).
    # AdamW changes each weight by about lr, and the weights per output grow with the width.
    return width ** (-0.5 if by_muon else -1.0)


Norms = Mapping[nn.Parameter, Tensor]


class Blocks:
    """The parameters of a sharded model by block.

    `names` has the B blocks in the order of forward: "inputs", "layers.0", ..., "head". A tied weight belongs to the
    inputs; so does whatever is not in a block, a final norm or the output matrix.

    Args:
        replicas: dp_replicate, the number of HSDP replicas, each of which has all parameters.
    """

    def __init__(self, model: nn.Module, replicas: int) -> None:
        ends = {"norm": "head", "output": "head"}
        self._blocks = {
            p: ".".join(name.split(".")[:2]) if name.startswith("layers.") else ends.get(name.split(".")[0], "inputs")
            for name, p in model.named_parameters()
        }
        self.names, self.replicas = [*dict.fromkeys(self._blocks.values())], replicas
        members = [[block == name for block in self._blocks.values()] for name in self.names]
        self._members = torch.tensor(members, device=next(model.parameters()).device)  # (B, parameters)

    def squares(self, grad_norms: Norms, *, weights: bool) -> dict[str, Tensor]:
        """Return this rank's parts of squared norms by block, (B,) float64: "grad_norm", if wanted also "weight_norm".

        Their sums over all ranks are the whole.

        Args:
            grad_norms: () float32, of this rank's part of each parameter's gradient. A missing one is 0.
        """
        found = {"grad_norm": self._squares(grad_norms)}
        if weights:
            norms = torch._foreach_norm([own_part(p.detach())[0] for p in self._blocks])
            found["weight_norm"] = self._squares(dict(zip(self._blocks, norms, strict=True)))
        return found

    def of_update(self, optimizer: GuardedOptimizer) -> dict[str, Tensor]:
        """Return the squared norms of the last update as "update_norm", if they were measured. Collective."""
        if not optimizer.update_norms or optimizer.found_inf is None:
            return {}
        squares = self._squares(optimizer.update_norms)
        return {"update_norm": sum_over_ranks(torch.where(optimizer.found_inf != 0, 0.0, squares))}

    def _squares(self, norms: Norms) -> Tensor:
        zero = torch.zeros((), device=self._members.device)
        each = torch.stack([norms.get(p, zero) for p in self._blocks]).double().square() / self.replicas
        return torch.where(self._members, each, 0.0).sum(1)


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
