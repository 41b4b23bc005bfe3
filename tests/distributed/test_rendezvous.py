"""How the ranks find each other: not those of an earlier attempt, and not for ever."""

import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # mypy: not an explicit re-export

from tests.forkserver import free_port
from tests.helpers import ranks, refused, tiny
from torchtitan_lite.distributed.rendezvous import Store, _store_of_this_attempt

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=60)


def test_a_restart_meets_under_a_prefix_of_its_own() -> None:
    """A second attempt, whose rank 0 comes last, a third one that is not complete, and a fourth one."""
    store: Store = dist.HashStore()  # type: ignore[attr-defined]

    def attempt(*order: int) -> list[Store]:
        found: dict[int, Store] = {}

        def arrive(rank: int) -> None:
            found[rank] = _store_of_this_attempt(store, rank, 3, LONG)

        threads = [threading.Thread(target=arrive, args=(rank,)) for rank in order]
        for rank, thread in zip(order, threads, strict=True):
            before = registered(rank)
            thread.start()
            while rank and store.check(["torchtitan_lite/attempt"]) and registered(rank) == before:
                pass  # until it has seen the attempt before
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(3)]

    def registered(rank: int) -> bytes:
        newest = "torchtitan_lite/attempt"
        key = f"{store.get(newest).decode()}/{rank}" if store.check([newest]) else newest
        return store.get(key) if store.check([key]) else b""

    first, second = attempt(0, 1, 2), attempt(1, 2, 0)
    for rank, said in ((0, "missing: rank 1, 2"), (1, "rank 0 did not confirm")):
        with pytest.raises(dist.DistStoreError, match=said):
            _store_of_this_attempt(store, rank, 3, SHORT)
    for number, stores in enumerate((first, second, attempt(1, 2, 0))):
        stores[2].set("key", str(number))
        assert [each.get("key") for each in stores] == 3 * [str(number).encode()]
    assert first[0].get("key") == b"0"


@pytest.mark.parametrize("agent", [False, True])
def test_a_rank_that_does_not_arrive_is_named_within_the_limit(agent: bool, text: Path, tmp_path: Path) -> None:
    """Without torchrun rank 0 hosts the store; with it, its agent does."""
    port = free_port()
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    host = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None
    more: Mapping[str, str] = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if host else {}
    command = tiny(text, tmp_path, run__name="run", run__start_timeout_minutes=0.05)
    said = ["rank 0, starting: not all ranks arrived within run.start_timeout_minutes = 0.05 ("]
    said += ["(missing: rank 1). A process or its machine died during startup, or a "] * agent
    refused(ranks(1, *command, env={**env, **more}, timeout=60), *said, code=1)
