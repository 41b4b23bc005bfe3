"""`run_cli`: errors of the input and the machine are messages with an exit code, and bugs keep their traceback."""

from collections.abc import Callable

import pytest

from torchtitan_lite import errors
from torchtitan_lite.errors import UserError, run_cli


def _raise(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


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
