"""torch's own comparison of sharded with replicated parameters and gradients, on models sharded by `apply_fsdp`."""

from typing import Any

import pytest
import torch

from tests.distributed import distributed_cases as cases
from tests.distributed.distributed_cases import plain
from tests.helpers import run_distributed
from torchtitan_lite.config.schema import FsdpConfig, ModelConfig
from torchtitan_lite.distributed.parallelize import before_micro_batch
from torchtitan_lite.distributed.process_group import Process, build_mesh
from torchtitan_lite.optim.groups import freeze

# rows of 30, 10 and 3 divide by neither 2 nor 4, and of 3 one of four ranks has none
MODEL = ModelConfig(family="llama", dim=30, n_heads=3, n_kv_heads=1, hidden_dim=3, n_layers=2, max_seq_len=8)
# keys of [fsdp], and what is frozen
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({}, ["tok_embeddings.*", "layers.0.*", "layers.1.attention.wq.weight"]),
    ({"dp_replicate": 2}, []),
    ({"dp_shard": 1}, []),
    ({"reshard_after_forward": 2}, []),
    ({"reshard_after_forward": False, "reshard_after_backward": False, "grad_sync": "last"}, []),
    ({"dp_replicate": 2, "grad_sync": "all_reduce_last"}, []),
]


def require_equal_steps(process: Process, keys: dict[str, Any], frozen: list[str]) -> None:
    """After the forwards and backwards of two steps of two micro-batches; between the steps is an update."""
    # imports expecttest
    from torch.testing._internal.common_fsdp import check_sharded_parity
    from torch.testing._internal.common_utils import TestCase

    config, n = FsdpConfig(**keys), process.world_size
    whole, sharded = plain(1, MODEL), cases.sharded(build_mesh(config, process.device), config, 1, MODEL, frozen)
    freeze(whole, frozen)
    # not AdamW, which turns the rounding of a gradient near zero into a step of its own
    both = [(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) for model in (whole, sharded)]
    for step in range(2):
        tokens = torch.randint(97, (2, n, 9), generator=torch.Generator().manual_seed(step))
        for i, rows in enumerate(tokens):
            (whole(rows[:, :-1], rows[:, 1:]) / tokens[:, :, 1:].numel()).backward()
            before_micro_batch(sharded, config, last=i == 1)
            mine = rows[process.rank, None]
            (sharded(mine[:, :-1], mine[:, 1:]) * n / tokens[:, :, 1:].numel()).backward()
        check_sharded_parity(TestCase(), whole, sharded)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


def all_agree(process: Process) -> None:
    """Of each case; the first that does not ends the run."""
    for keys, frozen in CASES:
        require_equal_steps(process, keys, frozen)


@pytest.mark.extended
def test_torch_finds_parameters_and_gradients_equal() -> None:
    pytest.importorskip("expecttest")
    run_distributed(all_agree, 4)
