"""The tensors of a state dict, and their names: flat in our files, nested in torch's functions."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing.storage import MODEL, OPTIMIZER
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.optim.groups import hyperparameters

Tensors = dict[str, Tensor]
GROUP_BYTES = 2**20  # of small tensors that are gathered, or read and sent, together


def model_tensors(model: nn.Module) -> Tensors:
    """Return parameters and persistent buffers; a tied parameter only under its first name."""
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: value.detach() for name, value in model.state_dict().items() if name in once}


def prefix(file: str) -> str:
    """Return the prefix of a file's tensors in a sharded state dict: "model." or "optimizer."."""
    return file.removesuffix("safetensors")


def by_name(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> Tensors:
    """Return all tensors by their names in a sharded state dict."""
    of_optimizer = {f"{prefix(OPTIMIZER)}{name}": tensor for name, tensor in optimizer.items()}
    return {f"{prefix(MODEL)}{name}": tensor for name, tensor in model.items()} | of_optimizer


def by_file(tensors: Tensors) -> dict[str, Tensors]:
    """Return the tensors of each file of a full state dict, by their names in it."""
    return {
        file: {name.removeprefix(prefix(file)): t for name, t in tensors.items() if name.startswith(prefix(file))}
        for file in (MODEL, OPTIMIZER)
    }


def in_groups(tensors: Mapping[str, Tensor]) -> Iterator[Tensors]:
    """Yield all in order: each large tensor alone, and small ones together, at most GROUP_BYTES."""
    group, n_bytes = dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if group and n_bytes + tensor.nbytes > GROUP_BYTES:
            yield group
            group, n_bytes = {}, 0
        group[name] = tensor
        n_bytes += tensor.nbytes  # of the whole tensor, so that all ranks make the same groups
    if group:
        yield group


def with_tied(model: nn.Module, content: Tensors) -> Tensors:
    """Add the other names of tied parameters, which files store once."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tied = {name: names[p] for name, p in model.named_parameters(remove_duplicate=False)}
    return content | {name: content[first] for name, first in tied.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's tensors, as "state.output.weight.exp_avg", which torch's state dicts flatten to.

    Raises:
        CheckpointError: the state has other values, which a resume would lose.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():  # frozen parameters have no state
            local = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
            if isinstance(value, Tensor) and not (local and value.numel() != 1):
                tensors[f"state.{name}.{key}"] = value
            elif value is not None:
                raise CheckpointError(
                    f'{type(optimizer).__name__} keeps "{key}" of {name} as {type(value).__name__}, which can\'t be '
                    "saved: it should be a DTensor (torch.zeros_like(parameter)) or a tensor of one element"
                )
    return tensors


def flat(nested: Any) -> Tensors:
    """Return torch's nested optimizer state under our names."""
    return {f"state.{name}.{key}": value for name, state in nested["state"].items() for key, value in state.items()}


def renamed(name: str) -> str:
    """Return today's name of a tensor in a checkpoint of format 6, which has "optimizer.exp_avg.output.weight"."""
    file, key, rest = name.split(".", 2) if name.startswith(prefix(OPTIMIZER)) else ("", "", "")
    return f"{file}.state.{rest}.{key}" if file else name


def nested_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> dict[str, Any]:
    """Return the optimizer's tensors in torch's nesting, with its current hyperparameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[str, Tensors] = {}
    for path, value in tensors.items():
        name, key = path.removeprefix("state.").rsplit(".", 1)
        state.setdefault(name, {})[key] = value
    groups = [
        {**values, "params": [names[p] for p in group["params"]]}
        for values, group in zip(hyperparameters(optimizer), optimizer.param_groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}
