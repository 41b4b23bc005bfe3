"""A refused command changes nothing, a restart does not apply `resume` twice, and a status belongs to its attempt."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.helpers import checkpoint, losses, python, ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing import select, storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import CheckpointError, ConfigError
from torchtitan_lite.monitoring import run_folder

RUN = {"run__name": "run", "train__steps": 8, "checkpoint__every": 2, "eval__every": 0}
NEVER = {"checkpoint__resume": "never"}
OTHER_LENGTH = {"train__steps": 12, "train__seq_len": 16}
extended = pytest.mark.extended
Again = Callable[..., str]


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints at 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("attempts")
    succeeded(ranks(1, *tiny(text, folder, **RUN)))
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def again(run: Path, text: Path) -> Again:
    """The command of the run again; its output, also on stderr if it must fail with `code`, -1 for any."""

    def start(*, n: int = 1, code: int = 0, env: Any = None, fault: str = "", **more: Any) -> str:
        result = ranks(n, *tiny(text, run.parent, **RUN | more), env=env, fault=fault)
        if not code:
            return succeeded(result)
        output = result.stdout + result.stderr
        assert result.returncode == code if code > 0 else result.returncode, output
        return output

    return start


def about(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def contents(run: Path) -> dict[str, object]:
    """What a refused command must not change."""
    files = ("metrics.jsonl", "config.toml", "tokenizer.json")
    facts = {key: value for key, value in about(run).items() if key in ("argv", "step", "started", "world_size")}
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    return {name: (run / name).read_bytes() for name in files} | {"run.json": facts, "checkpoints": names}


def status_in_table(run: Path) -> str:
    """Of the run's row in `report --table`."""
    return succeeded(python(str(run), "--table", script="-m torchtitan_lite.report")).splitlines()[1].split()[-1]


def set_aside(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob(".*"))


# --- refused ----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no weights": (NEVER | {"model__init_from": "tests"}, "", "is not a run with a checkpoint"),
    "another identity": ({"checkpoint__resume": "step-4", "train__seq_len": 16}, "", "train.seq_len is 32 in the"),
    "a full disk": (NEVER, "error:0:0:space", "No space left on device"),
    "files that can't grow": ({"checkpoint__resume": "step-4"}, "full:0:0:lock", "can't be written: File too large"),
}


@pytest.mark.parametrize("why", [pytest.param(why, marks=[] if why == "no weights" else [extended]) for why in REFUSED])
def test_a_refused_command_sets_nothing_aside(why: str, run: Path, again: Again) -> None:
    more, fault, expected = REFUSED[why]
    before = contents(run)
    said = again(code=2, fault=fault, **{"train__steps": 12} | more)
    assert expected in said
    assert "Traceback" not in said
    assert contents(run) == before
    assert "resumed after step 8" in again(train__steps=9)


@pytest.mark.parametrize(("name", "problem"), [
    ("config.toml", "can't be written: it is a folder"),
    ("run.json", "can't be read: Is a directory"),  # it decides whether checkpoints may be set aside
])  # fmt: skip
def test_a_file_that_can_t_be_replaced_leaves_the_checkpoints_alone(
    name: str, problem: str, run: Path, again: Again
) -> None:
    (run / name).unlink()
    (run / name).mkdir()
    assert f"{name} {problem}" in again(code=2, **NEVER)
    assert set_aside(run) == []
    assert not list(run.glob(".*.new"))


@extended
def test_a_damaged_checkpoint_stays_in_place_until_training_starts(run: Path, again: Again) -> None:
    (checkpoint(run, 8) / "model.safetensors").write_bytes(b"")
    before = contents(run)
    assert "damaged: " in again(n=2, code=-1, train__seq_len=16)
    assert contents(run) == before
    output = again(n=2)
    assert "resumed after step 6" in output
    assert "step-00000008 was set aside as " in output
    assert set_aside(run) == [".bad-step-00000008"]


def test_a_kill_before_the_first_step_leaves_all_in_place_for_the_same_command(run: Path, again: Again) -> None:
    before = contents(run)
    again(code=-1, fault="kill:0:0:space", checkpoint__resume="step-4")
    assert contents(run) == before
    assert "resumed after step 4" in again(checkpoint__resume="step-4")
    assert set_aside(run) == [".old-step-00000006", ".old-step-00000008"]
    assert [r["step"] for r in records(run) if "loss" in r] == list(range(1, 9))


def test_a_checkpoint_that_can_t_be_renamed_leaves_all_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4, 6):
        storage.commit(storage.begin(tmp_path, step), TrainState(step=step), "full", 1, {})
    honest = storage.set_aside

    def fails_at_4(folder: Path, why: str) -> Path | None:
        if folder.name.endswith("4"):
            raise PermissionError(13, "Permission denied", str(folder))
        return honest(folder, why)

    monkeypatch.setattr(storage, "set_aside", fails_at_4)
    with pytest.raises(CheckpointError, match="step-00000004 can't be set aside"):
        select.set_aside(tmp_path, [(6, "old"), (4, "old"), (2, "old")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004", "step-00000006"]


# --- restarts ---------------------------------------------------------------------------------------------------


def torchrun_attempt(number: int, run_id: str = "x") -> dict[str, str]:
    """The environment that torchrun gives the workers of an attempt."""
    return {"TORCHELASTIC_RESTART_COUNT": str(number), "TORCHELASTIC_RUN_ID": run_id}


@pytest.mark.parametrize(("resume", "aside", "n"), [("never", [2, 4, 6, 8], 2), ("step-2", [4, 6, 8], 1)])
@extended
def test_a_restart_by_torchrun_resumes_from_the_previous_attempt(
    resume: str, aside: list[int], n: int, run: Path, again: Again
) -> None:
    expected = [f".old-step-{step:08d}" for step in aside]
    again(n=n, code=-1, env=torchrun_attempt(0), fault="kill:0:5", checkpoint__resume=resume)
    assert set_aside(run) == expected
    why = "world 2: 1 rank on 1 machine: a (b is lost)"  # as tools.elastic sets it
    output = again(n=n, env=torchrun_attempt(1) | {"TORCHTITAN_LITE_WORLD": why}, checkpoint__resume=resume)
    assert f'checkpoint.resume = "{resume}" was applied by an earlier attempt' in output
    assert "; a new secret begins another launch" in output
    assert f"\nstart   {why}\n" in (run / "train.log").read_text()
    assert "resumed after step 4" in output
    assert set_aside(run) == expected
    assert losses(run).keys() == set(range(1, 9))
    # a person who types it again, which may be under the same name
    output = again(n=n, env=torchrun_attempt(0), checkpoint__resume=resume)
    assert ("new; the same" if resume == "never" else "resumed after step 2") in output
    assert len(set_aside(run)) > len(expected)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """An attempt of one rank without a process group, which may end before it is accepted."""
    monkeypatch.setattr(run_folder, "from_rank0", lambda value: value)
    monkeypatch.setattr(run_folder, "from_all_ranks", lambda value: [value])

    def attempt(resume: str, count: int = 1, *, accepted: bool = True, **env: str) -> str:
        with monkeypatch.context() as patched:
            for name, value in (torchrun_attempt(count, "none") | env).items():
                patched.setenv(name, value)
            found = run_folder.begin(tmp_path, World(0, 1, torch.device("cpu"), 1), resume)
            if accepted:
                (tmp_path / "run.json").write_bytes(run_folder.accepted(tmp_path, 0, found, {}))
        return found

    return attempt


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 9, b"[]"])
def test_a_restart_with_a_damaged_record_does_not_begin_again(
    content: bytes, begin: Callable[..., str], tmp_path: Path
) -> None:
    assert begin("never", accepted=False) == "never"
    (tmp_path / "run.json").write_bytes(content)
    for resume in ("never", "step-2"):
        with pytest.raises(ConfigError, match="is damaged, and can't tell whether checkpoint.resume ="):
            begin(resume)
    assert (tmp_path / "run.json").read_bytes() == content
    assert begin("auto", accepted=False) == "auto"


def test_another_secret_is_another_launch_also_in_the_same_slurm_job(begin: Callable[..., str]) -> None:
    found = []
    for secret, world in [("a", "world 1"), ("a", "world 2"), ("b", "world 1"), ("c", "")]:
        under = {"TORCHTITAN_LITE_WORLD": world} if world else {}  # or under torchrun
        found.append(begin("never", SLURM_JOB_ID="7", TORCHELASTIC_RUN_ID=secret, **under))
    assert found == ["never", "auto", "never", "auto"]


def test_an_attempt_that_dies_early_leaves_resume_to_the_next(begin: Callable[..., str]) -> None:
    """Even if an earlier launch had the same id: torchrun's default id is "none"."""
    assert begin("never", 0) == "never"
    assert begin("never", 0, accepted=False) == "never"
    assert begin("never", 1) == "never"
    assert begin("never", 2) == "auto"


@extended
def test_a_requeued_job_resumes_from_its_checkpoint(run: Path, again: Again) -> None:
    job = {"env": {"SLURM_JOB_ID": "7"}, "checkpoint__resume": "step-2", "train__steps": 14}
    again(fault="term:0:5", **job)
    assert about(run)["status"] == "preempted"
    aside = set_aside(run)
    # another command in between does not change that, whether it is refused or resumes
    again(code=2, **job | {"env": None, "train__seq_len": 16})
    again(fault="term:0:8", train__steps=14)
    left = about(run)["step"]
    assert 8 <= left < 14
    assert f"resumed after step {left}" in again(**job)
    assert set_aside(run) == aside
    assert "resumed after step 4" in again(**job | {"checkpoint__resume": "step-4"}), "another value, another command"


# --- the status of an attempt -----------------------------------------------------------------------------------


def test_a_status_belongs_to_its_attempt(run: Path, again: Again) -> None:
    first = about(run)
    assert (first["status"], first["step"]) == ("complete", 8)
    again(code=2, env={"TORCHTITAN_LITE_ATTEMPT": "7-1"}, **OTHER_LENGTH)
    second = about(run)
    why = second.pop("refused")
    assert second == first, "the run is as it was"
    assert not (run / "stacks").exists()
    assert why["attempt"] == "7-1"
    assert "train.seq_len is 32 in the checkpoint and 16 here" in why["message"]
    assert status_in_table(run) == "complete"
    said = succeeded(python(str(run), script="-m torchtitan_lite.status"))
    assert f"run     {run}: complete" in said
    assert "a command was refused, the run is as it was: " in said
    again(code=-1, fault="kill:0:0:hash")
    third = about(run)
    assert third["status"] == status_in_table(run) == "complete"
    again()
    last = about(run)
    assert last["status"] == "complete", "there was nothing left to do"
    assert len({first["attempt"], "7-1", third["starting"]["attempt"], last["attempt"]}) == 4
    assert not {"refused", "starting"} & last.keys()


def test_an_error_of_ours_is_a_failed_attempt_too(run: Path, again: Again) -> None:
    assert "Traceback" in again(code=-1, fault="raise:0:0:hash", train__steps=12)
    assert about(run)["status"] == "complete", "no step has been made"
    assert "a bug in somebody's loader" in about(run)["refused"]["message"]


@pytest.mark.parametrize("status", ["complete", "running"])
def test_all_ranks_of_an_attempt_report_one_refusal(status: str, begin: Callable[..., str], tmp_path: Path) -> None:
    """A rank dies while it loads: each of the others writes it, in any order."""
    first = {"status": status, "step": 8}
    (tmp_path / "run.json").write_text(json.dumps(first))
    begin("auto", accepted=False)
    run_folder.stand_in(tmp_path, 0, "rank 1 died")
    run_folder.write_status(tmp_path, World(0, 3, torch.device("cpu"), 1), "failed", None, "lost rank 1")
    run_folder.stand_in(tmp_path, 0, "lost rank 1")
    assert about(tmp_path)["refused"]["message"] == "rank 1 died"
    assert {key: about(tmp_path)[key] for key in first} == first


def test_a_command_that_finds_the_folder_in_use_leaves_the_status_alone(run: Path, again: Again) -> None:
    before = (run / "run.json").read_bytes()
    (run / ".lock-holder").write_text("process 7 on node3")
    with FileLock(run / ".lock"):
        assert f"{run} is being used by process 7 on node3;" in again(code=1)  # the same command may work later
    assert (run / "run.json").read_bytes() == before


def test_stacks_of_an_earlier_attempt_are_kept(run: Path, again: Again) -> None:
    """A restart must not remove files that the previous attempt's error names."""
    stacks = run / "stacks"
    stacks.mkdir()
    (stacks / "rank-0.txt").write_text("Timeout (0:00:08)!\nwhere it hung\n")
    again(train__steps=9)
    assert (stacks / "rank-0.txt").read_text() == "Timeout (0:00:08)!\nwhere it hung\n"
    assert os.listdir(stacks) == ["rank-0.txt"]
