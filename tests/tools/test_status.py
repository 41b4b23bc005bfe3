"""The status of a run: derived from its lock where a killed process could write none, and shown by the command."""

import fcntl
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ROOT, checkpoint, ranks, tiny
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.monitoring import run_folder
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
    assert re.search(r"stopped without a word, last record \d+\w* ago", capsys.readouterr().out)
    out = said(capsys, run, 1)
    assert re.search(rf"^run     {run}: stopped without a word, last record \w+ ago$", out, re.M)
    assert re.search(r"^step    5 of 8, \w+ ago, loss \d\.\d{4}$", out, re.M)
    assert re.search(r"^speed   [\d,]+ tokens per second", out, re.M)
    assert "to the last step" not in out
    assert re.search(r"^saved   step-00000004, \w+ ago, ", out, re.M)
    (checkpoint(run, 4) / "model.safetensors").write_bytes(b"")
    assert "saved   step-00000002, " in (out := said(capsys, run, 1))
    assert "step-00000004 is damaged" in out
    for step, later in ((2, 100_000_000), (4, 99_999_999)):
        renamed = checkpoint(run, step).rename(checkpoint(run, later))
        assert f"saved   step-{later}, " not in said(capsys, run, 1), "it holds another step"
        content = json.loads((renamed / "manifest.json").read_text()) | {"step": later}
        (renamed / "manifest.json").write_text(json.dumps(content))
    assert "saved   step-100000000, " in said(capsys, run, 1), "the highest step, not the last name"
    shutil.copytree(checkpoint(run, 100_000_000), checkpoint(run, 10**20 - 1))
    assert "saved   step-100000000, " in said(capsys, run, 1)


def test_a_lock_that_is_held_is_a_run_that_is_alive(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = said(capsys, run, 0)
        assert f"run     {run}: running\n" in out
        assert "to the last step" in out
        about = json.loads((run / "run.json").read_text()) | {"status": "complete", "starting": {}}
        assert status.status_of(run, about) == status.Status("starting", active=True)
    assert status.status_of(run, about) == status.Status("complete", active=False), "killed while it loaded"


def test_a_reader_that_tests_the_lock_refuses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a shared lock for an instant, in which a run may start."""
    monkeypatch.setattr(run_folder, "from_rank0", lambda value: value)
    with (tmp_path / ".lock").open("w") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(reader, fcntl.LOCK_UN))
        run_folder.lock(tmp_path, World(0, 1, torch.device("cpu"), 1)).release()


def test_what_cannot_be_seen_from_here_is_not_called_dead(run: Path) -> None:
    about, holder = json.loads((run / "run.json").read_text()), (run / ".lock-holder").read_text()
    (run / ".lock-holder").write_text("")  # by a power loss or a full disk; run.json then names the machine
    assert not status.status_of(run, about).active
    assert status.status_of(run, about | {"starting": {}}).active, "another attempt has begun"
    (run / ".lock-holder").write_text("process 7 on node3.cluster")
    elsewhere = status.status_of(run, about)
    (run / ".lock-holder").write_text(holder)
    (run / ".lock").unlink()
    for found, on in ((elsewhere, "node3.cluster"), (status.status_of(run, about), socket.gethostname())):
        assert found.active
        assert re.fullmatch(rf"running on {on} when last seen, last record \w+ ago", found.text)


def test_the_last_events_and_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    events: list[dict[str, Any]] = [
        {"step": 5, "spike": {"loss": 9.5, "action": "skip"}, "time": now - 300},
        {"step": 5, "skipped_samples": [24, 30], "time": now - 200},
    ]
    with (run / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(event) + "\n" for event in events)
        stream.write('[1]\n{"step": 7, "lo')
    failed = {"status": "failed", "step": 5, "reason": "step 6: it \x1b broke\nmore", "time": now - 50, "steps": 8}
    (run / "run.json").write_text(json.dumps(failed))
    out = said(capsys, run, 1)
    assert [line.split(": ", 1)[1] for line in out.splitlines() if line.startswith("event")] == [
        "failed at step 5: step 6: it ? broke",
        "step 5 was skipped: not finite",
        "loss spike at step 5 (loss 9.5000), action skip",
    ]
    for content, message in (("[]", "holds no table"), ("{", "can't be read"), (None, "it has no run.json")):
        (run / "run.json").unlink()
        if content is not None:
            (run / "run.json").write_text(content)
        assert status.main([str(run)]) == 2
        assert message in capsys.readouterr().err
        (run / "run.json").touch()


def test_the_speed_beside_the_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = json.loads((run / "run.json").read_text())
    assert status.main([str(run), "--plan"]) == 1
    assert "plan    has no figures of this device: cpu" in capsys.readouterr().out
    (run / "run.json").write_text(json.dumps(about | {"device": "cuda NVIDIA H100 80GB HBM3"}))
    assert status.main([str(run), "--plan"]) == 1
    assert re.search(r"^plan    expects [\d,]+ tokens per second: the run has \d+%$", capsys.readouterr().out, re.M)


def test_it_loads_no_torch(run: Path) -> None:
    script = "import sys; from torchtitan_lite.tools.status import main; code = main(sys.argv[1:]); "
    script += "print('torch' in sys.modules, code)"
    result = subprocess.run([sys.executable, "-c", script, run], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "False 1", result.stdout + result.stderr
