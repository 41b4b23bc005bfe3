"""The status of a run: derived from its lock where a killed process could write none, and shown by the command."""

import fcntl
import json
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT, ranks, tiny
from torchtitan_lite.run import attempts
from torchtitan_lite.tools import status
from torchtitan_lite.tools.report import report


@pytest.fixture(scope="module")
def killed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that SIGKILL has ended in step 6; it has a checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("status")
    command = tiny(text, folder, run__name="run", train__steps=8, checkpoint__every=2, eval__every=0)
    assert ranks(1, *command, fault="kill:0:6").returncode
    return folder / "run"


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "run")
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], run: Path, code: int, *options: str) -> str:
    assert status.main([str(run), *options]) == code
    return capsys.readouterr().out


def test_a_killed_run_does_not_run_for_ever(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    assert report.main([str(run), "--table"]) == 0
    assert re.search(r"stopped unexpectedly, last record \d+\w* ago", capsys.readouterr().out)
    shutil.copytree(run / "checkpoints/step-00000004", run / "checkpoints/step-00000004.bak")  # somebody's copy
    out = said(capsys, run, 1)
    assert re.search(rf"^run     {run}: stopped unexpectedly, last record \w+ ago$", out, re.M)
    assert re.search(r"^step    5 of 8, \w+ ago, loss \d\.\d{4}$", out, re.M)
    assert re.search(r"^saved   step 4, \w+ ago$", out, re.M)
    found = json.loads(said(capsys, run, 1, "--json"))
    known = {"run": str(run), "status": "stopped", "active": False, "attempt": 1, "steps": 8, "saved": 4, "best": None}
    assert found | known | {"last_record": attempts.last_record(attempts.records(run))} == found
    assert not [key for key in found if f"`{key}`" not in (ROOT / "docs/watching.md").read_text()]


def test_a_failure_and_a_lock_and_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of other runs are in run/test_recorded_histories.py."""
    about = attempts.newest_status(run) | {"status": "failed", "reason": "step 6: it \x1b broke\nmore"}
    (run / "run.json").write_text(json.dumps(about))
    newest = attempts.records(run)[-1] | {"time": time.time() + 100}  # the clock of another machine
    with (run / "metrics.jsonl").open("a") as file:
        for n in range(1, 13):  # the rate is the median of the last ten
            for record in (
                newest | {"tokens_per_second": 1000 + n, "loss": None},
                {"upload_s" if n % 2 else "upload_error": "no route", "time": newest["time"], "attempt": 1},
            ):
                file.write(json.dumps(record | {"step": 5 + n}) + "\n")
    out = said(capsys, run, 1)
    assert f"run     {run}: failed: step 6: it ? broke\n" in out
    assert "step    17 of 8, 0s ago, loss not finite\n" in out
    assert "bucket  step 17 is not in the bucket: no route, 0s ago\nspeed   1,008 tokens per second, " in out
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"run     {run}: starting\n" in said(capsys, run, 0)
