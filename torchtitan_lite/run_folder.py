"""The folder of a run: it can be written, and nobody else writes to it."""

from pathlib import Path

from filelock import FileLock, Timeout

from torchtitan_lite.distributed import World, from_rank0
from torchtitan_lite.errors import ConfigError


def make(folder: Path) -> None:
    """Make the folder.

    Raises:
        ConfigError: it can't be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.log").touch()
    except OSError as error:
        raise ConfigError(f"run.out_dir: {folder} can't be written: {error}") from None


def lock(folder: Path, world: World) -> FileLock:
    """Hold the folder on rank 0 for as long as the returned lock lives: two runs in one folder would ruin each other.

    Raises:
        ConfigError: on every rank, if another process holds it.
    """
    held = FileLock(folder / ".lock", blocking=False)
    taken = False
    if world.rank == 0:
        try:
            held.acquire()
        except Timeout:
            taken = True
    if from_rank0(taken):
        raise ConfigError(f"{folder} is being used by another process; wait for it, or choose another --run.name=NAME")
    return held
