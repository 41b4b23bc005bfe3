"""The page of `report`: its content, of one run and of several, and how a real browser renders it."""

import html
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import HANGS_S, ranks, succeeded, tiny
from torchtitan_lite.run import attempts

pytest.importorskip("plotly")

from torchtitan_lite.tools.report import report
from torchtitan_lite.tools.report.figure import figure
from torchtitan_lite.tools.report.runs import read_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def about(status: str, reason: str = "") -> str:
    """The content of run.json."""
    values = {"format_version": attempts.FORMAT_VERSION, "status": status, "reason": reason, "time": 1.8e9}
    return json.dumps(values)


def attempt(number: int, after: int, config: dict[str, Any]) -> str:
    """A line of attempts.jsonl."""
    values: dict[str, Any] = {
        "attempt": number,
        "time": 1.7e9,
        "step": after,
        "config": {"train.steps": 20, **config},
        "hosts": ["node3"],
    }
    values |= {"command": [], "samples": 0, "setting": {}, "tasks": {}, "world_size": 1, "versions": {}, "git": {}}
    values["device"] = "cpu"
    return json.dumps(values) + "\n"


def write_run(folder: Path, records: list[dict[str, Any]], **files: str) -> Path:
    """A run of these records; `run_json` is the content of run.json, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"attempts_jsonl": attempt(0, 0, {}), "run_json": about("complete"), "config_toml": "", **files}
    found["metrics_jsonl"] = "".join(json.dumps({"time": 1.8e9} | r) + "\n" for r in records) + files.get(
        "metrics_jsonl", ""
    )
    for name, content in found.items():
        (folder / name.replace("_", ".")).write_text(content, encoding="utf-8")
    return folder


def step(n: int, **more: Any) -> dict[str, Any]:
    return {
        **{"step": n, "loss": 5.0 - n / 1e6, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100 * n, "time": 1.8e9 + n},
        **{"tokens_per_second": 1000.0, "peak_memory_gib": 0.5, "seconds": 1.0, "data_s": 0.1, "optimizer_s": 0.2},
        **more,
    } | ({} if "mean_loss" in more else {"mean_loss": more.get("loss", 5.0 - n / 1e6)})


def figure_of(*runs: Path) -> dict[str, Any]:
    """What plotly draws."""
    return dict(json.loads(figure([read_run(run) for run in runs]).to_json()))


def traces_of(*runs: Path) -> dict[str, dict[str, Any]]:
    """The curves by name, those that smoothing changes; of several with a name, the first."""
    found: dict[str, dict[str, Any]] = {}
    for trace in figure_of(*runs)["data"]:
        if trace.get("hoverinfo") != "skip" and trace["y"] != [None]:
            (name,) = re.findall("<extra>(.*)</extra>", trace["hovertemplate"])
            found.setdefault(name.strip() or "marks", trace)
    return found


def titles_of(*runs: Path) -> list[str]:
    """The title of each panel, and its unit."""
    return [re.sub("<.*?>", "", note["text"]) for note in figure_of(*runs)["layout"]["annotations"]]


def made(out: Path, *runs: Path) -> str:
    assert report.main([*map(str, runs), "--out", str(out)]) == 0
    return out.read_text()


def test_the_page_of_a_real_run_has_its_curves_tiles_and_samples(text: Path, tmp_path: Path) -> None:
    more = {"train__steps": 4, "eval__every": 2, "sample__every": 2, "sample__max_tokens": 5, "run__name": "run"}
    succeeded(ranks(1, *tiny(text, tmp_path, **more)))
    run = tmp_path / "run"
    page = made(tmp_path / "page.html", run)
    titles = ["Loss", "Bits per byte", "Learning rate", "Gradient norm", "Gradient norm by block"]
    titles += ["Throughput", "Seconds since the previous record", "Peak memory of rank 0"]
    assert [title.split("  ")[0] for title in titles_of(run)] == titles
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    traces = traces_of(run)
    assert traces["train"]["x"] == [1, 2, 3, 4]
    assert traces["train"]["y"] == [r["mean_loss"] for r in losses if "loss" in r]
    assert traces["validation"]["x"] == [2, 4]
    heat = traces["Gradient norm by block"]
    assert (heat["x"], heat["y"]) == ([1, 2, 3, 4], ["inputs", "layers.0", "layers.1", "head"])
    assert heat["customdata"][2] == [r["grad_norm/layers.1"] for r in losses if "loss" in r]
    assert heat["z"][2] == [math.log10(norm) for norm in heat["customdata"][2]]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * len({s["prompt"] for s in samples})  # the text, and so its prompts, are of this Python
    assert all(html.escape(s["text"]) in page for s in samples)


def test_a_number_that_no_panel_names_gets_one_of_its_own(tmp_path: Path) -> None:
    """Numbers with the same part before a "/" share a panel. Lists and numbers of validations get none."""
    more = {"mfu": 0.25, "norm/layers.0": 1.0, "norm/layers.1": 2.0, "rank_losses": [1.0], "x<y": None}
    records = [step(1, **more), step(2, **more | {"x<y": 7}), {"step": 2, "val_loss": 4.0, "eval_samples": 8}]
    run = write_run(tmp_path / "run", records)
    assert titles_of(run)[-3:] == ["mfu  ", "norm  ", "x&lt;y  "]
    assert {name: trace["y"] for name, trace in traces_of(run).items() if name in ("mfu", "layers.1", "x&lt;y")} == {
        "mfu": [0.25, 0.25],
        "layers.1": [2.0, 2.0],
        "x&lt;y": [None, 7],
    }


def test_a_diverged_run_does_not_flatten_the_others(tmp_path: Path) -> None:
    """The axes end near the initial loss, and the title says so."""

    def a_run(name: str, losses: list[float | None]) -> Path:
        records = [step(n, loss=loss) for n, loss in enumerate(losses, 1)]
        validations = [
            {"step": n, "val_loss": loss, "val_bits_per_byte": loss / 2}
            for n, loss in enumerate(losses, 1)
            if loss and n > 1
        ]
        return write_run(tmp_path / name, records + validations)

    good = [a_run(name, [8.0, 6.0, 5.0, 4.0, 4.0]) for name in ("one", "two")]
    bad = a_run("bad", [8.0, 4.0, 14.0, None, 5000.0])
    late = a_run("late", [900.0, 901.0, 902.0, 903.0, 904.0])  # its first record is after it diverged
    runs = (*good, bad, late)
    layout = figure_of(*runs)["layout"]
    assert layout["yaxis"]["range"] == [pytest.approx(4 - 0.05 * 6), 10]
    assert traces_of(*runs)["bad train"]["y"] == [8.0, 4.0, 14.0, None, 5000.0]
    assert titles_of(*runs)[0] == "Loss  nats per token; the axis ends at 10, the curves reach 5,000"
    assert (layout["yaxis2"]["range"][1], figure_of(good[0], late)["layout"]["yaxis"]["range"][1]) == (3.75, 10)
    # another vocabulary begins higher, continued pretraining ends higher: neither has diverged
    wide = a_run("wide", [12.0, 10.0, 8.0, 7.0, 6.0])
    tuned = a_run("tuned", [2.0, 3.0, 3.0, 3.0])
    for several in (good, [*good, wide], [tuned]):
        assert "range" not in figure_of(*several)["layout"]["yaxis"]


def test_what_is_not_finite_is_a_gap_and_is_marked(tmp_path: Path) -> None:
    """A gap alone is overlooked."""
    records = [step(1), step(2, loss=None, grad_norm=None), step(3), {"step": 2, "skipped_samples": [6, 12]}]
    nan = {"step": 4, "loss": math.nan, "mean_loss": math.nan, "tokens": 400, "seconds": 1.0, "time": 1.8e9}
    cut = json.dumps(nan) + '\n{"step": 5, "lo'
    run = write_run(tmp_path / "run", records, metrics_jsonl=cut)
    assert [y is None for y in traces_of(run)["train"]["y"]] == [False, True, False, True]
    assert read_run(run).events == {2: "not finite"}
    (marks,) = (trace for trace in figure_of(run)["data"] if trace["mode"] == "markers+text")
    assert (marks["x"], marks["y"], marks["text"]) == ([2], [records[0]["loss"]], ["not finite"])
    never = write_run(
        tmp_path / "never",
        [step(1, loss=None)],
        samples_jsonl='{"step": 1, "prompt": "", "text": "no UTF-8: \\ud800"}\n',
    )
    assert "<b>not finite</b>" in made(tmp_path / "page.html", never)


# --- several runs -----------------------------------------------------------------------------------------------


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep(tmp_path)
    monkeypatch.chdir(runs[0])
    assert (report.main([".", "nosuch", *[f"../{runs[1].name}"] * 8]), capsys.readouterr().out.splitlines()) == (
        0,
        [
            "note  nosuch is not the folder of a run: it has no run.json that can be read",
            f"report  {tmp_path / 'runs/report.html'}",
        ],
    )
    assert f"<title>sweep-1e-3{', sweep-2e-3' * 8}</title>" in (tmp_path / "runs/report.html").read_text()
    assert not (runs[0] / "report.html").exists()


def test_the_table_has_the_best_run_first_and_the_keys_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep(tmp_path)
    empty = tmp_path / "runs/sweep-8e-3"
    empty.mkdir()
    assert report.main([*map(str, (empty, *runs, tmp_path / "gone")), "--table"]) == 0
    *rows, note, gone = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", row) for row in rows] == [
        ["run", "step", "best val_loss", "at", "bits/byte", "status", "optim.lr"],
        ["sweep-2e-3", "20/20", "3.5000 +- 0.0500", "20", "2.000", "complete", "0.002"],
        ["sweep-1e-3", "20/20", "4.0000 +- 0.0500", "20", "2.000", "complete", "0.001"],
        ["sweep-4e-3", "20/20", "4.9000 +- 0.0500", "10", "2.000", "complete", "0.004"],
    ]
    assert [note, gone] == [
        f"note  {folder} is not the folder of a run: it has no run.json that can be read"
        for folder in (empty, tmp_path / "gone")
    ]
    assert not list((tmp_path / "runs").rglob("report.html"))
    for run, path in zip(runs, ("a\x1b[31m\n", "x" * 38, "y" * 39), strict=True):
        (run / "attempts.jsonl").write_text(attempt(0, 0, {"data.path": path}))
    assert report.main([*map(str, runs), "--table"]) == 0
    out = capsys.readouterr().out
    assert all(f'"{shown}' in out for shown in ("x" * 38 + '"', "y" * 36 + "...")), "40 characters, and 41"
    assert "\x1b" not in out
    assert report.main([str(tmp_path / "none"), "--table"]) == 2
    assert "none is not the folder of a run" in capsys.readouterr().err
    assert report.main([str(runs[0]), "--tabel"]) == 2
    assert "the nearest known one is --table" in capsys.readouterr().err


# --- in a browser -----------------------------------------------------------------------------------------------

EVIL = "</script><script>document.title='evil'</script><img src=http://example.com/x onerror=alert(1)>"


# the browser's own traffic: updates, hints, models, the check of the connection
QUIET = [
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    *("--disable-default-apps", "--disable-extensions", "--no-default-browser-check", "--no-pings"),
    *("--disable-domain-reliability", "--disable-client-side-phishing-detection", "--disable-field-trial-config"),
    "--disable-features=OptimizationHints,OptimizationGuideModelDownloading,MediaRouter,Translate",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # and nothing reaches the network
]


def browse(page: Path, tmp_path: Path) -> tuple[str, str, list[str]]:
    """The page's elements after its scripts ran, what the console said, and every address that was asked for."""
    if CHROMIUM is None:
        assert "TORCHTITAN_LITE_CI" not in os.environ, "chromium is missing, and this must not be skipped here"
        pytest.skip("there is no chromium here")
    net_log, profile = tmp_path / f"{page.stem}.json", tmp_path / f"profile-{page.stem}"
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", *QUIET, f"--user-data-dir={profile}"]
    command += ["--window-size=800,1200", "--virtual-time-budget=20000", "--enable-logging=stderr"]
    command += [f"--log-net-log={net_log}", "--dump-dom", page.as_uri()]
    env = os.environ | {"HOME": str(profile)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr
    console = "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)
    events = (event.get("params", {}) for event in json.loads(net_log.read_text())["events"])
    asked = [
        given["url"]
        for given in events
        if re.match("https?://", given.get("url", ""))
        # what the browser wants for itself has no initiator
        and given.get("initiator", "not an origin") != "not an origin"
    ]
    return result.stdout, console, asked


# what a reader does, and what plotly then holds
ACTIONS = """<script>
const result = {}, plot = document.getElementById("curves"), pause = () => new Promise((done) => setTimeout(done, 300));
const press = (text) => {
  const label = [...plot.querySelectorAll(".updatemenu-item-text")].find((found) => found.textContent === text);
  label.parentElement.querySelector(".updatemenu-item-rect").dispatchEvent(new MouseEvent("click", { bubbles: true }));
  return pause();
};
const ranges = () => Object.keys(plot.layout).filter((key) => key.startsWith("xaxis"))
  .map((key) => plot.layout[key].range.map(Math.round));
const curve = () => plot.data[1];
const boxes = (what) => [...plot.querySelectorAll(what)].map((one) => one.getBoundingClientRect());
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
async function act() {
  while (!plot.layout) await pause();
  const [titles, legends] = [boxes(".annotation-text"), boxes("[class^=legend] > .bg")];
  result.covered = titles.filter((title) => legends.some((legend) => meet(title, legend))).length;
  const edge = plot.getBoundingClientRect().right;
  result.cut = boxes("svg text").filter((text) => text.right > edge).length;
  const [area] = boxes(".nsewdrag");
  result.cut += boxes(".textpoint text").filter((text) => text.right > area.right).length;
  const box = plot.querySelector(".nsewdrag").getBoundingClientRect();
  const mouse = (kind, share) => (kind === "mousedown" ? plot.querySelector(".nsewdrag") : document).dispatchEvent(
    new MouseEvent(kind, { clientX: box.x + share * box.width, clientY: box.y + 100, bubbles: true, buttons: 1 }));
  for (const [kind, share] of [["mousedown", 0.25], ["mousemove", 0.5], ["mouseup", 0.5]]) mouse(kind, share);
  await pause();
  result.zoomed = ranges();
  await press("tokens");
  [result.tokens, result.reset] = [curve().x, ranges()];
  await press("10 %");
  result.smoothed = curve().y;
  const [first] = plot.querySelectorAll(".legendtoggle");
  for (const kind of ["mousedown", "mouseup"]) first.dispatchEvent(new MouseEvent(kind, { bubbles: true }));
  await new Promise((done) => setTimeout(done, 1000));  // it may have become a double click
  result.hidden = plot.data.filter((trace) => trace.visible === "legendonly").map((trace) => trace.legendgroup);
  document.body.dataset.result = JSON.stringify(result);
}
act();
</script></body></html>"""


@pytest.mark.extended
def test_a_browser_shows_the_page_and_its_buttons_without_errors(tmp_path: Path) -> None:
    samples = "".join(json.dumps({"step": n, "prompt": "<b>def", "text": EVIL}) + "\n" for n in (1, 2))
    losses = [8.0, 4.0, 8.0, 4.0, 8.0, 4.0, 8.0, 4.0, 8.0, 4.0, 8.0]
    runs = []
    for name in ("one", "<i>other"):
        task = {"step": 2, "task/<!--<script>": 0.5, "task_stderr/<!--<script>": 0.1, "time": 1.8e9}
        records = [step(n, loss=loss) for n, loss in enumerate(losses, 1)]
        records += [{"step": 2, "val_loss": 4.0, "ema_val_loss": 4.0, "time": 1.8e9}, task]
        files = {"config_toml": f'[run]\nname = "{EVIL}" # command line\n', "run_json": about("failed", "<u>")}
        runs.append(write_run(tmp_path / name, records, samples_jsonl=samples, **files))
    (runs[1] / "attempts.jsonl").write_text(attempt(-1, 0, {"optim.<u>": 1}) + attempt(0, 10, {"optim.<u>": 2}))
    page = made(tmp_path / "page.html", *runs)
    (tmp_path / "acted.html").write_text(page.removesuffix("</body></html>\n") + ACTIONS)
    elements, console, asked = browse(tmp_path / "acted.html", tmp_path)
    assert not console
    assert not asked
    n = len(titles_of(*runs))
    assert n == 7
    assert elements.count('class="js-line"') >= 2 * n
    assert ">killed, &lt;u&gt;</" in elements
    assert "<title>one, &lt;i&gt;other</title>" in elements
    assert html.escape(EVIL, quote=False) in elements
    for markup in ("<img", "<u>", "<i>"):
        assert markup not in elements
    found = re.search('data-result="(.*?)"', elements)
    assert found
    result = json.loads(html.unescape(found[1]))
    assert (result["covered"], result["cut"]) == (0, 0), "titles under a legend, and texts beyond an edge"
    assert result["zoomed"] == [[3, 6]] * n, "all panels zoom together"
    assert result["tokens"] == [100 * i for i in range(1, 12)]
    assert all(low <= 100 and high >= 1100 for low, high in result["reset"])
    assert result["smoothed"][:2] == [8, pytest.approx((8 * 0.5 + 4) / 1.5)]
    assert set(result["hidden"]) == {"0"}
    assert len(result["hidden"]) >= n, "a run is hidden in all panels"


def test_nothing_can_be_fetched(tmp_path: Path) -> None:
    """What got into the page somehow: the page's policy forbids it. Without the policy it is asked for."""
    evil = '<main><img src="http://example.com/x.png"><script>fetch("http://example.com/y")</script>'
    page = made(tmp_path / "page.html", write_run(tmp_path / "run", [step(1)])).replace("<main>", evil)
    assert not re.search("<script[^>]* src=", page), "it works without a network"
    (tmp_path / "page.html").write_text(page)
    _, console, asked = browse(tmp_path / "page.html", tmp_path)
    assert "Content Security Policy" in console
    assert not asked
    (tmp_path / "open.html").write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page))
    _, _, asked = browse(tmp_path / "open.html", tmp_path)
    assert {"http://example.com/x.png", "http://example.com/y"} <= set(asked)
