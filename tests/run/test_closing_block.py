"""The last lines of a run are commands that work; other lines of its log."""

import re
import shlex
from pathlib import Path

import pytest

from tests.helpers import ranks, run_python, succeeded, tiny
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
