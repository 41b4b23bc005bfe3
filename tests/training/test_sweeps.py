"""Commands that would change what a run learns with: refused, asked for, recorded and shown. And a sweep's table."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, losses, ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing import compatibility
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import schema
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.monitoring import resumed


@pytest.fixture(scope="module")
def first(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 4 steps, with a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("sweeps")
    succeeded(ranks(1, *tiny(text, folder, run__name="run", train__steps=4, checkpoint__every=2)))
    return folder / "run"


def copied(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / run.name)
    return tmp_path / run.name


def again(text: Path, run: Path, *flags: str, n: int = 1, **more: Any) -> tuple[int, str]:
    values = {"run__name": run.name, "train__steps": 4, "checkpoint__every": 2} | more
    result = ranks(n, *flags, *tiny(text, run.parent, **values))
    return result.returncode, result.stdout + result.stderr


RECORD = ("run.json", ".lock-holder", ".lock")  # of the attempt


# --- the rule -----------------------------------------------------------------------------------------------------


def states(**changes: Any) -> tuple[TrainState, TrainState]:
    saved = TrainState(step=7, config=flatten(Config()))
    return saved, TrainState(step=7, config=flatten(Config()) | {k.replace("__", "."): v for k, v in changes.items()})


def refused(**changes: Any) -> str:
    try:
        resumed.require_same_learning(Config(), *states(**changes))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "change",
    [
        *({"optim__lr": 1e-3}, {"optim__betas": [0.9, 0.99]}, {"optim__weight_decay": 0.0}, {"optim__warmup_steps": 1}),
        *({"optim__schedule": "constant"}, {"optim__groups": [{"match": "*norm*"}]}, {"optim__max_norm": 2.0}),
        *({"train__global_batch_size": 32}, {"train__z_loss": 1e-4}, {"model__init_from": "runs/other"}),
    ],
)
def test_what_a_run_learns_with_is_not_changed_in_passing(change: dict[str, Any]) -> None:
    message = refused(**change)
    (key,) = (name.replace("__", ".") for name in change)
    assert f"{key} = " in message
    for expected in ("has made 7 steps with other values", "--run.name=NEW", "from step 8 on: --resume-with-changes"):
        assert expected in message
    assert re.search(rf"its own values: '?--{key}=", message)
    assert compatibility.is_learned_with(key)


@pytest.mark.parametrize(
    "change",
    [
        *({"train__steps": 9}, {"train__micro_batch_size": 2}, {"fsdp__param_dtype": "bfloat16"}, {"run__threads": 2}),
        *({"log__every": 1}, {"checkpoint__every": 1}, {"sample__prompts": ["x"]}, {"eval__samples": 3}),
        *({"speed__chunked_loss": False}, {"compile__enabled": True}, {"model__init_from": ""}, {"optim__lr": 4e-3}),
    ],
)
def test_everything_else_resumes_as_before(change: dict[str, Any]) -> None:
    assert not refused(**change)


def test_a_run_of_an_older_version_resumes() -> None:
    """Its checkpoints lack newer keys, or hold no config at all."""
    saved, here = states()
    older = {key: value for key, value in saved.config.items() if key not in ("train.z_loss", "optim.muon_scale")}
    for config in (older, {}, {**older, "optim.gone": 3}):
        resumed.require_same_learning(Config(), TrainState(step=7, config=config), here)
    changed = TrainState(step=7, config={**here.config, "train.z_loss": 1e-4})
    with pytest.raises(ConfigError, match=r"train.z_loss = 0.0 so far, 0.0001 here"):
        resumed.require_same_learning(Config(), TrainState(step=7, config=older), changed)


def test_values_with_unset_keys_are_shown_without_them() -> None:
    """As a group of a real config has: TOML has no null."""
    given = {"match": "*norm*", "lr_factor": 0.5, "weight_decay": None}
    assert 'optim.groups = [] so far, [{ match = "*norm*", lr_factor = 0.5 }] here' in refused(optim__groups=[given])


def test_the_order_of_sources_decides_the_order_of_samples() -> None:
    both = {"data/a": 1.0, "data/b": 1.0}
    here = TrainState(step=7, config=flatten(Config()) | {"data.sources": both})
    saved = TrainState(step=7, config={**here.config, "data.sources": dict(reversed(both.items()))})
    resumed.require_same_learning(Config(), here, here)
    with pytest.raises(ConfigError, match=r"this run has \['data/b', 'data/a'\], not \['data/a', 'data/b'\]"):
        resumed.require_same_learning(Config(), saved, here)


def test_no_key_that_is_refused_anyway_asks() -> None:
    """Every key of [optim] does one or the other."""
    for key in schema.known_keys():
        if key.startswith("optim."):
            assert compatibility.is_refused(key) or compatibility.is_learned_with(key), key


# --- runs ---------------------------------------------------------------------------------------------------------


def test_another_rate_does_not_pass_as_finished(first: Path, text: Path, tmp_path: Path) -> None:
    """It said "changed since then", then "finished", and exited with 0."""
    run = copied(first, tmp_path)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name not in RECORD}
    code, output = again(text, run, optim__lr=1e-3)
    assert code == 2
    assert f"{run} has made 4 steps with other values than this command has:" in output
    assert "optim.lr = 0.004 so far, 0.001 here" in output
    assert "continue this one with its own values: --optim.lr=0.004" in output
    assert "finished" not in output
    assert "Traceback" not in output
    assert {file: file.read_bytes() for file in before} == before
    about = json.loads((run / "run.json").read_text())
    assert about["status"] == "complete"
    assert "other values than this command has" in about["refused"]["message"]
    code, output = again(text, run, optim__lr=0.004)
    assert code == 0
    assert "finished: step 4" in output


def test_two_ranks_refuse_with_one_message(first: Path, text: Path, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    code, output = again(text, run, n=2, train__global_batch_size=8, train__steps=9)
    assert code == 1
    assert output.count("train.global_batch_size = 6 so far, 8 here") == 1


def test_two_files_of_one_name_do_not_share_a_run(text: Path, tmp_path: Path) -> None:
    more = tiny(text, tmp_path, train__steps=2, optim__warmup_steps=1)
    for folder, rate in (("a", 1e-3), ("b", 2e-3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text(f"[optim]\nlr = {rate}\n")
    succeeded(ranks(1, "--config", str(tmp_path / "a/mine.toml"), *more))
    result = ranks(1, "--config", str(tmp_path / "b/mine.toml"), *more)
    assert result.returncode == 2
    assert f"{tmp_path / 'mine'} has made 2 steps" in result.stderr
    assert "optim.lr = 0.001 so far, 0.002 here" in result.stderr


def test_changes_are_recorded_by_step(first: Path, text: Path, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    assert not (run / "changes.jsonl").exists()
    code, output = again(text, run, "--resume-with-changes", train__steps=6, optim__lr=1e-3)
    assert code == 0, output
    assert "optim.lr 0.004 -> 0.001" in output

    def changes() -> list[tuple[int, set[str]]]:
        found = map(json.loads, (run / "changes.jsonl").read_text().splitlines())
        return [(r["step"], set(r["changed"])) for r in found]

    assert changes() == [(4, {"train.steps", "optim.lr"})]
    again(text, run, train__steps=8, optim__lr=1e-3)
    assert changes() == [(4, {"train.steps", "optim.lr"}), (6, {"train.steps"})]
    # back to step 4, and from there with other values: what was changed after it is gone
    flags = ("--resume-with-changes", "--checkpoint.resume=step-4")
    code, output = again(text, run, *flags, train__steps=6, optim__weight_decay=0.0)
    assert code == 0, output
    assert changes() == [(4, {"train.steps", "optim.weight_decay"})]
    rates = {r["step"]: r["lr"] for r in records(run) if "lr" in r}
    assert rates[6] > 1e-4 * 1.01, "the first rate again"
    code, output = again(text, run, "--checkpoint.resume=never", train__steps=4)
    assert code == 0, output
    assert changes() == []
    assert set(losses(run)) == {1, 2, 3, 4}
    assert checkpoint(run, 4).is_dir()


def test_another_run_s_checkpoint_may_be_continued_with_other_values(first: Path, text: Path, tmp_path: Path) -> None:
    options = tiny(text, tmp_path, run__name="new", train__steps=6, optim__lr=1e-3, checkpoint__resume=first)
    assert "resumed after step 4" in succeeded(ranks(1, *options))
    (record,) = map(json.loads, (tmp_path / "new/changes.jsonl").read_text().splitlines())
    assert record["step"] == 4
    assert record["changed"]["optim.lr"] == [0.004, 0.001]


def test_the_refusal_comes_before_anything_else_is_done(first: Path, text: Path, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    code, output = again(text, run, train__steps=9, optim__lr=1e-3)
    assert code == 2
    assert not re.search(r"^step ", output, re.M)
    assert "changed since then" not in output
