"""What a person sees: a bar on a terminal, plain lines in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.helpers import ROOT, python, succeeded, tiny


def test_a_bar_on_a_terminal_only(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "train.py", *tiny(text, tmp_path, run__name="terminal")]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    assert process.wait() == 0
    screen = seen.decode()
    assert "%|" in screen
    assert "/20 [" in screen
    assert "step    20/20" in screen
    piped = python(*tiny(text, tmp_path, run__name="pipe"))
    assert "step    20/20" in succeeded(piped)
    assert "%|" not in piped.stdout + piped.stderr
    log = (tmp_path / "terminal/train.log").read_text()
    assert "step    20/20" in log
    assert "%|" not in log
