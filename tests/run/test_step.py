"""What a step does beside the model: its collectives, its passes over the gradients, what is withheld."""

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import train
from tests.distributed.knob_table import Case
from tests.distributed.knob_worker import training
from tests.distributed.test_blocks import Operators
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.tools.estimate.simulate import fake_world

CPU = torch.device("cpu")


class Collectives(Operators):
    """Counts the operators that read or write gradients of all parameters, and the elements of each all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # then DTensor's own collectives, and its local operators, are seen here
        if "allreduce" in str(function) or "all_reduce" in str(function):
            self.sums.append((args[0][0] if isinstance(args[0], list | tuple) else args[0]).numel())
        return super().__torch_dispatch__(function, types, args, kwargs)


def of_a_step(ranks: int, **keys: Any) -> Collectives:
    """What rank 0 does in a step; the other ranks don't exist, so that its numbers mean nothing."""
    set_ = {key.replace("__", "."): value for key, value in keys.items()}
    with fake_world(ranks):
        t = training(Case(ranks, set_).config(), World(0, ranks, CPU, 1))
        with Collectives() as operators:
            train.train_step(t, 1)
    return operators


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"optim__name": "sgd"},
        {"optim__max_norm": math.inf},
        {"fsdp__param_dtype": "float16"},
        {"fsdp__dp_replicate": 2},
        {"optim__freeze": ["tok_embeddings.*", "layers.0.*"]},
    ],
)
def test_a_step_shares_its_totals_in_one_all_reduce(keys: dict[str, Any]) -> None:
    """FSDP's own all-reduces, which HSDP has, are of gradients."""
    sums = of_a_step(4, **keys).sums
    assert [n for n in sums if n <= 100] == [3 + 4]
    assert len(sums) == (1 if "fsdp__dp_replicate" not in keys else 1 + 2 * 5), "two micro-batches, five groups"


@pytest.mark.parametrize(
    ("keys", "passes"), [({}, 0), ({"fsdp__param_dtype": "float16"}, 0), ({"optim__name": "sgd"}, 1)]
)
def test_a_fused_optimizer_clips_without_a_pass_over_the_gradients(keys: dict[str, Any], passes: int) -> None:
    counts = of_a_step(1, **keys).counts
    assert counts["_foreach_norm.Scalar"] == 1
    assert counts["_foreach_mul_.Tensor"] == passes
    if not passes:
        assert counts["_fused_adamw_"] > 0
