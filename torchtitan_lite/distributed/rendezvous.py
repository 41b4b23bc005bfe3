"""How the ranks find each other: torchrun's store, under a new prefix for each attempt."""

import contextlib
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # mypy: not an explicit re-export
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from torchtitan_lite.errors import BusyError, StuckError


def join_store(timeout_minutes: float) -> tuple[Store, int, int]:
    """Return the store, this rank and the world size.

    Raises:
        BusyError: the ranks can't reach the store, or its port is in use.
        StuckError: a rank did not arrive in time.
    """
    timeout = timedelta(minutes=timeout_minutes)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        return _store_of_this_attempt(store, rank, world_size, timeout), rank, world_size
    except dist.DistNetworkError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise BusyError(
            f"the ranks can't connect at {where}: {str(error).splitlines()[0]}\n  If the port is in use, choose "
            "another MASTER_PORT; torchrun --standalone takes a free one.\n  If the host's name does not resolve, give "
            "torchrun its address: --local-addr=ADDRESS, 127.0.0.1 on a single machine"
        ) from None
    except dist.DistStoreError as error:
        raise StuckError(
            f"rank {os.environ['RANK']}, starting: not all ranks arrived within run.start_timeout_minutes = "
            f"{timeout_minutes:g} ({str(error).splitlines()[0]}). A process or its machine died during startup, or a "
            "process is still preparing the data. In that case prepare the data first, or raise the limit"
        ) from None


def _store_of_this_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store under a prefix that no earlier attempt has used.

    torchrun's store outlives a restart and still contains dead ranks' keys. TORCHELASTIC_RESTART_COUNT does not
    identify the attempt: each machine counts its own failures. So rank 0 chooses a prefix, and each process registers
    under the newest prefix that it sees. Once rank 0 lists the process as a member, that prefix is the right one.

    Raises:
        DistStoreError: a rank did not register within the timeout.
    """
    attempt_key, members_key, this_process = "torchtitan_lite/attempt", "{}/members", uuid.uuid4().hex
    if rank == 0:
        attempt = uuid.uuid4().hex
        store.set(attempt_key, attempt)
        others = {f"{attempt}/{other}": other for other in range(1, world_size)}
        try:
            store.wait(list(others), timeout)
        except dist.DistStoreError:
            missing = ", ".join(str(other) for key, other in others.items() if not store.check([key]))
            raise dist.DistStoreError(f"missing: rank {missing}") from None
        store.set(members_key.format(attempt), " ".join(store.get(key).decode() for key in others))
        return PrefixStore(attempt, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        attempt = store.get(attempt_key).decode()  # perhaps of an earlier attempt
        store.set(f"{attempt}/{rank}", this_process)
        with contextlib.suppress(dist.DistStoreError):
            store.wait([members_key.format(attempt)], timedelta(seconds=0.5))
            if this_process in store.get(members_key.format(attempt)).decode().split():
                return PrefixStore(attempt, store)
            time.sleep(0.1)
    raise dist.DistStoreError("rank 0 did not confirm")
