"""A real Slurm on this machine, with a node that is lost and one that returns: `python -m tests.faults.slurm [FOLDER]`.

slurmctld and three slurmd of one core each (Debian: slurm-wlm) run scripts/slurm.sbatch with `--nodes=1-3`. A node is
killed with all its processes (3 > 2 machines); slurmd starts again there, and `scancel --signal=USR1` ends the job's
present start (2 > 3). In the history that counts, each step must have seen each of its samples once, and its loss must
be that of an undisturbed process. Slurm itself holds a requeued job for 120 s.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.figures import some_text, stamp
from tests.faults.machines import arguments, difference_of_losses, last_line, problems, send, with_children
from tests.forkserver import free_port
from tests.helpers import ROOT, until
from torchtitan_lite.checkpointing import storage

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
NODES = {f"unknown-{n}": f"127.0.0.{n}" for n in (1, 2, 3)}  # names that are not in DNS, with addresses of this machine
CONFIG = """ClusterName=faults
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=30
SlurmdParameters=config_overrides
"""
# plays $PYTHON: it trains by tests/faults/recorder.py, and everything else is done by the real one
PYTHON = """#!/bin/bash
export MACHINE=$SLURMD_NODENAME
[ "${{2:-}}" = torch.distributed.run ] && set -- "${{@/#train.py/tests/faults/recorder.py}}"
exec {python} "$@"
"""


class Cluster:
    """slurmctld and three nodes, as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        host, conf = socket.gethostname(), folder / "slurm.conf"
        lines = [CONFIG.format(host=host, port=free_port(), user=os.environ.get("USER", "root"), folder=folder)]
        for node, address in NODES.items():
            (folder / node / "spool").mkdir(parents=True)
            lines.append(f"NodeName={node} NodeAddr={address} NodeHostname={host} Port={free_port()} CPUs=1\n")
        lines.append("PartitionName=main Nodes=ALL Default=YES State=UP\n")
        (folder / "state").mkdir()
        conf.write_text("".join(lines))
        os.environ["SLURM_CONF"] = str(conf)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [f"--{name}={folder / file}" for name, file in {
            "key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log",
            "seed-file": "munge.seed"}.items()]  # fmt: skip
        self._services = [self._start(folder, "munged", "--foreground", "--force", *files)]
        until((folder / "munge.socket").exists, "munged listens")
        self._services.append(self._start(folder, "slurmctld", "-D"))
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        for node in NODES:
            self.start(node)

    def start(self, node: str) -> None:
        """Start slurmd of a node. Its folder tells which processes are the node's."""
        self._nodes[node] = self._start(self._folder / node, "slurmd", "-D", "-N", node)

    def kill(self, node: str) -> None:
        """SIGKILL of everything on a node."""
        mine = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if process.joinpath("cwd").readlink() == self._folder / node:
                    mine.append(int(process.name))
        pids = with_children(mine)
        send(pids, signal.SIGSTOP)
        send(pids, signal.SIGKILL)
        self._nodes[node].wait()

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    def close(self) -> None:
        for node in self._nodes:
            self.kill(node)
        for process in reversed(self._services):
            process.terminate()
            process.wait()

    def _start(self, cwd: Path, *command: str) -> subprocess.Popen[bytes]:
        with (cwd / f"{command[0]}.txt").open("ab") as out:
            return subprocess.Popen(command, cwd=cwd, stdout=out, stderr=out, start_new_session=True)


def main() -> None:
    """Lose a node and get it back; print a row for each. The run and what was printed stay in FOLDER, which is new."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        sys.exit(f"tests.faults.slurm needs {', '.join(missing)}: apt-get install slurm-wlm")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(*sys.argv[1:2] or [name]).absolute()
        for each in ("samples", "slurm"):
            (folder / each).mkdir(parents=True)
        text = some_text(folder)
        python = folder / "python"
        python.write_text(PYTHON.format(python=sys.executable))
        python.chmod(0o755)
        env = {"SAMPLES": str(folder / "samples"), "PYTHON": str(python), "NPROC": "1", "PORT": str(free_port())}
        os.environ |= env
        cluster = Cluster(folder / "slurm")
        try:
            rows = scenario(cluster, folder)
        finally:
            cluster.close()
        trained = storage.find_steps(folder / "run/checkpoints")[-1]
        found = problems(folder / "run", folder / "samples", trained)
        difference = difference_of_losses(folder / "run", folder, text, trained)
    print("| event | machines | seconds to the next step | steps repeated |\n|---|---|---|---|")
    print(*rows, sep="\n")
    print(f"{trained} steps, {'; '.join(found) or 'each sample once'}; losses within {difference:.1e}; {stamp('none')}")
    sys.exit(bool(found) or difference > 1e-4)


def scenario(cluster: Cluster, folder: Path) -> list[str]:
    """What happens. Returns rows of a table."""
    rows = []
    file = folder / "samples/0.txt"

    def trains(size: int, since: float) -> bool:
        words = last_line(file)
        return bool(words) and float(words[2]) > since and int(words[4]) == size

    def happens(what: str, action: Callable[[], object], size: int) -> None:
        before, since = last_line(file), time.time()
        action()
        until(lambda: trains(size, since), what)
        after = last_line(file)
        until(lambda: int(last_line(file)[1]) > int(after[1]) + 25, "steps, and two checkpoints")
        made = [words[1] for words in map(str.split, file.read_text().splitlines()) if int(words[0]) >= int(before[0])]
        seconds, repeated = float(after[2]) - since, len(made) - len({*made})
        rows.append(f"| {what} | {before[4]} > {size} | {seconds:.0f} | {repeated} |")
        print(rows[-1], flush=True)

    until(lambda: cluster.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "3", "three idle nodes")
    options = ["--parsable", "--nodes=1-3", "--gpus-per-node=0", f"--output={folder}/job.txt"]
    command = [*options, "scripts/slurm.sbatch", *arguments(folder, folder / "text", "run")]
    job = cluster.ask("sbatch", *command)
    until(lambda: trains(3, 0), "three machines train")
    happens("a node is killed", lambda: cluster.kill("unknown-3"), 2)
    cluster.start("unknown-3")
    until(lambda: cluster.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "1", "the node is back")
    happens("it is back, scancel --signal=USR1", lambda: cluster.ask("scancel", "--signal=USR1", job), 3)
    happens("the node with the batch script is killed", lambda: cluster.kill("unknown-1"), 2)
    cluster.ask("scancel", job)
    return rows


if __name__ == "__main__":
    main()
