"""`train.py --dry-run`: planned and measured values agree, and no files remain."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

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


def slow_rank(process: Process) -> list[str]:
    """The table of four ranks on three machines, where the matmuls of rank 2 take 15 % longer, on the clock."""
    dry_run.socket = SimpleNamespace(gethostname=lambda: f"node{max(0, process.rank - 1)}")  # type: ignore[assignment, attr-defined]
    rates = iter([1.0 + 0.15 * (process.rank == 2), 0.5, 0.25])
    dry_run.seconds_of = lambda compute: (compute(), next(rates))[1]
    return dry_run.speed_lines(process)


def test_slow_ranks_are_named_with_their_machine() -> None:
    _, matmul, within, between = run_distributed(slow_rank, 4)[3]
    assert matmul.split()[2:] == ["0.00187", "0.00215", "0.00215", "rank", "2", "(node1)", "0.00187"]
    assert within.split()[4:] == ["0.0168", "0.0168", "0.0168", "none"], "8 MiB from one other rank, in half a second"
    assert between.split()[4:] == ["0.0224", "0.0224", "0.0447", "none"], "11 MiB, of ranks 0, 2 and 3"


@pytest.mark.parametrize(("error", "stays"), [(StuckError("a"), True), (ConfigError("a"), False)])
def test_the_folder_stays_for_the_stacks_of_a_rank_that_hangs(error: Exception, stays: bool) -> None:
    with (
        pytest.raises(type(error)),
        dry_run.in_temporary_folder(
            Config.model_validate({"run": {"remote": "s3://bucket"}}), {"train.steps": 7}
        ) as changed,
    ):
        raise error
    assert (changed.folder.is_dir(), changed.train.steps, changed.run.remote) == (stays, 7, "")
    shutil.rmtree(changed.run.out_dir, ignore_errors=True)


@pytest.mark.extended
def test_a_run_in_progress_is_not_changed(finished: Path, text: Path) -> None:
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    options = tiny(text, finished.parent, run__name="run", train__steps=4, checkpoint__every=2)
    assert "dry run" in succeeded(ranks(1, "--dry-run", *options))
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before
