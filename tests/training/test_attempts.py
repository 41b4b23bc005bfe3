"""A refused command changes nothing, a restart does not apply `resume` twice, and a status belongs to its attempt."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
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


def command(text: Path, tmp_path: Path, **more: Any) -> list[str]:
    return tiny(text, tmp_path, **RUN | more)


def about(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def contents(run: Path) -> dict[str, object]:
    """What a refused command must not change."""
    files = ("metrics.jsonl", "config.toml", "tokenizer.json")
    facts = {key: value for key, value in about(run).items() if key in ("argv", "step", "started", "world_size")}
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    return {name: (run / name).read_bytes() for name in files} | {"run.json": facts, "checkpoints": names}


def table(run: Path) -> str:
    """The row of the run in `report --table`."""
    return succeeded(python(str(run), "--table", script="-m torchtitan_lite.report")).splitlines()[1]


def set_aside(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob(".*"))


# --- refused ----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "another identity": ({"checkpoint__resume": "step-4", "train__seq_len": 16}, "", "train.seq_len is 32 in the"),
    "no weights": ({"checkpoint__resume": "never", "model__init_from": "EMPTY"}, "", "is not a run with a checkpoint"),
    "a full disk": ({"checkpoint__resume": "never"}, "error:0:0:space", "No space left on device"),
    "files that can't grow": ({"checkpoint__resume": "step-4"}, "full:0:0:lock", "can't be written: File too large"),
}


@pytest.mark.parametrize(
    "why", [pytest.param(why, marks=[] if why == "no weights" else [pytest.mark.extended]) for why in REFUSED]
)
def test_a_refused_command_sets_nothing_aside(why: str, run: Path, text: Path, tmp_path: Path) -> None:
    more, fault, said = REFUSED[why]
    if "model__init_from" in more:
        (tmp_path / "empty").mkdir()
        more = more | {"model__init_from": tmp_path / "empty"}
    before = contents(run)
    result = ranks(1, *command(text, tmp_path, **{"train__steps": 12} | more), fault=fault)
    assert result.returncode == 2, result.stdout + result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert contents(run) == before
    assert "resumed after step 8" in succeeded(ranks(1, *command(text, tmp_path, train__steps=9)))


@pytest.mark.extended
def test_a_damaged_checkpoint_stays_in_place_until_training_starts(run: Path, text: Path, tmp_path: Path) -> None:
    (checkpoint(run, 8) / "model.safetensors").write_bytes(b"")
    before = contents(run)
    result = ranks(2, *command(text, tmp_path, train__seq_len=16))
    assert result.returncode != 0
    assert "damaged: " in result.stdout
    assert contents(run) == before
    output = succeeded(ranks(2, *command(text, tmp_path)))
    assert "resumed after step 6" in output
    assert "step-00000008 was set aside as " in output
    assert set_aside(run) == [".bad-step-00000008"]


def test_a_kill_before_the_first_step_leaves_all_in_place_for_the_same_command(
    run: Path, text: Path, tmp_path: Path
) -> None:
    before = contents(run)
    same = command(text, tmp_path, checkpoint__resume="step-4")
    assert ranks(1, *same, fault="kill:0:0:space").returncode != 0
    assert contents(run) == before
    assert "resumed after step 4" in succeeded(ranks(1, *same))
    assert set_aside(run) == [".old-step-00000006", ".old-step-00000008"]
    assert [r["step"] for r in records(run) if "loss" in r] == list(range(1, 9))


# --- a full disk ------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("file systems can't be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.extended
def test_a_full_disk_at_a_resume_is_reported(finished: Path, text: Path, disk: Path) -> None:
    run = disk / "run"
    shutil.copytree(finished, run)
    (run / ".lock-holder").unlink()
    with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    before = contents(run)
    result = ranks(2, *command(text, disk, train__steps=12, checkpoint__resume="step-4"))
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert "MiB, but " in result.stderr
    assert contents(run) == before
    (disk / "ballast").unlink()
    assert "resumed after step 8" in succeeded(ranks(2, *command(text, disk, train__steps=9)))


# --- restarts ---------------------------------------------------------------------------------------------------


def torchrun_attempt(number: int, run_id: str = "x") -> dict[str, str]:
    """The environment that torchrun gives the workers of an attempt."""
    return {"TORCHELASTIC_RESTART_COUNT": str(number), "TORCHELASTIC_RUN_ID": run_id}


@pytest.mark.parametrize(
    ("resume", "aside"), [pytest.param("never", [2, 4, 6, 8], marks=pytest.mark.extended), ("step-2", [4, 6, 8])]
)
@pytest.mark.extended
def test_a_restart_by_torchrun_resumes_from_the_previous_attempt(
    resume: str, aside: list[int], run: Path, text: Path, tmp_path: Path
) -> None:
    same = command(text, tmp_path, checkpoint__resume=resume)
    expected = [f".old-step-{step:08d}" for step in aside]
    n = 2 if resume == "never" else 1
    first = ranks(n, *same, env=torchrun_attempt(0), fault="kill:0:5")
    assert first.returncode != 0
    assert set_aside(run) == expected
    why = "world 2: 1 rank on 1 machine: a (b is lost)"  # as tools.elastic sets it
    output = succeeded(ranks(n, *same, env=torchrun_attempt(1) | {"TORCHTITAN_LITE_WORLD": why}))
    assert f'checkpoint.resume = "{resume}" was applied by an earlier attempt' in output
    assert "; a new secret begins another launch" in output
    assert f"\nstart   {why}\n" in (run / "train.log").read_text()
    assert "resumed after step 4" in output
    assert set_aside(run) == expected
    assert losses(run).keys() == set(range(1, 9))
    # a person who types it again, which may be under the same name
    again = succeeded(ranks(n, *same, env=torchrun_attempt(0)))
    assert ("new; the same" if resume == "never" else "resumed after step 2") in again
    assert len(set_aside(run)) > len(expected)


@pytest.mark.extended
def test_an_attempt_that_dies_early_leaves_resume_to_the_next(run: Path, text: Path, tmp_path: Path) -> None:
    """Even if an earlier launch had the same id: torchrun's default id is "none"."""
    same = command(text, tmp_path, checkpoint__resume="never")
    succeeded(ranks(1, *same, env=torchrun_attempt(0, "none")))
    assert ranks(1, *same, env=torchrun_attempt(0, "none"), fault="kill:0:0:space").returncode != 0
    assert storage.find_steps(run / "checkpoints") == [2, 4, 6, 8]
    output = succeeded(ranks(1, *same, env=torchrun_attempt(1, "none")))
    assert "new; the same" in output
    assert len(set_aside(run)) == 8


@pytest.mark.extended
def test_another_launch_is_no_restart(run: Path, text: Path, tmp_path: Path) -> None:
    same = command(text, tmp_path, checkpoint__resume="never")
    succeeded(ranks(1, *same, env=torchrun_attempt(0, "x")))
    assert "new; the same" in succeeded(ranks(1, *same, env=torchrun_attempt(1, "y")))


ALONE = World(0, 1, torch.device("cpu"), 1)


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of one rank, without a process group."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(run_folder, "from_rank0", lambda value: value)
    monkeypatch.setattr(run_folder, "from_all_ranks", lambda value: [value])


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 9, b"[]"])
def test_a_restart_with_a_damaged_record_does_not_begin_again(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    assert run_folder.begin(tmp_path, ALONE, "never") == "never"
    (tmp_path / "run.json").write_bytes(content)
    for resume in ("never", "step-2"):
        with pytest.raises(ConfigError, match="is damaged, and can't tell whether checkpoint.resume ="):
            run_folder.begin(tmp_path, ALONE, resume)
    assert (tmp_path / "run.json").read_bytes() == content
    assert run_folder.begin(tmp_path, ALONE, "auto") == "auto"


def test_another_secret_is_another_launch_also_in_the_same_slurm_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = []
    for secret, world in [("a", "world 1"), ("a", "world 2"), ("b", "world 1"), ("c", "")]:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", secret)
        monkeypatch.setenv("TORCHTITAN_LITE_WORLD", world)
        if not world:  # under torchrun
            monkeypatch.delenv("TORCHTITAN_LITE_WORLD")
        found.append(run_folder.begin(tmp_path, ALONE, "never"))
        (tmp_path / "run.json").write_bytes(run_folder.accepted(tmp_path, 0, found[-1], {}))
    assert found == ["never", "auto", "never", "auto"]


@pytest.mark.extended
def test_a_requeued_job_resumes_from_its_checkpoint(run: Path, text: Path, tmp_path: Path) -> None:
    longer = {"train__steps": 14}
    same = command(text, tmp_path, checkpoint__resume="step-2", **longer)
    job = {"SLURM_JOB_ID": "7"}
    succeeded(ranks(1, *same, env=job, fault="term:0:5"))
    assert about(run)["status"] == "preempted"
    aside = set_aside(run)
    # a command of somebody else that is refused in between does not change that, nor does one that goes on
    assert ranks(1, *same, "--train.seq_len=16").returncode == 2
    succeeded(ranks(1, *command(text, tmp_path, **longer), fault="term:0:8"))
    left = about(run)["step"]
    assert 8 <= left < 14
    output = succeeded(ranks(1, *same, env=job))
    assert f"resumed after step {left}" in output
    assert set_aside(run) == aside
    other = succeeded(ranks(1, *same, "--checkpoint.resume=step-4", env=job))
    assert "resumed after step 4" in other, "another value is another command"


# --- the status of an attempt -----------------------------------------------------------------------------------


def test_a_status_belongs_to_its_attempt(run: Path, text: Path, tmp_path: Path) -> None:
    first = about(run)
    assert (first["status"], first["step"]) == ("complete", 8)
    refused = ranks(1, *command(text, tmp_path, train__seq_len=16), env={"TORCHTITAN_LITE_ATTEMPT": "7-1"})
    assert refused.returncode == 2
    second = about(run)
    why = second.pop("refused")
    assert second == first, "the run is as it was"
    assert why["attempt"] == "7-1"
    assert "train.seq_len is 32 in the checkpoint and 16 here" in why["message"]
    assert table(run).split()[-1] == "complete", table(run)
    said = succeeded(python(str(run), script="-m torchtitan_lite.status"))
    assert f"run     {run}: complete" in said
    assert "a command was refused, the run is as it was: " in said
    assert ranks(1, *command(text, tmp_path), fault="kill:0:0:hash").returncode != 0
    third = about(run)
    assert third["status"] == "complete"
    assert third["starting"]["attempt"] not in ("7-1", first["attempt"])
    assert table(run).split()[-1] == "complete", table(run)
    succeeded(ranks(1, *command(text, tmp_path)))
    assert about(run)["status"] == "complete", "there was nothing left to do"
    assert about(run)["attempt"] not in ("7-1", first["attempt"], third["starting"]["attempt"])
    assert not {"refused", "starting"} & about(run).keys()


def test_an_error_of_ours_is_a_failed_attempt_too(run: Path, text: Path, tmp_path: Path) -> None:
    result = ranks(1, *command(text, tmp_path, train__steps=12), fault="raise:0:0:hash")
    assert "Traceback" in result.stderr
    assert about(run)["status"] == "complete", "no step has been made"
    assert "a bug in somebody's loader" in about(run)["refused"]["message"]


@pytest.mark.parametrize("status", ["complete", "running"])
def test_all_ranks_of_an_attempt_report_one_refusal(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies while it loads: each of the others writes it, in any order."""
    monkeypatch.setattr(run_folder, "from_rank0", lambda value: value)
    monkeypatch.setattr(run_folder, "from_all_ranks", lambda value: [value])
    first = {"status": status, "step": 8}
    (tmp_path / "run.json").write_text(json.dumps(first))
    world = World(0, 3, torch.device("cpu"), 1)
    run_folder.begin(tmp_path, world, "auto")
    run_folder.stand_in(tmp_path, 0, "rank 1 died")
    run_folder.write_status(tmp_path, world, "failed", None, "lost rank 1")
    run_folder.stand_in(tmp_path, 0, "lost rank 1")
    assert about(tmp_path).pop("refused")["message"] == "rank 1 died"
    assert {key: about(tmp_path)[key] for key in first} == first


def test_a_command_that_finds_the_folder_in_use_leaves_the_status_alone(run: Path, text: Path, tmp_path: Path) -> None:
    before = (run / "run.json").read_bytes()
    with FileLock(run / ".lock"):
        assert ranks(1, *command(text, tmp_path)).returncode == 1  # the same command may work later
    assert (run / "run.json").read_bytes() == before


def test_stacks_of_an_earlier_attempt_are_kept(run: Path, text: Path, tmp_path: Path) -> None:
    """A restart must not remove files that the previous attempt's error names."""
    stacks = run / "stacks"
    stacks.mkdir()
    (stacks / "rank-0.txt").write_text("Timeout (0:00:08)!\nwhere it hung\n")
    succeeded(ranks(1, *command(text, tmp_path, train__steps=9)))
    assert (stacks / "rank-0.txt").read_text() == "Timeout (0:00:08)!\nwhere it hung\n"
    assert os.listdir(stacks) == ["rank-0.txt"]


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


def test_a_file_that_can_t_be_replaced_leaves_the_checkpoints_alone(run: Path, text: Path, tmp_path: Path) -> None:
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()
    result = ranks(1, *command(text, tmp_path, checkpoint__resume="never"))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "config.toml can't be written: it is a folder" in result.stderr
    assert set_aside(run) == []
    assert not list(run.glob(".*.new"))


def test_a_run_json_that_can_t_be_read_refuses_the_attempt(run: Path, text: Path, tmp_path: Path) -> None:
    """run.json decides whether checkpoints may be set aside, so an unreadable one is not treated as empty."""
    (run / "run.json").unlink()
    (run / "run.json").mkdir()
    result = ranks(1, *command(text, tmp_path, checkpoint__resume="never"))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "run.json can't be read: Is a directory" in result.stderr
    assert set_aside(run) == []


def test_a_refused_command_leaves_no_stacks(run: Path, text: Path, tmp_path: Path) -> None:
    assert ranks(1, *command(text, tmp_path, train__steps=12, train__seq_len=16)).returncode == 2
    assert not (run / "stacks").exists()
