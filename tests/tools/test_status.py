"""The status of a run: derived from its lock where a killed process could write none, and shown by the command."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from tests.helpers import ranks, tiny
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
    assert re.search(r"^speed   [\d,]+ tokens per second, goodput \d+% of \w+ since the first launch$", out, re.M)


def test_what_cannot_be_seen_from_here_is_not_called_dead(run: Path) -> None:
    about, history = attempts.newest_status(run), (run / attempts.FILE).read_text()
    records = attempts.records(run)
    assert not status.status_of(run, about, records).active
    (run / attempts.FILE).write_text(history.replace(json.dumps(socket.gethostname()), '"node3.cluster"'))
    elsewhere = status.status_of(run, about, records)
    (run / attempts.FILE).write_text(history)
    (run / ".lock").unlink()
    for found, on in ((elsewhere, "node3.cluster"), (status.status_of(run, about, records), socket.gethostname())):
        assert found.active
        assert re.fullmatch(rf"running on {on} when last seen, last record \w+ ago", found.text)


def test_a_failure_has_its_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = attempts.newest_status(run) | {"status": "failed", "reason": "step 6: it \x1b broke\nmore"}
    (run / "run.json").write_text(json.dumps(about))
    assert f"run     {run}: failed: step 6: it ? broke\n" in said(capsys, run, 1)
    for command in (status.main, report.main):
        assert command([str(run.parent)]) == 2
        assert "; it has the runs run\n" in capsys.readouterr().err
    (run / "metrics.jsonl").unlink()
    assert "step    none has been logged" in said(capsys, run, 1)
    for content in ("{", None):
        (run / "run.json").unlink()
        if content is not None:
            (run / "run.json").write_text(content)
        assert status.main([str(run)]) == 2
        assert "it has no run.json that can be read" in capsys.readouterr().err
        (run / "run.json").touch()
