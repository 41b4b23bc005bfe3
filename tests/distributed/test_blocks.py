"""Activation checkpointing and compilation of blocks, in one process: what they compute, keep, and compute again."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.config.schema import ActivationCheckpointingConfig, CompileConfig, ModelConfig
from torchtitan_lite.config.sections.compute import missing_for_inductor
from torchtitan_lite.distributed.blocks import apply_activation_checkpointing, apply_compile
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.tools.allocator import peak_of

LLAMA = ModelConfig(dim=64, n_heads=4, n_layers=4, max_seq_len=64)
GPT = ModelConfig(family="gpt", dim=64, n_heads=4, n_layers=4, max_seq_len=64, dropout=0.1)


def made(config: ModelConfig = LLAMA, mode: str = "none", every: int = 1, compiled: str = "") -> Transformer:
    with torch.device("meta"):
        model = build(config, 97)
    settings: dict[str, Any] = {"mode": mode, "every": every}
    apply_activation_checkpointing(model, ActivationCheckpointingConfig.model_validate(settings))
    apply_compile(model, CompileConfig.model_validate({"enabled": bool(compiled), "backend": compiled or "eager"}))
    materialise(model, torch.device("cpu"), 3)
    return model


def loss_of(model: Transformer) -> torch.Tensor:
    tokens = torch.randint(97, (4, 64), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # for dropout
    return model(tokens, tokens)


def gradients(model: Transformer) -> list[torch.Tensor]:
    loss_of(model).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def peak_bytes(model: Transformer) -> int:
    """The most that one forward and backward hold beyond what was there."""
    return peak_of(lambda: loss_of(model).backward())


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


@pytest.mark.extended
def test_memory_falls_as_more_is_computed_again() -> None:
    none, selective, full = (peak_bytes(made(mode=mode)) for mode in ("none", "selective", "full"))
    assert none > 1.2 * selective > 1.2 * 1.2 * full, (none, selective, full)
    assert none > peak_bytes(made(mode="full", every=2)) > full


def test_what_is_computed_again_is_what_was_asked_for() -> None:
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    none, selective, full = (in_backward(made(mode=mode)) for mode in ("none", "selective", "full"))
    assert (none["silu"], selective["silu"], full["silu"]) == (0, 4, 4)
    assert (none[attention], selective[attention], full[attention]) == (0, 0, 4)
    assert none["mm"] == selective["mm"] < full["mm"]
    assert in_backward(made(mode="full", every=2))["silu"] == 2
    assert sum(none.values()) < sum(selective.values()) < sum(full.values())


@pytest.fixture
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (functools.partial(made, compiled="aot_eager"), 1),
        (functools.partial(made, GPT, compiled="eager"), 1),
        (functools.partial(made, mode="full", compiled="eager"), 1),
        (functools.partial(made, mode="full", every=2, compiled="eager"), 2),
    ],
    ids=["llama", "gpt", "checkpointed", "every other one checkpointed"],
)
@pytest.mark.extended
def test_each_kind_of_block_is_compiled_once(make: Callable[[], Transformer], kinds: int) -> None:
    model = make()
    for _ in range(2):
        gradients(model)
    assert counters["stats"]["unique_graphs"] == kinds
    assert not counters["graph_break"]


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.extended
def test_compiled_blocks_compute_the_same_under_the_same_names(mode: str) -> None:
    plain, compiled = made(), made(mode=mode, compiled="aot_eager")
    assert list(plain.state_dict()) == list(compiled.state_dict())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in compiled.named_parameters()]
    torch.testing.assert_close(gradients(plain), gradients(compiled), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(bool(missing_for_inductor("cpu", 0)), reason="there is no C++ compiler here")
@pytest.mark.extended
def test_inductor_computes_the_same() -> None:
    """Forward only: each kernel takes g++ two seconds. Training is among the `extended` rows of test_knobs.py."""
    plain, compiled = made(GPT).eval(), made(GPT, compiled="inductor").eval()
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
