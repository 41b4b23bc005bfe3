"""Peak memory, and advice for out-of-memory errors."""

import contextlib
import resource
from collections.abc import Iterator

import torch

from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import NoMemoryError, is_out_of_memory

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Return this rank's peak memory so far in GiB (2^30 bytes): reserved on the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


@contextlib.contextmanager
def with_advice(config: Config) -> Iterator[None]:
    """Turn out-of-memory errors of the device or the host into NoMemoryError, which says what to try next."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = str(error)
        raise NoMemoryError(
            f"out of memory: {text.splitlines()[0] if text else 'the host'}\n  {advice(config)}"
        ) from None


def advice(config: Config) -> str:
    """Return the cheapest remaining change to try."""
    if config.train.micro_batch_size > 1:
        half = config.train.micro_batch_size // 2
        return f"try --train.micro_batch_size={half}: the same global batch in more micro-batches, with the same result"
    if config.activation_checkpointing.mode != "full":
        return "try --activation_checkpointing.mode=full: about a third more computation, much less memory"
    if config.fsdp.param_dtype == "float32":
        return "try --mixed-precision: activations of half the size"
    return "try more ranks (each holds a smaller shard), a shorter --train.seq_len, or a smaller model"
