"""The commands of `checkpoint.py`: which checkpoint they take, and what `verify` reports."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import checkpoint, ranks, succeeded, tiny
from torchtitan_lite.tools import checkpoints


def test_every_command_takes_the_newest_complete_checkpoint_and_names_a_damaged_one(
    finished: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    weights = checkpoint(run, 4) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    note = f"note    damaged: {weights}: its SHA-256 does not match the manifest"
    assert checkpoints.main(["inspect", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("step 2,")
    assert note in said
    assert checkpoints.main(["export", str(run), str(tmp_path / "hf")]) == 0
    assert note in capsys.readouterr().out
    assert (tmp_path / "hf/tokenizer.json").is_file()
    command = tiny(text, tmp_path, run__name="from", train__steps=1, optim__warmup_steps=0, model__init_from=run)
    assert note in succeeded(ranks(2, *command))
    (checkpoint(run, 2) / "state.json").unlink()
    for name in ("inspect", "export"):
        assert checkpoints.main([name, str(run), *([str(tmp_path / "no")] if name == "export" else [])]) == 2
        assert "no checkpoint is complete" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_verify_takes_a_folder_of_runs(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    (tmp_path / "runs/started").mkdir()
    assert checkpoints.main(["verify", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.count("complete ") == 4
    (checkpoint(tmp_path / "runs/b", 2) / "model.safetensors").write_bytes(b"x")
    assert checkpoints.main(["verify", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr().out
    assert (said.count("complete "), "DAMAGED" in said) == (3, True)
    there = f"runs there: {tmp_path / 'runs/a'}, {tmp_path / 'runs/b'}"
    for name, problem in (("started", "is not a run with a checkpoint, or a checkpoint"), ("none", "does not exist")):
        assert checkpoints.main(["verify", str(tmp_path / "runs" / name)]) == 2
        assert capsys.readouterr().err == f"checkpoint.py: {tmp_path / 'runs' / name} {problem}; {there}\n"
