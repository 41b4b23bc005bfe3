"""A checkpoint loads the same bits on any number of ranks with either API, whichever saved it."""

from pathlib import Path

import pytest

from tests.helpers import ranks, succeeded
from tests.reload_worker import MESHES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every mesh, in each of the four ways."""
    folder = tmp_path_factory.mktemp("saved")
    for mesh, (n, _) in MESHES.items():
        succeeded(ranks(n, str(folder), "save", mesh, entry="tests.reload_worker"))
    return folder


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.extended] if mesh != "2x2" else []) for mesh in MESHES]
)
@pytest.mark.extended
def test_every_mesh_loads_what_every_mesh_saved_in_every_way(mesh: str, saved: Path) -> None:
    """Full tensors of model and optimizer, bit for bit: 1, 2, 3, 4 ranks, and 2 copies of 2 shards."""
    succeeded(ranks(MESHES[mesh][0], str(saved), "load", mesh, entry="tests.reload_worker"))
