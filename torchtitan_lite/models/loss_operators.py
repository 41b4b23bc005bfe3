"""The operators of the chunked loss: logits become their gradient in place, and matmuls accumulate in float32.

On a GPU one kernel computes the gradient, and a chunk's matmul adds to the float32 gradient of the weight in place. The
kernel is an operator of its own, so that FakeTensors and dispatch modes see it. Plain operators compute the same on the
CPU, and on a GPU without Triton.
"""

import torch
from torch import Tensor

from torchtitan_lite.models import kernels
from torchtitan_lite.models.loss import of_gpu, plain_logits_to_gradient_

PLAIN_ROWS = 1024  # rows that plain operators compute at a time on a GPU, to bound their float32 copies


@torch.library.custom_op("torchtitan_lite::logits_to_gradient_", mutates_args={"logits"}, device_types="cpu")
def logits_to_gradient_(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    """Compute plain_logits_to_gradient_; on a GPU, with one kernel."""
    return plain_logits_to_gradient_(logits, targets, ignore, write, z_loss)


@logits_to_gradient_.register_kernel("cuda")
def _on_cuda(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    if kernels.kernel_works(logits.device, logits.dtype, logits.shape[1]):
        return kernels.launch(logits, targets, ignore, write, z_loss)
    pieces = zip(logits.split(PLAIN_ROWS), targets.split(PLAIN_ROWS), strict=True)
    return torch.cat([plain_logits_to_gradient_(*piece, ignore, write, z_loss) for piece in pieces])


@logits_to_gradient_.register_fake
def _fake(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float = 0.0) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


def padding(x: Tensor, vocab_size: int) -> int:
    """Return how many columns to add to `x`'s logits: on a GPU up to a multiple of 64, unless V is a multiple of 16.

    In unaligned rows Triton moves single elements, and cuBLAS is slower (its manual, "Tensor Core Usage").
    """
    return -vocab_size % 64 if vocab_size % 16 and of_gpu(x) else 0


def add_matmul_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a @ b to `total`, or set it if `first`. The sum is float32 throughout."""
    if a.dtype == torch.float32 or not of_gpu(a):
        torch.addmm(total, a.float(), b.float(), beta=int(not first), out=total)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    elif kernels.SIMULATES_ADDING if type(a) is not Tensor else kernels.adds_in_place(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(a, b, out_dtype=torch.float32)
