"""The operators of the chunked loss: a chunk's logits become their gradient in place, and products add up in float32.

On a GPU one kernel does the first:

    per logit:            read twice (the second time from the L2 cache), written once
    per weight and chunk: the product adds to the float32 gradient, without a copy of it

The kernel is an operator of its own, so that FakeTensors and dispatch modes see it. Plain operators compute the same on
the CPU, and on a GPU without Triton.
"""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

# Whether FakeTensors of 16-bit matrices can be added to a float32 matrix as a product: not in torch 2.11 and 2.12.
SIMULATES_ADDING = torch.__version__ >= "2.13"
PLAIN_ROWS = 1024  # rows that plain operators compute at a time on a GPU: they make several float32 copies of them


def plain_logits_to_gradient_(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float) -> Tensor:
    """The loss of each row, (n,) float32. If `write`, logits (n, V) become their gradient (see chunked_loss.py)."""
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    losses = F.nll_loss(log_p, targets, ignore_index=ignore, reduction="none")
    if write:
        counts = (targets != ignore)[:, None]
        p = log_p.exp_()
        if z_loss:
            p *= 1 + 2 * z_loss * logits.float().logsumexp(-1, keepdim=True)
        p.scatter_add_(1, torch.where(counts, targets[:, None], 0), torch.full_like(p[:, :1], -1.0))
        logits.copy_(p.mul_(counts))
    return losses


@torch.library.custom_op("torchtitan_lite::logits_to_gradient_", mutates_args={"logits"}, device_types="cpu")
def logits_to_gradient_(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    """plain_logits_to_gradient_, by one kernel on a GPU."""
    return plain_logits_to_gradient_(logits, targets, ignore, write, z_loss)


@logits_to_gradient_.register_kernel("cuda")
def _on_cuda(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    if kernel_works(logits.device, logits.dtype, logits.shape[1]):
        return _launch(logits, targets, ignore, write, z_loss)
    pieces = zip(logits.split(PLAIN_ROWS), targets.split(PLAIN_ROWS), strict=True)
    return torch.cat([plain_logits_to_gradient_(*piece, ignore, write, z_loss) for piece in pieces])


@logits_to_gradient_.register_fake
def _fake(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


def _launch(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float) -> Tensor:
    from torchtitan_lite.models.loss_kernel import launch  # needs Triton

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    launch(logits, targets, losses, ignore, write, z_loss)
    return losses


@functools.cache
def kernel_works(device: torch.device, dtype: torch.dtype, vocab_size: int) -> bool:
    """Compile the kernel, which needs Triton and a C compiler, and compare it with plain operators.

    The host waits for the device, once.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        logits = torch.linspace(-8, 8, 3 * vocab_size, device=device).view(3, vocab_size).to(dtype)
        targets = torch.tensor([0, -100, vocab_size - 1], device=device)
        gradient, on_host = logits.clone(), logits.cpu()
        losses = _launch(gradient, targets, -100, True, 1e-4)
        expected = plain_logits_to_gradient_(on_host, targets.cpu(), -100, True, 1e-4)
        torch.testing.assert_close(losses.cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient.cpu(), on_host, rtol=2e-2, atol=1e-6)
    except Exception as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        warnings.warn(f"the loss runs without its GPU kernel, which is slower: {why}", stacklevel=2)
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def padding(x: Tensor, vocab_size: int) -> int:
    """Columns that the logits of `x` get beyond the vocabulary: on a GPU to a multiple of 64, unless it is one of 16.

    In other rows Triton moves single elements. cuBLAS is fastest if sizes and rows are multiples of 16 bytes (its
    manual, "Tensor Core Usage"), on an A100 of 128 bytes (NVIDIA's guide to matrix multiplication).
    """
    return -vocab_size % 64 if vocab_size % 16 and _of_gpu(x) else 0


def with_zero_rows(weight: Tensor, n: int) -> Tensor:
    """A copy of weight (V, D) with n more rows."""
    padded = weight.new_empty(len(weight) + n, weight.shape[1])
    padded[: len(weight)].copy_(weight)
    padded[len(weight) :].zero_()
    return padded


def _of_gpu(x: Tensor) -> bool:
    return x.device.type != "cpu" or type(x) is not Tensor  # a FakeTensor stands for a GPU's


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a @ b, or total = a @ b. The sum is float32 throughout."""
    if a.dtype == torch.float32 or not _of_gpu(a):
        torch.addmm(total, a.float(), b.float(), beta=int(not first), out=total)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    elif SIMULATES_ADDING if type(a) is not Tensor else _adds_in_place(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(a, b, out_dtype=torch.float32)


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of 16-bit matrices to a float32 matrix; older ones want equal dtypes."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
