"""Kills at random moments, and what must hold after each: `python -m tests.faults.soak [kills [seed [ways]]]`.

For each of the four ways of saving, beside training and not: one undisturbed run; then the same run, killed again and
again by SIGKILL, one rank or all, at random moments, with a save after every second step. After each kill every
checkpoint that was reported as saved (and not deleted by retention since) is verified; at the end losses, model and
optimizer have to be those of the undisturbed run, bit for bit.
"""

import importlib
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from tests.faults.figures import none_of, some_text, stamp
from tests.forkserver import Ranks
from tests.helpers import HANGS_S, assert_same_end, tiny
from torchtitan_lite.checkpointing import storage

WAYS = list(product(("full", "sharded"), ("dtensor", "dcp"), (False, True)))
STEPS = 24


def arguments(folder: Path, text: Path, name: str, way: tuple[str, str, bool]) -> list[str]:
    """A tiny run that saves all the time."""
    kind, api, beside = way
    more: dict[str, Any] = {"model__dropout": 0.1, "train__micro_batch_size": 3, "run__timeout_minutes": 10}
    more |= {"eval__every": 0, "checkpoint__every": 2, "checkpoint__keep_latest": 3}
    more |= {"checkpoint__state_dict": kind, "checkpoint__api": api, "checkpoint__async_save": str(beside).lower()}
    return tiny(text, folder, run__name=name, train__steps=STEPS, **more)


def reported(run: Path) -> list[int]:
    """The steps that the run said were saved, in order."""
    log = run / "train.log"
    return [int(step) for step in re.findall(r"^saved .*/step-(\d+) ", log.read_text() if log.exists() else "", re.M)]


def check_after_a_kill(run: Path) -> None:
    """Nothing that was reported as saved is lost, and nothing counts that is not whole."""
    checkpoints = run / "checkpoints"
    found = storage.find_steps(checkpoints)
    for step in found:
        assert not (problems := storage.verify(storage.step_folder(checkpoints, step))), problems
    newest = max(reported(run), default=0)
    assert newest == 0 or (found and found[-1] >= newest), f"step {newest} was reported as saved, and there are {found}"


def soak(way: tuple[str, str, bool], kills: int, rng: random.Random, folder: Path, text: Path) -> Counter[str]:
    """One way of saving. Returns what happened, counted."""
    said = folder / "said.txt"

    def begun(name: str) -> Ranks:
        return Ranks(2, arguments(folder, text, name, way), said, said)

    def complete(ranks: Ranks) -> None:
        assert ranks.wait(HANGS_S), said.read_text()[-3000:]
        assert ranks.codes == {0: 0, 1: 0}, said.read_text()[-3000:]

    began = time.monotonic()
    complete(begun("straight"))
    lasted = time.monotonic() - began
    counts: Counter[str] = Counter()
    while counts["kills"] < kills:
        counts["runs"] += 1
        name = f"run{counts['runs']}"
        run = folder / name
        ranks = begun(name)
        while counts["kills"] < kills and not ranks.wait(rng.uniform(0.2, 0.8) * lasted):
            victims = rng.choice([[0], [1], [0, 1]])
            counts["while saving"] += bool(list((run / "checkpoints").glob(".tmp-*")))
            ranks.kill(victims)
            counts["kills"] += 1
            counts["all ranks" if len(victims) == 2 else "one rank"] += 1
            check_after_a_kill(run)
            ranks = begun(name)
        complete(ranks)
        assert_same_end(run, folder / "straight", STEPS)
    return counts


def main() -> None:
    """All eight ways, or those whose numbers follow."""
    kills, seed = (int(given) for given in (*sys.argv[1:3], *("200", "1")[len(sys.argv) - 1 :]))
    ways = {int(number): WAYS[int(number)] for number in sys.argv[3:] or range(len(WAYS))}
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp())
    print(f"{kills} kills, {stamp(seed)}")
    with tempfile.TemporaryDirectory() as folder:
        text = some_text(Path(folder))
        total: Counter[str] = Counter()
        for place, (number, way) in enumerate(ways.items()):
            inside = Path(folder) / str(number)
            inside.mkdir()
            share = kills // len(ways) + (place < kills % len(ways))
            try:
                counts = soak(way, share, random.Random(f"{seed}/{number}"), inside, text)
            except BaseException:
                print(f"failed; again: python -m tests.faults.soak {share} {seed} {number}  ({stamp(seed)})")
                raise
            print(f"{way[0]:<8} {way[1]:<8} {'beside' if way[2] else 'now':<7} {dict(counts)}", flush=True)
            total += counts
        print(f"all: {dict(total)}; {none_of(kills, 'kills lost a save that was reported')}; {stamp(seed)}")
        print(none_of(total["runs"], "runs ended with other losses or tensors than the undisturbed one"))


if __name__ == "__main__":
    for module in ("train", "torch._dynamo"):  # the second by an optimizer: both once, for all forks
        importlib.import_module(module)
    main()
