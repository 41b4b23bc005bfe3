"""train.py with a fault at a named place: FAULT="what:rank:step" in the environment.

enospc     writing a checkpoint's files fails, from this step on, for the first three saves
fsync      syncing fails instead
hang       the rank stops for ever at the beginning of a step
nan        the loss is NaN in the first micro-batch of the step
kill       SIGKILL, in the first attempt only (torchrun --max-restarts)
"""

import os
import signal
import sys
import time
from typing import Any

import torch

import train
from torchtitan_lite import tensorfile
from torchtitan_lite.distributed import env_int, leave
from torchtitan_lite.watch import Watch

what, rank, step = os.environ["FAULT"].split(":")
mine = env_int("RANK", 0) == int(rank)
now = 0
fired = 0


def fire() -> None:
    """Tests assert that this was printed: a fault that does not happen proves nothing."""
    global fired
    fired += 1
    print(f"FAULT {what} fired on rank {rank} at step {now}", flush=True)


honest_step = Watch.step


def watched(self: Watch, number: int) -> None:
    global now
    now = number
    honest_step(self, number)
    if mine and number == int(step):
        if what == "hang":
            fire()
            time.sleep(10_000)
        if what == "kill" and env_int("TORCHELASTIC_RESTART_COUNT", 0) == 0:
            fire()
            os.kill(os.getpid(), signal.SIGKILL)


Watch.step = watched  # type: ignore[method-assign]

if what in ("enospc", "fsync") and mine:
    honest = tensorfile.HashingStream.write if what == "enospc" else os.fsync

    def full(*args: Any) -> Any:
        if now >= int(step) and fired < 3:
            fire()
            raise OSError(28, "No space left on device")
        return honest(*args)

    if what == "enospc":
        tensorfile.HashingStream.write = full  # type: ignore[method-assign,assignment]
    else:
        os.fsync = full  # type: ignore[assignment]

if what == "nan" and mine:
    honest_train_step = train.train_step

    def train_step(t: Any, number: int) -> Any:
        forward = t.model.forward
        if number in range(int(step), int(step) + env_int("FAULT_STEPS", 1)):
            fire()
            t.model.forward = lambda *args: forward(*args) * torch.nan
        try:
            return honest_train_step(t, number)
        finally:
            t.model.forward = forward

    train.train_step = train_step  # type: ignore[assignment]

if __name__ == "__main__":
    leave(train.main(sys.argv[1:]))
