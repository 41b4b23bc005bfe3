"""Commands that would change what a run learns with: refused, asked for, recorded and shown. And a sweep's table."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, ranks, succeeded, tiny
from torchtitan_lite.run import attempts


def again(text: Path, run: Path, *flags: str, n: int = 1, code: int = 0, **more: Any) -> str:
    values = {"run__name": run.name, "train__steps": 4, "checkpoint__every": 2} | more
    result = ranks(n, *flags, *tiny(text, run.parent, **values))
    output = result.stdout + result.stderr
    assert result.returncode == code, output
    return output


# --- the rule -----------------------------------------------------------------------------------------------------


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "steps"), [(1, 4), (2, 9)])
def test_another_rate_is_refused_with_one_message_before_anything_else_is_done(
    n: int, steps: int, finished: Path, text: Path, tmp_path: Path
) -> None:
    """Also if the run is finished: a sweep's second rate must not pass as done."""
    run = shutil.copytree(finished, tmp_path / "run")
    before = {
        file: file.read_bytes()
        for file in run.rglob("*")
        if file.is_file() and file.name not in ("run.json", ".lock-holder", ".lock")  # of the attempt
    }
    output = again(text, run, n=n, code=3 - n, train__steps=steps, optim__lr=1e-3)
    assert output.count(f"{run} has made 4 steps, and its values differ from this command's:") == 1
    assert "optim.lr is 0.004 in the checkpoint and 0.001 here" in output
    assert "continue with the run's values: --optim.lr=0.004" in output
    assert not re.search(r"^step |finished|Traceback|changed since then", output, re.M)
    assert {file: file.read_bytes() for file in before} == before
    assert "finished: step 4 of train.steps = 3" in again(text, run, train__steps=3)
    changed = {file.name for file, content in before.items() if file.read_bytes() != content}
    assert changed == {"attempts.jsonl", "train.log"}
    about = attempts.newest_status(run)
    assert (about["status"], about["step"]) == ("complete", 4)


def test_the_printed_fork_continues_with_the_new_rate(finished: Path, text: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    output = again(text, run, code=2, train__steps=6, optim__lr=1e-3)
    (line,) = (line for line in output.splitlines() if "--run.name=run-from-4" in line)
    said = succeeded(ranks(1, *shlex.split(line.split(" train.py ")[1])))
    assert f"a fork of {checkpoint(run, 4)}, after its step 4" in said
    assert "optim.lr 0.004 -> 0.001" in said
    assert attempts.read(tmp_path / "run-from-4")[-1].config["optim.lr"] == 0.001
