"""A process that lacks rights, a home, memory or a sane environment: one message, and no traceback."""

import os
from pathlib import Path

import pytest

import train
from tests.helpers import python, ranks, tiny, torchrun

as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become another")


@as_root
@pytest.mark.parametrize("key", ["data.path", "model.init_from", "tokenizer.path", "checkpoint.resume"])
def test_a_folder_of_another_user_is_an_error(key: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file.txt").write_text("text")
    os.chown(theirs, 54321, 54321)
    theirs.chmod(0o700)
    for path in (theirs, theirs / "file.txt"):
        argv = [f"--{key}={path}", "--check-config"]
        result = ranks(1, *argv, entry="tests.config.limited_process", env={"LIMIT": "restricted"})
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr
        assert key in result.stderr
        assert str(path) in result.stderr
        assert "ermission denied" in result.stderr


@pytest.mark.extended
def test_a_user_without_a_name_and_a_home_is_told_what_to_set(tmp_path: Path) -> None:
    given = [f"--run.out_dir={tmp_path}", "--run.device=cpu"]
    result = ranks(1, "--inspect", *given, entry="tests.config.limited_process", env={"LIMIT": "homeless"})
    assert result.returncode == 2, result.stderr
    assert "there is no default folder, because HOME is not set" in result.stderr
    assert "data.cache_dir =" in result.stderr
    result = ranks(
        1, "--check-config", "--data.path=~/x", entry="tests.config.limited_process", env={"LIMIT": "homeless"}
    )
    assert result.returncode == 2
    assert "has no name; write the path in full" in result.stderr


def test_several_ranks_print_one_message(text: Path, tmp_path: Path) -> None:
    result = ranks(2, *tiny(text, tmp_path), entry="tests.config.limited_process", env={"LIMIT": "denied"})
    assert result.returncode != 0
    assert result.stderr.count("train.py: /their/text.txt: Permission denied") == 1
    assert "Traceback" not in result.stderr


def test_too_little_memory_to_build_is_a_message(text: Path, tmp_path: Path) -> None:
    result = ranks(1, *tiny(text, tmp_path), entry="tests.config.limited_process", env={"LIMIT": "huge"})
    assert result.returncode == 1
    assert "train.py: out of memory: " in result.stderr
    assert "\n  try --" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", ""), ("LOCAL_RANK", "x"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "-1")]
)
def test_an_invalid_environment_is_an_error(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert train.main(["--run.timeout_minutes=1", "--check-config"]) == (0 if name == "LOCAL_RANK" else 2)


def test_plain_python_exits_with_2_and_no_traceback() -> None:
    result = python("--train.step=5", "--train.steps=x")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "the configuration has 2 problems" in result.stderr


@pytest.mark.extended
def test_under_torchrun_the_message_is_printed_once_and_repeated_at_the_end() -> None:
    result = torchrun(2, "--train.step=5")
    assert result.returncode == 1  # torchrun's own
    ours, torchruns = result.stderr.split("ChildFailedError", 1)
    assert ours.count("the configuration has 1 problem") == 1
    assert "the configuration has 1 problem" in torchruns
    assert "exitcode  : 2" in result.stderr
