"""The loss as a GPU computes it: its kernel, its chunks, its bytes. Here on the CPU; test_cuda.py runs the kernel."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda.operators import OperatorLog
from tests.models import triton_stand_in
from tests.models.test_z_loss import gradients
from torchtitan_lite.models import chunked_loss, loss_operators
from torchtitan_lite.models.loss import IGNORE, summed_cross_entropy

Launch = Callable[[Tensor, Tensor, Tensor, int, bool, float], None]


@pytest.fixture
def launch() -> Launch:
    """The kernel, run by the stand-in for Triton in blocks of 64 columns."""
    module = triton_stand_in.kernel_module()
    module.MAX_BLOCK = 64
    return module.launch


@pytest.mark.parametrize("columns", [5, 64, 91, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_kernel_computes_loss_and_gradient(columns: int, dtype: torch.dtype, z_loss: float, launch: Launch) -> None:
    """On nine rows of a wider matrix, some of them without a target, against plain operators."""
    generator = torch.Generator().manual_seed(columns)
    wide = (torch.randn(9, columns + 5, generator=generator) * 4).to(dtype)
    targets = torch.randint(columns, (9,), generator=generator)
    targets[::4], targets[1], targets[2] = IGNORE, columns - 1, 0
    exact = wide[:, :columns].clone()
    expected = loss_operators.logits_to_gradient_(exact, targets, IGNORE, True, z_loss)
    for write in (False, True):
        made, losses = wide.clone(), torch.full((9,), -1.0)
        launch(made[:, :columns], targets, losses, IGNORE, write, z_loss)
        torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)
        assert made[:, columns:].equal(wide[:, columns:]), "beyond its columns"
        if write:
            eps = 1.01 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
            torch.testing.assert_close(made[:, :columns], exact, rtol=eps, atol=1e-7)
        else:
            assert made.equal(wide)


def test_the_kernel_passes_on_what_is_not_finite(launch: Launch) -> None:
    logits = torch.zeros(5, 70)
    logits[0, 3], logits[1, 69], logits[2, :] = float("nan"), float("inf"), -float("inf")
    logits[3, 5] = -float("inf")  # an impossible token is no error
    losses = torch.zeros(5)
    launch(logits, torch.tensor([1, 2, 3, 4, 70]), losses, IGNORE, True, 0.0)
    assert losses.isfinite().tolist() == [False, False, False, True, False], "the last target is out of range"
    assert logits[3].isfinite().all()


# --- chunks -----------------------------------------------------------------------------------------------------


def plainly(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return summed_cross_entropy(F.linear(x, weight), targets)


@pytest.mark.parametrize("n", [1, 60, 200, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_in_the_gpus_chunks_is_the_loss(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 140 * 91 * dtype.itemsize)
    found, expected = (gradients(way, dtype, n) for way in (chunked_loss.chunked_cross_entropy, plainly))
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_a_padded_vocabulary_has_the_same_loss(
    z_loss: float, dtype: torch.dtype, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """91 tokens, padded to 128 as on a GPU: by plain operators and by the kernel, and forward alone."""

    def by_kernel(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float) -> Tensor:
        losses = torch.empty(len(logits))
        launch(logits, targets, losses, ignore, write, z_loss)
        return losses

    way = functools.partial(chunked_loss.chunked_cross_entropy, z_loss=z_loss)
    expected = gradients(way, dtype, n=150)
    monkeypatch.setattr(loss_operators, "padding", lambda _, vocab_size: -vocab_size % 64)
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 128 * 128 * dtype.itemsize)  # three chunks
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    for operator in (loss_operators.plain_logits_to_gradient_, by_kernel):
        monkeypatch.setattr(loss_operators, "logits_to_gradient_", operator)
        torch.testing.assert_close(gradients(way, dtype, n=150), expected, rtol=tolerance, atol=tolerance)
    x, weight = torch.randn(1, 6, 16).to(dtype), torch.randn(91, 16).to(dtype)
    targets = torch.tensor([[0, 90, 5, IGNORE, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(way(x, weight, targets), summed_cross_entropy(x @ weight.T, targets, z_loss))


class Products(TorchDispatchMode):
    """The sizes and row strides of each matrix product."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[set[int]] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function._opname in ("mm", "addmm"):
            self.found.append({n for t in (*args[:2], out) for n in (*t.shape, max(t.stride()))})
        return out


@pytest.mark.parametrize("vocab_size", [50257, 50272, 50304])
def test_a_gpus_products_are_aligned(vocab_size: int) -> None:
    """In training, all sizes; in validation, all rows: there W is not copied. A multiple of 16 is left as it is."""
    with FakeTensorMode():
        x = torch.empty(1, 4096, 768, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab_size, 768, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(1, 4096, dtype=torch.int64)
        with Products() as training:
            chunked_loss.chunked_cross_entropy(x, weight, targets).backward()
        with torch.no_grad(), Products() as validation:
            chunked_loss.chunked_cross_entropy(x, weight, targets)
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    width = 50272 if vocab_size == 50272 else 50304
    assert [width in sizes and all(n % 16 == 0 for n in sizes - {1}) for sizes in training.found] == [True] * 3
    assert all(n % 16 == 0 for sizes in validation.found for n in sizes - {1, vocab_size})


def test_no_gradient_is_computed_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    real = loss_operators.logits_to_gradient_

    def noted(*args: Any) -> Tensor:
        written.append(args[3])
        return real(*args)

    monkeypatch.setattr(loss_operators, "logits_to_gradient_", noted)
    x, weight, targets = torch.randn(1, 6, 4), torch.randn(9, 4, requires_grad=True), torch.zeros(1, 6).long()
    chunked_loss.chunked_cross_entropy(x, weight, targets).backward()
    assert weight.grad is not None
    with torch.no_grad():
        chunked_loss.chunked_cross_entropy(x, weight, targets)
    assert written == [True, False]
    assert chunked_loss.chunked_cross_entropy(x[:, :0], weight, targets[:, :0]).item() == 0


def test_chunks_are_equal_and_bounded_by_bytes() -> None:
    assert chunked_loss.chunk_size(8192, 128_256, 2) == 4096
    assert chunked_loss.chunk_size(8192, 32_000, 2) == 8192  # all at once
    assert chunked_loss.chunk_size(4500, 128_256, 2) == 2304  # not 4096 and 404
    assert chunked_loss.chunk_size(5, 128_256, 2) == 128
    assert chunked_loss.chunk_size(0, 517, 4) == 1
    for n, vocabulary, itemsize in ((16384, 151_936, 4), (100_000, 256_000, 2)):
        size = chunked_loss.chunk_size(n, vocabulary, itemsize)
        assert size * vocabulary * itemsize <= chunked_loss.LOGITS_BYTES
        assert size % 128 == 0


def elementwise_bytes(compute: Callable[..., Tensor]) -> int:
    """Of forward and backward of a bfloat16 head, as on a GPU, without the matrix products."""
    with FakeTensorMode():
        x = torch.empty(1, 8192, 2048, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(128_256, 2048, dtype=torch.bfloat16, requires_grad=True)
        with OperatorLog() as log:
            compute(x, weight, torch.empty(1, 8192, dtype=torch.int64)).backward()
    return log.bytes(without=("aten.mm", "aten.addmm"))


def test_the_kernel_moves_an_eighth_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the products: per logit of bfloat16 a read and a write, per weight the float32 gradient once more.

    Before torch 2.13 the second chunk's product is added to the gradient by an operator: two reads and a write more.
    """
    logits, weights = 8192 * 128_256, 128_256 * 2048
    in_place = loss_operators.SIMULATES_ADDING
    found = elementwise_bytes(chunked_loss.chunked_cross_entropy)
    assert found == pytest.approx(4 * logits + (4 + 2 + (0 if in_place else 12)) * weights, rel=0.03)
    least = 7 if in_place else 5
    assert elementwise_bytes(plainly) > least * found
    monkeypatch.setattr(loss_operators, "logits_to_gradient_", loss_operators.plain_logits_to_gradient_)
    assert elementwise_bytes(chunked_loss.chunked_cross_entropy) > least * found, "without Triton"


def test_without_triton_a_gpu_computes_the_same_with_plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """And warns, once. Rows are computed in groups: the plain operators make copies of them."""

    def broken(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(loss_operators, "_launch", broken)
    monkeypatch.setattr(loss_operators, "PLAIN_ROWS", 3)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    logits, targets = torch.randn(7, 91), torch.tensor([0, 90, 5, IGNORE, 7, 8, 9])
    expected = logits.clone()
    losses = loss_operators.logits_to_gradient_(expected, targets, IGNORE, True, 0.01)
    with pytest.warns(UserWarning, match="without its GPU kernel, which is slower: No module named 'triton'"):
        found = loss_operators._on_cuda(logits, targets, IGNORE, True, 0.01)
    torch.testing.assert_close((found, logits), (losses, expected))
    loss_operators.kernel_works.cache_clear()
