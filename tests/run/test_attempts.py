"""A run only moves forward: refused commands, forks, damaged checkpoints, and the history that each attempt leaves."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, checkpoint, damage, losses, python, ranks, run_of, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.run import attempts

RUN = {"run__name": "run", "train__steps": 8, "train__micro_batch_size": 6, "checkpoint__every": 2, "eval__every": 0}
extended = pytest.mark.extended
Again = Callable[..., str]


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints at 4, 6 and 8."""
    return run_of(1, text, tmp_path_factory.mktemp("attempts"), **RUN)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def again(run: Path, text: Path) -> Again:
    """The command of the run again; its output, also on stderr if it must fail with `code`, -1 for any."""

    def start(*flags: str, n: int = 1, code: int = 0, fault: str = "", **more: Any) -> str:
        result = ranks(n, *flags, *tiny(text, run.parent, **RUN | more), fault=fault)
        if not code:
            return succeeded(result)
        output = result.stdout + result.stderr
        assert result.returncode == code if code > 0 else result.returncode, output
        return output

    return start


def contents(run: Path) -> dict[str, object]:
    """What a refused command must not change."""
    files = ("metrics.jsonl", "attempts.jsonl", "run.json", "config.toml", "tokenizer.json")
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    return {name: (run / name).read_bytes() for name in files} | {"checkpoints": names}


def begun(run: Path) -> list[tuple[int, str]]:
    """The step that each attempt began after, and how it ended."""
    return [(attempt.step, attempt.ended) for attempt in attempts.read(run)]


# --- refused ----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a different model": ({"train__seq_len": 16}, "", "train.seq_len is 32 in the"),
    "a full disk": ({}, "error:0:0:space", "No space left on device"),
    "files that can't grow": ({}, "full:0:0:lock", "File too large"),
}


@pytest.mark.parametrize(
    "why", [pytest.param(why, marks=[] if why == "a different model" else [extended]) for why in REFUSED]
)
def test_a_refused_command_is_no_attempt(why: str, run: Path, again: Again) -> None:
    more, fault, expected = REFUSED[why]
    before = contents(run)
    said = again(code=1 if why == "a full disk" else 2, fault=fault, **{"train__steps": 12} | more)
    assert expected in said
    assert "Traceback" not in said
    assert contents(run) == before
    assert not (run / "stacks").exists()
    assert not list(run.glob("*.new"))
    assert "resumed after step 8" in again(train__steps=9)
    assert begun(run) == [(0, "complete"), (8, "complete")]


def test_a_check_refuses_what_a_start_would(run: Path, again: Again) -> None:
    before = contents(run)
    said = again("--check-config", code=2, optim__lr=0.5, train__steps=12)
    assert "has made 8 steps, and its values differ from this command's:" in said
    said = again("--check-config", code=2, model__dim=64, model__vocab_size=600, train__steps=12)
    assert "model.dim is 32 in the checkpoint and 64 here" in said
    assert "model.vocab_size is 517 in the checkpoint and 600 here" in said
    fork = {"run__name": "new", "checkpoint__resume": run}
    assert "can't be forked, because its values differ" in again("--check-config", code=2, **fork, model__dim=64)
    for more in ({"train__steps": 12}, fork, fork | {"optim__lr": 0.5}):
        assert "the configuration is fine" in again("--check-config", **more)
    assert contents(run) == before


def test_a_fork_on_other_text_resumes_by_the_same_command(run: Path, text: Path, again: Again, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text((text / "typing.txt").read_text()[::-1])
    fork = {
        **{"run__name": "fork", "checkpoint__resume": run, "data__path": tmp_path / "other.txt", "train__steps": 10},
        "tokenizer__path": run / "tokenizer.json",
    }
    again(**fork)
    assert "resumed after step 10" in again(**fork | {"train__steps": 12})
    assert "its values differ" in again(code=2, **fork | {"train__steps": 14, "data__path": text}), "the first text"


def test_an_error_or_a_kill_while_it_loads_is_no_attempt(run: Path, again: Again) -> None:
    before = contents(run)
    assert "Traceback" in again(code=-1, fault="raise:0:0:hash", train__steps=12)
    again(code=-1, fault="kill:0:0:space", train__steps=12)
    assert contents(run) == before


@pytest.mark.parametrize("value", ["RUN", "RUN/checkpoints/step-00000004"])
def test_a_run_does_not_go_back_within_its_folder(value: str, run: Path, again: Again) -> None:
    """A path into the run itself."""
    before = contents(run)
    said = again(code=2, checkpoint__resume=value.replace("RUN", str(run)))
    assert "a run does not go back within its folder" in said
    assert f"--run.name=NEW, from an earlier checkpoint with --checkpoint.resume={run}/checkpoints/step-N" in said
    assert contents(run) == before


def test_a_folder_of_an_older_version_is_refused(run: Path, again: Again) -> None:
    (run / "attempts.jsonl").unlink()
    (run / "run.json").write_text('{"status": "complete", "step": 8, "reason": "", "time": 1.0, "attempt": "abc"}')
    before = (run / "run.json").read_bytes()
    expected = f"{run} was made by an older version: finish it, or export it, with the last commit of 0.4 (6b3ed8e"
    assert expected in again(code=2, train__steps=9)
    assert (run / "run.json").read_bytes() == before
    for command in ("status", "report"):
        assert expected in python(str(run), script=f"-m torchtitan_lite.{command}").stderr


# --- the history ------------------------------------------------------------------------------------------------


def test_after_a_kill_the_records_of_the_last_attempt_count(text: Path, tmp_path: Path) -> None:
    """SIGKILL in step 8, after the checkpoint of step 6: steps 7 and on are made again. No line is removed."""
    run, command = tmp_path / "run", tiny(text, tmp_path, **RUN | {"eval__every": 4, "sample__every": 4})
    assert ranks(1, *command, fault="kill:0:8:step").returncode
    assert (attempts.newest_status(run)["status"], begun(run)) == ("running", [(0, "")])
    left = (run / "metrics.jsonl").read_bytes() + b'{"step": 8, "lo'  # as a kill while it writes leaves it
    (run / "metrics.jsonl").write_bytes(left)
    history = (run / "attempts.jsonl").read_bytes() + b'{"attempt": 1, "en'
    (run / "attempts.jsonl").write_bytes(history)
    assert "resumed after step 6" in succeeded(ranks(1, *command))
    assert [
        (run / "metrics.jsonl").read_bytes().startswith(left + b"\n"),
        (run / "attempts.jsonl").read_bytes().startswith(history + b"\n"),
        (run / "stacks/rank-0.txt").read_text().count("--- attempt of ") == 2,
    ] == [True, True, True]
    assert begun(run) == [(0, ""), (6, "complete")]
    assert attempts.read(run)[1].samples == 6 * attempts.read(run)[0].config["train.global_batch_size"]
    by_step = [(record["step"], record["attempt"]) for record in attempts.records(run) if "loss" in record]
    assert by_step == [(step, 1 if step < 7 else 2) for step in range(1, 9)]
    assert [record["step"] for record in attempts.records(run) if "val_loss" in record] == [4, 8]
    assert {record["step"] for record in attempts.records(run, "samples.jsonl")} == {4, 8}
    written = [json.loads(line) for line in left.splitlines()[:-1]]
    assert [record["step"] for record in written if "loss" in record] == list(range(1, 8)), "7 was made twice"


def test_a_failed_attempt_says_why(run: Path, again: Again) -> None:
    again(code=-1, fault="raise:0:10:step", train__steps=12)
    status, last = attempts.newest_status(run), attempts.read(run)[-1]
    assert (status["status"], status["step"], status["attempt"], status["repeats"]) == ("failed", 9, 2, False)
    assert "a bug in somebody's loader" in status["reason"]
    assert (last.ended, last.last_step, last.reason) == ("failed", 9, status["reason"])


# --- damaged checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["commit", "before rename", "delete"])
def test_a_kill_while_a_damaged_checkpoint_is_replaced_loses_nothing(site: str, run: Path, again: Again) -> None:
    damage(checkpoint(run, 8))
    again(code=-1, fault=f"kill:0:8:{site}")
    assert storage.verify(checkpoint(run, 6)) == []
    assert f"resumed after step {8 if site == 'delete' else 6}" in again(train__steps=9)
    assert (storage.verify(checkpoint(run, 9)), [*(run / "checkpoints").glob(".*")]) == ([], []), "nothing is left"
    assert losses(run).keys() == set(range(1, 10))


# --- forks ------------------------------------------------------------------------------------------------------


def test_a_fork_starts_from_another_run_s_checkpoint(run: Path, finished: Path, again: Again) -> None:
    """With what the run has learned with, unless the command says otherwise; afterwards it is a run of its own."""
    again(train__steps=9)
    before, source = contents(run), checkpoint(run, 6)
    fork = {"run__name": "fork", "checkpoint__resume": source}
    output = again(**fork, optim__lr=1e-3)
    assert f"run     {run.parent / 'fork'}  new, a fork of {source}, after its step 6; the same command" in output
    assert "optim.lr 0.004 -> 0.001" in output
    assert begun(run.parent / "fork") == [(6, "complete")]
    assert attempts.of_step(attempts.read(run.parent / "fork"), 6) is None, "the other run made it"
    assert losses(run.parent / "fork").keys() == {7, 8}
    assert "resumed after step 8" in again(**fork, optim__lr=1e-3, train__steps=9), "its own come first"
    assert contents(run) == before
    again(**fork | {"run__name": "same", "checkpoint__resume": os.path.relpath(run / "checkpoints", ROOT)})
    (same,) = attempts.read(run.parent / "same")
    assert (same.step, same.ended, same.forked_from[0]) == (9, "complete", "/")
    shutil.rmtree(checkpoint(run, 9))
    again(**fork | {"run__name": "equal"})
    ends = [checkpoint(folder, 8) / "model.safetensors" for folder in (run.parent / "equal", finished)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_fork_says_which_values_came_from_there(run: Path, text: Path, tmp_path: Path) -> None:
    """A value that the command does not give, and for which today's default differs, is the other run's."""
    command = [word for word in tiny(text, tmp_path, **RUN) if not word.startswith("--optim.lr")]
    (tmp_path / "mine.toml").write_text("[optim]\nlr = 0.002\n")
    succeeded(ranks(1, "--config", str(tmp_path / "mine.toml"), *command, "--run.name=one", "--train.steps=4"))
    output = succeeded(ranks(1, *command, "--run.name=two", f"--checkpoint.resume={tmp_path / 'one'}"))
    source = checkpoint(tmp_path / "one", 4)
    assert f"resume  optim.lr = 0.002: kept from {source} (not set here; the defaults differ)" in output
    assert attempts.read(tmp_path / "two")[0].config["optim.lr"] == 0.002
