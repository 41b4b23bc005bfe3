"""Accidents at random moments, each many times: `python -m tests.faults.attacks [tries [seed [names ...]]]`.

By default each has 20 tries. After a try, every checkpoint that is there is verified, no rank may have printed a
traceback, and the same command, undisturbed, has to end as the undisturbed run, bit for bit. Prints a row for each
accident: how often it hit a running process, how the attacked commands ended, and in how many tries a promise was
broken, with the bound that so many tries give.
"""

import argparse
import functools
import hashlib
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.figures import none_of, some_text, stamp
from tests.forkserver import Ranks, free_port
from tests.helpers import HANGS_S, ROOT, assert_same_end, limited, tiny
from torchtitan_lite.checkpointing import storage

STEPS = 12
TRACEBACK = "Traceback (most recent call last)"


class Bench:
    """Undisturbed runs on one and on two ranks, and the tools of an attack."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text, self.rng = folder, some_text(folder), random.Random(0)
        self.hits, self.ends = 0, Counter[str]()
        self.lasted: dict[int, float] = {}
        self.expected: dict[str, Any] = {}
        for n in (1, 2):
            began = time.monotonic()
            self.complete(self.start(n, f"straight-{n}"), f"straight-{n}")
            self.lasted[n] = time.monotonic() - began

    def arguments(self, name: str, **more: Any) -> list[str]:
        """A run that validates and saves often."""
        keys: dict[str, Any] = {"model__dropout": 0.1, "eval__every": 2, "checkpoint__every": 3}
        keys |= {"train__micro_batch_size": 3, "train__steps": STEPS, "run__timeout_minutes": 2}
        return tiny(self.text, self.folder, run__name=name, **keys | more)

    def start(self, n: int, name: str, *, entry: str = "train", env: Any = None, fault: str = "") -> Ranks:
        """Begin the run of this name, or continue it."""
        out = self.folder / f"{name}.txt"
        return Ranks(n, self.arguments(name), out, out, env=env, entry=entry, fault=fault)

    def said(self, name: str) -> str:
        """What the runs of this name have printed."""
        return (self.folder / f"{name}.txt").read_text(errors="replace")

    def complete(self, ranks: Ranks, name: str) -> None:
        """Wait for ranks that must succeed, all that were said under this name without a traceback."""
        assert ranks.wait(HANGS_S)
        assert not any(ranks.codes.values()), self.said(name)[-3000:]
        assert TRACEBACK not in self.said(name), self.said(name)[self.said(name).index(TRACEBACK) :][:5000]

    def killed(self, ranks: Ranks, seconds: float) -> None:
        """SIGKILL for all after so long, if they still run."""
        if ranks.wait(seconds):
            self.ended(ranks)
        else:
            self.hits += 1
            ranks.kill(range(len(ranks.pids)))
            self.ends["killed"] += 1

    def ended(self, ranks: Ranks) -> None:
        """Count how the attacked command ended, when it has."""
        assert ranks.wait(HANGS_S), "it hangs"
        self.ends[f"exit code {next((c for c in ranks.codes.values() if c), 0)}"] += 1

    def intact(self, n: int, name: str) -> None:
        """What must hold after a try."""
        run = self.folder / name
        for step in storage.find_steps(run / "checkpoints"):
            assert not (problems := storage.verify(storage.step_folder(run / "checkpoints", step))), problems
        self.complete(self.start(n, name), name)
        assert_same_end(run, self.folder / f"straight-{n}", STEPS)


def tree(folder: Path) -> dict[str, str]:
    """The content of every file, and every name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- the accidents --------------------------------------------------------------------------------------------------


def two_trainings_in_one_folder(b: Bench, name: str) -> None:
    one = b.start(1, name)
    one.wait(b.rng.uniform(0, b.lasted[1]))
    b.hits += bool(one.running())
    other = b.start(1, name)
    b.ended(one)
    b.ended(other)
    assert 0 in (one.codes[0], other.codes[0]), b.said(name)[-3000:]
    assert {one.codes[0], other.codes[0]} <= {0, 1}, b.said(name)[-3000:]
    b.intact(1, name)


def kill_of_a_run(b: Bench, name: str, first: float, last: float) -> None:
    b.killed(b.start(2, name), b.rng.uniform(first, last) * b.lasted[2])
    b.intact(2, name)


def kill_of_a_report(b: Bench, name: str) -> None:
    run, page = b.folder / "straight-1", b.folder / f"{name}.html"
    before = tree(run / "checkpoints")
    _killed_and_again(b, name, page, "torchtitan_lite.report", str(run), "--out", str(page))
    assert page.read_text().rstrip().endswith("</html>")
    assert tree(run / "checkpoints") == before


def kill_of_a_preparation(b: Bench, name: str) -> None:
    out = b.folder / f"{name}-data"
    options = "--out", str(out), "--train-tokenizer", "517"
    _killed_and_again(b, name, out, "torchtitan_lite.data.prepare", str(b.text), *options)
    found = {Path(path).name: digest for path, digest in tree(out).items() if path.endswith((".bin", "tokenizer.json"))}
    assert len(found) > 1
    assert found == b.expected.setdefault("tokens", found), "other tokens"


def _killed_and_again(b: Bench, name: str, made: Path, module: str, *options: str) -> None:
    """Make something; once more from nothing, killed at some moment; and what the kill has left is finished."""
    log = b.folder / f"{name}.txt"
    start = functools.partial(Ranks, 1, options, log, log, entry=f"-m {module}")
    began = time.monotonic()
    b.complete(start(), name)
    lasted = time.monotonic() - began
    shutil.rmtree(made) if made.is_dir() else made.unlink()
    b.killed(start(), b.rng.uniform(0, lasted))
    b.complete(start(), name)


def ulimit_v(b: Bench, name: str) -> None:
    result = limited("AS", int(b.rng.uniform(0.2, 1) * 2**30), b.arguments(name), b.folder)
    assert TRACEBACK not in result.stderr, result.stderr
    b.ends[f"exit code {result.returncode}"] += 1
    b.hits += bool(result.returncode)
    b.intact(1, name)


def forbidden(b: Bench, name: str, forbid: Callable[[Path], None]) -> None:
    """A command of somebody who may not write changes nothing."""
    ranks, run = b.start(1, name), b.folder / name
    if not ranks.wait(b.rng.uniform(0.6, 1) * b.lasted[1]):
        ranks.kill([0])
    modes = {path: (path.stat().st_mode, path.stat().st_uid) for path in (run, *run.rglob("*"))}
    for path in modes:
        forbid(path)
    before = tree(run)
    ranks = b.start(1, name, entry="tests.config.limited_process", env={"LIMIT": "restricted"})
    b.ended(ranks)
    b.hits += bool(ranks.codes[0])
    assert ranks.codes[0] != 0, b.said(name)[-3000:]
    assert tree(run) == before, "it changed something"
    for path, (mode, owner) in modes.items():
        os.chown(path, owner, owner)
        path.chmod(mode)
    b.intact(1, name)


def full_folder(b: Bench, name: str) -> None:
    b.hits += 1
    b.ended(b.start(1, name, fault=f"full:0:{b.rng.randint(1, STEPS)}"))
    b.intact(1, name)


def one_of_two_agents_dies(b: Bench, name: str) -> None:
    if not b.expected.get("two agents"):
        began = time.monotonic()
        assert not any(one.wait(HANGS_S) for one in _agents(b, f"{name}-undisturbed"))
        b.expected["two agents"] = time.monotonic() - began
    agents = _agents(b, name)
    victim = b.rng.choice(agents)
    try:
        victim.wait(b.rng.uniform(0, b.expected["two agents"]))
    except subprocess.TimeoutExpired:
        b.hits += 1
        victim.send_signal(signal.SIGKILL)
    b.ends[f"exit codes {sorted(agent.wait(HANGS_S) for agent in agents)}"] += 1
    b.intact(2, name)


def _agents(b: Bench, name: str) -> list[subprocess.Popen[bytes]]:
    """Two torchruns with a rank each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launcher += ["--rdzv-conf", "timeout=30"]  # by default torchrun waits for the other one for ten minutes, and longer
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (b.folder / f"{name}.launcher").open("ab") as out:
        train = ["train.py", *b.arguments(name, run__timeout_minutes=0.5)]
        return [
            subprocess.Popen([*launcher, "--node-rank", str(node), *train], cwd=ROOT, env=env, stdout=out, stderr=out)
            for node in range(2)
        ]


ACCIDENTS: dict[str, Callable[[Bench, str], None]] = {
    "two_trainings_in_one_folder": two_trainings_in_one_folder,
    "kill_at_the_start": functools.partial(kill_of_a_run, first=0, last=0.5),
    "kill_in_training_and_validation": functools.partial(kill_of_a_run, first=0.3, last=1),
    "kill_of_a_report": kill_of_a_report,
    "kill_of_a_preparation": kill_of_a_preparation,
    "ulimit_v": ulimit_v,
    "another_user": functools.partial(forbidden, forbid=lambda path: os.chown(path, 65534, 65534)),
    "read_only_folder": functools.partial(forbidden, forbid=lambda path: path.chmod(0o555 if path.is_dir() else 0o444)),
    "full_folder": full_folder,
    "one_of_two_agents_dies": one_of_two_agents_dies,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tries", nargs="?", type=int, default=20)
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("names", nargs="*", help="of accidents; NAME:I only its try I")
    given = parser.parse_args()
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp())
    print(f"{stamp(given.seed)}\n\n| accident | hit | the attacked commands | broken promises |\n|---|---:|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        b = Bench(Path(folder))
        for name, accident in ACCIDENTS.items():
            wanted = [w.partition(":") for w in given.names if w.partition(":")[0] == name]
            if given.names and not wanted:
                continue
            b.hits, b.ends = 0, Counter()
            tries = [int(w[2]) for w in wanted if w[2]] or list(range(given.tries))
            for i in tries:
                b.rng = random.Random(f"{given.seed}/{name}/{i}")
                try:
                    accident(b, f"{name}-{i}")
                except BaseException:
                    again = f"python -m tests.faults.attacks 1 {given.seed} {name}:{i}"
                    print(f"failed; again: {again}  ({stamp(given.seed)})", flush=True)
                    raise
                shutil.rmtree(b.folder / f"{name}-{i}", ignore_errors=True)
            ends = ", ".join(f"{count} {end}" for end, count in b.ends.most_common())
            title = name.replace("_", " ")
            print(f"| {title} | {b.hits} of {len(tries)} | {ends} | {none_of(len(tries), 'tries')} |", flush=True)


if __name__ == "__main__":
    for module in ("train", "torch._dynamo"):
        importlib.import_module(module)
    main()
