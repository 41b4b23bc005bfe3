"""Output: a bar and fitted lines on a terminal, plain full lines in a pipe, no colours."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.helpers import ROOT, python, succeeded, tiny


def on_a_terminal(columns: int, *options: str) -> str:
    """What train.py writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    command = [sys.executable, "train.py", *options]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    assert process.wait() == 0
    return seen.decode()


@pytest.mark.extended
def test_the_bar_is_shown_on_a_terminal_only_and_lines_fit_it(text: Path, tmp_path: Path) -> None:
    more = {"sample__every": 20, "sample__max_tokens": 99}
    screen = on_a_terminal(60, *tiny(text, tmp_path, run__name="narrow", **more))
    lines = [part for line in screen.splitlines() for part in line.split("\r")]
    assert any("%|" in part and "/20 [" in part for part in lines)
    assert all(len(part) <= 60 for part in lines if "%|" in part or part.startswith("step "))
    assert any(re.match(r"step +20/20  loss \S+ .*tok/s", part) for part in lines)
    samples = [part for part in lines if part.startswith("sample ")]
    assert samples
    assert all(len(part) <= 60 for part in samples)
    assert "\x1b[3" not in screen  # no colour, so there is none to switch off by NO_COLOR
    piped = python(*tiny(text, tmp_path, run__name="pipe"))
    assert "step    20/20" in succeeded(piped)
    log = (tmp_path / "narrow/train.log").read_text()
    for plain in (piped.stdout, piped.stderr, log):
        assert "%|" not in plain
    (last,) = re.findall("^step +20/20.*", log, re.MULTILINE)
    assert all(f"  {name} " in last for name in ("grad_norm", "lr", "mem", "data", "eta"))
    assert any(len(line) > 60 for line in log.splitlines() if line.startswith("sample "))
