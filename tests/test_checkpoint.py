"""What is wrong with a checkpoint is said before anything is overwritten."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import checkpoint, python, records, start, succeeded, tensors, tiny
from torchtitan_lite import storage
from torchtitan_lite.errors import CheckpointError


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    succeeded(python(*tiny(text, folder, run__name="run", train__steps=4, checkpoint__every=2)))
    return folder / "run"


def again(finished: Path, text: Path, tmp_path: Path, **more: object) -> str:
    """The error of the same command, changed."""
    if not (tmp_path / "run").exists():
        shutil.copytree(finished, tmp_path / "run")
    result = python(*tiny(text, tmp_path, **{"run__name": "run", "train__steps": 6, "checkpoint__every": 2} | more))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_finished_run_says_so_and_exits_0(finished: Path, text: Path) -> None:
    before = records(finished)
    output = succeeded(python(*tiny(text, finished.parent, run__name="run", train__steps=4, checkpoint__every=2)))
    assert "finished: step 4 of train.steps = 4" in output
    assert "--train.steps=8" in output
    assert "--run.name=NAME" in output
    assert records(finished) == before


def test_more_steps_continue_a_finished_run(finished: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    output = succeeded(python(*tiny(text, tmp_path, run__name="run", train__steps=6, optim__lr=1e-4)))
    assert "resumed after step 4" in output
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == [1, 2, 3, 4, 5, 6]
    # tensors are restored, the learning rate is the config's
    assert [r["lr"] for r in records(tmp_path / "run") if r["step"] == 6 and "lr" in r] == [pytest.approx(1e-5)]
    assert tensors(checkpoint(tmp_path / "run", 6))["step.output.weight"] == 6


@pytest.mark.parametrize(
    ("key", "value", "saved", "here"),
    [
        ("model__n_layers", 3, "2", "3"),
        ("model__dim", 48, "32", "48"),
        ("train__seq_len", 16, "32", "16"),
        ("run__seed", 5, "0", "5"),
    ],
)
def test_checkpoint_of_another_run(
    key: str, value: int, saved: str, here: str, finished: Path, text: Path, tmp_path: Path
) -> None:
    message = again(finished, text, tmp_path, **{key: value})
    assert f"{key.replace('__', '.')} is {saved} in the checkpoint and {here} here" in message
    assert "--run.name=NAME" in message


def test_other_text_or_vocabulary(finished: Path, text: Path, tmp_path: Path) -> None:
    message = again(finished, text, tmp_path, tokenizer__vocab_size=400)
    assert "tokenizer is " in message
    assert "data is " in message
    message = again(finished, text, tmp_path, data__path=text / "typing.txt")
    assert "data is " in message


def damage_json(folder: Path) -> None:
    (folder / "state.json").write_text((folder / "state.json").read_text()[:50])


def future_format(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"format_version": 99}))


def cut_short(folder: Path) -> None:
    with (folder / "optimizer.safetensors").open("r+b") as stream:
        stream.truncate(1000)


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("step-00000009"))


def lose_a_tensor(folder: Path) -> None:
    content = load_file(folder / "model.safetensors")
    del content["norm.weight"]
    save_file(content, folder / "model.safetensors")


def reshape_a_tensor(folder: Path) -> None:
    content = load_file(folder / "model.safetensors")
    save_file(content | {"norm.weight": torch.zeros(33)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (damage_json, "state.json can't be read"),
        (future_format, "has format_version 99, and this version of torchtitan_lite reads 1"),
        (cut_short, "optimizer.safetensors can't be read"),
        (rename, "step-00000009 holds step 4: it was renamed"),
        (lose_a_tensor, "norm.weight is - in the checkpoint and (32,) here"),
        (reshape_a_tensor, "norm.weight is (33,) in the checkpoint and (32,) here"),
    ],
)
def test_damaged_checkpoint_is_named(
    harm: Callable[[Path], None], expected: str, finished: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    harm(checkpoint(tmp_path / "run", 4))
    message = again(finished, text, tmp_path)
    assert expected in message
    assert "step-0000000" in message


def test_only_whole_checkpoints_are_found(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "checkpoints", tmp_path / "c")
    for name in ("step-7", "step-00000009.bak", ".tmp-step-00000011", "step-00000012"):
        (tmp_path / "c" / name).mkdir()
    (tmp_path / "c" / "step-00000013").write_text("a file")
    assert storage.find_steps(tmp_path / "c") == [2, 4]
    assert storage.find_steps(tmp_path / "none") == []


def test_a_full_disk_is_an_error_and_leaves_the_old_checkpoints(finished: Path, text: Path, tmp_path: Path) -> None:
    """No file may grow beyond 64 KiB: the weights don't fit."""
    shutil.copytree(finished, tmp_path / "run")
    command = [sys.executable, "train.py", *tiny(text, tmp_path, run__name="run", train__steps=6)]
    result = start(["bash", "-c", 'ulimit -f 64; exec "$0" "$@"', *command])
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "step-00000006 could not be written" in result.stderr
    assert "older checkpoints are untouched" in result.stderr
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_a_failed_write_leaves_nothing_and_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = storage.TrainState(step=1)
    content = {"w": torch.ones(3)}
    storage.write(tmp_path, state, content, content)
    kept = (tmp_path / "step-00000001" / "model.safetensors").read_bytes()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "_sync", full)
    with pytest.raises(CheckpointError, match="No space left on device; older checkpoints are untouched"):
        storage.write(tmp_path, storage.TrainState(step=2), {"w": torch.zeros(3)}, content)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert (tmp_path / "step-00000001" / "model.safetensors").read_bytes() == kept
