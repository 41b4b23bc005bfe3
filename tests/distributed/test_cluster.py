"""Two machines, simulated by two torchruns, and the Slurm script with stand-ins for its commands."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from tests.faults.machines import ENV, Soak
from tests.forkserver import ADDRESS, free_port
from tests.helpers import HANGS_S, ROOT, checkpoint, losses, ranks, records, refused, server, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.errors import EXIT_WOULD_REPEAT, UserError
from torchtitan_lite.run import attempts

DOC = (ROOT / "docs/cluster.md").read_text()


def test_ranks_that_connect_lazily_train_save_and_resume_as_others_do(text: Path, tmp_path: Path) -> None:
    more = {"speed__shared_memory": False, "eval__every": 0, "optim__warmup_steps": 1}
    saves = {"checkpoint__async_save": True, "checkpoint__state_dict": "sharded"}
    for name, lazy, steps, keys in (("at-once", "0", 3, {}), ("lazy", "1", 2, saves), ("lazy", "1", 3, saves)):
        given = tiny(text, tmp_path, run__name=name, **(more | keys | {"train__steps": steps}))
        said = succeeded(ranks(3, *given, "--optim.schedule=constant", env={"TORCH_GLOO_LAZY_INIT": lazy}))
    assert "resumed after step 2" in said
    assert losses(tmp_path / "lazy") == losses(tmp_path / "at-once")


def two_machines(
    n: int, *arguments: str, env: dict[str, str], restarts: int = 2
) -> list[subprocess.CompletedProcess[str]]:
    """Run two torchruns of n processes each, to their ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(n)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "x"]
    command += ["--local-addr", "127.0.0.1", "--max-restarts", str(restarts), "tests/faults/worker.py", *arguments]

    def machine(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=ENV | env, capture_output=True, text=True, timeout=HANGS_S)

    with ThreadPoolExecutor(2) as both:
        return list(both.map(machine, range(2)))


@pytest.mark.extended
def test_a_rank_killed_on_one_of_two_machines_restarts_both(text: Path, tmp_path: Path) -> None:
    """The same numbers as on one machine, and checkpoints of both.

    torchrun counts a restart only on the machine whose rank died; the ranks still rendezvous.
    Rank 0 is slow, so that its torchrun learns of the restart before its rank fails without the other.
    """
    more = {"train__steps": 6, "checkpoint__every": 2, "checkpoint__state_dict": "sharded"}
    env = {
        "FAULT": "kill:1:5:batch,slow:0:5:batch",
        "FAULT_SECONDS": "5",
        "TORCHTITAN_LITE_FAILED": f"{tmp_path}/nodes",
    }
    both = two_machines(1, *tiny(text, tmp_path, run__name="two", **more), env=env)
    output = "".join(map(succeeded, both))
    assert output.count("FAULT kill fired on rank 1") == 1, output
    assert "resumed after step 4" in output
    assert output.count("\ndone ") == 1, "one speaks"
    assert not (tmp_path / "nodes").exists(), "the other one failed first"
    succeeded(ranks(2, *tiny(text, tmp_path, run__name="one", **more)))
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert storage.verify(storage.step_folder(tmp_path / "two/checkpoints", 6)) == []
    last = attempts.read(tmp_path / "two")[-1]
    assert (last.ended, last.world_size, len(last.hosts)) == ("complete", 2, 1)
    assert "--run.name=two" in last.command


@pytest.mark.extended
def test_a_rank_killed_on_one_of_two_machines_ends_ranks_that_wait_in_a_kernel_on_both(
    text: Path, tmp_path: Path
) -> None:
    """The others hang, as within NCCL. The rank beside the killed one tells those of the other machine."""
    env = {"FAULT": "kill:3:3:batch,hang:0:3:batch,hang:1:3:batch,hang:2:3:batch"}
    said = [agent.stderr for agent in two_machines(2, *tiny(text, tmp_path, run__name="run"), env=env, restarts=0)]
    name = f"a process died on {os.uname().nodename}: rank 3 (last seen: step 3, fetching its batch)"
    assert [f"train.py: {name}" in errors for errors in said] == [True, True], said
    assert name in json.loads((tmp_path / "run/run.json").read_text())["reason"]


def test_machines_that_do_not_run_the_same_are_named(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", train__steps=6)
    port = str(free_port())

    def machine(rank: int) -> subprocess.CompletedProcess[str]:
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        other = ["--optim.lr=0.5"] if rank == 1 else []
        return ranks(1, *command, *other, env=there | {"RANK": str(rank), "LOCAL_RANK": "0"})

    with ThreadPoolExecutor(2) as both:
        results = list(both.map(machine, (0, 1)))
    assert [result.returncode for result in results] == [1, 2], "the first is not to blame, and starts again"
    said = [result.stderr for result in results]
    host = os.uname().nodename
    wrong = [f"optim.lr: {a} on rank 0 ({host}); {b} on rank 1 ({host})" for a, b in ((0.004, 0.5), (0.5, 0.004))]
    assert any(line in errors for line in wrong for errors in said), said
    assert not (tmp_path / "run/metrics.jsonl").exists()


def write_programs(folder: Path, **contents: str) -> None:
    """Executable bash scripts."""
    for name, content in contents.items():
        (folder / name).write_text(f"#!/bin/bash\n{content}\n")
        (folder / name).chmod(stat.S_IRWXU)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment in which srun and scontrol are stand-ins: srun runs its command here, scontrol writes down."""
    programs = tmp_path / "bin"
    programs.mkdir()
    srun = 'while [[ "$1" == --* ]]; do shift; done; echo $$ > "$SRUN_PID"; exec "$@"'
    scontrol = """case "$1 $2" in
    "show hostnames") echo here; echo there ;;
    "show -o") echo NodeName=here CPUs=1 NodeAddr=127.0.0.1 Port=1 ;;
    "show job") echo "  ReqNodeList=(null) ExcNodeList=broken" ;;
    *) echo "$@" >> "$REQUEUED" ;;
    esac"""
    write_programs(programs, srun=srun, scontrol=scontrol)
    return ENV | {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": sys.executable, "NPROC": "1",
        "SLURM_SUBMIT_DIR": str(ROOT), "LOGS": str(tmp_path),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "nodes", "SLURMD_NODENAME": "here",
        "PORT": str(free_port()), "REQUEUED": str(tmp_path / "requeued"), "SRUN_PID": str(tmp_path / "pid"),
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
    refused(sbatch(slurm, *options, "--train.step=3"), "the nearest known one is train.steps")


def test_the_slurm_script_prints_the_fork_as_a_job(
    slurm: dict[str, str], finished: Path, text: Path, tmp_path: Path
) -> None:
    options = tiny(text, finished.parent, run__name="run", train__steps=4, checkpoint__every=2)
    write_programs(tmp_path / "bin", python=f'exec {sys.executable} -m tests.forkserver "$@"')
    slurm |= {"PYTHON": f"{tmp_path}/bin/python", ADDRESS: server().address}
    said = refused(sbatch(slurm | {"SLURM_JOB_NUM_NODES": "2"}, *options, "--optim.lr=0.01", "--optim.name=adamw"))
    words = [word for word in [*options, "--optim.lr=0.01", "--optim.name=adamw"] if word != "--run.name=run"]
    fork = f"--run.name=run-from-4 --checkpoint.resume={checkpoint(finished, 4)}"
    assert [line for line in said.splitlines() if line.endswith(fork)] == [
        f"    sbatch --nodes=2 scripts/slurm.sbatch {' '.join(words)} {fork}"
    ], "it checks once"
    (finished / ".lock-holder").write_text("process 5 on node3, job 6")
    with FileLock(finished / ".lock"):
        refused(sbatch(slurm, *options), f"{finished} is being used by process 5 on node3, job 6; wait for it")


@pytest.mark.parametrize("mode", ["--retry", "--inspect"])
def test_one_of_several_processes_does_not_train_alone(mode: str, text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", fsdp__dp_shard=4)
    refused(ranks(1, *command, mode, env={"WORLD_SIZE": "4"}), "WORLD_SIZE=4, as if this were one of several processes")
    assert not (tmp_path / "run").exists()
    succeeded(ranks(1, *command, "--check-config", env={"WORLD_SIZE": "4"}))


# plays $PYTHON: the check before and after a launch, a launch that may write a status, everything else by the real one
PLAYED = """
case "$*" in
*--check-config*)
  echo "the configuration is fine; its run is in $RUN"
  [ ! -e "$RUN/launched" ] || exit "$CHECK" ;;
*torch.distributed.run*)
  touch "$RUN/launched"
  echo "$PET_RDZV_CONF $PET_LOCAL_ADDR $*"
  echo "$FAILED" > "$TORCHTITAN_LITE_FAILED"
  [ -z "$STATUS" ] || echo "{\\"status\\": \\"$STATUS\\", \\"time\\": $(date +%s.%N)}" > "$RUN/run.json"
  exit "$CODE" ;;
*) exec "$REAL" "$@" ;;
esac"""


@pytest.mark.parametrize(("before", "status", "code", "check", "requeued"), [
    # a status that an earlier attempt has left: this one has died before it could write its own
    pytest.param("preempted", "", 1, 0, True, marks=pytest.mark.extended),
    pytest.param("complete", "", 1, 0, True, marks=pytest.mark.extended),
    # this attempt's
    ("complete", "failed", 1, 0, True),
    pytest.param("preempted", "running", 137, 0, True, marks=pytest.mark.extended),
    ("failed", "preempted", 1, 0, True),
    pytest.param("failed", "complete", 1, 0, False, marks=pytest.mark.extended),
    pytest.param("failed", "", 0, 0, False, marks=pytest.mark.extended),  # a dry run
    # a failure that would repeat
    pytest.param("running", "failed", 1, 3, False, marks=pytest.mark.extended),
    pytest.param("running", "", 1, 2, False, marks=pytest.mark.extended),
])  # fmt: skip
def test_the_slurm_script_requeues_what_may_go_better(
    before: str,
    status: str,
    code: int,
    check: int,
    requeued: bool,
    slurm: dict[str, str],
    tmp_path: Path,
) -> None:
    """By the status of this attempt only. Three failures since the last stop that saved end the job."""
    write_programs(tmp_path / "bin", python=PLAYED)
    (tmp_path / "run").mkdir()
    env = slurm | {"PYTHON": "python", "REAL": sys.executable, "RUN": str(tmp_path / "run"), "FAILURES": "2"}
    env |= {"STATUS": status, "CODE": str(code), "CHECK": str(check), "FAILED": "a"}
    for times in range(1, 5):
        (tmp_path / "run/launched").unlink(missing_ok=True)
        (tmp_path / "run/run.json").write_text(json.dumps({"status": before, "time": time.time() - 5}))
        result = sbatch(env, "--run.name=run")
        assert f"is: {status or 'unknown'} (exit code {code})" in result.stdout
        ends = times > 2 and status not in ("preempted", "complete") and code and not check
        assert result.returncode == (1 if ends else check), result.stdout + result.stderr
        queue = tmp_path / "requeued"
        assert queue.exists() == (requeued and not ends)
        queue.unlink(missing_ok=True)


def test_the_slurm_script_excludes_a_node_and_names_an_unknown_one(slurm: dict[str, str], tmp_path: Path) -> None:
    """A node that failed first twice in a row. USR1 before torchrun handles it (138) is no failure."""
    assert "--cpus" not in (ROOT / "scripts/slurm.sbatch").read_text(), "smaller nodes refuse the number of larger ones"
    write_programs(tmp_path / "bin", python=PLAYED, timeout='case "$*" in *nowhere) exit 124 ;; esac')
    env = slurm | {
        **{"PYTHON": "python", "REAL": sys.executable, "RUN": str(tmp_path), "FAILURES": "5"},
        **{"STATUS": "", "CHECK": "0", "SLURM_JOB_NUM_NODES": "2"},
    }
    for code, failed in ((1, "a"), (1, "b"), (138, ""), (1, "b"), (1, "b\na"), (1, "b")):
        said = succeeded(sbatch(env | {"CODE": str(code), "FAILED": failed}, "--run.name=run"))
        assert re.search("^is_host=1 127.0.0.1 -m torch.distributed.run .* --rdzv-endpoint 127.0.0.1:", said, re.M)
    expected = ["requeue 7"] * 4 + ["update JobId=7 ExcNodeList=broken,b"] + ["requeue 7"] * 2
    assert (tmp_path / "requeued").read_text().splitlines() == expected
    for restarts, ends in (("1", 1), ("0", 2)):  # after a requeue, it may be the name service
        result = sbatch(env | {"RDZV_HOST": "nowhere", "SLURM_RESTART_COUNT": restarts}, "--run.name=run")
        refused(result, "can't resolve RDZV_HOST=nowhere: set it to", code=ends)


@pytest.fixture
def soak(text: Path, tmp_path: Path) -> Iterator[Soak]:
    """Machines by the commands of docs/cluster.md: two at a time, and a spare."""
    soak = Soak(tmp_path, text, 1, 3, checkpoint__every=2)
    yield soak
    soak.close()


@pytest.mark.extended
def test_machines_join_and_leave_and_a_spare_takes_over(soak: Soak) -> None:
    """The first machine is lost: the spare replaces it. Each step is made once, or again from the last checkpoint."""

    def trains(world_size: int) -> attempts.Attempt:
        """Wait for four steps of a new attempt with this world size."""
        before = soak.newest()[0]

        def made() -> int:
            attempt, *_, size = soak.newest()
            return (size == world_size) * sum(a == attempt for a, _ in soak.steps() if attempt > before)

        soak.until(lambda: made() >= 4, f"a world of {world_size}")
        return attempts.read(soak.run)[-1]

    a, b, spare = soak.machines.values()
    a.start()
    first = trains(1)
    b.start()
    joined = trains(2)
    assert attempts.read(soak.run)[0].last_step == joined.step > first.step, "no step is repeated"
    spare.start()
    a.kill()
    assert trains(2).step % 2 == 0, "from a checkpoint"
    soak.stop("b")
    left = trains(1)
    assert attempts.read(soak.run)[-2].last_step == left.step, "no step is repeated"
    soak.stop("c")
    assert soak.restarts == 0
    about = json.loads((soak.run / "run.json").read_text())
    assert about["status"] == "preempted"
    assert [r["step"] for r in records(soak.run) if "loss" in r] == list(range(1, about["step"] + 1))


def test_machines_agree_on_the_next_id_after_one_is_closed(tmp_path: Path) -> None:
    """By the loop of the page, with stand-ins. A torchrun that was killed, signalled or has failed closes no id."""
    (loop,) = re.findall(r"^set -o pipefail\nuntil n=.*?^done$", DOC, re.M | re.S)
    script = loop.replace("torchrun ...", "./torchrun").replace(" ... 2>&1", " 2>&1").replace("/tmp/", "")
    torchrun = 'echo "$2" >> ids; set -- $(sed -n "$(wc -l < ids)p" ends); echo "x.$2: closed"; exit $1'
    loop = script.replace("python train.py", "./train")
    write_programs(tmp_path, torchrun=torchrun, loop=loop, train='exit "$(cat check)"')
    (tmp_path / "runs").mkdir()
    closed = "RendezvousClosedError"
    ends = ["137", "1", f"1 {closed}", "1 Error", f"1 {closed}", "0", f"1 {closed}", "134", "0", "1 Error", "1 Error"]
    (tmp_path / "ends").write_text("\n".join(ends))
    (tmp_path / "check").write_text("0")

    def loop_ends() -> list[str]:
        subprocess.run(["./loop"], cwd=tmp_path, check=False, timeout=HANGS_S)
        return (tmp_path / "ids").read_text().split()

    ids = ["mine-0", "mine-0", "mine-0", "mine-1", "mine-1", "mine-2"]
    assert loop_ends() == ids
    (tmp_path / "runs/mine.id").write_text("7")  # by another machine
    assert loop_ends() == [*ids, "mine-7", "mine-8", "mine-8"]
    (tmp_path / "check").write_text("2")
    assert loop_ends() == [*ids, "mine-7", "mine-8", "mine-8", "mine-8"], "it does not begin again"


@pytest.mark.extended
@pytest.mark.parametrize(("wrong", "said"), [
    (["--train.step=3"], "the nearest known one is train.steps"),
    (["--optim.lr=1e30", "--optim.warmup_steps=0"], "not finite"),
])  # fmt: skip
def test_a_failure_that_would_repeat_ends_torchrun(wrong: list[str], said: str, soak: Soak) -> None:
    """Though it has a thousand restarts left."""
    machine = soak.machines["a"]
    machine.start(*wrong)
    assert machine.process is not None
    assert machine.process.wait(HANGS_S) == 1
    printed = machine.output.read_text()
    assert said in printed
    assert "ending torchrun, because a restart would fail in the same way" in printed
    assert len(attempts.read(soak.run)) <= 1


SCHEMAS = json.loads((Path(__file__).parent / "trainer_crds.json").read_text())


def wrong_in(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    """What the API server would refuse, or drop silently: a part of OpenAPI 3, as CRDs have it."""
    if not schema or schema.get("x-kubernetes-int-or-string"):
        return []
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if type(value) is not types[schema["type"]]:
        return [f"{where}: {value!r} is no {schema['type']}"]
    found = [f"{where}: {value!r} is not allowed"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, list):
        return found + [
            wrong for i, item in enumerate(value) for wrong in wrong_in(item, schema["items"], f"{where}[{i}]")
        ]
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties")
        if known or other is not None:
            found += [f"{where}: {key} is missing" for key in schema.get("required", []) if key not in value]
            found += [f"{where}: {key} is unknown" for key in value if key not in known and other is None]
            return found + [w for k in value for w in wrong_in(value[k], known.get(k, other or {}), f"{where}.{k}")]
    return found


def test_the_trainjob_is_valid() -> None:
    """Against the schemas of the CRDs of Kubeflow Trainer; and its options are those of train.py."""
    runtime, job = yaml.safe_load_all((ROOT / "scripts/trainjob.yaml").read_text())
    for part in (runtime, job):
        assert wrong_in(part, SCHEMAS[part["kind"]], part["kind"]) == []
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (rule,) = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [UserError.exit_code, EXIT_WOULD_REPEAT]
    pod = replicated["template"]["spec"]["template"]["spec"]
    pod["restartPolicies"] = "Never"
    pod["containers"][0]["command"] = "bash"
    wrong = wrong_in(runtime, SCHEMAS["TrainingRuntime"], "")
    assert [error.rpartition(": ")[2] for error in wrong] == ["restartPolicies is unknown", "'bash' is no array"]


@pytest.mark.parametrize(("check", "expected"), [(0, "torchrun"), (3, "")])
def test_a_pod_checks_before_it_trains(check: int, expected: str, tmp_path: Path) -> None:
    runtime, job = yaml.safe_load_all((ROOT / "scripts/trainjob.yaml").read_text())
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    command = replicated["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    write_programs(
        tmp_path, python=f'echo "$TORCHELASTIC_RUN_ID $WORLD_SIZE $@"; exit {check}', torchrun='echo torchrun "$@"'
    )
    env = ENV | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}
    env["PET_RDZV_ID"] = "mine.trainjob"  # by Kubernetes
    pod = subprocess.run(
        [*command, *job["spec"]["trainer"]["args"]], env=env, capture_output=True, text=True, timeout=60
    )
    own = "train.py --config=configs/llama_8b.toml --run.name=mine --data.path=/shared/data/mine --run.out_dir=/shared"
    checked, *launched = pod.stdout.splitlines()
    assert pod.returncode == check, pod.stderr
    assert checked.startswith(f"mine.trainjob 16 {own}")
    assert checked.endswith("--check-config")
    assert [line.startswith(f"{expected} {own}") for line in launched] == [True] * (not check)
