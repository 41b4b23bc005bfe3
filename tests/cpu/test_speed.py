"""Compares the fast paths with the plain computation: values, gradients, memory, and their switches."""

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.test_recompute_and_compile import Operators, made
from tests.helpers import python, succeeded, tiny
from torchtitan_lite.config.schema import ModelConfig, SpeedConfig
from torchtitan_lite.cpu import attention as by_blocks
from torchtitan_lite.cpu import loss as in_chunks
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.attention import attend
from torchtitan_lite.models.loss import IGNORE, summed_cross_entropy
from torchtitan_lite.tools.dry_run import peak_of

LLAMA = ModelConfig(dim=48, n_heads=6, n_kv_heads=2, n_layers=2, max_seq_len=64)
GPT = ModelConfig(family="gpt", dim=48, n_heads=4, n_layers=2, max_seq_len=64)
extended = pytest.mark.extended


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and chunks also of short sequences, the last ones not full."""
    monkeypatch.setattr(by_blocks, "BLOCK", dict.fromkeys((2, 4, 8), 24))
    monkeypatch.setattr(in_chunks, "CHUNK", 37)
    monkeypatch.setattr(in_chunks, "ROWS", 20)


def with_gradients(compute: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]


def error(found: Tensor, exact: Tensor) -> float:
    """The root mean square error, relative to the size of what is exact."""
    return ((found.double() - exact).norm() / exact.norm()).item()


# --- attention --------------------------------------------------------------------------------------------------


def queries(length: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, (2, T, 3, 20) each, and weights of a result."""
    generator = torch.Generator().manual_seed(length)
    made = [torch.randn(2, length, 3, 20, generator=generator) for _ in range(4)]
    return [t.to(dtype) for t in made[:3]], made[3]


@pytest.mark.parametrize(
    ("length", "window"),
    [*((n, 0) for n in (1, 2, 23, 24, 25, 48, 61)), *((61, n) for n in (1, 5, 24, 40, 99)), (9, 9)],
)
def test_attention_by_blocks_is_attention(length: int, window: int) -> None:
    """Windows that end within the first, the same or another block, or before the text begins."""
    inputs, weights = queries(length)
    ways = (functools.partial(way, window=window) for way in (by_blocks.attend, attend))
    ours, plain = (with_gradients(way, inputs, weights) for way in ways)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_by_blocks_rounds_about_as_much_as_the_kernel(dtype: torch.dtype) -> None:
    """Scores and probabilities are rounded to the dtype, which the kernel keeps in float32.

    The gradients of keys and values are sums over 20 blocks, in float32.
    """
    inputs, weights = queries(480, dtype)
    exact = with_gradients(attend, [t.double() for t in inputs], weights)
    ours, kernel = (with_gradients(way, inputs, weights) for way in (by_blocks.attend, attend))
    for one, other, truth, bound in zip(ours, kernel, exact, (2.5, 2.5, 1.3, 1.3), strict=True):
        assert one.dtype == dtype
        assert error(one, truth) < bound * error(other, truth) + torch.finfo(dtype).eps / 16


def test_large_scores_do_not_overflow() -> None:
    inputs, weights = queries(50)
    inputs = [t * 12 for t in inputs]  # exp of some scores is infinite
    ours, exact = (with_gradients(way, inputs, weights) for way in (by_blocks.attend, attend))
    assert all(error(one, truth) < 1e-3 for one, truth in zip(ours, exact, strict=True))


# --- loss -------------------------------------------------------------------------------------------------------


def plainly(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return summed_cross_entropy(F.linear(x, weight), targets)


def test_loss_in_chunks_rounds_no_more_than_the_plain_one() -> None:
    """Of 2 x 200 positions, some of which do not count, and 91 entries."""
    torch.manual_seed(200)
    inputs = [torch.randn(2, 200, 16).bfloat16(), torch.randn(91, 16).bfloat16()]
    targets = torch.randint(91, (2, 200))
    targets[:, ::5] = IGNORE

    def in_float64(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten(), reduction="sum")

    exact = with_gradients(in_float64, [t.double() for t in inputs], torch.tensor(1.0))
    ours = with_gradients(lambda x, w: in_chunks.chunked_cross_entropy(x, w, targets)[0], inputs, torch.tensor(0.3))
    plain = with_gradients(lambda x, w: plainly(x, w, targets)[0], inputs, torch.tensor(0.3))
    assert ours[0].dtype == torch.float32
    for i, (one, other) in enumerate(zip(ours, plain, strict=True)):
        truth = exact[i] * (1 if i == 0 else 0.3)
        assert error(one, truth) < 1.3 * error(other, truth)
        scale = (one.double() * truth).sum() / truth.square().sum()
        assert abs(scale - 1) < 1e-3, "the factor of the loss is not rounded"


def test_improbable_targets_have_a_finite_loss() -> None:
    """A probability that is 0 in float32 has a logarithm all the same."""
    x = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    weight = torch.tensor([[500.0, 0.0], [-500.0, 0.0], [0.0, 0.0]], requires_grad=True)
    loss, _ = in_chunks.chunked_cross_entropy(x, weight, torch.tensor([[1]]))
    assert loss.item() == pytest.approx(1000.0)
    loss.backward()
    assert x.grad is not None
    assert x.grad[0, 0].tolist() == pytest.approx([1000.0, 0.0])


def test_memory_of_the_loss_does_not_grow_with_tokens_times_vocabulary() -> None:
    def peak(n: int, vocabulary: int, way: Callable[..., tuple[Tensor, Tensor]]) -> int:
        x, weight = torch.randn(1, n, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
        return peak_of(lambda: way(x, weight, torch.zeros(1, n, dtype=torch.int64))[0].backward())

    small, more_tokens, larger_vocabulary, both = (
        peak(n, v, in_chunks.chunked_cross_entropy) for n, v in ((500, 2000), (1000, 2000), (500, 4000), (1000, 4000))
    )
    # a mixed difference sees only what grows with the product
    assert abs(both - more_tokens - larger_vocabulary + small) < 0.02 * 500 * 2000 * 4
    assert peak(1000, 4000, plainly) - both > 1000 * 4000 * 4


# --- whole models -----------------------------------------------------------------------------------------------


def results(model: Transformer) -> list[Tensor]:
    """Loss and gradients."""
    tokens = torch.randint(97, (3, 61), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    loss = model(tokens, targets)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("config", [LLAMA, GPT, LLAMA.model_copy(update={"tie_embeddings": True})])
@pytest.mark.parametrize("mode", ["none", *(pytest.param(mode, marks=extended) for mode in ("full", "selective"))])
@pytest.mark.parametrize("backend", ["", pytest.param("aot_eager", marks=extended)])
def test_fast_models_compute_the_same_under_the_same_names(config: ModelConfig, mode: str, backend: str) -> None:
    torch._dynamo.reset()
    plain, fast = made(config), made(config, mode, compiled=backend, speed=SpeedConfig())
    torch.testing.assert_close(results(fast), results(plain), rtol=2e-5, atol=2e-5)
    assert {k: v.shape for k, v in fast.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}


def test_each_key_switches_one_path_off() -> None:
    def ran(**speed: bool) -> tuple[bool, bool, bool]:
        with Operators() as operators:
            results(made(LLAMA, speed=SpeedConfig(**speed)))
        kernel = any("scaled_dot_product" in name for name in operators.counts)
        means = any(name.split(".")[0] == "mean" for name in operators.counts)  # of PyTorch's RMSNorm
        return kernel, operators.counts["_log_softmax"] > 0, means

    assert ran() == (False, False, False)
    assert ran(block_attention=False) == (True, False, False)
    assert ran(chunked_loss=False) == (False, True, False)
    assert ran(fused_functions=False) == (False, False, True)


# --- runs -------------------------------------------------------------------------------------------------------


_WATCHED = """
import gc, sys, train
gc.callbacks.append(lambda phase, info: phase == "start" and print("collected", info["generation"], flush=True))
train.exit_process(train.main(sys.argv[1:]))
"""


def test_the_loop_collects_garbage_every_so_many_steps(text: Path, tmp_path: Path) -> None:
    command = tiny(
        text, tmp_path, run__name="run", train__steps=10, speed__gc_every=5, eval__every=0, checkpoint__every=0
    )
    (tmp_path / "watched.py").write_text(_WATCHED)
    said = succeeded(python(*command, script=str(tmp_path / "watched.py"))).splitlines()
    between = [line.split()[0:2] for line in said if line.startswith(("step ", "collected "))]
    loop = between[between.index(["step", "1/10"]) : between.index(["step", "10/10"]) + 2]
    assert [before[1] for before, line in pairwise(loop) if line[0] == "collected"] == ["5/10", "10/10"], loop
