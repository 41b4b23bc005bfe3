"""Failures to print or log do not end a run: full disks, closed streams and other encodings."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ranks, succeeded, tiny
from tests.run.test_faults import saved_steps
from torchtitan_lite.run.metrics import Log

SHORT = {"run__name": "run", "train__steps": 4, "eval__every": 2, "checkpoint__every": 2, "sample__every": 2}
SAMPLES = ['--sample.prompts=["caf\u00e9 \u2603"]', "--sample.max_tokens=2"]


def with_stdout(
    out: str, *arguments: str, encoding: str = "utf-8", entry: str = "train"
) -> subprocess.CompletedProcess[str]:
    env = {"STREAM_OUT": out, "STREAM_ENCODING": encoding, "STREAM_ENTRY": entry}
    return ranks(1, *arguments, entry="tests.run.streams", env=env)


def test_a_terminal_that_is_not_utf8_gets_escapes(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "said"
    succeeded(with_stdout(str(out), *tiny(text, tmp_path, **SHORT), *SAMPLES, encoding="ascii"))
    assert 'sample  step 2  "caf\\xe9 \\u2603" -> ' in out.read_text("ascii")
    assert 'sample  step 2  "caf\u00e9 \u2603" -> ' in (tmp_path / "run/train.log").read_text("utf-8")
    out.unlink()
    arguments = [str(tmp_path / "run"), "--prompt=caf\u00e9 \u2603", "--max-tokens=2"]
    succeeded(with_stdout(str(out), *arguments, encoding="ascii", entry="torchtitan_lite.generate"))
    assert out.read_text("ascii").startswith("caf\\xe9 \\u2603")
    full = with_stdout("/dev/full", *arguments, entry="torchtitan_lite.generate")
    assert full.returncode == 1
    assert "generate: No space left on device" in full.stderr
    assert "Traceback" not in full.stderr


def test_a_step_is_saved_before_it_is_sampled(text: Path, tmp_path: Path) -> None:
    result = ranks(1, *tiny(text, tmp_path, **SHORT), *SAMPLES, fault="raise:0:2:sample")
    assert result.returncode != 0
    assert saved_steps(tmp_path / "run") == [2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_and_lines_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "9")
    for streams, shown, bar in (((Terminal(), Terminal()), "a l 9\n", True), ((io.StringIO(),) * 2, "a line\n", False)):
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        log = Log(tmp_path, enabled=True)
        log.info("a line", lambda text, columns: f"{text[:3]} {columns}")
        log.info("other")
        assert streams[0].getvalue() == f"{shown}other\n"
        assert list(log.progress(3, 5)) == [3, 4, 5]
        assert ("2/5" in streams[1].getvalue()) == bar
        silent = Log(tmp_path, enabled=False)
        silent.info("no line")
        silent.record({"step": 1})
        assert list(silent.progress(2, 3)) == [2, 3]
        assert "no line" not in streams[0].getvalue()
    assert (tmp_path / "train.log").read_text() == "a line\nother\n" * 2
    assert not (tmp_path / "metrics.jsonl").exists()


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
        assert said.count("stdout can't be written") == 1
        assert said.count("metrics.jsonl can't be written") == 1
