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
from torchtitan_lite.optim import make_state
from torchtitan_lite.resume import with_defaults
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
            make_state(self.optimizer)
            newest = storage.step_folder(self.folder, state.step)
            self._on_rank0(lambda: self._compare(newest))
            self._spread(newest)
        return state

    def load_weights(self, open_weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Load a model's weights, and nothing else.

        Args:
            open_weights: called on rank 0; returns whole tensors by our names, all of them in its memory.

        Raises:
            CheckpointError: on every rank, before anything is overwritten, if they are of another model.
        """
        shapes = _shapes(self._own_tensors())

        def compare() -> None:
            weights.update(open_weights())
            advice = "set [model], and its vocab_size or [tokenizer] path, to the folder's values"
            storage.compare(Path("model.init_from"), _shapes(weights), shapes, "model", advice)

        weights: dict[str, Tensor] = {}
        self._on_rank0(compare)
        self._fill(self._own_tensors(), weights.__getitem__)

    def _read_state(self, identity: Mapping[str, Any]) -> TrainState | None:
        steps = storage.find_steps(self.folder)
        if not steps:
            return None
        newest = storage.step_folder(self.folder, steps[-1])
        state = storage.read_state(newest)
        storage.compare(newest, with_defaults(state.identity, identity), identity, "model, or other data")
        return state

    def _compare(self, folder: Path) -> None:
        for file, tensors in ((storage.MODEL, self._own_tensors()), (storage.OPTIMIZER, self._optimizer_tensors())):
            storage.compare(folder, storage.read_shapes(folder / file), _shapes(tensors), file.split(".")[0])

    def _own_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers, each once: of two names of a tied parameter the first."""
        once = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        return {name: value for name, value in self.model.state_dict().items() if name in once}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors, as "exp_avg.output.weight"."""
        return {
            f"{key}.{name}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()  # a frozen one has none
            if isinstance(value, Tensor)
        }

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
        model = {name: self._full(value) for name, value in self._own_tensors().items()}
        optimizer = {name: self._full(value) for name, value in self._optimizer_tensors().items()}
        return (model, optimizer) if self.world.rank == 0 else ({}, {})

    def _full(self, value: Tensor) -> Tensor:
        """The whole tensor on rank 0's CPU. All ranks gather it, one tensor at a time, and the others let it go."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu().contiguous() if self.world.rank == 0 else torch.empty(0)

    def _spread_dtensor(self, folder: Path) -> None:
        for file, targets in ((storage.MODEL, self._own_tensors()), (storage.OPTIMIZER, self._optimizer_tensors())):
            read = storage.open_tensors(folder / file).get_tensor if self.world.rank == 0 else None
            self._fill(targets, read)

    @torch.no_grad()
    def _fill(self, targets: Mapping[str, Tensor], read: Callable[[str], Tensor] | None) -> None:
        """Fill tensors with whole ones that rank 0 reads, one at a time: each rank is sent its own rows."""
        for name, target in targets.items():
            whole = read(name) if read and self.world.rank == 0 else torch.empty(target.shape, dtype=target.dtype)
            whole = whole.to(self.world.device, target.dtype)
            if isinstance(target, DTensor):
                target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
            else:
                dist.broadcast(whole, src=0)
                target.copy_(whole)

    # --- the DCP state-dict API ---------------------------------------------------------------------------------

    def _gather_dcp(self) -> tuple[FullStateDict, FullStateDict]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: Any = get_model_state_dict(self.model, options=options)
        nested: Any = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        model, optimizer = self._own_tensors().keys(), self._optimizer_tensors().keys()
        if self.world.rank != 0:
            return {}, {}
        states = nested["state"].items()
        flat = {f"{key}.{name}": value for name, state in states for key, value in state.items()}
        return {name: whole[name] for name in model}, {name: flat[name] for name in optimizer}

    def _spread_dcp(self, folder: Path) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model: dict[str, Any] = {}
        nested: dict[str, Any] = {}
        # It also restores the saved hyperparameters of each group; ours are the config's, so hand in those.
        ours = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        if self.world.rank == 0:
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            content = load_file(folder / storage.MODEL)
            # a tied parameter has one name in the file, and here all of its names
            tied = {name: names[p] for name, p in self.model.named_parameters(remove_duplicate=False)}
            model = content | {name: content[first] for name, first in tied.items()}
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


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
