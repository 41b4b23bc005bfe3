"""The operators of the chunked loss: logits become their gradient in place, and matmuls accumulate in float32.

On a GPU one kernel computes the gradient. It reads each logit twice (the second time from the L2 cache) and writes it
once. The matmul of each chunk adds to the weight's float32 gradient without a copy.

The kernel is an operator of its own, so that FakeTensors and dispatch modes see it. Plain operators compute the same on
the CPU, and on a GPU without Triton.
"""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite import errors

# Whether `addmm` of 16-bit FakeTensors can add to a float32 one; torch 2.11 and 2.12 refuse it.
SIMULATES_ADDING = torch.__version__ >= "2.13"
PLAIN_ROWS = 1024  # rows that plain operators compute at a time on a GPU, to bound their float32 copies


def plain_logits_to_gradient_(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float) -> Tensor:
    """Return each row's loss, (n,) float32. If `write`, overwrite logits (n, V) with their gradient."""
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    losses = F.nll_loss(log_p, targets, ignore_index=ignore, reduction="none")
    if write:
        has_target = (targets != ignore)[:, None]
        p = log_p.exp_()
        if z_loss:
            p *= 1 + 2 * z_loss * logits.float().logsumexp(-1, keepdim=True)
        p.scatter_add_(1, torch.where(has_target, targets[:, None], 0), torch.full_like(p[:, :1], -1.0))
        logits.copy_(p.mul_(has_target))
    return losses


@torch.library.custom_op("torchtitan_lite::logits_to_gradient_", mutates_args={"logits"}, device_types="cpu")
def logits_to_gradient_(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    """Compute plain_logits_to_gradient_; on a GPU, with one kernel."""
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
    """Return whether the kernel compiles (it needs Triton and a C compiler) and agrees with plain operators.

    The first call makes the host wait for the device.
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
        why = errors.text_of(error).splitlines()[0]
        warnings.warn(f"the loss runs without its GPU kernel, which is slower: {why}", stacklevel=2)
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def padding(x: Tensor, vocab_size: int) -> int:
    """Return how many columns to add to `x`'s logits: on a GPU up to a multiple of 64, unless V is a multiple of 16.

    In unaligned rows Triton moves single elements. cuBLAS is fastest if sizes and rows are multiples of 16 bytes (its
    manual, "Tensor Core Usage"); on an A100, multiples of 128 bytes (NVIDIA's guide to matrix multiplication).
    """
    return -vocab_size % 64 if vocab_size % 16 and _of_gpu(x) else 0


def _of_gpu(x: Tensor) -> bool:
    return x.device.type != "cpu" or type(x) is not Tensor  # a FakeTensor stands for a GPU's


def add_matmul_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a @ b to `total`, or set it if `first`. The sum is float32 throughout."""
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
    """Return whether `addmm` of 16-bit matrices can add to a float32 one; older torch needs equal dtypes."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
