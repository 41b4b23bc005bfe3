"""Two machines, simulated by two torchruns, and the Slurm script with stand-ins for its commands."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoint import Checkpointer
from tests.forkserver import free_port
from tests.helpers import HANGS_S, ROOT, losses, python, ranks, records, run_distributed, succeeded, tiny
from tests.tools.elastic_machines import until
from torchtitan_lite import process
from torchtitan_lite.checkpointing import save, storage
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.distributed.ranks import gather
from torchtitan_lite.errors import StuckError
from torchtitan_lite.monitoring import attempts
from torchtitan_lite.monitoring.watchdog import explained

LAZY = "TORCH_GLOO_LAZY_INIT"
DOC = (ROOT / "docs/cluster.md").read_text()
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def agents(command: list[str], fault: str) -> list[subprocess.Popen[str]]:
    """Two torchruns with a fault, which meet on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "x"]
    launcher += ["--local-addr", "127.0.0.1", "--max-restarts", "2", "tests/faults/worker.py", *command]
    env = ENV | {"FAULT": fault, "FAULT_SECONDS": "5"}
    pipe = subprocess.PIPE
    return [subprocess.Popen(launcher, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]


def test_a_large_world_connects_lazily_and_may_open_as_many_files_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(LAZY, raising=False)
    process.connect_lazily(process.LARGE)
    assert LAZY not in os.environ
    process.connect_lazily(process.LARGE + 1)
    assert os.environ[LAZY] == "1"
    script = tmp_path / "limited.py"
    script.write_text(
        "import resource\nfrom tests.called import RunConfig, process_group\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))\n"
        'with process_group(RunConfig(device="cpu", threads=1)):\n'
        "    print(hard, *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    hard, soft, still_hard = map(int, succeeded(python(script=str(script))).split())
    assert soft == min(hard, 2**20) > hard // 2
    assert hard == still_hard


@pytest.mark.parametrize("background", [False, True])
def test_only_a_save_in_the_background_has_a_group_of_its_own(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group is a connection to every rank."""
    own: Any = object()
    shared: Any = object()
    monkeypatch.setattr(save, "untimed_group", lambda: own)
    world = World(0, 1, torch.device("cpu"), 1, untimed=shared)
    nothing: Any = None
    found = Checkpointer(Path(), nothing, nothing, CheckpointConfig(async_save=background), world)
    assert found.group is (own if background else shared)


def test_ranks_that_connect_lazily_train_save_and_resume_as_others_do(text: Path, tmp_path: Path) -> None:
    more = {"speed__shared_memory": False, "train__global_batch_size": 4, "eval__every": 0, "optim__warmup_steps": 1}
    saves = {"checkpoint__async_save": True, "checkpoint__state_dict": "sharded"}
    for name, lazy, steps, keys in (("at-once", "0", 3, {}), ("lazy", "1", 2, saves), ("lazy", "1", 3, saves)):
        given = tiny(text, tmp_path, run__name=name, **(more | keys | {"train__steps": steps}))
        said = succeeded(ranks(4, *given, "--optim.schedule=constant", env={LAZY: lazy}))
    assert "resumed after step 2" in said
    assert losses(tmp_path / "lazy") == losses(tmp_path / "at-once")


def exchange_without_one(world: World, folder: Path) -> None:
    """Rank 1 ends before any rank has connected to it; each other rank exchanges a value, and writes its error."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    assert world.store is not None
    if world.rank == 1:
        world.store.set("pid", str(os.getpid()))
        os._exit(0)
    stat = Path(f"/proc/{int(world.store.get('pid'))}/stat")
    with contextlib.suppress(OSError):
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            pass
    try:
        with explained(world):
            gather(world.rank, group)
    except StuckError as error:
        (folder / f"error-{world.rank}").write_text(str(error))
    while len(list(folder.glob("error-*"))) < world.world_size - 1:
        pass  # rank 0 has the store
    os._exit(0)


def test_a_rank_that_ends_before_others_connect_to_it_is_an_error_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether the rank connects or waits to be connected to."""
    monkeypatch.setenv(LAZY, "1")
    run_distributed(exchange_without_one, 4, tmp_path)
    for rank in (0, 2, 3):
        error = (tmp_path / f"error-{rank}").read_text()
        assert error.startswith(
            (
                f"rank {rank}, starting: connection reset: a process died. ",
                f"rank {rank}, starting: waited for the other ranks",
            )
        ), error


@pytest.mark.extended
def test_a_rank_killed_on_one_of_two_machines_restarts_both(text: Path, tmp_path: Path) -> None:
    """The same numbers as on one machine, and checkpoints of both.

    torchrun counts a restart only on the machine whose rank died; the ranks still rendezvous.
    Rank 0 is slow, so that its torchrun learns of the restart before its rank fails without the other.
    """
    more = {"train__steps": 6, "checkpoint__every": 2, "checkpoint__state_dict": "sharded"}
    both = agents(tiny(text, tmp_path, run__name="two", **more), "kill:1:5:batch,slow:0:5:batch")
    said = [agent.communicate(timeout=HANGS_S) for agent in both]
    assert [agent.returncode for agent in both] == [0, 0], said
    output = "".join(out for out, _ in said)
    assert output.count("FAULT kill fired on rank 1") == 1, output
    assert "resumed after step 4" in output
    assert output.count("\ndone ") == 1, "one speaks"
    succeeded(ranks(2, *tiny(text, tmp_path, run__name="one", **more)))
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert storage.verify(storage.step_folder(tmp_path / "two/checkpoints", 6)) == []
    last = attempts.read(tmp_path / "two")[-1]
    assert (last.ended, last.world_size, len(last.hosts)) == ("complete", 2, 1)
    assert "--run.name=two" in last.command


def test_machines_that_do_not_run_the_same_are_named(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", train__steps=6)
    port = str(free_port())

    def machine(rank: int) -> subprocess.CompletedProcess[str]:
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        other = ["--optim.lr=0.5"] if rank == 1 else []
        return ranks(1, *command, *other, env=there | {"RANK": str(rank), "LOCAL_RANK": "0"})

    with ThreadPoolExecutor(2) as both:
        results = list(both.map(machine, (0, 1)))
    assert all(result.returncode for result in results)
    said = [result.stderr for result in results]
    host = os.uname().nodename
    wrong = [f"optim.lr: {a} on rank 0 ({host}); {b} on rank 1 ({host})" for a, b in ((0.004, 0.5), (0.5, 0.004))]
    assert any(line in errors for line in wrong for errors in said), said
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment in which srun and scontrol are stand-ins: srun runs its command here, scontrol writes down."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, content in {
        "srun": 'while [[ "$1" == --* ]]; do shift; done; echo $$ > "$SRUN_PID"; exec "$@"',
        "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{content}\n")
        (programs / name).chmod(stat.S_IRWXU)
    return os.environ | ENV | {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": sys.executable, "NPROC": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "PORT": str(free_port()),
        "REQUEUED": str(tmp_path / "requeued"), "SRUN_PID": str(tmp_path / "pid"),
    }  # fmt: skip


def sbatch(env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/slurm.sbatch", *options]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANGS_S)


@pytest.mark.extended
def test_the_slurm_script_puts_a_preempted_job_back_into_the_queue(
    slurm: dict[str, str], text: Path, tmp_path: Path
) -> None:
    long = {"train__steps": 2000, "optim__schedule": "constant"}
    options = tiny(text, tmp_path, run__name="run", **long)
    command = ["bash", "scripts/slurm.sbatch", *options]
    job = subprocess.Popen(command, cwd=ROOT, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("step"):
            break
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGUSR1)  # what Slurm does to the processes of srun
    output, _ = job.communicate(timeout=HANGS_S)
    assert f"the run in {tmp_path / 'run'} is: preempted" in output
    assert job.returncode == 0, output
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    # what the queue starts then resumes, to the end
    left = json.loads((tmp_path / "run/run.json").read_text())["step"]
    assert f"resumed after step {left}" in succeeded(sbatch(slurm, *options, f"--train.steps={left + 2}"))
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert records(tmp_path / "run")[-1]["step"] == left + 2
    bad = sbatch(slurm, *options, "--train.step=3")
    assert bad.returncode == 2
    assert "the nearest known one is train.steps" in bad.stderr


PLAYED = """#!/usr/bin/env python3
# plays $PYTHON: the check of the config, a launch that may write a status, and everything else by the real one
import json, os, sys, time
if "--check-config" in sys.argv:
    print("the configuration is fine; its run is in", os.environ["RUN"])
elif "torch.distributed.run" in sys.argv or "torchtitan_lite.tools.elastic" in sys.argv:
    print("COMMAND", *sys.argv[1:])
    if status := os.environ.get("STATUS"):
        run = {"status": status, "time": time.time()}
        json.dump(run, open(os.environ["RUN"] + "/run.json", "w"))
    sys.exit(int(os.environ["CODE"]))
else:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def played(slurm: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """The script with a played python: its output, if it ends with the expected code and (not) requeues the job."""
    python = tmp_path / "bin/played-python"
    python.write_text(PLAYED)
    python.chmod(stat.S_IRWXU)

    def run(code: int, expected: int, requeued: bool, **env: str) -> str:
        env |= {"PYTHON": str(python), "RUN": str(tmp_path / "run"), "CODE": str(code)}
        result = sbatch(slurm | env, "--run.name=run")
        assert result.returncode == expected, result.stdout + result.stderr
        assert (tmp_path / "requeued").exists() == requeued
        return result.stdout

    return run


@pytest.mark.parametrize(("before", "status", "code", "expected", "requeued"), [
    # a status that an earlier attempt has left: this one has died before it could write its own
    ("preempted", "", 1, 1, False),
    ("complete", "", 2, 2, False),
    # this attempt's
    ("complete", "failed", 1, 1, False),
    ("preempted", "running", 137, 137, False),
    ("failed", "preempted", 1, 0, True),
    ("failed", "complete", 1, 0, False),
])  # fmt: skip
@pytest.mark.extended
def test_the_slurm_script_uses_only_the_status_of_this_attempt(
    before: str, status: str, code: int, expected: int, requeued: bool, played: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(json.dumps({"status": before, "time": time.time() - 5}))
    said = played(code, expected, requeued, STATUS=status)
    assert f"is: {status or 'unknown'} (exit code {code})" in said


@pytest.mark.parametrize(("code", "expected", "requeued"), [(75, 0, True), (0, 0, False), (1, 1, False)])
@pytest.mark.extended
def test_the_slurm_script_joins_a_coordinator(
    code: int, expected: int, requeued: bool, played: Callable[..., str]
) -> None:
    """A machine that left on a signal is requeued, whatever the status of the run: others continue it."""
    said = played(code, expected, requeued, COORDINATOR="login1:29400", SECRET_FILE="a b.key", NPROC="8")
    command = "-m torchtitan_lite.tools.elastic join --secret-file a b.key --nproc-per-node 8 login1:29400 train.py"
    assert f"COMMAND {command} --run.name=run\n" in said


@pytest.mark.extended
def test_torchrun_loses_a_machine_and_gets_one_back(text: Path, tmp_path: Path) -> None:
    """The commands of docs/cluster.md for torchrun."""
    store, launch = re.findall(r"^(python -c .*|TORCH_DISABLE\S* torchrun .*)$", DOC, re.M)
    port = str(free_port())
    options = tiny(text, tmp_path, train__steps=100_000, optim__schedule="constant", checkpoint__every=2)
    run, log = tmp_path / "mine", tmp_path / "mine/train.log"
    replaced = launch.replace("torchrun", f"{sys.executable} -m torch.distributed.run --local-addr 127.0.0.1")
    replaced = replaced.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("node0:29400", f"127.0.0.1:{port}")
    command = f"exec env {replaced} {shlex.join(options)}"
    processes: list[subprocess.Popen[bytes]] = []
    killed: list[subprocess.Popen[bytes]] = []

    def started(line: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "said.txt").open("ab") as out:
            processes.append(subprocess.Popen(["sh", "-c", line], cwd=ROOT, env=ENV, stdout=out, stderr=out))
        return processes[-1]

    def trains(world: str, after: int = 0) -> bool:
        ended = [process.poll() for process in processes if process not in killed]
        assert not any(code is not None for code in ended), (tmp_path / "said.txt").read_text()[-3000:]
        text = log.read_text() if log.exists() else ""
        size, _, rest = text.rpartition("  cpu  world ")[2].partition(" = ")
        return size == world and "\nstep " in rest and text.count("  cpu  world ") > after

    try:
        started("exec " + store.replace("python", sys.executable, 1).replace("29400", port))
        until(lambda: not socket.socket().connect_ex(("127.0.0.1", int(port))), "the store")
        first = started(command)
        until(lambda: trains("1"), "one machine")
        second = started(command)
        until(lambda: trains("2"), "two machines")
        killed.append(first)
        first.kill()
        until(lambda: trains("1", 2), "the second alone")
        second.send_signal(signal.SIGTERM)
        second.wait(HANGS_S)
    finally:
        for process in processes:
            process.kill()
            process.wait(HANGS_S)
    about = json.loads((run / "run.json").read_text())
    assert about["status"] == "preempted", (tmp_path / "said.txt").read_text()[-3000:]
    assert [record["step"] for record in records(run) if "loss" in record] == list(range(1, about["step"] + 1))
