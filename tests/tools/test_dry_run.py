"""`train.py --dry-run`: planned and measured values agree, and no files remain."""

import re
from pathlib import Path

import pytest

from tests.helpers import ranks, succeeded, tiny

MIB = {"MiB": 1.0, "GiB": 1024.0}


def rows(output: str) -> dict[str, list[str]]:
    """Cells by the first one."""
    table = output[output.index("memory of rank 0") :].splitlines()
    return {cells[0]: cells[1:] for line in table if len(cells := re.split(r"  +", line.strip())) > 1}


def mib(cell: str) -> float:
    number, unit = cell.split()
    return float(number.replace(",", "")) * MIB[unit]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_planned_memory_matches_measured_memory(world_size: int, text: Path, tmp_path: Path) -> None:
    large = {"model__dim": 192, "model__max_seq_len": 256, "train__seq_len": 256, "train__micro_batch_size": 2}
    more = {"train__global_batch_size": 8, "run__name": "run"} | large
    output = succeeded(ranks(world_size, "--dry-run", *tiny(text, tmp_path, **more)))
    found = rows(output)
    for kind in ("parameters", "optimizer state", "gradients", "total at the peak"):
        planned, measured, ratio = found[kind]
        assert mib(planned) == pytest.approx(mib(measured), rel=0.05)
        assert float(ratio) == pytest.approx(1, abs=0.05)
    (step,) = found["time of a step"]
    (rate,) = found["tokens per second"]
    assert float(rate.replace(",", "")) == pytest.approx(8 * 256 / float(step.removesuffix(" s")), rel=0.05)
    assert f"dry run of {tmp_path / 'run'}" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extended
def test_a_run_in_progress_is_not_changed(text: Path, tmp_path: Path) -> None:
    options = tiny(text, tmp_path, run__name="run", train__steps=4, checkpoint__every=4, eval__every=0)
    succeeded(ranks(1, *options))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert "dry run" in succeeded(ranks(1, "--dry-run", *options))
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_errors_are_those_of_a_run(text: Path, tmp_path: Path) -> None:
    result = ranks(1, "--dry-run", *tiny(text, tmp_path, optim__lr=1e30, optim__warmup_steps=0))
    assert result.returncode == 1
    assert "not finite" in result.stderr
    assert list(tmp_path.iterdir()) == []
