"""The report of several runs: its place, table, changes by step, narrow screens, and the page of a live run."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tools.test_report import about, attempt, data_of, figures_of, made, step, write_run
from torchtitan_lite.tools.report import report

pytest.importorskip("plotly")


def sweep(tmp_path: Path) -> list[Path]:
    """Three runs; the second has the lowest validation loss."""
    runs = []
    for name, losses in (("sweep-1e-3", (5.0, 4.0)), ("sweep-2e-3", (4.5, 3.5)), ("sweep-4e-3", (4.9, None))):
        records = [step(10), step(20)]
        for n, loss in zip((10, 20), losses, strict=True):
            records.append({"step": n, "val_loss": loss, "val_loss_stderr": 0.05, "val_bits_per_byte": 2.0})
        runs.append(write_run(tmp_path / "runs" / name, records))
        config = f'[run]\nname = "{name}"\n[train]\nsteps = 20\n[optim]\nlr = {name.removeprefix("sweep-")}\n'
        (runs[-1] / "config.toml").write_text(config)
        (runs[-1] / "run.json").write_text(about("complete"))
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


def test_changes_are_marked_on_the_curves_and_listed(tmp_path: Path) -> None:
    one, two, _ = sweep(tmp_path)
    config: dict[str, Any] = {"optim.lr": 0.004, "log.every": 1, "optim.<b>": "a", "checkpoint.resume": ""}
    history = attempt(1, 0, config)
    history += attempt(2, 12, config | {"log.every": 9})  # the next attempt began at an earlier checkpoint
    history += attempt(3, 10, config := config | {"optim.lr": 0.001, "log.every": 2, "checkpoint.resume": "x"})
    history += attempt(4, 12, config := config | {"log.every": 3})
    history += attempt(5, 15, config | {"optim.<b>": "</script>"})
    (one / "attempts.jsonl").write_text(history + '{"attempt": 6, "st')
    records = [{**step(n), "attempt": a} for a, n in ((1, 10), (1, 12), (3, 12), (4, 15), (5, 20))]
    (one / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = made(tmp_path / "page.html", one)
    assert data_of(page)["runs"][0]["marks"] == [[10, "lr"], [15, "&lt;b&gt;"]]
    assert "<h2>Changed on a resume</h2>" in page
    assert "<th>10</th><td>optim.lr</td><td><code>0.004</code></td><td><code>0.001</code></td></tr>" in page
    assert re.findall("<th>(..)</th><td>log.every</td>", page) == ["10", "12"]
    assert "checkpoint.resume</td><td><code>&quot;&quot;" not in page
    assert "</script></code>" not in page
    assert figures_of(page)["Loss"]["traces"][0]["x"] == [10, 12, 15, 20]
    both = made(tmp_path / "both.html", two, one)
    assert [(run["color"], len(run["marks"])) for run in data_of(both)["runs"]] == [("#4c78a8", 0), ("#f58518", 2)]
    assert re.search(r"Changed on a resume of <i[^>]*></i>sweep-1e-3", both)


def test_the_table_on_the_page_is_that_of_the_terminal(tmp_path: Path) -> None:
    """The best run first, with the colours of the curves; keys that differ before the results."""
    runs = sweep(tmp_path)
    page = made(tmp_path / "page.html", *runs)
    head, *rows = re.findall("<tr.*?</tr>", page[page.index("<section class=runs>") :].split("</section>")[0])
    columns = ["run", "optim.lr", "step", "best val_loss", "at", "bits/byte", "status"]
    assert re.findall("<th>(.*?)</th>", head) == columns
    plain = [re.sub("<[^>]*>", "|", row) for row in rows]
    assert [re.sub(r"\|+", "|", row).split("|")[1] for row in plain] == ["sweep-2e-3", "sweep-1e-3", "sweep-4e-3"]
    assert re.sub(r"\|+", "|", plain[0]).split("|")[2:-1] == [
        *(" ", "&#9733; best", "0.002", "20/20", "3.5000 +- 0.0500", "20", "2.000", "complete")
    ]
    assert [("best" in row) for row in rows] == [True, False, False]
    colours = dict(zip((run.name for run in runs), (run["color"] for run in data_of(page)["runs"]), strict=True))
    for row in rows:
        (name,) = re.findall("<a href=#run[0-9]><i[^>]*></i>(.*?)</a>", row)
        assert f"background: {colours[name]}" in row
    assert [t["name"] for t in figures_of(page)["Learning rate"]["traces"]] == [run.name for run in runs]
    without = [write_run(tmp_path / name, [step(1)]) for name in ("a", "b")]
    page = made(tmp_path / "page.html", *without)
    assert "best</span>" not in page
    assert "The configs of the runs do not differ." in page


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
    assert "sweep-8e-3 has no metrics.jsonl" in rows[3]
    assert not list((tmp_path / "runs").rglob("report.html"))
    hostile = "a\\u001b[31m\\n" + "x" * 500
    (runs[0] / "config.toml").write_text(f'[data]\npath = "{hostile}"\n')
    assert report.main([*map(str, runs), "--table"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 250
    run = write_run(tmp_path / "run", [step(1)])
    assert report.main([str(run), "--table"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["run", "1/?", "-", "-", "-", "unknown"]
    assert report.main([str(tmp_path / "none"), "--table"]) == 2
    assert "none has no metrics.jsonl" in capsys.readouterr().err


def test_a_live_page_reloads_itself_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    pages: list[str] = []

    def tick(seconds: float) -> None:
        """What the run does while the report waits."""
        assert seconds == 7
        page = run / "report.html"
        pages.append(page.read_text() if page.exists() else "")
        if len(pages) == 1:
            (run / "metrics.jsonl").write_text(json.dumps(step(1)) + "\n")
            (run / "attempts.jsonl").write_text(attempt(0, 0, {}))
            (run / "run.json").write_text(about("running"))
        elif len(pages) == 2:
            with (run / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps(step(2)) + "\n")
        else:
            (run / "run.json").write_text(about("complete"))

    monkeypatch.setattr(time, "sleep", tick)
    for wrong, message in (("0", "--live=0 should be 1 second or more"), ("5", "no metrics.jsonl")):
        assert report.main([str(tmp_path / "nothing"), "--live", wrong]) == 2
        assert message in capsys.readouterr().err
    assert report.main([str(run), "--live", "7"]) == 0
    assert pages[0] == "", "no step yet"
    assert "<meta http-equiv=refresh content=7>" in pages[1]
    assert figures_of(pages[1])["Loss"]["traces"][0]["x"] == [1]
    assert figures_of(pages[2])["Loss"]["traces"][0]["x"] == [1, 2]
    last = (run / "report.html").read_text()
    assert "http-equiv=refresh" not in last
    assert ">complete</b>" in last
    assert not list(run.glob(".report*"))
    said = capsys.readouterr().out
    assert "waiting " in said
    assert "live    ended" in said
