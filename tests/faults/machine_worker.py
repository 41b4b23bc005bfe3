"""train.py at a pace, one process of a machine: each rank writes down which samples it trained on in which world.

SAMPLES is the folder for that, PACE_S the least duration of a step, POISON as for tests.training.spike_worker.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import train
from tests.training import spike_worker
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.distributed.process_group import exit_process
from torchtitan_lite.process import env_int


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


def install() -> None:
    """Put the record, the pace and the poison in place."""
    spike_worker.poison()
    drawn: dict[int, list[int]] = {}
    batch, train_step = Loader.batch, train.train_step
    folder, pace_s = Path(os.environ["SAMPLES"]), float(os.environ["PACE_S"])
    file = folder / f"{env_int('RANK', 0)}.txt"
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
        line = f"{world} {step} {time.time():.3f} {','.join(map(str, drawn.pop(first)))}\n"
        with file.open("a") as out:  # one write: a kill cuts no line
            out.write(line)
        time.sleep(max(0.0, pace_s - (time.monotonic() - began)))
        return result

    Loader.batch = recorded_batch  # type: ignore[method-assign]
    train.train_step = recorded_step


if __name__ == "__main__":
    install()
    exit_process(train.main(sys.argv[1:]))
