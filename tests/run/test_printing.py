"""Output: a terminal gets a bar and lines that fit, and failures to print or log do not end a run."""

import io
import re
import sys
from pathlib import Path

import pytest

from tests.helpers import ranks, refused, succeeded, tiny
from torchtitan_lite.run.metrics import Log

SHORT = {"run__name": "run", "train__steps": 4, "eval__every": 2, "checkpoint__every": 2, "sample__every": 2}
SAMPLES = ['--sample.prompts=["caf\u00e9 \u2603"]', "--sample.max_tokens=2"]
STREAMS = "tests.run.streams"


def test_a_terminal_that_is_not_utf8_gets_escapes(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "said"
    result = ranks(1, str(out), "ascii", "train", *tiny(text, tmp_path, **SHORT), *SAMPLES, entry=STREAMS)
    succeeded(result)
    assert re.search("^step    4/4 .*  mem .*  data .*  eta ", out.read_text("ascii"), re.M), "a file gets whole lines"
    assert "%|" not in result.stderr
    assert 'sample  step 2  "caf\\xe9 \\u2603" -> ' in out.read_text("ascii")
    assert 'sample  step 2  "caf\u00e9 \u2603" -> ' in (tmp_path / "run/train.log").read_text("utf-8")
    command = ["torchtitan_lite.generate", str(tmp_path / "run"), "--prompt=caf\u00e9 \u2603", "--max-tokens=2"]
    succeeded(ranks(1, str(out), "ascii", *command, entry=STREAMS))
    assert "\ncaf\\xe9 \\u2603" in out.read_text("ascii")
    for words in command, ["torchtitan_lite.status", str(tmp_path / "run")]:
        refused(ranks(1, "/dev/full", "utf-8", *words, entry=STREAMS), f"{words[0][16:]}: No space left on", code=1)


def test_a_terminal_gets_a_bar_and_lines_that_fit_and_the_log_whole_ones(text: Path, tmp_path: Path) -> None:
    out, command = tmp_path / "said", tiny(text, tmp_path, **SHORT, sample__max_tokens=99)
    result = ranks(1, str(out), "utf-8", "train", *command, entry=STREAMS, env={"COLUMNS": "60"})
    succeeded(result)
    assert re.search(r"0%\|.* 0/4 \[", result.stderr)
    screen, log = out.read_text(), (tmp_path / "run/train.log").read_text()
    assert "\x1b[3" not in screen, "no colour, so there is none to switch off by NO_COLOR"
    for kind, n in (("step ", 4), ("sample ", 2)):
        shown, whole = ([line for line in text.split("\n") if line.startswith(kind)] for text in (screen, log))
        assert len(shown) == len(whole) == n
        assert max(map(len, shown)) <= 60 < max(map(len, whole))
    assert re.search(r"^step    4/4  loss \S+  grad_norm ", screen, re.M)
    assert "%|" not in log


class Broken(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")

    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("broken", ["stdout", "both", "closed"])
def test_a_log_never_raises(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", Broken() if broken == "both" else errors)
    out = Broken()
    if broken == "closed":
        out.close()
    monkeypatch.setattr(sys, "stdout", out)
    log = Log(tmp_path, enabled=True)
    for _ in range(3):
        log.info("a line \u2603 \udc80")
        log.record({"step": 1, "odd": object()})
    assert (tmp_path / "train.log").read_text("utf-8") == "a line \u2603 \\udc80\n" * 3
    if broken != "both":
        errors.flush()
        said = errors.buffer.getvalue().decode()
        assert [said.count(f"{what} can't be written") for what in ("stdout", "metrics.jsonl")] == [1, 1]
