"""A checkpoint loads the same bits on any number of ranks with either API, whichever saved it."""

import shutil
from pathlib import Path

import pytest

from tests.checkpointing.reload_worker import MESHES, load, load_format_6, save
from tests.helpers import run_distributed
from torchtitan_lite.tools import checkpoints


def test_a_checkpoint_of_each_way_loads_by_the_other_api_on_another_mesh(tmp_path: Path) -> None:
    """From three ranks, which divide no number of rows evenly, on two machines' worth of copies; rows and columns."""
    for mesh in ("3", "3c"):
        run_distributed(save, 3, tmp_path, mesh, "llama")
    run_distributed(load, 4, tmp_path, "2x2", "llama", ["3c"])
    run_distributed(load, 4, tmp_path, "2x2c", "llama", ["3"])


def test_format_6_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """format6.zip was written by version 1.0 on two ranks, one state as "full" and as "sharded"."""
    shutil.unpack_archive(Path(__file__).with_name("format6.zip"), tmp_path)
    run_distributed(load_format_6, 3, tmp_path)
    for kind in ("full", "sharded"):
        assert checkpoints.main(["verify", str(tmp_path / kind)]) == 0
        assert checkpoints.main(["inspect", str(tmp_path / kind)]) == 0
        assert "optimizer.state.layers.0.attention.wq.weight.momentum_buffer\n" in capsys.readouterr().out


@pytest.fixture(scope="module", params=["llama", "t5"])
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
