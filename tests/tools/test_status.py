"""The status of a run: derived from its lock where a killed process could write none, and shown by the command."""

import fcntl
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, ranks, tiny
from torchtitan_lite.run import attempts
from torchtitan_lite.tools import status
from torchtitan_lite.tools.report import report


@pytest.fixture(scope="module")
def killed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that SIGKILL has ended in step 6; it has a checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("status")
    result = ranks(
        1, *tiny(text, folder, run__name="run", train__steps=8, checkpoint__every=2, eval__every=0), fault="kill:0:6"
    )
    assert result.returncode != 0
    return folder / "run"


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "run")
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], run: Path, code: int) -> str:
    assert status.main([str(run)]) == code
    return capsys.readouterr().out


def test_a_killed_run_does_not_run_for_ever(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    assert report.main([str(run), "--table"]) == 0
    assert re.search(r"stopped unexpectedly, last record \d+\w* ago", capsys.readouterr().out)
    shutil.copytree(run / "checkpoints/step-00000004", run / "checkpoints/step-00000006")
    (run / "checkpoints/step-00000006/optimizer.safetensors").write_bytes(b"")  # damaged
    (run / "checkpoints/step-00000004.bak").mkdir()  # somebody's copy
    out = said(capsys, run, 1)
    assert re.search(rf"^run     {run}: stopped unexpectedly, last record \w+ ago$", out, re.M)
    assert re.search(r"^step    5 of 8, \w+ ago, loss \d\.\d{4}$", out, re.M)
    assert re.search(r"^saved   step 4, \w+ ago$", out, re.M)


LINES = """\
run     {run}: {status}
ranks   3 on node1, node2
step    1,012 of 2,000, 1h00m ago, loss {loss}
saved   step 4, 2h00m ago
best    the checkpoint of step 2, by validation loss
speed   1,100 tokens per second, goodput 10% of 5m00s since the first launch
"""


def test_the_lines_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest step that was logged, the median rate of the last ten, the checkpoints, and their best."""
    now, about = time.time(), attempts.newest_status(run)
    first = json.loads((run / attempts.FILE).read_text().splitlines()[0])
    first |= {"time": now - 3900, "world_size": 3, "hosts": ["node1", "node2"]}
    first["config"] |= {"train.steps": 2000}
    (run / attempts.FILE).write_text(json.dumps(first) + "\n")
    os.utime(checkpoint(run, 4), (now - 7200, now - 7200))
    losses = {2: 1.5, 3: 1.25, 4: 1.75}  # there is no checkpoint of step 3
    records: list[dict[str, Any]] = [
        {"step": n, "time": now - 3800, "val_loss": loss, "attempt": 1} for n, loss in losses.items()
    ]
    for i in range(1, 13):  # the rates of four are too high, two of which are before the last ten
        rate = 9000.0 if i < 5 else 1000.0 + 10 * i
        record = {"step": 1000 + i, "time": now - 3612 + i, "tokens_per_second": rate, "attempt": 1, "seconds": 2.5}
        records.append(record | {"loss": 9.0, "mean_loss": 9.54321})

    def shown(status: str, loss: float | None, code: int, locked: bool = False) -> str:
        (run / "run.json").write_text(json.dumps(about | {"status": status, "reason": "the reason"}))
        records[-1]["loss"] = loss
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        with (run / ".lock").open() as lock:
            if locked:
                fcntl.flock(lock, fcntl.LOCK_EX)
            return said(capsys, run, code)

    assert shown("complete", 9.0, 0) == LINES.format(run=run, status="complete: the reason", loss="9.5432")
    assert shown("failed", None, 1) == LINES.format(run=run, status="failed: the reason", loss="not finite")
    for before, found in (("complete", "starting"), ("running", "running")):
        assert shown(before, 9.0, 0, locked=True) == LINES.format(run=run, status=found, loss="9.5432")
    records[-1]["time"] = now + 100  # the clock of another machine
    assert "step    1,012 of 2,000, 0s ago" in shown("complete", 9.0, 0)
    for i in range(12):
        (run / f"{i:02}").mkdir()
        (run / f"{i:02}/run.json").touch()
    listed = ", ".join(f"{i:02}" for i in range(10))
    assert status.runs_in(run) == f"; it has the runs {listed} and 2 more"


def test_a_failure_has_its_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = attempts.newest_status(run) | {"status": "failed", "reason": "step 6: it \x1b broke\nmore"}
    (run / "run.json").write_text(json.dumps(about))
    assert f"run     {run}: failed: step 6: it ? broke\n" in said(capsys, run, 1)
    for command in (status.main, report.main):
        assert command([str(run.parent)]) == 2
        assert "; it has the runs run\n" in capsys.readouterr().err
    (run / "run.json").write_text("{")
    assert status.main([str(run)]) == 2
    assert f"{run} is not the folder of a run: it has no run.json that can be read" in capsys.readouterr().err
