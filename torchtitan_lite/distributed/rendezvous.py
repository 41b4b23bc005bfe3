"""How the ranks find each other: torchrun's store, under a new prefix for each attempt."""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, but not by name
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from torchtitan_lite.errors import BusyError, ConfigError


def find_ranks(timeout: timedelta) -> tuple[Store, int, int]:
    """The store, this rank and the world size.

    Raises:
        ConfigError: torchrun's environment is incomplete.
        BusyError: the ranks can't reach the store, or its port is in use.
    """
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    except ValueError as error:  # a variable is missing, or is not a number
        raise ConfigError(f"RANK is set, but not as torchrun does: {str(error).splitlines()[0]}") from None
    except dist.DistNetworkError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise BusyError(
            f"the ranks can't meet at {where}: {str(error).splitlines()[0]}\n  If the port is in use, choose "
            "another MASTER_PORT; torchrun --standalone takes a free one.\n  If the host's name does not resolve, give "
            "torchrun its address: --local-addr=ADDRESS, 127.0.0.1 on a single machine"
        ) from None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _store_of_this_attempt(store, rank, world_size, timeout)
    return store, rank, world_size


def _store_of_this_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store under a prefix that no earlier attempt has used.

    torchrun's store outlives a restart and still holds the keys of dead ranks. TORCHELASTIC_RESTART_COUNT does not
    identify the attempt: each machine counts its own failures. So rank 0 chooses a prefix and offers it to the newest
    process registered as rank r until that process acknowledges it. A dead one never does.

    Raises:
        DistStoreError: a rank did not register within the timeout.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        me = uuid.uuid4().hex
        store.set(f"attempt/rank {rank}", me)
        prefix = store.get(f"attempt/prefix for {me}").decode()
        store.set(f"attempt/{prefix} has {me}", "")
        return PrefixStore(prefix, store)
    prefix = uuid.uuid4().hex
    for other in range(1, world_size):
        while True:
            registered = store.get(f"attempt/rank {other}").decode()
            store.set(f"attempt/prefix for {registered}", prefix)
            try:
                store.wait([f"attempt/{prefix} has {registered}"], timedelta(seconds=1))
                break
            except dist.DistStoreError:  # from an earlier attempt, or slow
                if time.monotonic() > deadline:
                    raise dist.DistStoreError(f"rank {other} did not arrive within {timeout}") from None
    return PrefixStore(prefix, store)
