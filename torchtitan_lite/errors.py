"""Errors that a user can fix.

`run_cli` prints these and errors of the machine (e.g. a full disk, out of memory) without a traceback; any other
exception is a bug in torchtitan_lite.
"""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_lite.terminal import print_error

EXIT_WOULD_REPEAT = 3  # exit code: training failed, and would fail again with the same config and code


class UserError(Exception):
    """An error whose message names the wrong value and the fix. The process exits with `exit_code`.

    2: the command, the config, the data or a checkpoint is wrong, so the next start would fail too. 3: see
    EXIT_WOULD_REPEAT. 1: the same command may work later.
    """

    exit_code = 2
    secondary = False  # true: another process failed first


class ConfigError(UserError):
    """A config file, key, value or combination of values is invalid."""


class DataError(UserError):
    """Text or prepared data is unreadable, damaged or too short."""


class CheckpointError(UserError):
    """A checkpoint is damaged, or belongs to a different model or different data."""


class FormatError(UserError):
    """A checkpoint has the format of a different version of torchtitan_lite. It is not damaged."""


class TemporaryError(UserError):
    """The same command may work later."""

    exit_code = 1


class BusyError(ConfigError, TemporaryError):
    """A resource is in use or can't be reached, or another rank has wrong values."""


class UnreadableError(TemporaryError):
    """The system failed to read a checkpoint (permissions, disk, network). The checkpoint may be intact."""


class SaveError(TemporaryError):
    """A checkpoint can't be written."""


class StuckError(TemporaryError):
    """Another rank failed, died, or made this one wait too long."""


class NoMemoryError(TemporaryError):
    """The device or the host has too little memory for this configuration."""


class ReplicaMismatchError(TemporaryError):
    """Replicas of the same parameters differ between ranks."""


class RepeatError(UserError):
    """Training failed, and would fail again. As such: the last attempt had the same config and code, and did."""

    exit_code = EXIT_WOULD_REPEAT


class NonFiniteError(RepeatError):
    """The loss or the gradient norm (the update is withheld), a parameter or a logit is NaN or infinite."""


class SpikeError(RepeatError):
    """The loss or the gradient norm jumped far above its recent values. That step's update was not applied."""


# --- commands ---------------------------------------------------------------------------------------------------

# The file system or the machine failed, not the input: exit code 1, not 2.
_SYSTEM_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.ETIMEDOUT)


def run_cli(name: str, main: Callable[[], int], local_rank: int = 0) -> int:
    """Run a command. User and machine errors become a message and an exit code; a bug keeps its traceback.

    Args:
        name: the command's name, which begins each message.
        main: returns the exit code.
        local_rank: see `report`.
    """
    try:
        code = main()
        sys.stdout.flush()  # while a full disk or a closed pipe can still be reported
        return code
    except KeyboardInterrupt:
        if local_rank == 0:
            print_error(f"{name}: stopped")
        return 130
    except UserError as error:
        final = error.exit_code in (UserError.exit_code, EXIT_WOULD_REPEAT)
        report(f"{name}: {error}", local_rank, secondary=error.secondary, final=final)
        return error.exit_code
    except Exception as error:
        if isinstance(error, BrokenPipeError):  # the pipe's reader, e.g. head, has exited
            sys.stdout = None  # else the interpreter flushes it again at exit
            return 1
        message = _explained(error)
        if not message:
            _note_machine()
            _tell_torchrun(traceback.format_exc(), time.time())
            raise
        report(f"{name}: {message}", local_rank)
        try:
            sys.stdout.flush()
        except OSError:  # stdout itself failed
            sys.stdout = None
        return 1 if isinstance(error, OSError) and error.errno in _SYSTEM_ERRORS else UserError.exit_code


def _explained(error: Exception) -> str:
    """Return the message for an error in the input or the machine; empty for a bug in torchtitan_lite."""
    if isinstance(error, OSError):
        return _os_error(error)
    if is_out_of_memory(error):
        return ": ".join(["out of memory", *str(error).splitlines()[:1]])
    return str(error) if isinstance(error, UnicodeError) else ""


_HINTS = {
    errno.EACCES: "this process runs as uid {uid}; give it access, or choose another path",
    errno.EPERM: "this process runs as uid {uid}; give it access, or choose another path",
    errno.EMFILE: "too many files are open; raise the limit with ulimit -n",
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space, or choose another disk",
}


def _os_error(error: OSError) -> str:
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    paths = " -> ".join(shortened(name) for name in names)
    text = error.strerror or str(error) or type(error).__name__
    hint = _HINTS.get(error.errno or 0, "").format(uid=os.geteuid())
    return ": ".join(part for part in (paths, text, hint) if part)


def report(message: str, local_rank: int = 0, *, secondary: bool = False, final: bool = False) -> None:
    """Print an error, and pass it to torchrun's summary. An error that all ranks share is printed once per machine.

    torchrun kills all ranks as soon as one exits, so the others wait for local rank 0 to report. A rank that is still
    alive after 10 s has an error of its own.

    Args:
        secondary: another rank failed first. torchrun reports the earliest error as the root cause, but timestamps a
            killed rank only when it notices the death. So this error gets a later timestamp.
        final: the next start would fail in the same way, so end torchrun before it restarts.
    """
    died = re.search(r"a process died(?: on (\S+))?: rank", message)  # beside this one, or on another machine
    _note_machine(died[1] in (None, socket.gethostname()) if died else not secondary)
    if local_rank != 0:
        time.sleep(10)
        message = f"[local rank {local_rank}] {message}"
    print_error(message)
    _tell_torchrun(message, time.time() + (60 if secondary else 0))
    if final and os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        print_error("ending torchrun, because a restart would fail in the same way; torchrun's traceback follows")
        os.kill(os.getppid(), signal.SIGTERM)


def within(seconds: float, action: Callable[..., Any], *given: Any) -> Any:
    """Return an action's result; None if it fails or takes longer, as a file system or the store may not answer."""
    results: list[Any] = []

    def act() -> None:
        with contextlib.suppress(Exception):
            results.append(action(*given))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _note_machine(failed_first: bool = True) -> None:
    """Add this machine to the list $TORCHTITAN_LITE_FAILED if a process of it failed first (scripts/slurm.sbatch)."""
    if failed_first and (path := os.environ.get("TORCHTITAN_LITE_FAILED")):
        with contextlib.suppress(OSError), open(path, "a") as file:
            file.write(os.environ.get("SLURMD_NODENAME", socket.gethostname()) + "\n")


def _tell_torchrun(message: str, when: float) -> None:
    """Write the error file that torchrun reads. torch's own writer adds a traceback and can't set the time."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = message.encode("utf-8", "backslashreplace").decode()  # torchrun can't print a lone surrogate
        with contextlib.suppress(OSError):  # a full disk
            error = {"message": {"message": text, "extraInfo": {"timestamp": str(int(when))}}}
            Path(f"{path}.new").write_text(json.dumps(error))
            os.replace(f"{path}.new", path)  # torchrun raises if it reads half a file


def text_of(error: Exception) -> str:
    """Return what an error says; for one without words, as of a bare assert, its name."""
    return str(error).strip() or repr(error)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the host or a device is out of memory. torch's CPU allocator raises a plain RuntimeError."""
    of_torch = type(error).__name__ == "OutOfMemoryError" or "you tried to allocate" in str(error)
    return isinstance(error, MemoryError) or of_torch


def shortened(value: object, longest: int = 200) -> str:
    """Return a value's text for a message, truncated to `longest` characters."""
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"
