"""Samples and tasks gather the parameters once, not once per token."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.distributed.distributed_cases import sharded
from torchtitan_lite.config.schema import FsdpConfig, ModelConfig
from torchtitan_lite.distributed import evaluating
from torchtitan_lite.distributed.process_group import build_mesh
from torchtitan_lite.models.generation import new_tokens
from torchtitan_lite.tools.estimate.simulate import fake_world

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # torch 2.13
TOKENS = 6


def gathers(reshard: bool, spare: int, more: dict[str, Any]) -> tuple[list[int], list[int]]:
    """All-gathers of a training step before, of the generation of TOKENS tokens, and of two steps after; and the
    tokens that were generated.
    """
    cpu, config = torch.device("cpu"), FsdpConfig(reshard_after_forward=reshard, param_dtype="bfloat16")
    model = sharded(build_mesh(config, cpu), config, 1, ModelConfig(dim=32, n_heads=2, n_layers=3, max_seq_len=32))
    found, plain, needed = [0], getattr(dist, ALL_GATHER), 2 * sum(p.numel() for p in model.parameters())
    tokens = torch.ones(2, 8, dtype=torch.int64)

    def counted(*args: Any, **options: Any) -> Any:
        found[-1] += 1
        return plain(*args, **options)

    with patch.object(dist, ALL_GATHER, counted), patch.object(evaluating, "GATHERED_BYTES", needed + spare):
        model(tokens, tokens).backward()
        found.append(0)
        with evaluating.generating(model, config.model_copy(update=more), cpu):
            made = list(new_tokens(model, [1, 2], TOKENS, lambda logits: int(logits.argmax())))
        # before torch 2.13, FSDP2 gathers the head once too often in the backward after an evaluation
        for _ in range(2):
            found.append(0)
            model(tokens, tokens).backward()
    return found, made


@pytest.mark.parametrize(("reshard", "spare", "more", "expected"), [
    (True, 0, {}, 5),  # one for each of 5 groups
    (False, 0, {}, 5),
    (True, -1, {}, 5 * TOKENS),  # it does not fit
    (True, 0, {"cpu_offload": True}, 5 * TOKENS),  # they would stay on the GPU
    (True, 0, {"reshard_after_forward": 2}, 5 * TOKENS),  # torch's setter takes no number
])  # fmt: skip
def test_generation_gathers_each_group_once_if_all_fit(
    reshard: bool, spare: int, more: dict[str, Any], expected: int
) -> None:
    with fake_world(2):  # what is gathered means nothing
        (before, during, first, after), made = gathers(reshard, spare, more)
    assert during == expected
    assert before == after == first - (not hasattr(FSDPModule, "reset_iter_state")), "training is as it was"
    assert len(made) == TOKENS
