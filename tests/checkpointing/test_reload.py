"""A checkpoint loads the same bits on any number of ranks with either API, whichever saved it."""

from pathlib import Path

import pytest

from tests.checkpointing.reload_worker import MESHES, MODELS
from tests.helpers import ranks, succeeded


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Checkpoints of every mesh, in each of the four ways, and the family of their model."""
    folder = tmp_path_factory.mktemp("saved")
    for mesh, (n, _) in MESHES.items():
        succeeded(ranks(n, str(folder), "save", mesh, request.param, entry="tests.checkpointing.reload_worker"))
    return folder, request.param


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.extended] if mesh != "2x2" else []) for mesh in MESHES]
)
@pytest.mark.extended
def test_every_mesh_loads_what_every_mesh_saved_in_every_way(mesh: str, saved: tuple[Path, str]) -> None:
    """Full tensors of model and optimizer, bit for bit: 1, 2, 3, 4 ranks, and 2 copies of 2 shards."""
    folder, family = saved
    succeeded(ranks(MESHES[mesh][0], str(folder), "load", mesh, family, entry="tests.checkpointing.reload_worker"))
