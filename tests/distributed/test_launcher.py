"""What a process takes from its launcher and its container: its end, and its number of cores."""

import os
import re
import select
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

import train
from tests.helpers import ROOT, start, succeeded, tiny
from torchtitan_lite import environment
from torchtitan_lite.environment import usable_cores

NAMESPACES = ["unshare", "--user", "--map-root-user", "--uts", "--pid", "--fork", "--mount-proc"]

# A launcher that starts a worker, tells its number, and waits. The worker then waits for its end.
LAUNCHER = """
import os, sys
if os.fork():
    os.close(1)  # so that whoever reads it sees the end if the worker dies
    sys.stdin.read()
os.environ["RANK"] = "0"
from torchtitan_lite.environment import die_with_launcher
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
    """What `docker run image torchrun ...` is. The hostname does not resolve, and the options are those of make."""
    options = re.findall(r"torch.distributed.run (--.*) --nproc-per-node", (ROOT / "Makefile").read_text())[0].split()
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    nowhere = ["sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh"]
    options += ["--nproc-per-node", "1", "train.py", *tiny(text, tmp_path, run__name="run", train__steps=3)]
    assert "done    3 steps" in succeeded(start([*NAMESPACES, *nowhere, *launcher, *options]))


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


def test_no_file_gets_the_number_of_a_stream_that_is_closed() -> None:
    """Numbers 1 and 2 are /dev/null, as are 3 and 5 of Python's streams; 4 is that of the answer."""
    assert (
        subprocess.check_output(
            [
                *("sh", "-c", 'exec "$0" -c "$1" 4>&1 >&- 2>&-', sys.executable),
                "import os, sys; from torchtitan_lite.terminal import prepare_streams; prepare_streams();"
                "print('lost', flush=True); print('lost', file=sys.stderr, flush=True);"
                "os.write(4, b'next: %d' % os.open(os.devnull, os.O_RDONLY))",
            ],
            cwd=ROOT,
        )
        == b"next: 6"
    )


@pytest.mark.parametrize(("given", "settings"), [
    ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    *[({name: "max_split_size_mb:64"},) * 2 for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")],
])  # fmt: skip
def test_segments_of_cuda_memory_can_grow_unless_the_user_says_otherwise(
    given: dict[str, str], settings: dict[str, str]
) -> None:
    """Before the first use of CUDA, when torch reads these variables."""

    def first_use() -> int:
        found.update(os.environ)
        raise SystemExit

    found: dict[str, str] = {}
    others = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    here = {"die_with_launcher": Mock(), "prepare_streams": Mock()}  # not for this process
    with (
        patch.dict(os.environ, others | given, clear=True),
        patch.multiple(environment, **here),
        patch("torch.cuda.device_count", first_use),
        pytest.raises(SystemExit),
    ):
        train.main([])
    assert (
        {name: value for name, value in found.items() if name.endswith("ALLOC_CONF")},
        [each.call_count for each in here.values()],
    ) == (settings, [1, 1])


V2 = "0::/pod/container\n"


@pytest.mark.parametrize(("groups", "files", "limit"), [
    (V2, {"pod/container/cpu.max": "max 100000"}, 0),
    (V2, {"pod/container/cpu.max": "150000 100000"}, 2),
    (V2, {"pod/container/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 1),  # the outer one limits
    (V2, {"pod/container/cpu.max": "300000 100000", "pod/cpu.max": "400000 100000"}, 3),
    ("0::/\n", {"cpu.max": "200000 100000"}, 2),  # a namespace of its own
    ("4:memory:/elsewhere\n2:cpu,cpuacct:/docker/1\n", {"cpu.max": "max 100000"}, 0),  # version 1
    ("", {}, 0),
])  # fmt: skip
def test_a_container_limits_the_cores(groups: str, files: dict[str, str], limit: int, tmp_path: Path) -> None:
    for name, content in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with patch("os.sched_getaffinity", return_value=range(9)):
        assert usable_cores(tmp_path) == (limit or 9)
