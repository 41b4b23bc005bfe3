"""Machines that fail and come back at random under torchrun: `python -m tests.faults.machines [EVENTS [SEED]]`.

Three machines of one process each train one run with the commands of docs/cluster.md, but for `--nnodes 1:2` (with
odd seeds: the third is a spare) or `1:3`. At random moments, also
while the machines start, one of these happens:

    killed        SIGKILL of a machine: torchrun and its process (in half of the cases the one with rank 0)
    rank          SIGKILL of one training process
    frozen        SIGSTOP of a machine, for 2 or 8 s, or until the others train without it (run.timeout_minutes)
    left          SIGTERM of a torchrun
    returned      a machine joins
    full          for some seconds every write of a checkpoint fails, as on a full disk
    clock         for some seconds the clocks of all training processes are an hour back

This module does what the loop of docs/cluster.md does on each machine: it starts torchrun again when it has ended by
itself, and counts the number of the --rdzv-id up, in a file that all machines share, if that id was closed.

In the history that counts (attempts.jsonl), each step must have seen each of its samples once, and its loss must be
that of an undisturbed process. What happens at event i follows from the seed, i and which machines are there. The
moments depend on the machine.
"""

import argparse
import contextlib
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.figures import none_of, some_text, stamp
from tests.forkserver import free_port
from tests.helpers import ROOT, losses, ranks, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.run import attempts

NAMES = ("a", "b", "c")
BATCH = 6
COMPARED = 1000  # steps: later, two undisturbed runs on other world sizes differ by 1e-3 and more, as rounding grows
STUCK_S = 600  # a run that has not recovered by then needs a person
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def commands(port: int, nnodes: str) -> tuple[str, str]:
    """Those of docs/cluster.md that start the store and a torchrun, for machines of one process on this one."""
    store, launch = re.findall(
        r"^(python -c .*|TORCH_DISABLE.* torchrun .*)$", (ROOT / "docs/cluster.md").read_text(), re.M
    )
    for name, here in {
        " torchrun ": f" {sys.executable} -m torch.distributed.run --local-addr 127.0.0.1 ",
        "node0:29400": f"127.0.0.1:{port}",
        "--nnodes 1:4": f"--nnodes {nnodes}",
        "--nproc-per-node 8": "--nproc-per-node 1",
        "train.py --config configs/llama_8b.toml": "tests/faults/recorder.py",
    }.items():
        assert name in launch
        launch = launch.replace(name, here)
    return store.replace("python", sys.executable, 1).replace("29400", str(port)), launch


def arguments(folder: Path, text: Path, name: str, **more: Any) -> list[str]:
    """A tiny run without dropout, whose masks would depend on the number of ranks."""
    values = {"optim__name": "muon", "optim__lr": 0.004, "optim__schedule": "constant", "train__steps": 100_000}
    values |= {"eval__every": 0, "checkpoint__every": 10, "checkpoint__keep_latest": 3}
    values |= {"checkpoint__state_dict": "sharded"}
    return tiny(text, folder, run__name=name, **values | more)


class PersonNeededError(Exception):
    """The run needs a person."""


class Machine:
    """One machine as its supervisor sees it: a torchrun of one process, started again when it ends by itself."""

    def __init__(self, name: str, soak: "Soak") -> None:
        self.output, self._name, self._soak = soak.folder / f"{name}.txt", name, soak
        self.starts, self.frozen = 0, False
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Join the rendezvous with the current number."""
        self.starts += 1
        self._number = self._soak.number()
        line = self._soak.launch.replace("--rdzv-id mine", f"--rdzv-id mine-{self._number}")
        env = ENV | {"SAMPLES": str(self._soak.samples), "MACHINE": self.label}
        with self.output.open("ab") as out:
            out.write(f"--- {time.time():.1f} {self.label} mine-{self._number}\n".encode())
            command = ["sh", "-c", f"exec env {line} {shlex.join(more)}"]
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)

    @property
    def label(self) -> str:
        """The name of this start of torchrun."""
        return f"{self._name}{self.starts}"

    def tend(self) -> None:
        """Start torchrun again if it has ended by itself, with the next number if its own was closed."""
        if self.process is None or self.process.poll() is None:
            return
        if self.process.returncode == 0:
            raise PersonNeededError(f"{self.label} took the run for complete")
        said = self.output.read_text(errors="replace").rpartition(f" {self.label} mine-")[2].splitlines()
        if any("RendezvousClosedError" in line for line in said):
            self._soak.numbers.write_text(str(self._number + 1))
        self._soak.restarts += 1
        print(f"     torchrun of {self.label} ended with {self.process.returncode}: {said[-1:]}", flush=True)
        self.start()

    def processes(self) -> list[int]:
        """Its torchrun, and the processes below it."""
        return with_children([self.process.pid] if self.process else [])

    def kill(self) -> None:
        pids = self.processes()
        send(pids, signal.SIGSTOP)  # none of them reacts to the death of another
        send(pids, signal.SIGKILL)
        if self.process:
            self.process.wait()
        self.process, self.frozen = None, False


class Soak:
    """One run, and what happens to it."""

    def __init__(self, folder: Path, text: Path, seed: int, timeout_minutes: float, **more: Any) -> None:
        self._seed, self._rng, self.folder = seed, random.Random(seed), folder
        self.samples, self.numbers, self.run = folder / "samples", folder / "number", folder / "run"
        self.samples.mkdir()
        self._most = 2 if seed % 2 else 3
        self._timeout_s = 60 * timeout_minutes
        self._before = 0, 0
        self._kind, self._since, self._after = "", 0.0, 0  # what the run has not recovered from yet
        self.nnodes = f"1:{self._most}"
        store, launch = commands(free_port(), self.nnodes)
        self._store = subprocess.Popen(["sh", "-c", f"exec {store}"])
        limits = {"run__timeout_minutes": timeout_minutes, "run__start_timeout_minutes": timeout_minutes}
        self.launch = f"{launch} {shlex.join(arguments(folder, text, 'run', **limits | more))}"
        self.machines = {name: Machine(name, self) for name in NAMES}
        self.kinds: Counter[str] = Counter()
        self.recoveries: list[dict[str, Any]] = []
        self.restarts = 0  # of torchruns that had ended by themselves

    def number(self) -> int:
        """The number in the --rdzv-id that machines join now."""
        return int(self.numbers.read_text()) if self.numbers.exists() else 0

    # --- what is seen from outside ----------------------------------------------------------------------------------

    def up(self) -> list[str]:
        return [name for name, machine in self.machines.items() if machine.process]

    def newest(self) -> tuple[int, int, float, list[str], int]:
        """Attempt, step and time of rank 0's newest step, and the machines and the size of its world."""
        lines = [line for rank in range(self._most) if (line := last_line(self.samples / f"{rank}.txt"))]
        if not lines:
            return 0, 0, 0.0, [], 0
        attempt, step, when, _, size = lines[0][:5]
        return int(attempt), int(step), float(when), [line[3] for line in lines if line[0] == attempt], int(size)

    def _trains(self, since: float, after: int) -> bool:
        """Whether all machines that are up, or as many as fit, have made a step since then, in an attempt after it."""
        attempt, _, when, members, size = self.newest()
        running = [machine.label for machine in self.machines.values() if machine.process and not machine.frozen]
        everybody = len(members) == size == min(len(running), self._most) and {*members} <= {*running}
        return when > since and attempt > after and everybody

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, and start torchruns again that have ended by themselves."""
        ends = time.monotonic() + STUCK_S
        while not condition():
            if time.monotonic() > ends:
                raise PersonNeededError(f"{what}: not within {STUCK_S} s")
            for machine in self.machines.values():
                machine.tend()
            time.sleep(0.05)

    def pause(self, seconds: float) -> None:
        """Let some time pass: part of what happens."""
        ends = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > ends, "a pause")

    # --- what happens -----------------------------------------------------------------------------------------------

    def events(self, number: int, minutes: float) -> None:
        """Let changes happen: some soon after the last, some once the run trains again."""
        ends = time.monotonic() + 60 * minutes
        self.machines["a"].start()
        self._recovered()
        for i in range(number):
            if time.monotonic() > ends:
                break
            self._rng = random.Random(f"{self._seed}/{i}")
            self._settled = bool(self.up()) and self._rng.random() < 0.7
            if self._settled:
                self._recovered()
            self.pause(self._rng.uniform(0, 4))  # perhaps while they start
            self._event()
        if self.up():
            self._recovered()

    def _happens(self, kind: str, name: str = "") -> None:
        self.kinds[kind] += 1
        attempt, _, _, members, _ = self.newest()
        about = f"up {','.join(self.up())}; attempt {attempt} of {','.join(members)}"
        print(f"{self.kinds.total():4d} {kind} {name}: {about}", flush=True)

    def _disturbs(self, kind: str, name: str, *, breaks: bool = True) -> None:
        """Something happens from which the run has to recover; if it `breaks` a member, the attempt can't go on."""
        self._happens(kind, name)
        attempt, _, _, members, _ = self.newest()
        self._before = attempt, len(members)
        breaks = breaks and self.machines[name].label in members
        self._kind, self._since, self._after = kind, time.time(), attempt if breaks else 0
        self._graceful = self._settled and kind in ("left", "returned")

    def _recovered(self) -> None:
        """Wait until all machines that are up train again, as many as fit."""
        self.until(lambda: self._trains(self._since, self._after), f"a step after {self._kind}")
        kind, self._kind = self._kind, ""
        now, size, (before, size_before) = self.newest(), self.newest()[4], self._before
        if not kind or now[0] == before:
            return  # nothing had to recover: a spare came or went
        made = [step for attempt, step in self.steps() if attempt >= before]
        found = {"kind": kind, "seconds": round(now[2] - self._since, 1), "repeated": len(made) - len({*made})}
        found |= {"worlds": f"{size_before}>{size}", "graceful": self._graceful}
        self.recoveries.append(found)
        print(f"     {found}", flush=True)

    def _event(self) -> None:
        """One random change."""
        rng, up = self._rng, self.up()
        gone = [name for name in NAMES if name not in up]
        kind = rng.choice(("rank", "frozen", "full", "clock", *["other"] * 10))
        name = rng.choice(up or gone)
        first = [each for each in up if self.newest()[3][:1] == [self.machines[each].label]]
        if not up or (kind == "other" and gone and rng.random() < (0.5 if len(gone) == 1 else 0.85)):
            name = rng.choice(gone)
            self._disturbs("returned", name, breaks=False)
            self.machines[name].start()
        elif kind in ("full", "clock"):
            self._happens(kind)
            (self.samples / kind).touch()
            self.pause(rng.uniform(0, 4))
            (self.samples / kind).unlink()
        elif kind == "rank":
            if children := self.machines[name].processes()[1:]:  # it may have none now
                self._disturbs(kind, name)
                os.kill(children[0], signal.SIGKILL)
        elif kind == "frozen":
            self._freeze(name)
        elif rng.random() < 0.25:
            self._disturbs("left", name)
            self.stop(name)
        else:
            name = first[0] if first and rng.random() < 0.5 else name
            self._disturbs("killed first" if name in first else "killed", name)
            self.machines[name].kill()

    def stop(self, name: str) -> None:
        """SIGTERM of a torchrun, which is not started again."""
        machine = self.machines[name]
        assert machine.process is not None
        process, machine.process = machine.process, None
        process.terminate()
        self.until(lambda: process.poll() is not None, "the end of a machine that leaves")

    def _freeze(self, name: str) -> None:
        """A short break, or one that is longer than the run's time limit."""
        machine = self.machines[name]
        seconds = self._rng.choice((2.0, 8.0, self._timeout_s + 10))
        lost = seconds > 8 and len(self.up()) > 1  # alone, it goes on where it was
        self._disturbs(f"frozen {seconds:g} s", name, breaks=lost)
        send(machine.processes(), signal.SIGSTOP)
        machine.frozen = True
        thaws = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > thaws or (lost and self._trains(self._since, self._after)), "a thaw")
        if time.monotonic() < thaws:
            self._recovered()
            self._disturbs("thawed", name, breaks=False)
        machine.frozen = False
        send(machine.processes(), signal.SIGCONT)

    # --- what was seen ----------------------------------------------------------------------------------------------

    def steps(self) -> list[tuple[int, int]]:
        """Attempt and number of each step that rank 0 has made."""
        lines = (self.samples / "0.txt").read_text().splitlines() if (self.samples / "0.txt").exists() else []
        return [(int(attempt), int(step)) for attempt, step, *_ in map(str.split, lines)]

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
        self._store.kill()
        self._store.wait()


def problems(run: Path, samples: Path, trained: int) -> list[str]:
    """What was lost or doubled in the steps that count, by the lines of tests/faults/recorder.py."""
    drawn: dict[tuple[int, int], list[int]] = {}
    for file in samples.glob("*.txt"):
        for attempt, number, _, _, _, numbers in map(str.split, file.read_text().splitlines()):
            drawn.setdefault((int(attempt), int(number)), []).extend(map(int, numbers.split(",")))
    history, found = attempts.read(run), []
    for step in range(1, trained + 1):
        made_by = attempts.of_step(history, step)
        seen = sorted(drawn.get((made_by.attempt if made_by else 0, step), []))
        if seen != list(range((step - 1) * BATCH, step * BATCH)):
            found.append(f"step {step} saw {seen}")
    consumed = storage.read_state(run / f"checkpoints/step-{trained:08d}").samples_consumed
    if consumed != trained * BATCH:
        found.append(f"{consumed} samples consumed after step {trained}")
    if sorted(step for step in losses(run) if step <= trained) != list(range(1, trained + 1)):
        found.append("records are missing or doubled")
    return found


def difference_of_losses(run: Path, folder: Path, text: Path, trained: int) -> float:
    """How far the losses are from those of an undisturbed process."""
    steps = min(trained, COMPARED)
    succeeded(ranks(1, *arguments(folder, text, "straight", train__steps=steps, checkpoint__every=0)))
    disturbed, straight = losses(run), losses(folder / "straight")
    return max(abs(disturbed[step][0] - straight[step][0]) for step in straight if step in disturbed)


def with_children(pids: Sequence[int]) -> list[int]:
    """Processes, and all below them."""
    found = list(pids)
    for pid in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def last_line(file: Path) -> list[str]:
    """The words of the last line of a file; empty without one."""
    with contextlib.suppress(OSError), file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 1000))
        return lines.read().decode().splitlines()[-1].split()
    return []


def main() -> None:
    """Run one piece of the soak: print what happened, and the row of a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", nargs="?", type=int, default=20)
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no event after so long")
    parser.add_argument("--timeout-minutes", type=float, default=1.0, help="run.timeout_minutes, also to start")
    parser.add_argument("--keep", type=Path, help="a new folder for the run and what was printed")
    given = parser.parse_args()
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp())
    with tempfile.TemporaryDirectory() as name:
        folder = (given.keep or Path(name)).absolute()
        folder.mkdir(exist_ok=True)
        text = some_text(folder)
        s = Soak(folder, text, given.seed, given.timeout_minutes)
        found, difference = [], 0.0
        try:
            s.events(given.events, given.minutes)
            for machine in s.up():
                s.stop(machine)
        except PersonNeededError as error:
            found.append(f"a person was needed: {error}")
        finally:
            s.close()
        if trained := max(storage.find_steps(s.run / "checkpoints"), default=0):
            found += problems(s.run, s.samples, trained)
            if (difference := difference_of_losses(s.run, folder, text, trained)) > 1e-4:
                found.append(f"the losses differ by {difference:.1e}")
    print(f"{stamp(given.seed)}, --nnodes {s.nnodes}: {dict(s.kinds)}; {s.restarts} torchruns started again")
    seconds = [each["seconds"] for each in s.recoveries] or [math.nan]
    print(f"recovery: median {statistics.median(seconds)} s, worst {max(seconds)} s of {len(seconds)}")
    graceful = [each["repeated"] > 0 for each in s.recoveries if each["graceful"]]
    print(f"joins and leaves that repeated steps: {sum(graceful)} of {len(graceful)}")
    lost = none_of(s.kinds.total(), "events lost or doubled a sample, or needed a person")
    print(f"{trained * BATCH} samples; losses within {difference:.1e}; {'; '.join(found) or lost}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
