"""Four ranks, of which the last stays away from one collective in each of its groups: how the others get out."""

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.distributed_cases import MESHES, loss_of, make_mesh, sharded
from torchtitan_lite.config.schema import FsdpConfig, RunConfig
from torchtitan_lite.distributed.lost import is_lost
from torchtitan_lite.distributed.process_group import exit_process, limit_group_timeouts, process_group
from torchtitan_lite.optim.optimizer import squared_norm


def groups() -> dict[str, dist.ProcessGroup]:
    known = dist.distributed_c10d._world.pg_map
    return {str(group.group_name): group for group in known if group.group_desc != "untimed"}


def main(argv: Sequence[str]) -> None:
    with process_group(RunConfig(device="cpu", threads=1, timeout_minutes=5)) as process:
        copies = sharded(make_mesh(MESHES["2 x 2"]))
        mesh, before = make_mesh(MESHES["4"]), groups().keys()
        parts = sharded(mesh, FsdpConfig(reshard_after_forward=2))
        resharding = len(groups().keys() - before)
        limit_group_timeouts(2 / 60)
        existing = groups()
        for model in (copies, parts):
            loss_of(model).backward()
            squared_norm(model, 1)
        late = sorted(groups().keys() - existing.keys())
        store = dist.distributed_c10d._get_default_store()
        seen = []
        if process.rank == 3:
            store.wait(["0", "1", "2"], timedelta(minutes=5))
        for name, group in existing.items() if process.rank != 3 else ():
            if 3 not in dist.get_process_group_ranks(group):
                continue
            began = time.monotonic()
            try:
                dist.all_reduce(torch.ones(3), group=group)
            except RuntimeError as error:
                seen.append([name, group.group_desc, time.monotonic() - began, is_lost(error), str(error)])
            else:
                seen.append([name, group.group_desc, 0.0, False, "no error"])
        Path(argv[0], f"rank-{process.rank}.json").write_text(
            json.dumps({"seen": seen, "late": late, "resharding": resharding})
        )
        store.set(str(process.rank), "done")
        store.wait(["0", "1", "2"], timedelta(minutes=5))
    exit_process(3)  # without waiting for each other
