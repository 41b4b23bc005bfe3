"""`train.py --dry-run`: planned and measured values agree, and no files remain."""

import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import ranks, run_distributed, succeeded, tiny
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import ConfigError, StuckError
from torchtitan_lite.tools import dry_run


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_planned_memory_matches_measured_memory(world_size: int, text: Path, tmp_path: Path) -> None:
    large = {"model__dim": 192, "model__max_seq_len": 256, "train__seq_len": 256, "train__micro_batch_size": 2}
    more = {"train__global_batch_size": 8, "run__name": "run"} | large
    output = succeeded(ranks(world_size, "--dry-run", *tiny(text, tmp_path, **more)))
    ((planned, measured),) = re.findall(r"memory of rank 0 at the peak +([\d.]+) MiB +([\d.]+) MiB", output)
    assert float(planned) == pytest.approx(float(measured), rel=0.05)
    assert f"dry run of {tmp_path / 'run'}" in output
    assert list(tmp_path.iterdir()) == []


def checked(process: Process, folder: Path, wrong: str) -> str:
    """What the preflight says on a rank, if the clock or the disk of rank 1 is wrong."""
    if process.rank == 1 and wrong == "clock":
        real = time.time
        dry_run.time.time = lambda: real() + 5  # type: ignore[attr-defined]
    if process.rank == 1 and wrong.startswith("disk"):
        Path.exists = lambda self: False  # type: ignore[method-assign]
    config = Config.model_validate({}, context="layers")
    os.environ["TORCHELASTIC_RUN_ID"] = "none" if wrong == "disk of fixed ranks" else "mine"
    services = SimpleNamespace(checkpointer=SimpleNamespace(require_space=lambda: None))
    s: Any = SimpleNamespace(process=process, config=config, services=services)
    try:
        return dry_run.check_machines(folder / "run", s)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("wrong", "expected"), [
    ("", r"ranks   2 on 1 machine; clocks within 0\.\d\d s; the disk has room"),
    ("clock", r"clocks differ from that of (\S+): \1 by \+5\.\d s\. torchrun would consider machines lost"),
    ("disk", ".* of rank 0 is not shared.*"),
    ("disk of fixed ranks", "ranks   2 on 1 machine; clocks within .*"),
], ids=["fine", "clock", "disk", "fixed ranks"])  # fmt: skip
def test_the_disk_and_the_clocks_of_all_machines_are_checked(wrong: str, expected: str, tmp_path: Path) -> None:
    for said in run_distributed(checked, 2, tmp_path, wrong):
        assert re.fullmatch(expected, said, re.DOTALL), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "stays"), [(StuckError("a"), True), (ConfigError("a"), False)])
def test_the_folder_stays_for_the_stacks_of_a_rank_that_hangs(error: Exception, stays: bool) -> None:
    with pytest.raises(type(error)), dry_run.in_temporary_folder(Config(), train={"steps": 7}) as changed:
        raise error
    assert (changed.folder.is_dir(), changed.train.steps) == (stays, 7)
    shutil.rmtree(changed.run.out_dir, ignore_errors=True)


@pytest.mark.extended
def test_a_run_in_progress_is_not_changed(finished: Path, text: Path) -> None:
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    options = tiny(text, finished.parent, run__name="run", train__steps=4, checkpoint__every=2)
    assert "dry run" in succeeded(ranks(1, "--dry-run", *options))
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before
