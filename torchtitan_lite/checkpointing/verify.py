"""The ranks verify a checkpoint together."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing import progress, storage
from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.storage import Manifest
from torchtitan_lite.distributed.process_group import World, from_all_ranks
from torchtitan_lite.errors import CheckpointError, UnreadableError


def verify_together(folder: Path, mode: str, world: World) -> tuple[Manifest | None, list[str]]:
    """The manifest, and all problems. The ranks share the hashing.

    A full state dict may be on a local disk of the first machine, so only that machine's ranks hash it.
    """

    def check() -> tuple[dict[str, Any] | None, str, int]:
        manifest, wrong = storage.check_manifest(folder)
        # rank 0's number of local ranks for all: another machine may have more or fewer
        return asdict(manifest) if manifest else None, wrong, world.local_world_size

    content, error, n = on_rank0(world, check)
    if content is None:
        return None, [error]
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    manifest = Manifest(**content | {"files": files})
    n = world.world_size if manifest.state_dict == "sharded" else min(n, world.world_size)
    by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
    mine = by_size[world.rank :: n] if world.rank < n else []
    problems: list[str] = []
    unreadable = ""
    try:
        with progress.working(f"verifying its share of {folder.name}"):
            problems = [
                wrong for name in mine if (wrong := storage.verify_file(folder, name, manifest.files[name], mode))
            ]
    except UnreadableError as caught:
        unreadable = str(caught)
    found = from_all_ranks((problems, unreadable), world.untimed)
    if errors := list(dict.fromkeys(text for _, text in found if text)):
        raise CheckpointError("\n  ".join(errors))
    return manifest, [wrong for some, _ in found for wrong in some]


def newest_of(folder: Path) -> Path:
    """The newest checkpoint of another run, or the checkpoint that the folder is."""
    found = storage.checkpoints_of(folder)
    if not found:
        raise CheckpointError(f'checkpoint.resume = "{folder}" is not a checkpoint, or a run with one')
    return found[-1]
