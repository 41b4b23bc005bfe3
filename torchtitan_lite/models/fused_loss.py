"""The chunked loss on a GPU: one kernel turns a chunk's logits into their gradient, in place.

    per logit:            read twice (the second time from the L2 cache), written once
    per weight and chunk: the product adds to the float32 gradient, without a copy of it

The kernel is an operator of its own, so that FakeTensors and dispatch modes see it. On the CPU, which only tests use,
plain operators compute the same.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LOGITS_BYTES = 1 << 30  # of a chunk's logits. They bound memory; each chunk costs a pass over the weight's gradient


def chunk_size(n: int, vocab_size: int, itemsize: int) -> int:
    """Tokens per chunk: equal chunks of at most LOGITS_BYTES, in multiples of 128 (or all)."""
    most = max(LOGITS_BYTES // (vocab_size * itemsize) // 128 * 128, 128)
    even = -(-n // max(-(-n // most), 1))
    return max(min(-(-even // 128) * 128, most), 1)


def fused_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore: int, wants_dx: bool, wants_dw: bool, z_loss: float = 0.0
) -> Tensor:
    """The summed loss, () float32, of x (N, D) @ weight.T (D, V) and targets (N,) or `ignore`."""
    return _FusedCrossEntropy.apply(x, weight, targets, ignore, wants_dx, wants_dw, z_loss)  # type: ignore[no-untyped-call]


class _FusedCrossEntropy(torch.autograd.Function):
    """As loss._ChunkedCrossEntropy: forward computes the gradients, up to the factor that backward provides."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore: int, wants_dx: bool, wants_dw: bool, z: float
    ) -> Tensor:
        loss, dx, dw = _loss_and_gradients(x, weight, targets, ignore, wants_dx, wants_dw, z)
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if dx is not None:
            dx = (dx * grads[0]).to(dx.dtype)
        if dw is not None:  # in one pass, without a float32 product
            dw = torch.mul(dw, grads[0], out=torch.empty(dw.shape, dtype=ctx.dtype, device=dw.device))
        return dx, dw, *(None,) * 5


def _loss_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, ignore: int, wants_dx: bool, wants_dw: bool, z: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The summed loss, the gradient of x, and that of weight in float32."""
    chunk = chunk_size(len(x), len(weight), x.element_size())
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if wants_dx else None
    dw = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if wants_dw else None
    buffer = x.new_empty(min(chunk, len(x)), len(weight))
    for start in range(0, len(x), chunk):
        part = x[start : start + chunk]
        logits = torch.mm(part, weight.T, out=buffer[: len(part)])
        loss += logits_to_gradient_(logits, targets[start : start + chunk], ignore, wants_dx or wants_dw, z).sum()
        if dx is not None:
            torch.mm(logits, weight, out=dx[start : start + chunk])
        if dw is not None:
            _add_product(dw, logits.T, part, first=start == 0)
    return loss, dx, dw.zero_() if dw is not None and not len(x) else dw


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a @ b, or total = a @ b. The sum is float32 throughout."""
    if a.dtype == torch.float32 or (a.device.type == "cpu" and not isinstance(a, FakeTensor)):
        torch.addmm(total, a.float(), b.float(), beta=int(not first), out=total)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    elif isinstance(a, FakeTensor) or _adds_in_place(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(a, b, out_dtype=torch.float32)


@torch.library.custom_op("torchtitan_lite::logits_to_gradient_", mutates_args={"logits"}, device_types="cpu")
def logits_to_gradient_(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    """The loss of each row, (n,) float32. If `write`, logits (n, V) become the gradient of their sum (see loss.py)."""
    losses = F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction="none")
    if write:
        kept = targets != ignore
        p = torch.softmax(logits, -1, dtype=torch.float32)
        if z_loss:
            p *= 1 + 2 * z_loss * logits.float().logsumexp(-1, keepdim=True)
        p -= F.one_hot(torch.where(kept, targets, 0), logits.shape[1])
        logits.copy_(p * kept[:, None])
    return losses


@logits_to_gradient_.register_kernel("cuda")
def _on_cuda(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    from torchtitan_lite.models.loss_kernel import launch

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    launch(logits, targets, losses, ignore, write, z_loss)
    return losses


@logits_to_gradient_.register_fake
def _fake(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


def is_usable(x: Tensor, vocab_size: int) -> bool:
    """Whether the kernel runs on x's device. It needs Triton, which needs a C compiler."""
    return isinstance(x, FakeTensor) or x.device.type == "cpu" or _runs(x.device, x.dtype, vocab_size)


@functools.cache
def _runs(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Compile the kernel, and compare it with plain operators. The host waits for the device, once."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        logits = torch.linspace(-8, 8, 3 * vocab_size, device=device).view(3, vocab_size).to(dtype)
        targets = torch.tensor([0, -100, vocab_size - 1], device=device)
        gradient, on_host = logits.clone(), logits.cpu()
        losses = logits_to_gradient_(gradient, targets, -100, True, 1e-4)
        expected = logits_to_gradient_(on_host, targets.cpu(), -100, True, 1e-4)
        torch.testing.assert_close(losses.cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient.cpu(), on_host, rtol=2e-2, atol=1e-6)
    except Exception as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        warnings.warn(f"the loss runs without its GPU kernel, which is slower: {why}", stacklevel=2)
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of 16-bit matrices to a float32 matrix; older ones want equal dtypes."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
