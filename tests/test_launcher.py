"""A worker ends with its launcher, even if that is process 1, as torchrun may be in a container."""

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, tiny
from torchtitan_lite.distributed import process

NAMESPACES = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]

# A launcher that starts a worker, tells its number, and waits. The worker then waits for its end.
LAUNCHER = """
import os, sys
if os.fork():
    os.close(1)  # so that whoever reads it sees the end if the worker dies
    sys.stdin.read()
os.environ["RANK"] = "0"
from torchtitan_lite.distributed.process import die_with_launcher
die_with_launcher()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def namespaces_work() -> bool:
    try:
        return subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not namespaces_work(), reason="unshare can't make a PID namespace here")
@pytest.mark.extended
def test_torchrun_can_be_process_1(text: Path, tmp_path: Path) -> None:
    """What `docker run image torchrun ...` is."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    result = subprocess.run(
        [*NAMESPACES, *launcher, "train.py", *tiny(text, tmp_path, run__name="run", train__steps=3)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "done    3 steps" in result.stdout


@pytest.mark.parametrize(("parents", "killed"), [
    ([1, 1], False),  # torchrun is process 1
    ([0, 0], False),  # it is outside of this process's PID namespace
    ([70, 70], False),
    ([70, 1], True),  # it was killed while prctl was called
    ([70, 60], True),  # the same, and a subreaper took this process
])  # fmt: skip
def test_only_a_parent_that_changes_is_dead(parents: list[int], killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, answers = [], iter(parents)
    monkeypatch.setattr(os, "getppid", lambda: next(answers))
    monkeypatch.setattr(os, "kill", lambda pid, number: seen.append((pid, number)))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: type("libc", (), {"prctl": lambda *_: 0}))
    monkeypatch.setenv("RANK", "0")
    process.die_with_launcher()
    assert seen == ([(os.getpid(), signal.SIGKILL)] if killed else [])


def test_a_worker_ends_with_its_launcher() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) != process.pid
    process.kill()
    # the worker holds the other end of this pipe, which is closed when it is gone
    assert select.select([process.stdout], [], [], 60)[0], "a worker outlives its launcher"
    assert process.stdout.read() == b""
    process.communicate()
