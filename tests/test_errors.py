"""`run_cli`: errors of the input and the machine are messages with an exit code, and bugs keep their traceback."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import start
from torchtitan_lite import errors, hints
from torchtitan_lite.errors import ConfigError, UserError, run_cli
from torchtitan_lite.tools import migrate_accelerate


def _raise(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def test_an_error_of_all_ranks_is_reported_once_after_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    known_before: list[bool] = []
    monkeypatch.setattr("time.sleep", lambda seconds: known_before.append(file.exists()))
    assert run_cli("x", _raise(ConfigError("wrong")), 1) == 2
    assert known_before == [False], "local rank 0 ends it meanwhile, if it has the same error"
    assert json.loads(file.read_text())["message"]["message"] == "[local rank 1] x: wrong"
    assert run_cli("x", _raise(ConfigError("wrong"))) == 2
    assert json.loads(file.read_text())["message"]["message"] == "x: wrong"
    assert capsys.readouterr().err == "[local rank 1] x: wrong\nx: wrong\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *of: ended.append(of))
    run_cli("x", _raise(errors.StuckError("before a restart")))
    assert ended == []
    run_cli("x", _raise(ConfigError("before none")))
    assert ended == [(os.getppid(), signal.SIGTERM)], "torchrun, which would try again"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no/folder"))
    run_cli("x", _raise(ConfigError("a full disk")))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("x: ")]
    assert said == ["x: before a restart", "x: before none", "x: a full disk"]


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (PermissionError(13, "Permission denied", "/a/b"), 2, "x: /a/b: Permission denied: this process runs as uid"),
        (OSError(36, "File name too long", "a" * 5000), 2, "(5,000 characters): File name too long"),
        (OSError(28, "No space left on device", "/a"), 1, "x: /a: No space left on device: free some space"),
        (OSError(5, "Input/output error"), 1, "x: Input/output error"),
        (UnicodeDecodeError("utf-8", b"a\xe9", 1, 2, "no"), 2, "x: byte 0xe9 at position 1 is not utf-8"),
        (MemoryError(), 2, "x: out of memory"),
        (RuntimeError("alloc_cpu.cpp: you tried to allocate 5 bytes\nmore"), 2, "x: out of memory: alloc_cpu.cpp"),
        (
            RuntimeError("can't start new thread"),
            2,
            "x: no more threads can be started; ulimit -u or",
        ),
        (RuntimeError("Resource temporarily unavailable"), 2, "x: no more threads can be started"),
        (RuntimeError("unable to start watchdog thread"), 2, "x: no more threads can be started"),
        (UserError("this and that"), 2, "x: this and that"),
        (errors.SaveError("late"), 1, "x: late"),
        (KeyboardInterrupt(), 130, "x: stopped"),
    ],
)
def test_an_input_error_is_a_message_without_a_traceback(
    error: BaseException, code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("x", _raise(error)) == code
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyError("a"), TypeError(), AttributeError("a"), ValueError("a"), OSError(9, "bad")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_cli("x", _raise(error))


def test_the_line_that_met_the_error_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.yaml").write_text("a: 1")
    monkeypatch.setattr(migrate_accelerate, "translate", lambda content: b"\xff".decode())
    assert migrate_accelerate.main([str(tmp_path / "one.yaml")]) == 2
    message = capsys.readouterr().err
    assert "migrate: byte 0xff at position 0 is not utf-8" in message
    assert "[torchtitan_lite/tools/migrate_accelerate.py:" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disks_and_closed_pipes_end_a_command_without_a_traceback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    lines = [
        "import sys",
        "from torchtitan_lite.errors import run_cli",
        "sys.exit(run_cli('x', lambda: print('y' * 9) or 0))",
    ]
    program.write_text("\n".join(lines))
    full = start(["bash", "-c", f"{sys.executable} {program} >/dev/full"])
    assert (full.returncode, full.stderr.count("x: No space left on device")) == (1, 1), full.stderr
    gone = start(["bash", "-c", f"exec {sys.executable} {program} > >(exec sleep 0)"])
    for result in (full, gone):
        assert "Traceback" not in result.stderr
        assert "Exception ignored" not in result.stderr


def test_a_long_value_is_shortened_and_its_length_is_told() -> None:
    assert errors.shortened("x" * 200) == "x" * 200
    assert errors.shortened("x" * 1201) == "x" * 200 + "... (1,201 characters)"


@pytest.mark.parametrize(("n", "last"), [(16, "15 is 15 in the checkpoint and - here"), (17, "and 1 more")])
def test_at_most_16_differences_of_a_checkpoint_are_listed(n: int, last: str) -> None:
    lines = hints.differences({f"{i:02d}": i for i in range(n)}, {})
    assert len(lines) == min(n, 17)
    assert lines[-1] == last
    assert hints.differences({"a": "f" * 64, "b": 1}, {"a": "e" * 64, "b": 1}) == [
        f"a is {'f' * 12}... in the checkpoint and {'e' * 12}... here"
    ]
