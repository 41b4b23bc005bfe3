"""Which rows of a parameter are this rank's, and the names of tensors in checkpoints.

Names are flat, as our files have them, and nested, as torch's functions want them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, and the index of the first of them.

    `fully_shard` cuts along dim 0 as torch.chunk does: ceil(rows / ranks) each, the last ranks may get fewer or none.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    first = 0
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0), f"rows are expected on dim 0, not {placement}"
            per_rank = -(-parameter.shape[0] // parameter.device_mesh.size(axis))
            first = min(per_rank * parameter.device_mesh.get_local_rank(axis), parameter.shape[0])
    return parameter.to_local(), first


Tensors = dict[str, Tensor]


Parts = dict[str, Tensors]  # by the file that they are in, of a full state dict


def own_tensors(model: nn.Module) -> Tensors:
    """Parameters and persistent buffers, each once: of two names of a tied parameter the first."""
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: value.detach() for name, value in model.state_dict().items() if name in once}


def prefix(file: str) -> str:
    """Of a full state dict's file, in the names of a sharded one: "model." or "optimizer."."""
    return file.removesuffix("safetensors")


def by_name(parts: Parts) -> Tensors:
    """All tensors, by the names that they have in a sharded state dict."""
    return {f"{prefix(file)}{name}": tensor for file, tensors in parts.items() for name, tensor in tensors.items()}


def with_tied(model: nn.Module, content: Tensors) -> Tensors:
    """A tied parameter has one name in a file, and here all of its names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tied = {name: names[p] for name, p in model.named_parameters(remove_duplicate=False)}
    return content | {name: content[first] for name, first in tied.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's tensors, as "exp_avg.output.weight"."""
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()  # a frozen one has none
        if isinstance(value, Tensor)
    }


def flat(nested: Any) -> Tensors:
    """An optimizer's state as torch nests it, by our names."""
    return {f"{key}.{name}": value for name, state in nested["state"].items() for key, value in state.items()}


def nested_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> dict[str, Any]:
    """An optimizer's tensors as torch nests them, with the hyperparameters that it has now."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[str, Tensors] = {}
    for key_and_name, value in tensors.items():
        key, name = key_and_name.split(".", 1)
        state.setdefault(name, {})[key] = value
    groups = [
        {**values, "params": [names[p] for p in group["params"]]}
        for values, group in zip(hyperparameters(optimizer), optimizer.param_groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group: the config's, which a load must not change."""
    return [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]


def restore(optimizer: torch.optim.Optimizer, ours: list[dict[str, Any]]) -> None:
    """Put them back: torch hands back lists for tuples, and what was saved for what is configured."""
    for group, values in zip(optimizer.param_groups, ours, strict=True):
        group.update(values)
