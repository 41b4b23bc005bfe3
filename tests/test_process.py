"""Small parts of every command: numbers in words, files, the environment of a launcher, and the commands it prints."""

import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from torchtitan_lite import files, process, terminal
from torchtitan_lite.errors import ConfigError, shortened


def test_numbers_in_words() -> None:
    assert [terminal.counted(n, "file") for n in (0, 1, 1234)] == ["0 files", "1 file", "1,234 files"]
    durations: dict[float, str] = {
        **{59.4: "59s", 59.6: "1m00s", 252: "4m12s", 3599: "59m59s", 3600: "1h00m"},
        **{7500: "2h05m", 86399: "23h59m", 86400: "1d00h", 273600: "3d04h"},
    }
    assert {seconds: terminal.duration(seconds) for seconds in durations} == durations
    sizes: dict[float, str] = {
        **{0: "0.00 MiB", 1: "1 byte", 512: "512 bytes", 10485: "10,485 bytes", 10486: "0.01 MiB"},
        **{20.25 * 2**20: "20.25 MiB", 2**30 - 2**20: "1,023.00 MiB", 1.5 * 2**40: "1,536.00 GiB"},
    }
    assert {n: terminal.size(n) for n in sizes} == sizes
    assert [shortened("a" * 200), shortened(range(1, 5), 3)] == ["a" * 200, "ran... (11 characters)"]


def test_an_error_of_writing_names_the_file_and_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, -1))
    limit = "the limit of this process is 65,536 bytes (ulimit -f)"
    for error, expected in (
        (OSError(27, "File too large"), f"[Errno 27] File too large: {limit}: 'mine'"),
        (OSError(28, "No space left"), "[Errno 28] No space left: 'mine'"),
        (OSError(27, "File too large", "its"), "[Errno 27] File too large: 'its'"),
    ):
        with pytest.raises(OSError) as caught, files.naming("mine"):  # noqa: PT011
            raise error
        assert str(caught.value) == expected
    (tmp_path / "folder").mkdir()
    files.write_durably(tmp_path / "file", b"first")
    files.write_durably(tmp_path / "file", b"next")
    with pytest.raises(IsADirectoryError):
        files.write_durably(tmp_path / "folder", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"], "a temporary file is left"
    assert (tmp_path / "file").read_bytes() == b"next"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "mine")))
        with pytest.raises(PermissionError, match="mine"):
            files.write_durably(tmp_path / "new", b"")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error: '.*file"):
        files.write_durably(tmp_path / "file", b"lost")
    assert (tmp_path / "file").read_bytes() == b"next", "what is not on the disk replaces nothing"


@pytest.mark.parametrize(("name", "value", "least"), [
    ("WORLD_SIZE", "0", 1), ("LOCAL_WORLD_SIZE", "-1", 1), ("RANK", "x", 0), ("LOCAL_RANK", "2147483648", 0),
    ("RANK", "1.5", 0), ("RANK", "", 0),
])  # fmt: skip
def test_a_wrong_environment_is_named(name: str, value: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        process.env_int(name, 1)
    assert str(caught.value) == (
        f"{name}={value!r} in the environment should be a number of {least} or more, as torchrun sets it; unset {name} "
        "for a world of one"
    )
    assert process.local_rank() == 0
    monkeypatch.setenv(name, "2147483647")
    assert process.env_int(name, 1) == 2147483647
    monkeypatch.delenv(name)
    assert process.env_int(name, 7) == 7


@pytest.mark.parametrize(("cores", "quota", "ranks", "expected"), [
    (8, 0, "3", (2, "8 cores / 3 ranks")),
    (2, 1.5, "1", (2, "quota of 1.5 cores / 1 rank")),
    (4, 4, "2", (2, "quota of 4 cores / 2 ranks")),
    (4, 4.5, "2", (2, "4 cores / 2 ranks")),
    (1, 0, "2", (1, "1 core / 2 ranks")),
])  # fmt: skip
def test_ranks_share_the_cores(
    cores: int, quota: float, ranks: str, expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: cores)
    monkeypatch.setattr(process, "quota_of_cores", lambda: quota)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert process.cpu_threads(0) == expected


@pytest.mark.parametrize(("env", "before"), [
    ({}, ".venv/bin/python train.py"),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, ".venv/bin/torchrun --nproc-per-node 4 train.py"),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "... train.py"),
])  # fmt: skip
def test_the_command_of_a_fork(env: dict[str, str], before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this process, with a name, a start and values of its own in the place of those that it had."""
    monkeypatch.setattr(os, "environ", env)
    monkeypatch.setattr(sys, "executable", os.path.abspath(".venv/bin/python"))
    words = ["train.py", "--run.name", "old", "--config", "a b.toml", "--checkpoint.resume=runs/x", "--a.skip=[1]"]
    monkeypatch.setattr(sys, "argv", [*words, "--optim.lr=1"])
    own = "--config 'a b.toml' --optim.lr=1 --run.name=new"
    assert process.fork_command("new", "", a__skip="[2]") == f"{before} {own} '--a.skip=[2]'"
    with_start = f"{before} {own} --checkpoint.resume=runs/y '--a.skip=[2]'"
    assert process.fork_command("new", "runs/y", a__skip="[2]") == with_start
    monkeypatch.setattr(sys, "executable", "/elsewhere/bin/python")
    assert process.python_command() == "/elsewhere/bin/python"
