"""How the ranks find each other: not those of an earlier attempt, and not for ever."""

import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name

from tests.forkserver import free_port
from tests.helpers import ranks, tiny
from torchtitan_lite.distributed.rendezvous import Store, _store_of_this_attempt

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=60)


def test_a_restart_meets_under_a_prefix_of_its_own() -> None:
    """In the second attempt rank 2 dies before it arrives, and in the third one all arrive late but rank 2."""
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    found: dict[int, Store] = {}

    def arrive(rank: int) -> None:
        found[rank] = _store_of_this_attempt(store, rank, 3, LONG)

    def attempt(*order: int) -> None:
        found.clear()
        threads = [threading.Thread(target=arrive, args=(rank,)) for rank in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[2].set("key", "of this attempt")
        assert {found[rank].get("key") for rank in range(3)} == {b"of this attempt"}

    attempt(0, 1, 2)
    first = found[0]
    with pytest.raises(dist.DistStoreError, match="missing: rank 1, 2"):
        _store_of_this_attempt(store, 0, 3, SHORT)
    attempt(2, 1, 0)
    found[0].set("key", "new")
    assert first.get("key") == b"of this attempt"


@pytest.mark.parametrize("agent", [False, True])
def test_a_rank_that_does_not_arrive_is_named_within_the_limit(agent: bool, text: Path, tmp_path: Path) -> None:
    """Without torchrun rank 0 hosts the store; with it, its agent does."""
    port = free_port()
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    host = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None
    more: Mapping[str, str] = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if host else {}
    command = tiny(text, tmp_path, run__name="run", run__start_timeout_minutes=0.05)
    result = ranks(1, *command, env={**env, **more}, timeout=60)
    assert result.returncode == 1
    assert "rank 0, starting: not all ranks arrived within run.start_timeout_minutes = 0.05 (" in result.stderr
    assert not host or "(missing: rank 1)" in result.stderr
    assert "Traceback" not in result.stderr
