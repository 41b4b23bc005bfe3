"""train.batch_schedule: batches change from some steps on, exactly, also under a resume."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import assert_same_end, forget_after, losses, ranks, records, succeeded, tiny

PLAIN: dict[str, Any] = {"train__steps": 8, "checkpoint__every": 4, "eval__every": 0, "optim__schedule": "constant"}


def test_samples_stay_in_order_and_a_resume_is_bitwise(text: Path, tmp_path: Path) -> None:
    """The same losses as a run whose batch size is changed by hand, across a stop, and on two ranks."""
    by_hand: dict[int, tuple[float, float]] = {}
    before = ""
    for steps, size in ((3, 6), (5, 4), (8, 9)):
        fork = {"run__name": f"by_hand{steps}", "checkpoint__resume": before, "train__steps": steps}
        succeeded(ranks(1, *tiny(text, tmp_path, **PLAIN | fork | {"train__global_batch_size": size})))
        before = str(tmp_path / f"by_hand{steps}")
        by_hand |= losses(Path(before))
    run = tmp_path / "run"
    command = [*tiny(text, tmp_path, run__name="run", **PLAIN), "--train.batch_schedule=[[3, 4], [5, 9]]"]
    succeeded(ranks(1, *command))
    assert losses(run) == by_hand
    assert [r["tokens"] for r in records(run) if "loss" in r] == [32 * n for n in (6, 12, 18, 22, 26, 35, 44, 53)]
    shutil.copytree(run, tmp_path / "straight")
    forget_after(run, 4)
    assert "resumed after step 4" in succeeded(ranks(1, *command))
    assert_same_end(run, tmp_path / "straight", 8)
    succeeded(ranks(2, *command, "--run.name=two"))
    for step, (loss, _) in losses(tmp_path / "two").items():
        assert loss == pytest.approx(losses(run)[step][0], rel=1e-4)
