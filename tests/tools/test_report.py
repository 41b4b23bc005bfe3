"""The page of `report`: its content, and how a real browser renders it."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.helpers import HANGS_S, ranks, start, succeeded, tiny
from torchtitan_lite.config import load, schema, toml
from torchtitan_lite.monitoring import attempts
from torchtitan_lite.tools.report import figures as figures_module
from torchtitan_lite.tools.report import page as page_module
from torchtitan_lite.tools.report import report
from torchtitan_lite.tools.report.page import seconds_of
from torchtitan_lite.tools.report.runs import read_run

pytest.importorskip("plotly")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write_run(folder: Path, records: list[dict[str, Any]], samples: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if samples is not None:
        (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    return folder


def step(n: int, **more: Any) -> dict[str, Any]:
    return {
        **{"step": n, "loss": 5.0 - n / 1e6, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100 * n, "time": 1.8e9 + n},
        **{"tokens_per_second": 1000.0, "peak_memory_gib": 0.5, "seconds": 1.0, "data_s": 0.1, "optimizer_s": 0.2},
        **more,
    } | ({} if "mean_loss" in more else {"mean_loss": more.get("loss", 5.0 - n / 1e6)})


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


def data_of(page: str) -> dict[str, Any]:
    """What report.js draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    assert not set("<>&") & set(found[1])  # "<!--<script>" in a name would hide the end of this script
    return json.loads(found[1])


def figures_of(page: str) -> dict[str, dict[str, Any]]:
    return {figure["title"]: figure for figure in data_of(page)["figures"]}


def loss_of(page: str) -> list[float | None]:
    """The first curve of the first figure."""
    return list(figures_of(page)["Loss"]["traces"][0]["y"])


def page_of(tmp_path: Path, records: list[dict[str, Any]], **files: str) -> str:
    """The page of a run of these records; `run_json` is the content of run.json, and so on."""
    run = tmp_path / str(len(list(tmp_path.iterdir())))
    write_run(run, records)
    for name, content in files.items():
        (run / name.replace("_", ".")).write_text(content, encoding="utf-8")
    return made(tmp_path / "page.html", run)


def made(out: Path, *runs: Path) -> str:
    assert report.main([*map(str, runs), "--out", str(out)]) == 0
    return out.read_text()


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, with samples, validations and checkpoints."""
    out_dir = tmp_path_factory.mktemp("report")
    more = {"sample__every": 10, "sample__max_tokens": 5, "run__name": "run"}
    succeeded(ranks(1, *tiny(text, out_dir, **more)))
    return out_dir / "run"


@pytest.mark.extended
def test_the_page_of_one_run_has_its_curves_tiles_and_samples(run: Path, tmp_path: Path) -> None:
    page = made(tmp_path / "page.html", run)
    figures = figures_of(page)
    assert list(figures)[:4] == ["Loss", "Bits per byte", "Learning rate", "Gradient norm, before clipping"]
    assert {"Throughput", "Peak memory of rank 0"} <= figures.keys()
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train, validation = figures["Loss"]["traces"]
    assert train["x"] == list(range(1, 21))
    assert train["y"] == [r["mean_loss"] for r in losses if "loss" in r]
    assert validation["x"] == [10, 20]
    times = {kind: seconds for kind, seconds in seconds_of(read_run(run)).items() if seconds}
    assert times.keys() == {"forward and backward", "optimizer", "waiting for data", "validation", "samples", "saving"}
    assert all(f"</i>{kind}</th>" in page for kind in times)
    assert sum(times.values()) < losses[-1]["time"] - losses[0]["time"] + 60
    assert times["forward and backward"] + times["optimizer"] + times["waiting for data"] == pytest.approx(
        sum(r["seconds"] for r in losses if "loss" in r)
    )
    assert '<b class="status good">complete</b>' in page
    assert re.search(r"<span>bits per byte</span><b>[0-9.]+</b><small>\+- [0-9.]+</small>", page)
    assert re.search(r"<span>best validation loss</span><b>[0-9.]+</b><small>nats per token, step ", page)
    assert "<th>train.steps</th><td><code>20</code></td><td>command line</td>" in page
    assert "<th>train.on_nonfinite</th><td><code>&quot;stop&quot;</code></td><td>default</td>" in page
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * len({s["prompt"] for s in samples})  # the text, and so its prompts, are of this Python
    assert all(html.escape(s["text"]) in page for s in samples)


def test_a_diverged_run_does_not_flatten_the_others(tmp_path: Path) -> None:
    """The axes end near the initial loss, and triangles mark where a curve leaves them."""

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
    page = made(tmp_path / "page.html", *good, bad, late)
    figures = figures_of(page)
    loss, bits = figures["Loss"], figures["Bits per byte"]
    assert loss["axis"]["range"] == [pytest.approx(4 - 0.05 * 6), 10]
    assert loss["traces"][4]["y"] == [8.0, 4.0, 14.0, None, 5000.0]
    leaves = {trace["name"]: trace["leaves"] for trace in loss["traces"] if trace["leaves"]}
    assert leaves == {
        "bad train": [pytest.approx(2.6)],
        "bad validation": [pytest.approx(2.6)],
        "late train": [1],
        "late validation": [2],
    }
    assert "the axis ends at 10, curves that leave it (triangles) reach 5,000" in loss["unit"]
    assert bits["axis"]["range"][1] == 5
    assert [word in page for word in ("diverged</b>", "triangles")] == [True, True]
    # another vocabulary begins higher, continued pretraining ends higher: neither has diverged
    wide = a_run("wide", [12.0, 10.0, 8.0, 7.0, 6.0])
    tuned = a_run("tuned", [2.0, 3.0, 3.0, 3.0])
    for runs in (good, [*good, wide], [tuned]):
        page = made(tmp_path / "page.html", *runs).split("<script")[0]
        assert [word in page for word in ("diverged</b>", "triangles")] == [False, False]


@pytest.mark.parametrize(("losses", "expected"), [
    ([7.0] + [15.0] * 9, True),  # most records: the axis shows it
    ([7.0, 5.0, None, None, None], True),
    ([None, None], True),
    ([7.0, 5.0, 4.0, 4.0, None, 60.0, 4.0, 4.0], False),  # it has recovered
    ([7.0, 5.0, 4.0, 4.0, 60.0], False),  # one spike
    ([7.0, 7.1, 6.0], False),
])  # fmt: skip
def test_a_run_that_has_diverged_is_named(losses: list[float | None], expected: bool, tmp_path: Path) -> None:
    page = page_of(tmp_path, [step(n, loss=loss) for n, loss in enumerate(losses, 1)], run_json=about("complete"))
    assert '<b class="status good">complete</b>' in page
    assert ('<b class="status bad">diverged</b>' in page) == expected


@pytest.mark.parametrize(("norms", "ticks"), [
    ([0.5, 1.2, 0.62], ["0.5", "0.7", "1", "1.5"]),
    ([1.0, 1.0], ["1"]),
    ([0.3, 40.0], ["0.2", "0.5", "1", "2", "5", "10", "20", "50"]),
    ([1e-3, 1e6], ["0.001", "0.01", "0.1", "1", "10", "100", "1000", "10000", "100000", "1e6"]),
    ([0.0, None, 2.0], ["2"]),
])  # fmt: skip
def test_the_axis_of_the_gradient_norm_begins_and_ends_at_a_label(
    norms: list[float | None], ticks: list[str], tmp_path: Path
) -> None:
    page = page_of(tmp_path, [step(n, grad_norm=norm) for n, norm in enumerate(norms, 1)])
    axis = figures_of(page)["Gradient norm, before clipping"]["axis"]
    low, high = (10**end for end in axis["range"])
    inside = [text for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True) if low <= value <= high]
    assert (axis["type"], inside) == ("log", ticks)
    known = [norm for norm in norms if norm]
    assert low < min(known) <= max(known) < high


def test_steps_become_tokens_and_time_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of training leaves out a stop of a day between two records."""
    records = [step(n, time=1.8e9 + n + 86400 * (n > 2), seconds=2.0) for n in (1, 2, 3)]
    run, other = (
        write_run(tmp_path / "run", records),
        write_run(tmp_path / "other", [{"step": 1, "loss": 1.0, "mean_loss": 1.0}]),
    )
    known, unknown = data_of(made(tmp_path / "page.html", run, other))["runs"]
    assert (known["steps"], known["tokens"], known["time"]) == ([1, 2, 3], [100, 200, 300], [2, 4, 6])
    assert (unknown["steps"], unknown["tokens"], unknown["time"]) == ([1], [], [])
    monkeypatch.setattr(figures_module, "POINTS", 4)
    for n in range(1, 12):
        steps = figures_module.axes(read_run(write_run(tmp_path / str(n), [step(i) for i in range(n)])))["steps"]
        assert (steps[0], steps[-1]) == (0, n - 1)
        assert len(steps) <= 5


def test_a_thinned_curve_keeps_both_ends_of_each_interval_and_its_mean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = page_of(tmp_path, [step(n) for n in range(1, 2002)])
    assert "2,001 records, drawn as at most 2,000 points" in page
    assert all(len(t["x"]) <= 2000 for figure in figures_of(page).values() for t in figure["traces"])
    monkeypatch.setattr(figures_module, "POINTS", 4)
    values = [1.0, 9.0, 2.0, None, None, None, 5.0]
    assert figures_module.thinned([*range(4)], values[:4]) == {"x": [0, 1, 2, 3], "y": [1, 9, 2, None]}, "few points"
    thinned = figures_module.thinned([*range(7)], values)
    assert thinned == {"x": [0, 1, 6], "y": [1, 9, 5], "mean": [4, 4, 5]}
    assert figures_module.thinned([*range(5)], [None] * 5) == {"x": [0, 3], "y": [None, None], "mean": [None, None]}


def test_what_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    records = [step(1), step(2, loss=None, grad_norm=None), step(3), {"step": 2, "skipped_samples": [6, 12]}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    page = page_of(tmp_path, [], metrics_jsonl=lines + '{"step": 4, "loss": NaN, "mean_loss": NaN}\n{"step": 5, "lo')
    assert [y is None for y in loss_of(page)] == [False, True, False, True]
    assert "the loss was not finite at" in page
    assert data_of(page)["runs"][0]["marks"] == [[2, "not finite"]], "a gap alone is overlooked"
    assert "1 step skipped, the first is 2" in page


def test_the_options_of_training_name_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([f"--run.out_dir={run.parent}", "--run.name=run", "--train.steps=200"]) == 0
    assert (run / "report.html").is_file()
    assert report.main(["--run.nam=x"]) == 2
    assert "run.name" in capsys.readouterr().err


@pytest.mark.extended
def test_without_plotly_the_error_names_the_extra(run: Path, tmp_path: Path) -> None:
    (tmp_path / "plotly.py").write_text("raise ModuleNotFoundError(\"No module named 'plotly'\", name='plotly')")
    call = f"from torchtitan_lite import report; sys.exit(report.main([{str(run)!r}]))"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {call}"
    result = start([sys.executable, "-c", code])
    assert result.returncode == 2
    assert 'pip install "torchtitan_lite[report]"' in result.stderr


def shown_config(page: str) -> dict[str, tuple[str, str]]:
    """Values and origins in the table of the config."""
    rows = re.findall(r"<tr class=\"\w+\"><th>(.*?)</th><td><code>(.*?)</code></td><td>(.*?)</td>", page)
    return {html.unescape(key): (html.unescape(value), html.unescape(origin)) for key, value, origin in rows}


def test_the_config_is_shown_with_origins(tmp_path: Path) -> None:
    values = {
        "run.name": "a # b",
        "run.out_dir": 'C:\\"x" # y',
        "sample.prompts": ["# def", "'#'", "\\", "two\nlines\n[optim]\nlr = 5.0 # command line", "\u2028"],
        "optim.lr": 0.25,
        "optim.max_norm": float("inf"),
    }
    origins = {"run.name": "command line", "run.out_dir": "a file # with a mark.toml", "optim.lr": "x.toml"}
    loaded = load.load(None, values)
    content = toml.to_toml_with_origins(toml.Loaded(loaded.config, origins))
    shown = shown_config(page_of(tmp_path, [step(1)], config_toml=content))
    for key, value in values.items():
        assert tomli.loads(f"value = {shown[key][0]}")["value"] == value
        assert shown[key][1] == origins.get(key, "default")
    assert shown["optim.eps"] == ("1e-08", "default")
    assert shown.keys() == schema.known_keys().keys()
    fake = "[optim]\nlr = 5.0 # command line"  # only a person writes such a file
    content = f'[run]\nname = """\n{fake}\n"""\n[optim]\nlr = 6.0 # x.toml\n[a.b]\nc = 1'
    shown = shown_config(page_of(tmp_path, [step(1)], config_toml=content))
    assert shown["optim.lr"] == ("6.0", "x.toml"), "a text of many lines gives no origin"
    assert tomli.loads(f"value = {shown['run.name'][0]}")["value"] == fake + "\n"


def test_odd_values_are_shown(tmp_path: Path) -> None:
    """What is not known, and halves of surrogate pairs, which a model can generate."""
    nothing, half = (
        dict.fromkeys(("loss", "mean_loss", "grad_norm", "tokens_per_second", "seconds", "data_s")),
        "\ud800",
    )
    records = [step(1), step(2), step(3, **nothing)]
    folder = write_run(tmp_path / "run", records, [{"step": 1, "prompt": half, "text": f"a{half}"}])
    page = made(tmp_path / "page.html", folder)
    assert loss_of(page)[2] is None
    assert r"a\ud800" in page


@pytest.mark.parametrize(("run_json", "shown"), [
    (about("failed", "<b>no disk\nmore"), '<b class="status bad">failed</b><small>&lt;b&gt;no disk</small>'),
    (about("preempted"), '<b class="status warn">preempted</b></div>'),
    (about("running"), '<b class="status live">running on node3 when last seen</b><small>last record '),
    ("", '<b class="status unknown">unknown</b>'),
])  # fmt: skip
def test_the_status_has_a_colour_and_its_reason(run_json: str, shown: str, tmp_path: Path) -> None:
    assert shown in page_of(tmp_path, [step(1)], run_json=run_json, attempts_jsonl=attempt(0, 0, {}))


def test_a_malformed_config_toml_does_not_stop_the_report(tmp_path: Path) -> None:
    for content in ("", "lr = 1", "[train]\nsteps = 0x" + "f" * 5000, "a = [" * 5000, "[train]\nsteps = '5' # x", "x"):
        page_of(tmp_path, [step(1)], config_toml=content)


def test_folders_without_a_step_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, message in ((tmp_path, "has no metrics.jsonl"), (tmp_path / ("x" * 5000), "can't be read")):
        assert report.main([str(folder)]) == 2
        assert message in capsys.readouterr().err
    for content in (b"", b"\xff\xfe\0\0" * 100, b'{"step": 1, "val_loss": 1.0}'):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        assert report.main([str(tmp_path)]) == 2
        assert "has no record of a step yet" in capsys.readouterr().err


EVIL = "</script><script>document.title='evil'</script><img src=http://example.com/x onerror=alert(1)>"


# the browser's own traffic: updates, hints, models, the check of the connection
QUIET = [
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    *("--disable-default-apps", "--disable-extensions", "--no-default-browser-check", "--no-pings"),
    *("--disable-domain-reliability", "--disable-client-side-phishing-detection", "--disable-field-trial-config"),
    "--disable-features=OptimizationHints,OptimizationGuideModelDownloading,MediaRouter,Translate",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # and nothing reaches the network
]


def asked_by_pages(net_log: dict[str, Any]) -> list[str]:
    """The http addresses that a document asked for. What the browser wants for itself has no initiator."""
    return [
        event["params"]["url"]
        for event in net_log["events"]
        if re.match("https?://", event.get("params", {}).get("url", ""))
        and event["params"].get("initiator", "not an origin") != "not an origin"
    ]


def browse(page: Path, tmp_path: Path, width: int = 1400) -> tuple[str, str, list[str]]:
    """The page's elements after its scripts ran, what the console said, and every address that was asked for."""
    if CHROMIUM is None:
        assert "TORCHTITAN_LITE_CI" not in os.environ, "chromium is missing, and this must not be skipped here"
        pytest.skip("there is no chromium here")
    net_log, profile = tmp_path / f"{page.stem}{width}.json", tmp_path / f"profile-{page.stem}{width}"
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", *QUIET, f"--user-data-dir={profile}"]
    command += [f"--window-size={width},1200", "--virtual-time-budget=20000", "--enable-logging=stderr"]
    command += [f"--log-net-log={net_log}", "--dump-dom", page.as_uri()]
    env = os.environ | {"HOME": str(profile)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr
    console = "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)
    return result.stdout, console, asked_by_pages(json.loads(net_log.read_text()))


@pytest.mark.extended
def test_a_browser_shows_the_page_without_errors(tmp_path: Path) -> None:
    samples = [{"step": n, "prompt": "<b>def", "text": EVIL, "seconds": 1.0} for n in (1, 2)]
    runs = []
    for name in ("one", "<i>other"):
        task = {"step": 2, "task/<!--<script>": 0.5, "task_stderr/<!--<script>": 0.1, "time": 1.8e9}
        records = [step(1), step(2), {"step": 2, "val_loss": 4.0, "time": 1.8e9}, task]
        records += [step(3, loss=99.0)] if name == "one" else []
        runs.append(write_run(tmp_path / name, records, samples))
        (runs[-1] / "config.toml").write_text(f'[run]\nname = "{EVIL}" # command line\n[optim]\n"<u>" = "<i>{name}"\n')
        (runs[-1] / "run.json").write_text(about("failed", "<u>"))
    history = attempt(-1, 0, {"optim.<u>": 1}) + attempt(0, 1, {"optim.<u>": 2})
    (runs[0] / "attempts.jsonl").write_text(history)
    made(tmp_path / "page.html", *runs)
    elements, console, asked = browse(tmp_path / "page.html", tmp_path)
    assert not console
    assert not asked
    n = len(figures_of((tmp_path / "page.html").read_text()))
    assert n >= 5
    assert f'data-drawn="{n}"' in elements
    assert elements.count('class="plot js-plotly-plot"') == n
    assert elements.count('class="js-line"') >= 2 * (n - 1)
    assert elements.count("annotation-text") >= n, "the change, in each figure"
    assert "curves that leave it (triangles) reach 99<" in elements
    assert "<title>one, &lt;i&gt;other</title>" in elements
    assert html.escape(EVIL, quote=False) in elements
    for markup in ("<img", "<u>", "<i>"):
        assert markup not in elements
    for drawn in ('class="gtitle"', 'class="ytitle"', 'class="legendtext"'):
        assert drawn not in elements, "titles and legends are HTML, which wraps on a narrow screen"


# What a reader does, and what the figures then hold. It runs after the page's own script, and shares its names.
ACTIONS = """<script>
const result = {}, pause = () => new Promise((done) => setTimeout(done, 300));
async function act() {
  while (!document.documentElement.dataset.drawn) await pause();
  const choose = (id, value, event) => { $(id).value = value; $(id).dispatchEvent(new Event(event)); return pause(); };
  const ranges = () => plots.map((plot) => plot.layout.xaxis.range.map(Math.round));
  const curve = () => plots[0].data.filter((trace) => trace.hoverinfo !== "skip" && trace.visible !== false)[0];
  result.top = plots[0].getBoundingClientRect().top;
  result.overflow = document.documentElement.scrollWidth - innerWidth;
  await Plotly.relayout(plots[0], { "xaxis.range[0]": 3, "xaxis.range[1]": 9 });
  await pause();
  result.zoomed = ranges();
  const box = plots[0].querySelector(".nsewdrag").getBoundingClientRect();
  const at = { clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true };
  plots[0].querySelector(".nsewdrag").dispatchEvent(new MouseEvent("mousemove", at));
  await pause();
  result.hovered = plots.map((plot) => plot.querySelectorAll(".hoverlayer .legend").length);
  $("reset").click();
  await pause();
  result.reset = ranges();
  await choose("x", "tokens", "change");
  result.tokens = curve().x;
  await choose("x", "time", "change");
  result.time = curve().x;
  await choose("smooth", 10, "input");
  result.smoothed = curve().y;
  document.querySelector("[data-run='0']").click();
  await pause();
  result.other = curve().name;
  result.saved = JSON.parse(sessionStorage.getItem(KEY));
  parent.postMessage(JSON.stringify(result), "*");
}
act();
</script></body>"""
FRAME = """<!doctype html><body style="margin: 0"><iframe src="acted.html" width="WIDTH" height="800"></iframe>
<script>addEventListener("message", (event) => { document.body.dataset.result = event.data; });</script></body>"""


@pytest.mark.extended
@pytest.mark.parametrize("width", [400, 1400])
def test_the_figures_zoom_hover_and_smooth_together(width: int, tmp_path: Path) -> None:
    """And on a narrow screen the first curve is within the first two screens."""
    losses = [8.0, 4.0, 8.0, 4.0, 8.0, 4.0, 8.0, 4.0, 8.0, 4.0, 8.0]
    runs = [
        write_run(tmp_path / f"sweep-{n}", [step(i, loss=loss, seconds=60.0) for i, loss in enumerate(losses, 1)])
        for n in range(8)
    ]
    page = made(tmp_path / "page.html", *runs)
    (tmp_path / "acted.html").write_text(page.removesuffix("</body></html>\n") + ACTIONS)
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    elements, console, asked = browse(tmp_path / "frame.html", tmp_path)
    assert not console
    assert not asked
    found = re.search('data-result="(.*?)"', elements)
    assert found
    result = json.loads(html.unescape(found[1]))
    n = len(figures_of(page))
    assert result["top"] < 1600
    assert result["overflow"] <= 0
    assert result["zoomed"] == [[3, 9]] * n
    assert result["hovered"] == [1] * n
    assert result["reset"] == [[1, 11]] * n
    assert result["tokens"] == [100 * i for i in range(1, 12)]
    assert result["time"] == list(range(1, 12)), "minutes"
    smoothed = result["smoothed"]
    assert smoothed[:2] == [8, pytest.approx((8 * 0.5 + 4) / 1.5)], "half-life of one step"
    assert all(4 < value < 8 for value in smoothed[1:])
    assert result["other"] == "sweep-1 train"
    assert {key: result["saved"][key] for key in ("x", "smooth", "runs")} == {"x": "time", "smooth": 10, "runs": [0]}


@pytest.mark.extended
def test_a_browser_shows_a_single_record(tmp_path: Path) -> None:
    page_of(tmp_path, [step(1)])
    elements, console, asked = browse(tmp_path / "page.html", tmp_path)
    assert not console
    assert not asked
    assert 'data-drawn="' in elements
    assert elements.count('class="point"') >= 5


def test_nothing_can_be_fetched(tmp_path: Path) -> None:
    """What got into the page somehow: the page's policy forbids it. Without the policy it is asked for."""
    evil = '<main><img src="http://example.com/x.png"><script>fetch("http://example.com/y")</script>'
    page = page_of(tmp_path, [step(1)]).replace("<main>", evil)
    (tmp_path / "page.html").write_text(page)
    _, console, asked = browse(tmp_path / "page.html", tmp_path)
    assert "Content Security Policy" in console
    assert not asked
    (tmp_path / "open.html").write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page))
    _, _, asked = browse(tmp_path / "open.html", tmp_path)
    assert {"http://example.com/x.png", "http://example.com/y"} <= set(asked)


def test_tasks_have_errors_and_a_chance_level(tmp_path: Path) -> None:
    """In one run and in several; a score that is not finite is a gap."""
    name = "<!--<script>"
    escaped = html.escape(name)
    scores = [
        {"step": n, f"task/{name}": score, f"task_stderr/{name}": 0.03, f"task_chance/{name}": 0.25, "task_s": 1.5}
        for n, score in ((1, 0.3), (2, 0.5), (3, None))
    ]
    folder = write_run(tmp_path / "run", [step(1), step(2), *scores, step(3)])
    page = made(tmp_path / "page.html", folder)
    (line,) = figures_of(page)["Tasks"]["traces"]
    assert (line["x"], line["y"], line["name"]) == ([1, 2, 3], [0.3, 0.5, None], escaped)
    assert line["errors"] == [0.03, 0.03, 0.03]
    assert figures_of(page)["Tasks"]["levels"] == [{"y": 0.25, "text": "chance"}]
    assert figures_of(page)["Tasks"]["axis"]["range"] == [0, pytest.approx(1.1 * 0.53)]
    assert f"<span>task {escaped}</span><b>not finite</b><small>+- 0.030; chance 0.250</small>" in page
    assert seconds_of(read_run(folder))["tasks"] == 4.5
    other = write_run(tmp_path / "other", [step(1), {"step": 1, "task/b": 0.1, "task_chance/b": 0.5}])
    several = figures_of(made(tmp_path / "page.html", folder, other))["Tasks"]
    assert [trace["name"] for trace in several["traces"]] == [f"run {escaped}", "other b"]
    assert [level["text"] for level in several["levels"]] == [f"chance of {escaped}", "chance of b"]
    assert several["traces"][1]["errors"] == [None]
    assert "Tasks" not in figures_of(page_of(tmp_path, [step(1)]))


@pytest.mark.parametrize(("n", "shown"), [
    (3, [2, 1, 0]), (4, [3, 2, 0]), (7, [6, 3, 0]),
])  # fmt: skip
def test_of_many_samples_some_are_shown(
    n: int, shown: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evenly spaced, with the first and the last."""
    monkeypatch.setattr(page_module, "SAMPLES", 3)
    samples = [{"step": i, "prompt": prompt, "text": "x"} for i in range(n) for prompt in "ab"]
    page = made(tmp_path / "page.html", write_run(tmp_path / "run", [step(1)], samples))
    section = page[page.index("<h2>Samples") :].split("</section>")[0]
    assert re.findall("<th>([0-9]+)</th>", section) == [str(i) for i in shown] * 2
    assert section.count(f"(3 of {n})") == (0 if n == 3 else 2)


def test_of_many_marks_and_tasks_some_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_module, "_MARKS", 2)
    monkeypatch.setattr(page_module, "_TASK_TILES", 2)
    spikes = [{"step": n, "spike": {"action": "none"}} for n in (1, 2, 3)]
    task = {"step": 1, "task/a": 0.1, "task/b": 0.2, "task/c": 0.3}
    page = page_of(tmp_path, [step(1), *spikes, task])
    assert data_of(page)["runs"][0]["marks"] == [[1, "spike"], [2, "spike"]]
    assert "3 loss spikes, the first at step 1." in page
    assert re.findall("<span>task (.)</span>", page) == ["a", "b"]
    assert [trace["label"] for trace in figures_of(page)["Tasks"]["traces"]] == ["a", "b", "c"]
