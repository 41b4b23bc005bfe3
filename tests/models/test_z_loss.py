"""train.z_loss: its gradient in every way to compute the loss, and what is reported without it."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.cpu import loss as on_cpu
from torchtitan_lite.models import chunked_loss
from torchtitan_lite.models.loss import IGNORE, LossOptions, summed_cross_entropy
from torchtitan_lite.models.transformer import Head

Z = 0.01


Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # the summed loss, and that of each token


def gradients(way: Way, dtype: torch.dtype, n: int = 300, wanted: tuple[bool, bool] = (True, True)) -> list[Tensor]:
    """The loss, and the `wanted` gradients of x (2, n, 16) and weight (91, 16). A fifth of the targets is masked."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, n, 16, generator=generator).to(dtype).requires_grad_(wanted[0])
    weight = torch.randn(91, 16, generator=generator).to(dtype).requires_grad_(wanted[1])
    targets = torch.randint(91, (2, n), generator=generator)
    targets[:, ::5] = IGNORE
    loss, losses = way(x, weight, targets)
    assert (loss.requires_grad, losses.requires_grad) == (any(wanted), False)
    torch.testing.assert_close(losses.sum(), loss.detach())
    return [
        loss.detach(),
        *(torch.autograd.grad(loss * 0.3, t, retain_graph=True)[0] for t in (x, weight) if t.requires_grad),
    ]


def by_autograd(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits, known = F.linear(x, weight).double()[targets != IGNORE], targets[targets != IGNORE]
    loss = F.cross_entropy(logits, known, reduction="sum") + Z * logits.exp().sum(-1).log().square().sum()
    return loss, loss.detach()


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return summed_cross_entropy(F.linear(x, weight), targets, Z)


def of_head(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    module = Head(16, 91, LossOptions(z_loss=Z, chunked=True))
    return torch.func.functional_call(module, {"weight": weight}, (x, targets))


WAYS: dict[str, Way] = {
    "plain": plain,
    "chunked": functools.partial(chunked_loss.chunked_cross_entropy, z_loss=Z),
    "cpu": functools.partial(on_cpu.chunked_cross_entropy, z_loss=Z),
    "cpu, widened": functools.partial(on_cpu.chunked_cross_entropy, z_loss=Z, matmul_dtype=torch.float32),
    "head": of_head,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_its_gradient_and_not_its_value(
    way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 140 * 91 * dtype.itemsize)
    monkeypatch.setattr(on_cpu, "CHUNK", 37)
    found, expected = gradients(WAYS[way], dtype), gradients(by_autograd, dtype)
    assert (way, dtype) != ("head", torch.float16) or all(map(torch.equal, found, gradients(plain, dtype))), (
        "the loss scale applies before anything is rounded to float16"
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    without = gradients(lambda x, w, t: summed_cross_entropy(F.linear(x, w), t), dtype)
    torch.testing.assert_close(found[0], without[0], rtol=tolerance, atol=0)
    for one, other, none in zip(found[1:], expected[1:], without[1:], strict=True):
        assert (one - other).float().norm() / other.float().norm() < tolerance
        assert (none - other).float().norm() / other.float().norm() > 3 * tolerance, "it has an effect"


@pytest.mark.parametrize("way", WAYS)
def test_what_is_frozen_has_no_gradient_and_changes_no_other(way: str) -> None:
    """A frozen head, frozen blocks below the head, and both."""
    loss, dx, dw = gradients(WAYS[way], torch.float32)
    for wanted, expected in (((True, False), [loss, dx]), ((False, True), [loss, dw]), ((False, False), [loss])):
        torch.testing.assert_close(gradients(WAYS[way], torch.float32, wanted=wanted), expected, rtol=1e-6, atol=1e-6)
