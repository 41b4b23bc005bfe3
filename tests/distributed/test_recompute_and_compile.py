"""Activation checkpointing and compilation of blocks, in one process: what they compute, keep, and compute again."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import meta_model
from torchtitan_lite import cpu
from torchtitan_lite.config.schema import (
    ActivationCheckpointingConfig,
    CompileConfig,
    ModelConfig,
    SpeedConfig,
)
from torchtitan_lite.distributed.evaluating import evaluating
from torchtitan_lite.distributed.initialize import materialize, require_initialised
from torchtitan_lite.distributed.recompute_and_compile import apply_activation_checkpointing, apply_compile
from torchtitan_lite.models import LossOptions, Transformer, build

LLAMA = ModelConfig(dim=64, n_heads=4, n_layers=4, max_seq_len=64)
GPT = ModelConfig(family="gpt", dim=64, n_heads=4, n_layers=4, max_seq_len=64, dropout=0.1)
PLAIN = SpeedConfig(chunked_loss=False, block_attention=False, fused_functions=False, shared_memory=False)


def made(
    config: ModelConfig = LLAMA,
    mode: str = "none",
    every: int = 1,
    compiled: str = "",
    *,
    speed: SpeedConfig = PLAIN,
    widen: bool = False,
) -> Transformer:
    model = meta_model(config, 97, LossOptions(chunked=speed.chunked_loss))
    cpu.apply(model, speed, widen=widen)
    settings: dict[str, Any] = {"mode": mode, "every": every}
    apply_activation_checkpointing(model, ActivationCheckpointingConfig.model_validate(settings))
    apply_compile(model, CompileConfig.model_validate({"enabled": bool(compiled), "backend": compiled or "eager"}))
    materialize(model, torch.device("cpu"), 3)
    return model


def loss_of(model: Transformer) -> torch.Tensor:
    tokens = torch.randint(97, (4, 64), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # for dropout
    return model(tokens, tokens)


def gradients(model: Transformer) -> list[torch.Tensor]:
    loss_of(model).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_parameters_on_the_host_are_the_same_and_what_is_not_initialised_is_named() -> None:
    model = meta_model(LLAMA, 97)
    materialize(model, torch.device("cpu"), 3, offload=True)
    assert {k: v.tolist() for k, v in model.named_buffers()} == {k: v.tolist() for k, v in made().named_buffers()}
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in made().state_dict().items()
    }
    wrong = nn.Module()
    for name, tensor in (
        ("zeros", torch.zeros(2, 2)),
        ("fine", torch.ones(2)),
        ("one", torch.ones(1, 1)),
        ("nan", torch.tensor([0, math.nan])),
    ):
        wrong.register_parameter(name, nn.Parameter(tensor))
    wrong.register_buffer("count", torch.tensor([3, torch.iinfo(torch.int64).min]))
    with pytest.raises(RuntimeError) as caught:
        require_initialised(wrong)
    assert str(caught.value) == (
        "the model is not initialised: zeros is constant; nan has values that are not finite: it was not fully "
        "initialised; count has values that are not finite: it was not fully initialised"
    )


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function).removeprefix("aten.").removesuffix(".default")] += 1
        return function(*args, **(kwargs or {}))


def in_backward(model: Transformer) -> Counter[str]:
    loss = loss_of(model)
    with Operators() as operators:
        loss.backward()
    return operators.counts


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt with dropout"])
@pytest.mark.parametrize(("mode", "every"), [("full", 1), ("full", 2), ("selective", 1), ("selective", 3)])
def test_gradients_are_the_same_bit_for_bit(config: ModelConfig, mode: str, every: int) -> None:
    for one, other in zip(gradients(made(config)), gradients(made(config, mode, every)), strict=True):
        assert one.equal(other)


def test_what_is_computed_again_is_what_was_asked_for() -> None:
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    none, selective, full = (in_backward(made(mode=mode)) for mode in ("none", "selective", "full"))
    assert (none["silu"], selective["silu"], full["silu"]) == (0, 4, 4)
    assert (none[attention], selective[attention], full[attention]) == (0, 0, 4)
    assert none["mm"] == selective["mm"] < full["mm"]
    assert in_backward(made(mode="full", every=2))["silu"] == 2
    assert sum(none.values()) < sum(selective.values()) < sum(full.values())


@pytest.mark.parametrize(
    ("config", "mode", "every", "kinds"), [(GPT, "none", 1, 1), (LLAMA, "full", 1, 1), (LLAMA, "full", 2, 2)]
)
@pytest.mark.extended
def test_each_kind_of_block_is_compiled_once(config: ModelConfig, mode: str, every: int, kinds: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = made(config, mode, every, compiled="eager")
    for _ in range(2):
        gradients(model)
    assert counters["stats"]["unique_graphs"] == kinds
    assert not counters["graph_break"]


@pytest.mark.parametrize("dynamic_shapes", [None, True])
def test_blocks_are_not_compiled_for_each_length_of_pairs(dynamic_shapes: bool | None) -> None:
    """Block attention would be: train.py sets `dynamic_shapes`, and without it torch finds out at the second length."""
    torch._dynamo.reset()
    counters.clear()
    model = build(ModelConfig(dim=32, n_heads=2, n_layers=2, max_seq_len=128), 97)
    cpu.apply(model, SpeedConfig())
    apply_compile(model, CompileConfig(enabled=True, backend="eager"), dynamic_shapes=dynamic_shapes)
    for length in range(8, 8 * 12, 8):
        tokens = torch.ones(2, length, dtype=torch.int64)
        model(tokens, tokens).backward()
    with torch.no_grad(), evaluating(model):  # in which no length is compiled
        model(tokens[:, :5])
    assert counters["stats"]["unique_graphs"] == (1 if dynamic_shapes else 2)
