"""Share one mesh between all groups with `reshard_after_forward = N`.

torch (2.11 to 2.13) makes a DeviceMesh in every call of `fully_shard` with a number: two process groups, and on GPUs
NCCL communicators, per group of parameters. All of them are the same, so one is enough.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def one_mesh() -> Iterator[None]:
    """Make calls of `fully_shard` in this context, all with the same mesh, share torch's mesh for each N."""
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    make = module._get_post_forward_mesh_info
    made: dict[int, Any] = {}

    def shared(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return make(reshard_after_forward, mesh_info)
        if reshard_after_forward not in made:
            made[reshard_after_forward] = make(reshard_after_forward, mesh_info)
        return made[reshard_after_forward]

    module._get_post_forward_mesh_info = shared
    try:
        yield
    finally:
        module._get_post_forward_mesh_info = make
