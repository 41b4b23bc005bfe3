"""Copies of tensors on the host, for saves in the background."""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.checkpointing.safetensors_file import TensorSpecs
from torchtitan_lite.checkpointing.tensor_names import Tensors
from torchtitan_lite.distributed.sharding import own_part


class HostCopies:
    """One block of host memory with a view for each tensor, reused as long as names, dtypes and shapes stay.

    For a GPU the block is page-locked by cudaHostRegister: torch's allocator of pinned memory would round each tensor
    up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._specs: TensorSpecs = {}
        self._views: Tensors = {}
        self._unpin = lambda: None

    def reserve(self, specs: TensorSpecs) -> None:
        """Make room for these tensors."""
        if specs == self._specs:
            return
        self._unpin()
        self._specs, self._views = {}, {}  # frees the block before the next one is made
        order = sorted(specs, key=lambda name: -specs[name][0].itemsize)  # large elements first, for alignment
        sizes = [specs[name][0].itemsize * torch.Size(specs[name][1]).numel() for name in order]
        block = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        if self._device.type == "cuda" and len(block):
            block.fill_(0)  # torch's threads map the pages; registering alone would, in one thread
            runtime, address = torch.cuda.cudart(), block.data_ptr()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, len(block), 1)))  # 1: for all devices
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)
        for name, data in zip(order, block.split(sizes), strict=True):
            dtype, shape = specs[name]
            self._views[name] = data.view(dtype).view(shape)
        self._specs = dict(specs)

    def fill(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Copy tensors, of a DTensor this rank's shard, into their views, and return these."""
        for name, tensor in tensors.items():
            self._views[name].copy_(own_part(tensor.detach())[0], non_blocking=True)
            progress.advance(self._views[name].nbytes)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return {name: self._views[name] for name in tensors}

    def of(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Copy exactly these tensors, and return the copies."""
        rows = {name: own_part(tensor.detach())[0] for name, tensor in tensors.items()}
        self.reserve({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in rows.items()})
        return self.fill(rows)
