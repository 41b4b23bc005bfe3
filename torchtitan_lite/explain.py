"""Messages for errors that Python raises: of the system, of encodings, of memory. errors.run_cli loads it for one."""

import errno
import io
import os
import traceback
from collections.abc import Callable

_HINTS = {
    errno.EACCES: "this process runs as uid {uid}; give it access, or choose another path",
    errno.EPERM: "this process runs as uid {uid}; give it access, or choose another path",
    errno.ENAMETOOLONG: "a name has at most 255 bytes; choose a shorter path",
    errno.ELOOP: "its symbolic links lead in a circle",
    errno.EMFILE: "too many files are open; raise the limit by ulimit -n",
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space, or choose another disk",
}


def explain(error: Exception, shortened: Callable[[object], str], *, out_of_memory: bool) -> str:
    """The message for an error of the input or the machine; empty for any other error, which is a bug of ours.

    Args:
        shortened, out_of_memory: errors.shortened, and what errors.is_out_of_memory returns.
    """
    if isinstance(error, OSError):
        if isinstance(error, io.UnsupportedOperation) or error.errno == errno.EBADF:
            return ""
        return _explain_os_error(error, shortened)
    if out_of_memory:
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


def _explain_os_error(error: OSError, shortened: Callable[[object], str]) -> str:
    paths = " -> ".join(
        shortened(os.fsdecode(p)) for p in (error.filename, error.filename2) if isinstance(p, str | bytes)
    )
    hint = _HINTS.get(error.errno or 0, "").format(uid=os.geteuid() if hasattr(os, "geteuid") else "-")
    text = error.strerror or str(error) or type(error).__name__
    return f"{f'{paths}: ' if paths else ''}{text}{f': {hint}' if hint else ''}{_where(error)}"


def _where(error: Exception) -> str:
    """The innermost line of this package in the traceback, as " [file:line]"."""
    package = os.path.dirname(os.path.abspath(__file__))
    ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(package)]
    ours = [f for f in ours if os.path.basename(f.filename) not in ("errors.py", "explain.py")]
    return f" [{os.path.relpath(ours[-1].filename, os.path.dirname(package))}:{ours[-1].lineno}]" if ours else ""
