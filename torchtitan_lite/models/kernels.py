"""Which kernels this GPU and this torch have, for attention and the loss. Each answer is found once."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite import errors
from torchtitan_lite.models.loss import plain_logits_to_gradient_

# Whether `addmm` of 16-bit FakeTensors can add to a float32 one; torch 2.11 and 2.12 refuse it.
SIMULATES_ADDING = torch.__version__ >= "2.13"


# --- attention --------------------------------------------------------------------------------------------------


def prefers_cudnn(q: Tensor, options: dict[str, Any]) -> bool:
    """Return whether to try cuDNN first, for queries (B, H, T, E).

    cuDNN before 9.15.1 is wrong for lengths that are not multiples of 128; later versions return NaN for some masks
    (pytorch issues 169849, 196678).
    """
    return "is_causal" in options and q.shape[2] % 128 == 0 and cudnn_is_faster()


def flash_supports_gqa(q: Tensor) -> bool:
    """Return whether the flash kernel supports GQA. (If it does, so does cuDNN's.)

    Follows torch's sdp_utils.cpp, because torch.compile can't trace can_use_flash_attention.
    """
    # above a head_dim of 192, some GPUs have no gradients
    return flash_works() and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 192


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def flash_works() -> bool:
    """Return whether PyTorch has a flash kernel, and the GPU is an A100 or newer."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability() >= (8, 0)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def cudnn_is_faster() -> bool:
    """Return whether the GPU has compute capability 9 or 10, for which torch also prefers cuDNN."""
    return torch.cuda.get_device_capability()[0] in (9, 10)


# --- the loss ---------------------------------------------------------------------------------------------------


def launch(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float) -> Tensor:
    """Compute plain_logits_to_gradient_ by the kernel."""
    from torchtitan_lite.models import loss_kernel  # needs Triton

    return loss_kernel.launch(logits, targets, ignore, write, z_loss)


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
        losses = launch(gradient, targets, -100, True, 1e-4)
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


@functools.cache
def adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `addmm` of 16-bit matrices can add to a float32 one; older torch needs equal dtypes."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
