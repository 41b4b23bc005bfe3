"""The last lines of a run are commands that work; other lines of its log."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import train
from tests.helpers import ranks, run_python, succeeded, tiny
from torchtitan_lite.config.derive import Layout
from torchtitan_lite.config.schema import Config, DataConfig, SampleConfig
from torchtitan_lite.run import console
from torchtitan_lite.terminal import counted
from torchtitan_lite.tools import checkpoints


def test_the_closing_block_is_commands_that_work(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny(text, tmp_path, run__name="mine", train__steps=2, optim__warmup_steps=1, run__threads=0)
    output = succeeded(ranks(1, *options))
    *_, prompt, report = output.rstrip().splitlines()
    assert prompt.endswith(f" -m torchtitan_lite.generate {tmp_path / 'mine'} --interactive")
    words = shlex.split(report.partition("plot its curves:")[2])  # as a shell reads it
    assert str(tmp_path / "mine") in succeeded(run_python(words[1:]))
    # one is singular
    assert checkpoints.main(["inspect", str(tmp_path / "mine")]) == 0
    assert "saved by 1 rank;" in capsys.readouterr().out
    assert "1 thread per rank (OMP_NUM_THREADS)" in output
    assert " x 1 rank x " in output
    assert not re.findall(
        r"(?<![\d,.])1 (?:ranks|threads|files|steps|groups|layers|heads|documents|sequences)\b", output
    )


def test_the_closing_block_fits_the_python_and_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompting(config: Config) -> str:
        folder, prompt, report = console.what_next(config).splitlines()
        assert folder == f"the run is in {config.folder}"
        assert f"-m torchtitan_lite.report {config.folder}" in report
        return prompt

    own = DataConfig(path="my_text")
    assert prompting(Config()).endswith(" --prompt 'def '")
    assert prompting(Config(data=own)).endswith(" --interactive")
    assert prompting(Config(data=own, sample=SampleConfig(prompts=["", "a $b"]))).endswith(" --prompt 'a $b'")
    assert prompting(Config(sample=SampleConfig(prompts=[""]))).endswith(" --interactive"), "generate needs text"
    monkeypatch.setattr(sys, "executable", "/opt/an env/bin/python3")
    assert "'/opt/an env/bin/python3' -m torchtitan_lite.generate" in prompting(Config())


def test_one_is_singular() -> None:
    assert [counted(n, "file") for n in (0, 1, 2, 1234)] == ["0 files", "1 file", "2 files", "1,234 files"]
    config = Config.model_validate({"fsdp": {"explicit_prefetching": True, "forward_prefetch": 1}})
    assert "prefetches 1 group in forward" in console.fsdp_line(config)


def test_threads_do_not_spin_on_a_busy_machine_unless_the_user_chose() -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    ask = [sys.executable, "-c", "import torchtitan_lite, os; print(os.environ.get('GOMP_SPINCOUNT'))"]
    with contextlib.ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            busy = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
            )
            stack.callback(busy.kill)
            assert busy.stdout is not None
            busy.stdout.readline()
        assert subprocess.check_output(ask, env=clean, text=True).strip() == "1000"
        assert subprocess.check_output(ask, env={**clean, "OMP_WAIT_POLICY": "ACTIVE"}, text=True).strip() == "None"


@pytest.mark.parametrize(
    ("fsdp", "layout", "named"),
    [
        ({}, Layout(1, 1, 1, 0, 0), "false would save"),
        ({}, Layout(4, 1, 2, 0, 0), 'fsdp.grad_sync = "last" (sums in another order) would'),
        ({}, Layout(1, 2, 2, 0, 0), None),
        ({"reshard_after_forward": False}, Layout(1, 1, 1, 0, 0), None),
    ],
)
def test_where_nothing_is_sharded_the_start_says_what_saves_copies(
    fsdp: dict[str, bool], layout: Layout, named: str | None
) -> None:
    lines = console.copies_lines(Config.model_validate({"fsdp": fsdp}), layout)
    assert [line for line in lines if named in line] if named else not lines, lines


def test_a_checked_config_names_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--check-config", "--run.name=mine"]) == 0
    assert "its run is in runs/mine" in capsys.readouterr().out
