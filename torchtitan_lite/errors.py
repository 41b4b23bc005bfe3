"""Errors that a person can act on. They are shown without a traceback; anything else is a bug of ours.

`run_cli` is the one place that does so: every command goes through it.
"""

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable


class UserError(Exception):
    """The message says what was wrong, with the value, and what to do. The process exits with `exit_code`."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration that can't be run: a file, a key, a value or a combination of values."""


class DataError(UserError):
    """Text that can't be read, or too little of it."""


class CheckpointError(UserError):
    """A checkpoint that can't be read, or that belongs to another model or other data."""


class UnreadableError(CheckpointError):
    """The system could not read a checkpoint (permissions, a disk or network error). It may be undamaged."""


class SaveError(UserError):
    """The last checkpoint of a run could not be written."""

    exit_code = 1


class OutputError(UserError):
    """Text that a person asked for can't be written."""

    exit_code = 1


class StuckError(UserError):
    """Another rank was lost, or kept this one waiting for too long."""

    exit_code = 1


class NoMemoryError(UserError):
    """The device or the host has too little memory for this configuration."""

    exit_code = 1


class DivergedError(UserError):
    """Ranks that hold copies of the same parameters hold different ones."""

    exit_code = 1


class NonFiniteError(UserError):
    """The loss or the gradient norm became NaN or infinite. The update of that step was withheld."""

    exit_code = 1


# --- the front doors --------------------------------------------------------------------------------------------

# The file system or the machine failed, not the input.
_OF_THE_MACHINE = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.ETIMEDOUT)
_HINTS = {
    errno.EACCES: "this process runs as uid {uid}; give it access, or choose another path",
    errno.EPERM: "this process runs as uid {uid}; give it access, or choose another path",
    errno.ENAMETOOLONG: "a name has at most 255 bytes; choose a shorter path",
    errno.ELOOP: "its symbolic links lead in a circle",
    errno.EMFILE: "too many files are open; raise the limit by ulimit -n",
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space, or choose another disk",
}


def run_cli(name: str, main: Callable[[], int], info: Callable[[str], None] | None = None) -> int:
    """Run a command. What a person can act on becomes a message and an exit code; a bug keeps its traceback.

    Args:
        name: of the command; each message starts with it.
        main: returns the exit code.
        say: prints a message; by default on stderr.
    """
    info = info or _to_stderr
    try:
        code = main()
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be reported
        return code
    except KeyboardInterrupt:
        info(f"{name}: stopped")
        return 130
    except UserError as error:
        info(f"{name}: {error}")
        return error.exit_code
    except Exception as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe, e.g. head, has seen enough
            _forget_stdout()
            return 1
        message = explain(error)
        if not message:
            raise
        info(f"{name}: {message}")
        try:
            sys.stdout.flush()
        except OSError:  # it is what failed, and the interpreter would flush it again
            _forget_stdout()
        return 1 if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE else UserError.exit_code


def explain(error: Exception) -> str:
    """An error of input, or of the machine, in words; empty for any other: that is a bug of ours."""
    if isinstance(error, OSError):
        if isinstance(error, io.UnsupportedOperation) or error.errno == errno.EBADF:
            return ""
        return _explain_os_error(error)
    if is_out_of_memory(error):
        first = str(error).splitlines()[:1]
        return f"out of memory{f': {first[0]}' if first else ''}{_where(error)}"
    if isinstance(error, UnicodeDecodeError):
        return (
            f"byte {error.object[error.start]:#04x} at position {error.start:,} is not {error.encoding}{_where(error)}"
        )
    if isinstance(error, UnicodeEncodeError):
        what = ascii(error.object[error.start])
        return f"the character {what} can't be written as {error.encoding}; try PYTHONIOENCODING=utf-8{_where(error)}"
    if isinstance(error, UnicodeError):
        return f"{error}{_where(error)}"
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply{_where(error)}"
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}{_where(error)}"
    return ""


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or a device has no memory left. (torch's CPU allocator has no class of its own for that.)"""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "you tried to allocate" in str(error)


def _explain_os_error(error: OSError) -> str:
    paths = " -> ".join(
        shortened(os.fsdecode(p)) for p in (error.filename, error.filename2) if isinstance(p, str | bytes)
    )
    hint = _HINTS.get(error.errno or 0, "").format(uid=os.geteuid() if hasattr(os, "geteuid") else "-")
    text = error.strerror or str(error) or type(error).__name__
    return f"{f'{paths}: ' if paths else ''}{text}{f': {hint}' if hint else ''}{_where(error)}"


def shortened(value: object, longest: int = 200) -> str:
    """A value for a message."""
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"


def _where(error: Exception) -> str:
    """The line of ours that met the error: it is no traceback, and enough to find the place."""
    package = os.path.dirname(os.path.abspath(__file__))
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(package)]
    ours = [f for f in ours if f.filename != os.path.abspath(__file__)]
    return f" [{os.path.relpath(ours[-1].filename, os.path.dirname(package))}:{ours[-1].lineno}]" if ours else ""


def _to_stderr(message: str) -> None:
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _forget_stdout() -> None:
    """Send what is still buffered nowhere."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
