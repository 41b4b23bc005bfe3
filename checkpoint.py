"""Save and load whole ("full") state dicts of an FSDP2 model and its optimizer, in two ways with the same result.

FSDP2's parameters and AdamW's moments are DTensors: each rank holds its rows. A full state dict holds whole tensors,
so that one plain process can read it, and any other number of ranks can load it.

    api        saving                                            loading
    dtensor    full_tensor(), parameter by parameter             distribute_tensor(), parameter by parameter
    dcp        get_model_state_dict, get_optimizer_state_dict    set_model_state_dict, set_optimizer_state_dict

Both gather to the CPU of rank 0, which alone reads and writes files: no shared file system is needed. Both write the
same files (torchtitan_lite/storage.py), and each loads what the other wrote. The dtensor way shows what happens and is
where to customise; the dcp way leaves it to torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite import storage
from torchtitan_lite.distributed import World, from_rank0
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.models import Transformer
from torchtitan_lite.storage import TrainState

T = TypeVar("T")
FullStateDict = dict[str, Tensor]  # whole tensors on the CPU of rank 0; empty on the others


class Checkpointer:
    """Saves a run's checkpoints and loads the newest. Every rank calls it; rank 0 touches the disk."""

    def __init__(
        self, folder: Path, model: Transformer, optimizer: torch.optim.Optimizer, api: str, world: World
    ) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self._gather, self._spread = {
            "dtensor": (self._gather_dtensor, self._spread_dtensor),
            "dcp": (self._gather_dcp, self._spread_dcp),
        }[api]

    def save(self, state: TrainState) -> Path:
        """Save model, optimizer and state, and return the checkpoint's folder.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write it.
        """
        model, optimizer = self._gather()
        return self._on_rank0(lambda: storage.write(self.folder, state, model, optimizer))

    def load_newest(self, identity: Mapping[str, Any]) -> TrainState | None:
        """Load the newest checkpoint into model and optimizer, and return its state; None if there is none.

        Only tensors are restored: learning rate and weight decay are the config's.

        Args:
            identity: what the checkpoint's own identity must be equal to.

        Raises:
            CheckpointError: on every rank, before anything is overwritten, if it is damaged or belongs to another
                model or other data.
        """
        state = self._on_rank0(lambda: self._read_state(identity))
        if state is not None:
            self._spread(storage.step_folder(self.folder, state.step))
        return state

    def _read_state(self, identity: Mapping[str, Any]) -> TrainState | None:
        steps = storage.find_steps(self.folder)
        if not steps:
            return None
        newest = storage.step_folder(self.folder, steps[-1])
        state = storage.read_state(newest)
        storage.compare(newest, state.identity, identity, "model, or other data")
        shapes = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        storage.compare(newest, storage.read_shapes(newest / storage.MODEL), shapes, "model")
        optimizer = storage.read_shapes(newest / storage.OPTIMIZER)
        parameters = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        storage.compare(newest, optimizer, _adamw_shapes(parameters), "optimizer")
        return state

    def _on_rank0(self, action: Callable[[], T]) -> T:
        """Do it on rank 0, and let every rank have the result or the error."""
        outcome: tuple[T | None, str] = None, ""
        if self.world.rank == 0:
            try:
                outcome = action(), ""
            except CheckpointError as error:
                outcome = None, str(error)
        result, error_text = from_rank0(outcome)
        if error_text:
            raise CheckpointError(error_text)
        return cast(T, result)

    # --- the DTensor API ----------------------------------------------------------------------------------------

    def _gather_dtensor(self) -> tuple[FullStateDict, FullStateDict]:
        model = {name: self._full(value) for name, value in self.model.state_dict().items()}
        optimizer = {
            f"{key}.{name}": self._full(value)
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }
        return (model, optimizer) if self.world.rank == 0 else ({}, {})

    def _full(self, value: Tensor) -> Tensor:
        """The whole tensor on rank 0's CPU. All ranks gather it, one tensor at a time, and the others let it go."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu().contiguous() if self.world.rank == 0 else torch.empty(0)

    def _spread_dtensor(self, folder: Path) -> None:
        self._from_file(folder / storage.MODEL, self.model.state_dict())
        # AdamW makes its state at its first step, so it is made here; keyed by parameter, found by name.
        wanted: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            wanted |= {f"{key}.{name}": value for key, value in state.items()}
        self._from_file(folder / storage.OPTIMIZER, wanted)

    @torch.no_grad()
    def _from_file(self, file: Path, wanted: Mapping[str, Tensor]) -> None:
        """Fill tensors from the whole ones in rank 0's file, one at a time: each rank is sent its own rows."""
        source: Any = storage.open_tensors(file) if self.world.rank == 0 else None
        for name, target in wanted.items():
            whole = source.get_tensor(name) if source else torch.empty(target.shape, dtype=target.dtype)
            whole = whole.to(self.world.device, target.dtype)
            if isinstance(target, DTensor):
                target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
            else:
                dist.broadcast(whole, src=0)
                target.copy_(whole)

    # --- the DCP state-dict API ---------------------------------------------------------------------------------

    def _gather_dcp(self) -> tuple[FullStateDict, FullStateDict]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model: Any = get_model_state_dict(self.model, options=options)
        nested: Any = get_optimizer_state_dict(self.model, self.optimizer, options=options).get("state", {})
        return model, {f"{key}.{name}": value for name, state in nested.items() for key, value in state.items()}

    def _spread_dcp(self, folder: Path) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model: dict[str, Any] = {}
        nested: dict[str, Any] = {}
        # It also restores the saved hyperparameters of each group; ours are the config's, so hand in those.
        ours = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        if self.world.rank == 0:
            model = load_file(folder / storage.MODEL)
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            groups = [
                {**values, "params": [names[p] for p in group["params"]]}
                for values, group in zip(ours, self.optimizer.param_groups, strict=True)
            ]
            state: dict[str, dict[str, Tensor]] = {}
            for key_and_name, value in load_file(folder / storage.OPTIMIZER).items():
                key, name = key_and_name.split(".", 1)
                state.setdefault(name, {})[key] = value
            nested = {"state": state, "param_groups": groups}
        set_model_state_dict(self.model, model, options=options)
        set_optimizer_state_dict(self.model, self.optimizer, nested, options=options)
        for group, values in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(values)  # torch hands back lists for tuples


def _adamw_shapes(parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """What AdamW keeps for parameters of these shapes."""
    return {
        f"{key}.{name}": () if key == "step" else shape
        for name, shape in parameters.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
