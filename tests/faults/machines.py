"""Machines that fail and come back at random: `python -m tests.faults.machines [events [seed]]`.

Up to two of three machines train one run (`python -m torchtitan_lite.tools.elastic`), and the third is a spare. At
random moments, also while they start, one of these happens:

    killed        SIGKILL of a machine with all its processes
    rank          SIGKILL of one training process
    frozen        SIGSTOP of a machine and its processes, for less or more than the 20 s after which it counts as lost
    left          SIGTERM of a machine
    returned      a machine joins
    coordinator   it is killed and started again, sometimes with all machines that were in its world
    stranger      somebody sends random bytes to its port, and holds the connections
    full          for some seconds every write of a checkpoint fails, as on a full disk
    clock         for some seconds the clocks of all processes of the machines are an hour back

Each step must have seen each of its samples once, whichever machines trained it, and the losses must be those of an
undisturbed process.

The machines and their processes are forked from a process that has torch, instead of importing it each time: ten
times as fast, and the same signals. `--real` starts them as a user does; then only the training processes' clocks go
back. What happens at event i follows from the seed, i and which machines are there. If one fails, the command that
leads to it again is printed.
"""

import argparse
import contextlib
import ctypes
import errno
import gc
import importlib
import inspect
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.faults.figures import busy, none_of, stamp
from tests.helpers import HANGS_S, losses, ranks, succeeded, tiny
from tests.tools.elastic_machines import ELASTIC, Machines, until
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.process import env_int

NAMES = ("a", "b", "c")
BATCH = 6
COMPARED = 1000  # steps: later, two undisturbed runs on other world sizes differ by 1e-3 and more, as rounding grows
PACE_S = 0.02  # the least duration of a step
AS_RANK = "as-rank"  # the first word of this module's command line in a training process of `--real`


def arguments(folder: Path, text: Path, name: str, **more: Any) -> list[str]:
    """A tiny run without dropout, whose masks would depend on the number of ranks."""
    values = {"optim__name": "muon", "optim__lr": 0.004, "optim__schedule": "constant", "train__steps": 100_000}
    values |= {"eval__every": 0, "run__timeout_minutes": 10, "checkpoint__every": 3, "checkpoint__keep_latest": 3}
    values |= {"checkpoint__state_dict": "sharded"}
    return tiny(text, folder, run__name=name, **values | more)


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

    _set_clock()

    def forked(command: Sequence[str], env: dict[str, str], **_: Any) -> ForkedProcess:
        assert command[2] == "train.py", command
        return ForkedProcess(lambda: _worker(command[3:]), env, dies=True)

    vars(machine)["subprocess"] = SimpleNamespace(Popen=forked)
    return __main__.main(words)


def _worker(argv: Sequence[str]) -> NoReturn:
    import train
    from torchtitan_lite.distributed.process_group import exit_process

    install()
    exit_process(train.main(argv))


class Recorded:
    """A source of samples that keeps which ones were drawn last."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples
        self.last: list[int] = []

    def draw(self, numbers: Any, seed: Any) -> Any:
        self.last = numbers.tolist()
        return self._samples.draw(numbers, seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)


now = time.time  # which `clock` does not change


def _flag(name: str) -> Path:
    """Exists while something is wrong with this process's surroundings."""
    return Path(os.environ["SAMPLES"]) / name


def _set_clock() -> None:
    flag = _flag("clock")
    setattr(time, "time", lambda: now() - 3600 * flag.exists())  # noqa: B010


def _fill_disk() -> None:
    from torchtitan_lite.checkpointing.safetensors_file import HashingStream

    flag, write = _flag("full"), HashingStream.write

    def failing(self: HashingStream, *given: Any) -> Any:
        if flag.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *given)

    setattr(HashingStream, "write", failing)  # noqa: B010


def install() -> None:
    """Write down which samples each rank trained on in which world, at a pace."""
    import train
    from torchtitan_lite.data.loader import Loader

    _fill_disk()
    drawn: dict[int, list[int]] = {}
    batch, train_step = Loader.batch, train.train_step
    file = Path(os.environ["SAMPLES"]) / f"{env_int('RANK', 0)}.txt"
    # a coordinator that was killed with all that knew it counts worlds from 1 again
    world = f"{env_int('TORCHELASTIC_RESTART_COUNT', 0)}.{os.environ['MASTER_PORT']}"

    def recorded_batch(self: Loader, first: int, size: int) -> Any:
        source: Any = self.samples
        if not isinstance(source, Recorded):
            source = Recorded(source)
            object.__setattr__(self, "samples", source)  # it is frozen
        result = batch(self, first, size)
        drawn[first] = source.last
        return result

    def recorded_step(s: Any, step: int) -> Any:
        began, first = time.monotonic(), s.state.samples_consumed
        result = train_step(s, step)
        line = f"{world} {step} {now():.3f} {','.join(map(str, drawn.pop(first)))}\n"
        with file.open("a") as out:  # one write: a kill cuts no line
            out.write(line)
        time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))
        return result

    Loader.batch = recorded_batch  # type: ignore[method-assign]
    train.train_step = recorded_step


def processes_of(pid: int) -> list[int]:
    """The children of a process that have not ended."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2][0]
                found += [int(child)] if state != "Z" else []
    return found


class Soak:
    """One run, and what happens to it."""

    def __init__(self, folder: Path, text: Path, seed: int, real: bool) -> None:
        self._seed, self._rng, self._folder, self._text = seed, random.Random(seed), folder, text
        self._samples = folder / "samples"
        self._samples.mkdir()
        self.run = folder / "run"
        env = {"SAMPLES": str(self._samples)}
        program = [__file__, AS_RANK] if real else ["train.py"]
        command = [*program, *arguments(folder, text, "run")]
        self.machines = (Machines if real else Forked)(folder, command, "--nnodes", "1:2", "--settle", "0.5", env=env)
        events = ["killed", "killed with rank 0", "all killed", "returned", "left", "coordinator", "and its world"]
        events += ["rank", "frozen", "stranger", "full", "clock"]
        self.counts = dict.fromkeys(events, 0)
        self.recoveries: list[float] = []
        self.at = 0  # the number of the event that happens
        self._worlds = 0  # how many there had been before the last change

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
        kind = rng.choice(("rank", "frozen", "stranger", "full", "clock", *["other"] * 10))
        if kind != "other" and alive:
            getattr(self, f"_{kind}")(rng.choice(alive))
            self.counts[kind] += 1
        elif rng.random() < 0.12:
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

    def _rank(self, name: str) -> None:
        """Kill one process of a machine, if it has any now."""
        worlds = self.machines.worlds()
        if children := processes_of(self.machines.alive[name].pid):
            os.kill(self._rng.choice(children), signal.SIGKILL)
            until(lambda: self.machines.worlds() > worlds, "a world after a process was killed")

    def _frozen(self, name: str) -> None:
        pids = [*processes_of(self.machines.alive[name].pid), self.machines.alive[name].pid]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(self._rng.choice((2, 5, 25)))  # part of what happens

    def _stranger(self, _name: str) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(self._rng.randint(1, 20)):
                with contextlib.suppress(OSError):
                    one = stack.enter_context(socket.create_connection(("127.0.0.1", self.machines.port), timeout=5))
                    one.sendall(self._rng.randbytes(self._rng.randint(0, 100_000)))
            time.sleep(self._rng.uniform(0, 3))

    def _full(self, _name: str) -> None:
        self._for_a_while("full")

    def _clock(self, _name: str) -> None:
        self._for_a_while("clock")

    def _for_a_while(self, flag: str) -> None:
        (self._samples / flag).touch()
        time.sleep(self._rng.uniform(0, 4))
        (self._samples / flag).unlink()

    def events(self, number: int, minutes: float) -> int:
        """Let changes happen: some soon after the last, some once the run trains again. Returns how many."""
        self.machines.join("a")
        happened, ends, i = 0.0, time.monotonic() + 60 * minutes, 0
        while i < number and time.monotonic() < ends:
            self.at, self._rng = i + 1, random.Random(f"{self._seed}/{i}")
            if self._rng.random() < 0.6:
                self.recovered(happened)
                time.sleep(self._rng.uniform(0, 4))
            else:
                time.sleep(self._rng.uniform(0, 4))  # perhaps while they start
            self._worlds, happened = self.machines.worlds(), now()
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
        assert self.machines.coordinator.poll() is None, self.told()
        since_start = said[said.rfind("coordinator: waiting for ") :].splitlines()
        last = next((line for line in reversed(since_start) if " world " in line), "")
        names = last.rpartition(": ")[2].split(", ") if ": world " in last else []
        started = (self._folder / "coordinator.txt").stat().st_mtime
        full = len(names) == min(len(self.machines.alive), 2)
        return full and {*names} <= {*self.machines.alive} and self.newest() > started

    def told(self) -> str:
        """The last that the coordinator and the machines have printed."""
        return "\n".join(f"--- {name}\n{self.machines.said(name)[-3000:]}" for name in ("coordinator", *NAMES))

    def end(self) -> None:
        """Save, and compare with what should have been."""
        self.machines.coordinator.send_signal(signal.SIGTERM)
        codes = self.machines.codes()
        assert not any(codes.values()), f"{codes}\n{self.told()}"

    def seen(self) -> dict[int, list[int]]:
        """The samples that each step saw in the world that trained it last."""
        records: dict[int, list[tuple[float, str, list[int]]]] = {}
        for file in self._samples.glob("*.txt"):
            for world, step, when, numbers in (line.split(" ") for line in file.read_text().splitlines()):
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
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no event after so long")
    parser.add_argument("--busy", type=int, default=0, help="so many other processes compute all the time")
    parser.add_argument("--real", action="store_true", help="each process is started, and imports torch")
    given = parser.parse_args()
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp())
    for module in ("train", "torch._dynamo"):
        importlib.import_module(module)
    gc.freeze()
    print(stamp(given.seed), flush=True)
    with busy(given.busy):
        print(f"{soak(given.events, given.seed, given.minutes, given.real)}; {stamp(given.seed)}")


def soak(events: int, seed: int, minutes: float, real: bool = False) -> str:
    """Let the events happen and check the run. Returns a summary."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text"
        text.mkdir()
        (text / "argparse.txt").write_text(inspect.getsource(argparse))
        s = Soak(folder, text, seed, real)
        try:
            happened = s.events(events, minutes)
            s.end()
        except BaseException:
            again = f"python -m tests.faults.machines {s.at} {seed}{' --real' * real}, with the same --busy"
            print(f"failed at event {s.at}; again: {again}  ({stamp(seed)})")
            raise
        finally:
            s.machines.close()
        trained = storage.find_steps(s.run / "checkpoints")[-1]
        check_samples(s, trained)
        succeeded(ranks(1, *arguments(folder, text, "straight", train__steps=trained, checkpoint__every=0)))
        disturbed, straight = losses(s.run), losses(folder / "straight")
        assert sorted(disturbed) == sorted(straight) == list(range(1, trained + 1))
        difference = max(abs(disturbed[step][0] - straight[step][0]) for step in straight if step <= COMPARED)
        assert difference < 1e-4, f"the losses differ by {difference}"
        return (
            f"{happened} events {s.counts}; {s.machines.worlds()} worlds, {trained} steps; recovery: median "
            f"{statistics.median(s.recoveries):.1f} s, worst {max(s.recoveries):.1f} s of {len(s.recoveries)}; "
            f"none of {trained * BATCH:,} samples: {none_of(happened, 'events lost or doubled one')}; "
            f"losses of the first {min(trained, COMPARED)} steps within {difference:.1e}"
        )


def check_samples(s: Soak, trained: int) -> None:
    """Each sample was seen once, in its step."""
    seen = {step: numbers for step, numbers in s.seen().items() if step <= trained}
    assert sorted(seen) == list(range(1, trained + 1)), "a step is missing"
    for step, numbers in seen.items():
        at = (step - 1) * BATCH
        assert numbers == list(range(at, at + BATCH)), f"step {step} saw {numbers}, not {at} and those after"
    state = storage.read_state(s.run / f"checkpoints/step-{trained:08d}")
    assert state.samples_consumed == trained * BATCH


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        _set_clock()
        _worker(sys.argv[2:])
    main()
