"""train.py on one rank that writes down what the model is given: a line for each call, in $BATCHES.RANK."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch

import train
from torchtitan_lite.models import Transformer


def main(argv: Sequence[str]) -> int:
    plain = Transformer.__call__

    def call(module: Any, *arguments: Any, **named: Any) -> Any:
        # sorted, since the order of the arguments may change
        given = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
        hashes = sorted(hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in given)
        with open(f"{os.environ['BATCHES']}.{os.environ.get('RANK', '0')}", "a") as file:
            file.write(" ".join(hashes) + "\n")
        return plain(module, *arguments, **named)

    Transformer.__call__ = call  # type: ignore[method-assign]
    return train.main(argv)
