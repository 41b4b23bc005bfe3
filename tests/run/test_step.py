"""What a step does beside the model: its collectives, its passes over the gradients, what is withheld."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import train
from tests.distributed.knob_table import Case
from tests.distributed.knob_worker import training
from tests.distributed.test_recompute_and_compile import Operators
from tests.helpers import ranks, records, succeeded, tiny
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.distributed.process_group import Process
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


def of_a_step(ranks: int, keys: dict[str, Any]) -> Collectives:
    """What rank 0 does in a step; the other ranks don't exist, so that its numbers mean nothing."""
    with fake_world(ranks):
        t = training(Case(ranks, {"log.norms": False} | keys).config(), Process(0, ranks, CPU, 1))
        with Collectives() as operators:
            train.train_step(t, 1)
    return operators


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"optim.name": "sgd"},
        {"log.norms": True},
        {"optim.max_norm": math.inf},
        {"fsdp.param_dtype": "float16"},
        {"fsdp.dp_replicate": 2},
        {"optim.freeze": ["tok_embeddings.*", "layers.0.*"]},
    ],
)
def test_a_step_shares_its_totals_in_one_all_reduce(keys: dict[str, Any]) -> None:
    """FSDP's own all-reduces, which HSDP has, are of gradients. Norms of updates have one of their own."""
    sums = of_a_step(4, keys).sums
    expected = [3 + 4 + 5 + 5 + 2 * 4, 5] if "log.norms" in keys else [3 + 4 + 5 + 2 * 4]
    assert [n for n in sums if n <= 100] == expected
    assert len(sums) == (len(expected) if "fsdp.dp_replicate" not in keys else 1 + 2 * 5), (
        "two micro-batches, five groups"
    )


@pytest.mark.parametrize(
    ("keys", "passes"), [({}, 0), ({"fsdp.param_dtype": "float16"}, 0), ({"optim.name": "sgd"}, 1)]
)
def test_a_fused_optimizer_clips_without_a_pass_over_the_gradients(keys: dict[str, Any], passes: int) -> None:
    counts = of_a_step(1, keys).counts
    assert counts["_foreach_norm.Scalar"] == 1
    assert counts["_foreach_mul_.Tensor"] == passes
    if not passes:
        assert counts["_fused_adamw_"] > 0


def test_each_rank_and_each_step_has_a_dropout_mask_of_its_own(tmp_path: Path) -> None:
    """All sequences are the same, and no parameter changes, so that only dropout makes a difference."""
    texts = (letter * (32 * 200 - 1) for letter in "ab")  # the first sequence and the last one have an end mark
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = tmp_path / "data"
    assert prepare([str(tmp_path / "text.jsonl"), "--out", str(data), "--tokenizer=bytes", "--val-fraction=0.5"]) == 0
    still = {"optim__lr": 1e-30, "optim__warmup_steps": 0, "eval__every": 0, "checkpoint__every": 0}
    found = {}
    for dropout in (0.0, 0.1):
        more = {"run__name": str(dropout), "model__dropout": dropout, "train__steps": 3, "train__global_batch_size": 4}
        succeeded(ranks(2, *tiny(data, tmp_path, **more, **still)))
        logged = [record for record in records(tmp_path / str(dropout)) if "loss" in record]
        found[dropout] = {loss for record in logged for loss in record["rank_losses"]}
    assert len(found[0.0]) == 1
    assert len(found[0.1]) == 3 * 2
