"""Starting from another model's weights: they are read once, before the first step of a run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchtitan_lite.checkpointing import dcp_storage, progress, storage
from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.distributed.sharding import local_rows, own_tensors

if TYPE_CHECKING:
    Checkpointer = Any  # checkpoint.py's, which the package does not import


def load_weights(saves: "Checkpointer", open_weights: Callable[[bool], Mapping[str, Tensor]]) -> None:
    """Load only a model's weights. On one machine each rank reads its rows; on several, rank 0 sends them.

    Args:
        open_weights: returns whole tensors by our names, read lazily. Its argument: verify the files (on rank 0).

    Raises:
        CheckpointError: on every rank, before anything is overwritten: the weights are of another model.
    """
    targets, world = own_tensors(saves.model), saves.world
    weights: Mapping[str, Tensor] = {}

    def compare() -> None:
        nonlocal weights
        weights = open_weights(True)
        found = {name: shape for name, (_, shape) in dcp_storage.specs(weights).items()}
        advice = "set [model], and its vocab_size or [tokenizer] path, to the folder's values"
        wanted = {name: tuple(tensor.shape) for name, tensor in targets.items()}
        storage.compare(Path("model.init_from"), found, wanted, "model", advice)

    on_rank0(world, compare)
    if world.local_world_size < world.world_size:
        saves.fill(targets, weights.__getitem__)
        return
    weights = weights or open_weights(False)
    for name, target in targets.items():
        rows, first = local_rows(target)
        with progress.working(f"reading {name}"):
            rows.copy_(weights[name][first : first + len(rows)])
