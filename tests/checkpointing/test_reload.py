"""A checkpoint loads the same bits on any number of ranks with either API, whichever saved it."""

from pathlib import Path

import pytest

from tests.checkpointing.reload_worker import MESHES, MODELS, load, save
from tests.helpers import run_distributed


def test_a_checkpoint_of_each_way_loads_by_the_other_api_on_another_mesh(tmp_path: Path) -> None:
    """From three ranks, which divide no number of rows evenly, on two machines' worth of copies; rows and columns."""
    for mesh in ("3", "3c"):
        run_distributed(save, 3, tmp_path, mesh, "llama")
    run_distributed(load, 4, tmp_path, "2x2", "llama", ["3c"])
    run_distributed(load, 4, tmp_path, "2x2c", "llama", ["3"])


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Checkpoints of every mesh, in each of the four ways, and the family of their model."""
    folder = tmp_path_factory.mktemp("saved")
    for mesh, (n, _) in MESHES.items():
        run_distributed(save, n, folder, mesh, request.param)
    return folder, request.param


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.extended
def test_every_mesh_loads_what_every_mesh_saved_in_every_way(mesh: str, saved: tuple[Path, str]) -> None:
    folder, family = saved
    run_distributed(load, MESHES[mesh][0], folder, mesh, family, list(MESHES))
