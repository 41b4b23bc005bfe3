"""The report of several runs: its place, table, changes by step and narrow screens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from tests.tools.test_report import attempt, figure_of, made, step, traces_of, write_run
from torchtitan_lite.tools.report import report
from torchtitan_lite.tools.report.runs import read_run


def sweep(tmp_path: Path) -> list[Path]:
    """Three runs; the second has the lowest validation loss."""
    runs = []
    for name, losses in (("sweep-1e-3", (5.0, 4.0)), ("sweep-2e-3", (4.5, 3.5)), ("sweep-4e-3", (4.9, None))):
        records = [step(10), step(20)]
        for n, loss in zip((10, 20), losses, strict=True):
            records.append({"step": n, "val_loss": loss, "val_loss_stderr": 0.05, "val_bits_per_byte": 2.0})
        config = {"run.name": name, "optim.lr": float(name.removeprefix("sweep-"))}
        runs.append(write_run(tmp_path / "runs" / name, records, attempts_jsonl=attempt(0, 0, config)))
    return runs


def test_a_page_of_several_runs_does_not_replace_that_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep(tmp_path)
    assert report.main([str(runs[0])]) == 0
    own = (runs[0] / "report.html").read_bytes()
    assert report.main([str(runs[0]), str(runs[1])]) == 0
    assert (runs[0] / "report.html").read_bytes() == own
    page = (tmp_path / "runs/report.html").read_text()
    assert "<title>sweep-1e-3, sweep-2e-3</title>" in page
    assert f"report  {tmp_path / 'runs/report.html'}" in capsys.readouterr().out


def test_changes_and_kills_are_marked_on_the_curve_and_listed(tmp_path: Path) -> None:
    one, two, _ = sweep(tmp_path)
    config: dict[str, Any] = {"optim.lr": 0.004, "log.every": 1, "optim.<b>": "a", "checkpoint.resume": ""}
    preempted = '{"attempt": 4, "ended": "preempted", "last_step": 15}\n'
    history = attempt(1, 0, config)
    history += attempt(2, 12, config | {"log.every": 9})  # the next attempt began at an earlier checkpoint
    history += attempt(3, 10, config := config | {"optim.lr": 0.001, "log.every": 2, "checkpoint.resume": "x"})
    history += attempt(4, 12, config := config | {"log.every": 3}) + preempted
    history += attempt(5, 15, config | {"optim.<b>": "</script>"})
    (one / "attempts.jsonl").write_text(history + '{"attempt": 6, "st')
    records = [{**step(n), "attempt": a} for a, n in ((1, 10), (1, 12), (3, 12), (4, 15), (5, 20))]
    (one / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = made(tmp_path / "page.html", one)
    assert read_run(one).events == {10: "killed, lr", 12: "killed", 15: "<b>"}
    marks = traces_of(one)["marks"]
    assert (marks["x"], marks["text"]) == ([10, 12, 15], ["killed, lr", "killed", "&lt;b&gt;"])
    assert "<h2>Changed on a resume</h2>" in page
    assert "<th>10</th><td>optim.lr</td><td><code>0.004</code></td><td><code>0.001</code></td></tr>" in page
    assert re.findall("<th>(..)</th><td>log.every</td>", page) == ["10", "12"]
    assert "checkpoint.resume</td><td><code>&quot;&quot;" not in page
    assert "</script></code>" not in page
    assert traces_of(one)["train"]["x"] == [10, 12, 15, 20]
    both = made(tmp_path / "both.html", two, one)
    (marks,) = (trace for trace in figure_of(two, one)["data"] if trace["mode"] == "markers+text")
    assert marks["marker"]["color"] == traces_of(two, one)["sweep-1e-3 train"]["line"]["color"]
    assert re.search(r"Changed on a resume of <i[^>]*></i>sweep-1e-3", both)


def test_runs_with_equal_configs_are_said_to_be_so(tmp_path: Path) -> None:
    without = [write_run(tmp_path / name, [step(1)]) for name in ("a", "b")]
    assert "The configs of the runs do not differ." in made(tmp_path / "page.html", *without)


def test_the_table_has_the_best_run_first_and_the_keys_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep(tmp_path)
    empty = tmp_path / "runs/sweep-8e-3"
    empty.mkdir()
    assert report.main([*map(str, (*runs, empty)), "--table"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head) == ["run", "step", "best val_loss", "at", "bits/byte", "status", "optim.lr"]
    assert [row.split()[0] for row in rows] == ["sweep-2e-3", "sweep-1e-3", "sweep-4e-3", "note"]
    assert re.split(r"  +", rows[0]) == ["sweep-2e-3", "20/20", "3.5000 +- 0.0500", "20", "2.000", "complete", "0.002"]
    assert rows[2].split()[2] == "4.9000"
    assert "sweep-8e-3 is not the folder of a run that has made a step" in rows[3]
    assert not list((tmp_path / "runs").rglob("report.html"))
    (runs[0] / "attempts.jsonl").write_text(attempt(0, 0, {"data.path": "a\x1b[31m\n" + "x" * 500}))
    assert report.main([*map(str, runs), "--table"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 250
    run = write_run(tmp_path / "run", [step(1)])
    assert report.main([str(run), "--table"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["run", "1/20", "-", "-", "-", "complete"]
    assert report.main([str(tmp_path / "none"), "--table"]) == 2
    assert "none is not the folder of a run" in capsys.readouterr().err
