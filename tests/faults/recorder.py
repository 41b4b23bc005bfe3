"""train.py on a machine of tests/faults/machines.py: it writes down which samples each rank trained on.

Each step adds a line to $SAMPLES/RANK.txt: attempt, step, time, machine, world size and sample numbers. While the file
$SAMPLES/full exists, no checkpoint can be written; while $SAMPLES/clock exists, the clock is an hour back.
"""

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import train
from torchtitan_lite.checkpointing.safetensors_file import TensorWriter
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed.process_group import exit_process

PACE_S = 0.1  # the least duration of a step
FOLDER = Path(os.environ["SAMPLES"])
now = time.time  # which `set_clock` does not change


def set_clock() -> None:
    flag = FOLDER / "clock"
    setattr(time, "time", lambda: now() - 3600 * flag.exists())  # noqa: B010


def fill_disk() -> None:
    flag, write = FOLDER / "full", TensorWriter.write

    def failing(self: TensorWriter, *given: Any) -> Any:
        if flag.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *given)

    setattr(TensorWriter, "write", failing)  # noqa: B010


def record() -> None:
    drawn: dict[int, list[int]] = {}  # by the first sample of the batch
    draw, batch, train_step = Mixture.draw, Loader.batch, train.train_step
    newest: list[int] = []
    file = FOLDER / f"{os.environ['RANK']}.txt"
    about = f"{os.environ['MACHINE']} {os.environ['WORLD_SIZE']}"

    def recorded_draw(self: Mixture, run_samples: Any, seed: Any) -> Any:
        newest[:] = run_samples.tolist()
        return draw(self, run_samples, seed)

    def recorded_batch(self: Loader, first: int, size: int) -> Any:
        result = batch(self, first, size)
        drawn[first] = [*newest]
        return result

    def recorded_step(s: Any, step: int) -> Any:
        began, first = time.monotonic(), s.state.samples_consumed
        result = train_step(s, step)
        line = f"{s.log.attempt} {step} {now():.3f} {about} {','.join(map(str, drawn.pop(first)))}\n"
        with file.open("a") as out:  # one write: a kill cuts no line
            out.write(line)
        time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))
        return result

    Mixture.draw, Loader.batch = recorded_draw, recorded_batch  # type: ignore[method-assign]
    train.train_step = recorded_step


if __name__ == "__main__":
    set_clock()
    fill_disk()
    record()
    exit_process(train.main(sys.argv[1:]))
