"""The loss as a GPU computes it: its kernel, its chunks, its bytes. Here on the CPU; test_cuda.py runs the kernel."""

import functools
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.models import triton_stand_in
from tests.models.test_z_loss import gradients
from torchtitan_lite.models import chunked_loss, kernels, loss_operators
from torchtitan_lite.models.loss import IGNORE, plain_logits_to_gradient_, summed_cross_entropy

Launch = Callable[[Tensor, Tensor, int, bool, float], Tensor]


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
        made = wide.clone()
        losses = launch(made[:, :columns], targets, IGNORE, write, z_loss)
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
    losses = launch(logits, torch.tensor([1, 2, 3, 4, 70]), IGNORE, True, 0.0)
    assert losses.isfinite().tolist() == [False, False, False, True, False], "the last target is out of range"
    assert logits[3].isfinite().all()


# --- chunks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_a_padded_vocabulary_has_the_same_loss(
    z_loss: float, dtype: torch.dtype, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """91 tokens, padded to 128 as on a GPU: by plain operators and by the kernel, and forward alone."""
    assert [loss_operators.padding(torch.empty(1, device="meta"), n) for n in (50257, 91, 48, 64)] == [47, 37, 0, 0]
    way = functools.partial(chunked_loss.chunked_cross_entropy, z_loss=z_loss)
    expected = gradients(way, dtype, n=150)
    monkeypatch.setattr(loss_operators, "padding", lambda _, vocab_size: -vocab_size % 64)
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 128 * 128 * dtype.itemsize)  # three chunks
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    for operator in (plain_logits_to_gradient_, launch):
        monkeypatch.setattr(loss_operators, "logits_to_gradient_", operator)
        torch.testing.assert_close(gradients(way, dtype, n=150), expected, rtol=tolerance, atol=tolerance)
    x, weight = torch.randn(1, 6, 16).to(dtype), torch.randn(91, 16).to(dtype)
    targets = torch.tensor([[0, 90, 5, IGNORE, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(way(x, weight, targets), summed_cross_entropy(x @ weight.T, targets, z_loss))


@pytest.mark.parametrize(("kernel", "why"), [
    (Mock(side_effect=ModuleNotFoundError("No module named 'triton'")), "No module named 'triton'"),
    (lambda logits, targets, ignore, write, z_loss:
     plain_logits_to_gradient_(logits, targets, ignore, write, 300 * z_loss), "Tensor-likes are not"),
])  # fmt: skip
def test_without_triton_a_gpu_computes_the_same_with_plain_operators(
    kernel: Callable[..., Tensor], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or with a kernel of another gradient. And warns, once. Rows are computed in groups: the operators copy them."""
    modes = list[str]()
    monkeypatch.setattr(kernels, "launch", kernel)
    monkeypatch.setattr(loss_operators, "PLAIN_ROWS", 3)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "error")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    logits, targets = torch.randn(7, 91), torch.tensor([0, 90, 5, IGNORE, 7, 8, 9])
    expected = logits.clone()
    losses = loss_operators.logits_to_gradient_(expected, targets, IGNORE, True, 0.01)
    with pytest.warns(UserWarning, match=f"without its GPU kernel, which is slower: {why}"):
        found = loss_operators._on_cuda(logits, targets, IGNORE, True, 0.01)
    torch.testing.assert_close((found, logits), (losses, expected))
    assert modes == ["default", "error"], "as it was"
    kernels.kernel_works.cache_clear()
