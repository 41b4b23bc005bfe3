"""docs/checkpoints.md: what a run wrote, read in five lines without this package."""

import builtins
import shutil
from pathlib import Path
from typing import Any

import pytest

import torchtitan_lite as ttl
from tests.docs.pages import blocks
from tests.helpers import ROOT, checkpoint, tensors

BLOCKS = blocks((ROOT / "docs/checkpoints.md").read_text(), "python")
FULL, SHARDED, _ = BLOCKS


def run(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names after these lines, which must not import our package."""
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert not name.startswith("torchtitan_lite")
        return real(name, *args, **kwargs)

    names: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(builtins, "__import__", guarded)
        exec(compile(block, "docs/checkpoints.md", "exec"), names)
    return names


def copied(source: Path, run: Path) -> Path:
    """The last checkpoint of a copy of a run. A link has the name of the page."""
    last = checkpoint(shutil.copytree(source, run), 4)
    last.with_name("step-00000750").symlink_to(last)
    return last


def test_a_checkpoint(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(finished, tmp_path / "runs/default")
    names = run(FULL, tmp_path, monkeypatch)
    model, _ = ttl.load_model(folder)
    assert names["weights"].keys() == dict(model.named_parameters()).keys()
    model.load_state_dict(names["weights"])
    assert names["weights"].keys() | names["optimizer"].keys() == tensors(folder).keys()
    assert names["state"]["step"] == 4


def test_a_sharded_checkpoint(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(sharded, tmp_path / "runs/sharded")
    weights = run(SHARDED, tmp_path, monkeypatch)["weights"]
    wanted = {name: tensor for name, tensor in tensors(folder).items() if not name.startswith(("exp_avg", "step"))}
    assert weights.keys() == wanted.keys()
    assert all(weights[name].equal(wanted[name]) for name in wanted)
