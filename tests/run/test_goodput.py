"""Goodput: the share of the time since the first launch in steps that count, also after kills."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.helpers import python, ranks, records, succeeded, tiny
from tests.run.test_history import begin
from torchtitan_lite.run import attempts
from torchtitan_lite.run.attempts import goodput_line
from torchtitan_lite.tools.report.page import page
from torchtitan_lite.tools.report.runs import read_run

RUN = {"run__name": "run", "train__steps": 9, "checkpoint__every": 3, "log__every": 2, "eval__every": 4}


def goodput_of(folder: Path) -> tuple[float, float]:
    return attempts.goodput(attempts.read(folder), attempts.records(folder))


def test_only_the_steps_that_count_are_training(tmp_path: Path) -> None:
    assert goodput_of(tmp_path) == (0.0, 0.0)
    begin(tmp_path, 1, 0)  # launched at 1 s
    assert goodput_of(tmp_path) == (0.0, 0.0)
    steps = [(1, 1, 11.0), (1, 2, 21.0), (1, 3, 31.0), (2, 3, 61.0), (2, 4, 71.0)]
    lines = [{"attempt": a, "step": s, "time": t, "loss": 1.0, "seconds": 5.0} for a, s, t in steps]
    lines.append({"attempt": 2, "step": 4, "time": 75.0, "save_s": 3.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    begin(tmp_path, 2, 2)
    assert goodput_of(tmp_path) == (20 / 74, 74.0)
    attempts.add(tmp_path, {"attempt": 2, "ended": "complete", "last_step": 4, "end_time": 81.0})
    assert goodput_of(tmp_path) == (0.25, 80.0)
    assert goodput_line(tmp_path) == "goodput 25% of 1m20s since the first launch"
    begin(tmp_path, 3, 4)  # started again a day later: there is nothing to train
    attempts.add(tmp_path, {"attempt": 3, "ended": "complete", "last_step": 4, "end_time": 86481.0})
    assert goodput_of(tmp_path) == (0.25, 80.0)


def test_a_killed_run_has_the_same_goodput_everywhere(text: Path, tmp_path: Path) -> None:
    """SIGKILL in step 9, after the checkpoint of step 6. Steps 7 and 8 are made again."""
    before = time.time()
    assert ranks(1, *tiny(text, tmp_path, **RUN), fault="kill:0:9:step").returncode
    run = tmp_path / "run"
    said = succeeded(ranks(1, *tiny(text, tmp_path, **RUN)))
    share, whole_s = goodput_of(run)
    trained_s = sum(record["seconds"] for record in attempts.records(run) if "loss" in record)
    assert [record["step"] for record in attempts.records(run) if "loss" in record] == [2, 4, 6, 8, 9]
    assert 0 < share == pytest.approx(trained_s / whole_s)
    assert whole_s <= time.time() - before + 1  # forked ranks are launched by the test's server
    about = json.loads((run / "run.json").read_text())
    assert about["goodput"] == round(share, 4)
    line = goodput_line(run)
    assert re.search(rf"^done .*, {line}", said, re.M)
    assert line in succeeded(python(str(run), script="-m torchtitan_lite.status"))
    assert f"<b>{share:.1%}</b>" in page([read_run(run)])


def test_rates_leave_out_what_is_no_training_and_waiting_for_data_is_shown(text: Path, tmp_path: Path) -> None:
    """A validation, a save and a sample after step 2 take a second and a half each, and so does the batch of step 3."""
    more = {"train__steps": 4, "eval__every": 2, "checkpoint__every": 2, "sample__every": 2, "sample__max_tokens": 2}
    fault = ",".join(f"slow:0:{step}:{site}" for step, site in ((2, "eval"), (2, "save"), (2, "sample"), (3, "batch")))
    command = tiny(text, tmp_path, **RUN | more | {"log__every": 1})
    succeeded(ranks(1, *command, fault=fault, env={"FAULT_SECONDS": "1.5"}))
    logged = {record["step"]: record for record in records(tmp_path / "run") if "loss" in record}
    assert logged[3]["data_s"] >= 1.5 > logged[2]["data_s"]
    for record in logged.values():
        assert record["seconds"] - record["data_s"] < 1.5
        assert record["tokens_per_second"] == pytest.approx(6 * 32 / record["seconds"], rel=0.01)
