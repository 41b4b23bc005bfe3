"""A run that fails says why, exits with an error, and keeps what it had."""

from pathlib import Path

from tests.helpers import checkpoint, python, tiny, torchrun
from torchtitan_lite import storage


def test_nan_on_one_rank_stops_the_run_before_it_is_saved(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="nan", checkpoint__every=2, eval__every=0, log__every=4)
    result = torchrun(2, *command, script="tests/nan_worker.py")
    assert result.returncode != 0
    assert result.stderr.count("step 3: the loss is not finite on rank 1. The update was withheld") == 1
    assert storage.find_steps(tmp_path / "nan/checkpoints") == [2]
    assert not (tmp_path / "nan/metrics.jsonl").exists(), "step 4, one late, must not be logged"
    assert checkpoint(tmp_path / "nan", 2).is_dir()


def test_bad_text_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"caf\xe9\n" * 2000)
    result = python(*tiny(tmp_path / "text.txt", tmp_path))
    assert result.returncode == 2
    assert "text.txt: line 1: byte 0xe9 is not utf-8" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unwritable_folder_is_an_error(text: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    result = python(*tiny(text, tmp_path / "runs"))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "can't be written" in result.stderr
