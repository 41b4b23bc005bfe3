"""Commands that would change what a run learns with: refused, asked for, recorded and shown. And a sweep's table."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, ranks, succeeded, tiny
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.monitoring import attempts, resumed
from torchtitan_lite.tools.report.runs import read_run


@pytest.fixture(scope="module")
def first(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 4 steps, with a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("sweeps")
    succeeded(ranks(1, *tiny(text, folder, run__name="run", train__steps=4, checkpoint__every=2)))
    return folder / "run"


def copied(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / run.name)
    return tmp_path / run.name


def again(text: Path, run: Path, *flags: str, n: int = 1, code: int = 0, **more: Any) -> str:
    values = {"run__name": run.name, "train__steps": 4, "checkpoint__every": 2} | more
    result = ranks(n, *flags, *tiny(text, run.parent, **values))
    output = result.stdout + result.stderr
    assert result.returncode == code, output
    return output


RECORD = ("run.json", ".lock-holder", ".lock")  # of the attempt


# --- the rule -----------------------------------------------------------------------------------------------------


def states(changes: dict[str, Any]) -> tuple[TrainState, TrainState]:
    saved = TrainState(step=7, config=flatten(Config()))
    return saved, TrainState(step=7, config=flatten(Config()) | changes)


def refused(changes: dict[str, Any]) -> str:
    try:
        resumed.require_same_learning(Config(), *states(changes))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("optim.lr", 1e-3), ("optim.betas", [0.9, 0.95]), ("optim.weight_decay", 0.0), ("optim.warmup_steps", 1)),
        *(("optim.schedule", "constant"), ("optim.groups", [{"match": "*norm*"}]), ("optim.max_norm", 2.0)),
        *(("train.global_batch_size", 32), ("train.z_loss", 1e-4), ("model.init_from", "runs/other")),
    ],
)
def test_what_a_run_learns_with_is_not_changed_in_passing(key: str, value: Any) -> None:
    message = refused({key: value})
    assert f"{key} = " in message
    for expected in ("has made 7 steps with other values", "--run.name=NEW", "from step 8 on: --resume-with-changes"):
        assert expected in message
    assert re.search(rf"its own values: '?--{key}=", message)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("train.steps", 9), ("train.micro_batch_size", 2), ("fsdp.param_dtype", "bfloat16"), ("run.threads", 2)),
        *(("log.every", 1), ("checkpoint.every", 1), ("sample.prompts", ["x"]), ("eval.samples", 3)),
        *(("speed.chunked_loss", False), ("compile.enabled", True), ("model.init_from", ""), ("optim.lr", 8e-3)),
    ],
)
def test_everything_else_resumes_as_before(key: str, value: Any) -> None:
    assert not refused({key: value})


def test_values_with_unset_keys_are_shown_without_them() -> None:
    """As a group of a real config has: TOML has no null."""
    given = {"match": "*norm*", "lr_factor": 0.5, "weight_decay": None}
    assert 'optim.groups = [] so far, [{ match = "*norm*", lr_factor = 0.5 }] here' in refused(
        {"optim.groups": [given]}
    )


def test_the_order_of_sources_decides_the_order_of_samples() -> None:
    both = {"data/a": 1.0, "data/b": 1.0}
    here = TrainState(step=7, config=flatten(Config()) | {"data.sources": both})
    saved = TrainState(step=7, config={**here.config, "data.sources": dict(reversed(both.items()))})
    resumed.require_same_learning(Config(), here, here)
    with pytest.raises(ConfigError, match=r"this run has \['data/b', 'data/a'\], not \['data/a', 'data/b'\]"):
        resumed.require_same_learning(Config(), saved, here)


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "steps"), [(1, 4), (2, 9)])
def test_another_rate_is_refused_with_one_message_before_anything_else_is_done(
    n: int, steps: int, first: Path, text: Path, tmp_path: Path
) -> None:
    """Also if the run is finished: a sweep's second rate must not pass as done."""
    run = copied(first, tmp_path)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name not in RECORD}
    output = again(text, run, n=n, code=3 - n, train__steps=steps, optim__lr=1e-3)
    assert output.count(f"{run} has made 4 steps with other values than this command has:") == 1
    assert "optim.lr = 0.004 so far, 0.001 here" in output
    assert "continue this one with its own values: --optim.lr=0.004" in output
    assert not re.search(r"^step |finished|Traceback|changed since then", output, re.M)
    assert {file: file.read_bytes() for file in before} == before
    about = json.loads((run / "run.json").read_text())
    assert about["status"] == "complete"
    assert "finished: step 4" in again(text, run, optim__lr=0.004)


def test_changes_are_recorded_by_attempt(first: Path, text: Path, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    output = again(text, run, "--resume-with-changes", train__steps=6, optim__lr=1e-3)
    assert "optim.lr 0.004 -> 0.001" in output
    again(text, run, train__steps=8, optim__lr=1e-3)
    made = attempts.read(run)
    assert [(one.step, one.config["train.steps"], one.config["optim.lr"]) for one in made] == [
        *((0, 4, 0.004), (4, 6, 0.001), (6, 8, 0.001))
    ]
    changes = [change for change in read_run(run).changes if change[1].startswith(("train.", "optim."))]
    assert changes == [
        (4, "train.steps", "4", "6"),
        (4, "optim.lr", "0.004", "0.001"),
        (6, "train.steps", "6", "8"),
    ]


def test_another_run_s_checkpoint_may_be_continued_with_other_values(first: Path, text: Path, tmp_path: Path) -> None:
    options = tiny(text, tmp_path, run__name="new", train__steps=6, optim__lr=1e-3, checkpoint__resume=first)
    assert f"a fork of {checkpoint(first, 4)}, after its step 4" in succeeded(ranks(1, *options))
