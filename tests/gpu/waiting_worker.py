"""train.py, with an error if the host waits for the GPU during a step: `torchrun waiting_worker.py ARGUMENTS`."""

import sys

import torch

import train
from torchtitan_lite.distributed.process_group import exit_process
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run.session import Session

plain = train.train_step


def train_step(s: Session, step: int) -> StepRecord:
    if step > 2:  # the first ones make state, and compile
        torch.cuda.set_sync_debug_mode("error")
    try:
        return plain(s, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    train.train_step = train_step
    exit_process(train.main(sys.argv[1:]))
