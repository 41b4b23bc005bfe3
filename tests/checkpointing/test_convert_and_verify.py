"""`checkpoint.py convert` writes folders that every tool takes; `verify` takes runs, checkpoints, folders of runs."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import checkpoint, ranks, run_python, succeeded, tiny
from torchtitan_lite.tools import checkpoints, generate


@pytest.fixture(scope="module")
def first(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 2 steps."""
    folder = tmp_path_factory.mktemp("convert")
    succeeded(ranks(1, *tiny(text, folder, run__name="run", train__steps=2, optim__warmup_steps=1)))
    return folder / "run"


def test_what_convert_writes_can_be_used_by_its_name(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert checkpoints.main(["convert", str(first), str(out)]) == 0
    assert (out / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert checkpoints.main(["verify", str(out)]) == 0
    assert f"complete {out / 'step-00000002'}" in capsys.readouterr().out
    assert checkpoints.main(["inspect", str(out)]) == 0
    assert checkpoints.main(["export", str(out), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf/tokenizer.json").is_file()
    words = ["-m", "torchtitan_lite.generate", str(out), "--prompt", "def ", "--max-tokens", "2"]
    assert "2 tokens" in run_python(words).stderr
    # into a run's own folder, as before
    assert checkpoints.main(["convert", str(first), str(tmp_path / "copy/checkpoints")]) == 0
    assert checkpoint(tmp_path / "copy", 2).is_dir()


def test_the_help_of_a_command_says_what_its_arguments_are(capsys: pytest.CaptureFixture[str]) -> None:
    for command, said in (
        ("export", "the Hugging Face folder to write: new or empty"),
        ("convert", "the folder in which"),
    ):
        with pytest.raises(SystemExit):
            checkpoints.main([command, "--help"])
        output = " ".join(capsys.readouterr().out.split())
        assert "a run (its newest checkpoint) or a checkpoint" in output
        assert said in output


def test_verify_takes_a_folder_of_runs(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        shutil.copytree(first, tmp_path / "runs" / name)
    (tmp_path / "runs/started").mkdir()
    assert checkpoints.main(["verify", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.count("complete ") == 2
    (checkpoint(tmp_path / "runs/b", 2) / "model.safetensors").write_bytes(b"x")
    assert checkpoints.main(["verify", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr().out
    assert (said.count("complete "), "DAMAGED" in said) == (1, True)
    there = f"runs there: {tmp_path / 'runs/a'}, {tmp_path / 'runs/b'}"
    for name, problem in (("started", "is not a run with a checkpoint, or a checkpoint"), ("none", "does not exist")):
        assert checkpoints.main(["verify", str(tmp_path / "runs" / name)]) == 2
        assert capsys.readouterr().err == f"checkpoint.py: {tmp_path / 'runs' / name} {problem}; {there}\n"


def test_generate_names_the_runs_of_a_folder_of_runs(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(first.parent), "--prompt=a"]) == 2
    assert f"runs there: {first}" in capsys.readouterr().err
