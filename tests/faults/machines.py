"""Machines that are killed and come back at random: `python -m tests.faults.machines [events [seed]] [--forked]`.

Up to two of three machines train one run (`python -m torchtitan_lite.tools.elastic`), and the third is a spare. At
random moments, also while they start, one of them is killed with all its processes (SIGKILL), or comes back, or leaves
on SIGTERM, or the coordinator is killed and started again, sometimes with all machines that were in its world. The
command has `checkpoint.resume = never`, which must be obeyed once: no checkpoint may be set aside. Some samples are
poisoned, so that the loss jumps and the run rewinds. Each step must have seen each of its samples once, whichever
machines trained it, rewinds must have skipped all others, and the losses must be those of an undisturbed process that
was told to skip the same samples.

With --forked the machines and their processes are forked from a process that has torch, instead of importing it each
time: ten times as fast, and the same signals.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.helpers import HANGS_S, losses, options, ranks, succeeded
from tests.tools.elastic_machines import ELASTIC, Machines, until
from torchtitan_lite.checkpointing import storage

NAMES = ("a", "b", "c")
BATCH = 6
LEARNED = 45 * BATCH  # samples after which a poisoned batch is far above the loss
COMPARED = 1000  # steps: later, two undisturbed runs on other world sizes differ by 1e-3 and more, as rounding grows
SPIKE = {"spike__action": "rewind", "spike__window": 12, "spike__max_rewinds": 10_000, "spike__recheck": True}
WORKER = "tests/faults/machine_worker.py"


def arguments(folder: Path, text: Path, name: str, **more: Any) -> list[str]:
    """A tiny run without dropout, whose masks would depend on the number of ranks."""
    values = {
        **{"run.name": name, "run.out_dir": folder, "data.path": text, "run.device": "cpu", "run.timeout_minutes": 10},
        **{"model.family": "gpt", "model.dim": 32, "model.n_layers": 2, "model.n_heads": 2, "model.max_seq_len": 37},
        **{"tokenizer.vocab_size": 517, "train.seq_len": 32, "train.micro_batch_size": 2, "run.threads": 1},
        **{"train.global_batch_size": BATCH, "train.steps": 100_000, "optim.warmup_steps": 2, "optim.lr": 0.004},
        **{"optim.schedule": "constant", "eval.every": 0, "sample.every": 0, "log.every": 1, "checkpoint.every": 3},
        **{"checkpoint.state_dict": "sharded", "checkpoint.keep_latest": 3},
        "checkpoint.resume": "never",
    }
    return options(values | {key.replace("__", "."): value for key, value in more.items()})


class Forked(Machines):
    """Machines that are forked from this process."""

    def join(
        self, name: str, *options: str, command: Sequence[str] | None = None, entry: Sequence[str] = ELASTIC
    ) -> None:
        words = ["join", "--name", name, *options, f"127.0.0.1:{self.port}", *(command or self.command)]
        out = self._folder / f"{name}.txt"
        self.alive[name] = ForkedProcess(lambda: _machine(words), self._env, out)  # type: ignore[assignment]


class ForkedProcess:
    """What is used of subprocess.Popen, of a child that is forked without exec."""

    def __init__(self, main: Any, env: dict[str, str], out: Path | None = None, dies: bool = False) -> None:
        self.returncode: int | None = None
        parent = os.getpid()
        # until it has handlers of its own, a signal for the child would go through this process's pipe of signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        else:
            code = 1
            try:
                if dies:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                    if os.getppid() != parent:
                        os._exit(1)
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.setpgid(0, 0)
                os.closerange(3, 1024)
                if out is not None:
                    with out.open("ab") as stream:
                        os.dup2(stream.fileno(), 1)
                        os.dup2(stream.fileno(), 2)
                os.environ.update(env)
                code = main()
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, seconds: float) -> int:
        until(lambda: self.poll() is not None, "the end of a process", seconds)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _machine(words: Sequence[str]) -> int:
    from torchtitan_lite.tools.elastic import __main__, machine

    def forked(command: Sequence[str], env: dict[str, str], **_: Any) -> ForkedProcess:
        assert command[2] == WORKER, command
        return ForkedProcess(lambda: _worker(command[3:]), env, dies=True)

    vars(machine)["subprocess"] = SimpleNamespace(Popen=forked)
    return __main__.main(words)


def _worker(argv: Sequence[str]) -> NoReturn:
    import train
    from tests.faults import machine_worker
    from torchtitan_lite.distributed.process_group import exit_process

    machine_worker.install()
    exit_process(train.main(argv))


class Soak:
    """One run, and what happens to it."""

    def __init__(self, folder: Path, text: Path, seed: int, forked: bool) -> None:
        self._rng, self._folder, self._text = random.Random(seed), folder, text
        self._samples = folder / "samples"
        self._samples.mkdir()
        self.run = folder / "run"
        self.poisoned = self._poison()
        env = {
            "SAMPLES": str(self._samples),
            "PACE_S": "0.02" if forked else "0.2",
            "POISON": json.dumps(self.poisoned),
        }
        kind = Forked if forked else Machines
        command = [WORKER, *arguments(folder, text, "run", **SPIKE)]
        self.machines = kind(folder, command, "--nnodes", "1:2", "--settle", "0.5", env=env)
        events = "killed", "killed with rank 0", "all killed", "returned", "left", "coordinator", "and its world"
        self.counts = dict.fromkeys(events, 0)
        self.recoveries: list[float] = []
        self._worlds = 0  # how many there had been before the last change

    def _poison(self) -> list[list[int]]:
        """Ranges of one or two batches, about one for 20 steps."""
        found, at = [], LEARNED
        while at < 60_000:  # an environment variable has room for these
            at += BATCH * self._rng.randint(10, 30)
            found.append([at, at + BATCH * self._rng.randint(1, 2)])
        return found

    def newest(self) -> float:
        """When rank 0 trained its last step, in seconds of the clock; 0: never."""
        file = self._samples / "0.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return float(lines[-1].split()[2]) if lines else 0.0

    def event(self) -> None:
        """One random change."""
        rng, machines = self._rng, self.machines
        alive, gone = sorted(machines.alive), [name for name in NAMES if name not in machines.alive]
        last = next((line for line in reversed(machines.said().splitlines()) if ": world " in line), "")
        world = last.rpartition(": ")[2].split(", ") if last else []
        if rng.random() < 0.12:
            self.counts["coordinator"] += 1
            machines.coordinator.kill()
            machines.coordinator.wait(HANGS_S)
            if spares := [name for name in alive if name not in world]:  # which have never been in this world
                self.counts["and its world"] += 1
                for name in set(alive) - set(spares):
                    machines.kill(name)
            elif gone and rng.random() < 0.5:
                machines.join(gone[0])  # it may come first
            time.sleep(rng.uniform(0, 3))  # it is not there for a while: part of what happens
            machines.coordinate()
        elif gone and rng.random() < (0.5 if len(gone) == 1 else 0.85):
            self.counts["returned"] += 1
            machines.join(rng.choice(gone))
        elif rng.random() < 0.15:
            self.counts["left"] += 1
            name = rng.choice(alive)
            machines.alive[name].send_signal(signal.SIGTERM)
            # -15: it had not started yet
            assert machines.alive.pop(name).wait(HANGS_S) in (75, -15), machines.said(name)[-3000:]
        else:
            name = rng.choice(alive)
            self.counts["killed with rank 0"] += world[:1] == [name]
            self.counts["killed"] += 1
            machines.kill(name)
            self.counts["all killed"] += not machines.alive

    def events(self, number: int, minutes: float) -> int:
        """Let changes happen: some soon after the last, some once the run trains again. Returns how many."""
        self.machines.join("a")
        happened, ends, i = 0.0, time.monotonic() + 60 * minutes, 0
        while i < number and time.monotonic() < ends:
            if self._rng.random() < 0.6:
                self.recovered(happened)
                time.sleep(self._rng.uniform(0, 4))
            else:
                time.sleep(self._rng.uniform(0, 4))  # perhaps while they start
            self._worlds, happened = self.machines.worlds(), time.time()
            self.event()
            if not self.machines.alive:  # nothing happens before one comes back
                self.machines.join(self._rng.choice(NAMES))
                self.counts["returned"] += 1
            i += 1
            print(f"{i:4d} {self.counts} alive: {sorted(self.machines.alive)}", flush=True)
        self.recovered(happened)
        return i

    def recovered(self, happened: float) -> None:
        """Wait until all machines that are there train in one world."""
        until(self._all_train, "a step after the last change")
        if happened and self.machines.worlds() > self._worlds:  # otherwise nothing had to recover
            self.recoveries.append(self.newest() - happened)

    def _all_train(self) -> bool:
        said = self.machines.said()
        assert self.machines.coordinator.poll() is None, said[-2000:] + "".join(map(self.machines.said, NAMES))[-6000:]
        since_start = said[said.rfind("coordinator: waiting for ") :].splitlines()
        last = next((line for line in reversed(since_start) if " world " in line), "")
        names = last.rpartition(": ")[2].split(", ") if ": world " in last else []
        started = (self._folder / "coordinator.txt").stat().st_mtime
        full = len(names) == min(len(self.machines.alive), 2)
        return full and {*names} <= {*self.machines.alive} and self.newest() > started

    def end(self) -> None:
        """Save, and compare with what should have been."""
        self.machines.coordinator.send_signal(signal.SIGTERM)
        codes = self.machines.codes()
        assert not any(codes.values()), (codes, self.machines.said()[-3000:])

    def seen(self) -> dict[int, list[int]]:
        """The samples that each step saw in the world that trained it last."""
        records: dict[int, list[tuple[float, str, list[int]]]] = {}
        for file in self._samples.glob("*.txt"):
            lines = [line.split(" ") for line in file.read_text().splitlines()]
            # a rewind makes a step again in the same world
            for (world, step), (when, numbers) in {(line[0], line[1]): (line[2], line[3]) for line in lines}.items():
                drawn = [int(number) for number in numbers.split(",") if number]
                records.setdefault(int(step), []).append((float(when), world, drawn))
        last = {step: max(found)[1] for step, found in records.items()}
        return {
            step: sorted(number for _, world, drawn in found if world == last[step] for number in drawn)
            for step, found in records.items()
        }


def main() -> None:
    """Run the soak, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", nargs="?", type=int, default=20)
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("--forked", action="store_true")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no event after so long")
    given = parser.parse_args()
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp())
    if given.forked:
        for module in ("train", "torch._dynamo"):
            importlib.import_module(module)
        gc.freeze()
    print(soak(given.events, given.seed, minutes=given.minutes, forked=given.forked))


def soak(events: int, seed: int, *, minutes: float, forked: bool) -> str:
    """Let the events happen and check the run. Returns a summary."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text"
        text.mkdir()
        (text / "argparse.txt").write_text(inspect.getsource(argparse))
        s = Soak(folder, text, seed, forked)
        try:
            happened = s.events(events, minutes)
            s.end()
        finally:
            s.machines.close()
        trained = storage.find_steps(s.run / "checkpoints")[-1]
        skipped = check_samples(s, trained)
        told = {"train__steps": trained, "checkpoint__every": 0, "data__skip_samples": json.dumps(skipped)}
        succeeded(ranks(1, *arguments(folder, text, "straight", **told)))
        disturbed, straight = losses(s.run), losses(folder / "straight")
        assert sorted(disturbed) == sorted(straight) == list(range(1, trained + 1))
        difference = max(abs(disturbed[step][0] - straight[step][0]) for step in straight if step <= COMPARED)
        assert difference < 1e-4, f"the losses differ by {difference}"
        return (
            f"{happened} events {s.counts}; {s.machines.worlds()} worlds, {trained} steps; recovery: median "
            f"{statistics.median(s.recoveries):.1f} s, worst {max(s.recoveries):.1f} s of {len(s.recoveries)}; "
            f"{trained * BATCH} samples, none lost or doubled; {len(skipped)} rewinds skipped "
            f"{sum(end - first for first, end in skipped)}; losses of the first "
            f"{min(trained, COMPARED)} steps within {difference:.1e}"
        )


def check_samples(s: Soak, trained: int) -> list[list[int]]:
    """Each sample was seen once or skipped by a rewind, and no poisoned one was seen. Returns what was skipped."""
    seen = {step: numbers for step, numbers in s.seen().items() if step <= trained}
    assert sorted(seen) == list(range(1, trained + 1)), "a step is missing"
    aside = [folder.name for folder in (s.run / "checkpoints").iterdir() if ".old" in folder.name]
    assert not aside, f"checkpoint.resume = never was obeyed again: {aside}"
    state = storage.read_state(s.run / f"checkpoints/step-{trained:08d}")
    jumps, at = list(state.jumps), 0
    for step in range(1, trained + 2):
        while jumps and jumps[0][0] == step - 1:
            _, first, end = jumps.pop(0)
            assert first == at, f"the samples {at} to {first - 1} were lost before step {step}"
            at = end
        if step <= trained:
            assert seen[step] == list(range(at, at + BATCH)), f"step {step} saw {seen[step]}, not {at} and those after"
            at += BATCH
    assert not jumps
    assert at == state.samples_consumed
    bad = {i for first, end in s.poisoned for i in range(first, end)}
    trained_on = {number for numbers in seen.values() for number in numbers}
    assert not bad & trained_on, f"no rewind skipped {sorted(bad & trained_on)}"
    return [[first, end] for _, first, end in state.jumps]


if __name__ == "__main__":
    main()
