"""train.py, but from step 3 on the loss of rank 1 is NaN."""

import sys

import torch
from torch import Tensor

import train
from torchtitan_lite.distributed import env_int, leave
from torchtitan_lite.models.common import Transformer

forwards = 0
honest = Transformer.forward


def forward(self: Transformer, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
    global forwards
    forwards += self.training
    poisoned = self.training and env_int("RANK", 0) == 1 and forwards > 2 * 3  # 3 micro-batches a step
    return honest(self, tokens, targets) * (torch.nan if poisoned else 1.0)


Transformer.forward = forward  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    leave(train.main(sys.argv[1:]))
