"""Commands that would change what a run learns with: refused, asked for, recorded and shown. And a sweep's table."""

import re
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, ranks, succeeded, tiny
from torchtitan_lite.checkpointing import compatibility
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.run import attempts


def again(text: Path, run: Path, *flags: str, n: int = 1, code: int = 0, **more: Any) -> str:
    values = {"run__name": run.name, "train__steps": 4, "checkpoint__every": 2} | more
    result = ranks(n, *flags, *tiny(text, run.parent, **values))
    output = result.stdout + result.stderr
    assert result.returncode == code, output
    return output


RECORD = ("run.json", ".lock-holder", ".lock")  # of the attempt


# --- the rule -----------------------------------------------------------------------------------------------------


def refused(changes: dict[str, Any], *, fork: bool = False) -> str:
    saved = TrainState(step=7, config=flatten(Config()))
    expected = TrainState(step=7, config=flatten(Config()) | changes).values
    try:
        compatibility.require_same_run(Path("runs/run/checkpoints/step-7"), saved, expected, fork=fork)
    except CheckpointError as error:
        return str(error)
    return ""


def test_the_whole_message_of_a_refused_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--optim.lr=0.5"])
    monkeypatch.setattr(compatibility, "fork_command", lambda name, checkpoint: f"FORK {name} {checkpoint}")
    where = "runs/run/checkpoints/step-7"
    values = "optim.lr is 0.008 in the checkpoint and 0.5 here\n  run.seed is 0 in the checkpoint and 4 here"
    assert refused({"optim.lr": 0.5, "run.seed": 4, "log.every": 3}) == (
        f"runs/run has made 7 steps, and its values differ from this command's:\n  {values}\n"
        "  continue with the run's values: --run.seed=0 --optim.lr=0.008\n"
        "  or fork it: a new run continues from here with the new values:\n"
        f"    FORK run-from-7 {where}"
    )
    dim = "model.dim is 128 in the checkpoint and 256 here\n  continue with the run's values: --model.dim=128\n  or "
    assert refused({"optim.lr": 0.5, "model.dim": 256}, fork=True) == (
        f"{where} can't be forked, because its values differ from this command's:\n  {dim}start a new run with "
        "--run.name=NEW and without checkpoint.resume"
    )
    assert refused({"model.dim": 256}) == (
        f"runs/run has made 7 steps, and its values differ from this command's:\n  {dim}start a new run with "
        "--run.name=NEW"
    )


FORK: dict[str, Any] = {
    **{"optim.lr": 1e-3, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.0, "optim.warmup_steps": 1},
    **{"optim.schedule": "constant", "optim.groups": [{"match": "*norm*"}], "optim.max_norm": 2.0},
    **{"train.global_batch_size": 32, "train.z_loss": 1e-4, "run.seed": 3, "train.seq_len": 64},
    **{"model.norm_eps": 1e-6, "data.objective": "pairs", "data.skip_samples": [[0, 8]]},
}
REFUSED: dict[str, Any] = {
    **{"model.dim": 256, "model.n_heads": 8, "model.qk_norm": True, "model.family": "gpt"},
    **{"optim.name": "sgd", "optim.freeze": ["norm.*"], "model.init_from": "runs/other"},
}
ALLOWED: list[tuple[str, Any]] = [
    *(("train.steps", 9), ("train.micro_batch_size", 2), ("fsdp.param_dtype", "bfloat16"), ("run.threads", 2)),
    *(("log.every", 1), ("checkpoint.every", 1), ("sample.prompts", ["x"]), ("eval.samples", 3)),
    *(("speed.chunked_loss", False), ("compile.enabled", True), ("model.init_from", ""), ("optim.lr", 8e-3)),
    *(("data.path", "moved"), ("run.out_dir", "elsewhere")),
]


@pytest.mark.parametrize(("key", "value", "advice"), [
    *((key, value, ("or fork it", "")) for key, value in FORK.items()),
    *((key, value, ("or start a new", "or start a new")) for key, value in REFUSED.items()),
    *((key, value, ("", "")) for key, value in ALLOWED),
])  # fmt: skip
def test_what_contradicts_the_tensors_is_refused_by_a_fork_too(key: str, value: Any, advice: tuple[str, str]) -> None:
    """What a run learns with needs a fork, and everything else resumes as before."""
    for fork, expected in zip((False, True), advice, strict=True):
        said = refused({key: value}, fork=fork)
        found = re.search(rf"\n  {key} is .*\n  continue with the run's values: '?--{key}=.*\n  {expected}", said)
        assert bool(found) == bool(said) == bool(expected)


TEXT = "data is aaaaaaaaaaaa... in the checkpoint and bbbbbbbbbbbb... here\n  "
TOKENS = "tokenizer is t in the checkpoint and u here\n  "
OWN = "continue with the run's values: "
ITS = "different text needs the run's tokenizer: --tokenizer.path=runs/run/tokenizer.json\n  "
NEW = "or start a new run with --run.name=NEW"
OTHER_TOKENS: dict[str, Any] = {"tokenizer": "u", "tokenizer.path": "", "model.vocab_size": 9}


@pytest.mark.parametrize(("fork", "values", "expected"), [
    (False, {"data.path": ""}, f"{TEXT}{OWN}--data.path=my_text\n  or fork it: a new run continues from here with the "
     "new values:\n    FORK run-from-7 runs/run/checkpoints/step-7"),
    (False, OTHER_TOKENS, f"{TEXT}{TOKENS}{OWN}--tokenizer.path=t.json\n  {ITS}{NEW}"),
    (True, {"data.path": ""}, f"{TEXT}{OWN}--data.path=my_text\n  {NEW} and without checkpoint.resume"),
    (True, OTHER_TOKENS | {"data.path": "", "data.sources": {"x": 1.0}}, f"{TOKENS}{OWN}--tokenizer.path=t.json --data."
     f"path=my_text '--data.sources={{  }}'\n  {ITS}{NEW} and without checkpoint.resume"),
    (False, {"data": "a" * 64, "order of data.sources": ["b", "a"]}, "order of data.sources is ['a', 'b'] in the "
     "checkpoint and ['b', 'a'] here\n  or fork it: a new run continues from here with the new values:\n    FORK "
     "run-from-7 runs/run/checkpoints/step-7"),
    (True, {"data.path": "other_text"}, ""),
    (True, {"data.path": "", "data.sources": {"x": 1.0}}, ""),
])  # fmt: skip
def test_other_text_is_named_by_the_key_to_give(
    fork: bool, values: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fork, too, unless it names a text."""
    monkeypatch.setattr(compatibility, "fork_command", lambda name, checkpoint: f"FORK {name} {checkpoint}")
    must = {"tokenizer": "t", "data": "a" * 64, "model.vocab_size": 8, "order of data.sources": ["a", "b"]}
    mine = flatten(Config()) | {"data.path": "my_text", "tokenizer.path": "t.json"}
    saved, here = TrainState(step=7, config=mine, must_match=must), mine | must | {"data": "b" * 64} | values
    with pytest.raises(CheckpointError) if expected else nullcontext() as caught:
        compatibility.require_same_run(Path("runs/run/checkpoints/step-7"), saved, here, fork=fork)
    assert str(caught.value if caught else "").partition(" differ from this command's:\n  ")[2] == expected


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "steps"), [(1, 4), (2, 9)])
def test_another_rate_is_refused_with_one_message_before_anything_else_is_done(
    n: int, steps: int, finished: Path, text: Path, tmp_path: Path
) -> None:
    """Also if the run is finished: a sweep's second rate must not pass as done."""
    run = shutil.copytree(finished, tmp_path / "run")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name not in RECORD}
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
