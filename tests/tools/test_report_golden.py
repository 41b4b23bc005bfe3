"""The report of made-up runs, whole: each curve, label and number of the page.

`python -m tests.tools.test_report_golden` writes what the test expects, report.txt; read its differences.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from tests.tools.test_report import about, attempt, figure_of, step, traces_of, write_run
from torchtitan_lite.tools.report import report
from torchtitan_lite.tools.report.page import page
from torchtitan_lite.tools.report.runs import read_run

GOLDEN = Path(__file__).with_name("report.txt")


def one_run(folder: Path) -> Path:
    """A run with every kind of curve, a skipped spike, and more samples and tasks than are shown."""
    losses, rates = (4.0, 3.5, 3.0, 2.0), (1000.0, 1500.0, 900.0, 1100.0)
    norms = [{}, *({"grad_norm/<in>": 0.0, "grad_norm/head": 10.0**n} for n in range(3))]
    records = [step(n, loss=n / 4, mean_loss=losses[n - 1], **norms[n - 1]) for n in range(1, 5)]
    for record, rate in zip(records, rates, strict=True):
        record["tokens_per_second"] = rate
    records[0] |= {"loss_scale": 65536.0, "seconds": 3.0, "tokens": 50, "save_s": 9.94, "rank_seconds": [1.5]}
    sources = {"val_loss/a": 3.0, "val_loss/<b>": 4.0, "val_loss/c": 4.0, "val_loss/d": 4.0}
    averages = {"ema_val_loss": 3.25, "ema_val_bits_per_byte": 1.25, "unigram_bits_per_byte": 4.0}
    validation = {"val_loss": 3.0, "val_bits_per_byte": 1.5, "val_bits_per_byte_stderr": 0.125, "eval_s": 9.95}
    records.append({"step": 2, **validation, **averages, **sources, "task/<quiz>": 0.625, "task_stderr/<quiz>": 0.25})
    tasks = {
        "task/<quiz>": 0.5,
        "task_stderr/<quiz>": 0.125,
        "task_chance/<quiz>": 0.25,
        "task/word": None,
        "task_s": 12.0,
    }
    tasks |= {f"task/{n}": n / 8 for n in range(5)}
    records.append({"step": 4, "val_loss": 3.5, **tasks, "spike": {"action": "skip"}})
    lines = [{"step": n, "prompt": "<p>", "text": f"t{n}", "seconds": 0.5, "reference": f"r{n}"} for n in range(1, 14)]
    lines.append({"step": 2, "prompt": "<q>", "text": "<u>", "seconds": 0.25})
    samples = "".join(json.dumps(line) + "\n" for line in lines)
    config = "[train]\nsteps = 20 # <command line>\nepochs = 0 # default\n\n[log]\nevery = 1 # default\n"
    return write_run(folder / "<run>", records, samples_jsonl=samples, config_toml=config)


def two_runs(folder: Path) -> list[Path]:
    """Runs of two hours with another learning rate; one was killed, changed and failed, and has no validation."""
    runs = []
    for name, rate in (("<first>", 0.001), ("second", 0.002)):
        records = [
            step(5 * n, loss=loss, seconds=2399.9 + 0.2 * (rate < 0.002))
            for n, loss in ((1, 8.0 + rate), (2, 7.0), (3, 6.0))
        ]
        config = {
            "optim.lr": rate,
            "run.name": name,
            "log.every": 1,
            "data.cache_dir": "a",
            "model.size": "9M",
            f"<key> {rate}": True,
            "run.out_dir": name,
        }
        history = attempt(0, 0, config)
        more = {}
        if name == "<first>":
            records.append(
                {"step": 12, "val_loss": 6.5, "val_loss_stderr": 0.25, "val_bits_per_byte": 2.0, "task/<q>": 0.5}
            )
            history += json.dumps({"attempt": 0, "ended": "complete", "last_step": 15, "end_time": 1.8e9}) + "\n"
        else:
            second = json.loads(
                attempt(
                    1,
                    10,
                    config
                    | {"optim.lr": 0.004, "log.every": 2, "optim.new": 3, "data.cache_dir": "b", "model.size": "8M"},
                )
            )
            history = history.replace('"tasks": {}', f'"tasks": {{"<quiz>": "{"a" * 64}"}}')
            history += json.dumps(second | {"tasks": {"<quiz>": "b" * 64, "new": "c"}}) + "\n"
            more, records[-1]["attempt"] = {"run_json": about("failed", "it broke\nmore")}, 1
        runs.append(write_run(folder / name, records, attempts_jsonl=history, **more))
    return runs[::-1]  # the table begins with the best, which is not the first


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in sorted(value.items()) if key != "template"}
    return [*map(rounded, value)] if isinstance(value, list) else round(value, 6) if type(value) is float else value


def found() -> str:
    """Of one run, then of two: a line for each curve and each part of the layout, and the page around the figure."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for runs in ([one_run(Path(name))], two_runs(Path(name))):
            shown = figure_of(*runs)
            lines += [json.dumps(rounded(curve)) for curve in shown["data"]]
            lines += [json.dumps(rounded({key: shown["layout"][key]})) for key in sorted(shown["layout"])]
            text = re.sub("<style>.*?</style>", "", page([read_run(run) for run in runs]), flags=re.DOTALL)
            head, _, rest = text.replace(name, "FOLDER").partition("<div class=scroll><div id=curves>")
            rest = rest[rest.index("</script>") :]
            lines += re.sub(
                "(</(?:tr|p|h1|h2|h3|div|section|pre|head|table)>)", r"\1\n", f"{head}\n{rest}"
            ).splitlines()
    return "\n".join(lines) + "\n"


def test_the_figure_and_the_page_are_those_that_were_looked_at() -> None:
    assert found().splitlines() == GOLDEN.read_text().splitlines()


def test_a_long_curve_keeps_its_spikes(tmp_path: Path) -> None:
    """Of 2,001 losses, which rise, the first and the last of each five; of five that are not finite, one."""
    losses: list[float | None] = [float(n) for n in range(2001)]
    losses[12], losses[13], losses[20:25] = 1e6, -1.0, [None] * 5
    trace = traces_of(write_run(tmp_path / "run", [step(n, loss=loss) for n, loss in enumerate(losses)]))["train"]
    expected = [5 * n + m for n in range(400) for m in (0, 4)] + [2000]
    expected[4:6], expected[8:10] = [12, 13], [20]
    assert (trace["x"], trace["mode"]) == (expected, "lines")
    assert trace["y"] == [losses[n] for n in expected]
    for n, mode in ((39, "lines+markers"), (40, "lines"), (1000, "lines")):
        short = traces_of(write_run(tmp_path / "short", [step(n) for n in range(n)]))["train"]
        assert (len(short["x"]), short["mode"]) == (n, mode)


def test_what_a_report_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [step(1)])
    assert report.main([f"--run.out_dir={tmp_path}", "--run.name=run"]) == 0
    assert capsys.readouterr().out == f"report  {run / 'report.html'}\n"
    assert report.main([str(run), f"--out={tmp_path}"]) == 2
    assert f"report: {tmp_path}" in capsys.readouterr().err
    for name in ("page", "figure"):
        monkeypatch.delitem(sys.modules, f"torchtitan_lite.tools.report.{name}")
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert report.main([str(run)]) == 2
    assert 'report: a report needs plotly: pip install "torchtitan_lite[report]"' in capsys.readouterr().err


if __name__ == "__main__":
    GOLDEN.write_text(found())
