"""Profiles, trackers, and MFU in the step line."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import train
from tests.helpers import losses, ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config, LogConfig, ProfileConfig
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.run import trackers
from torchtitan_lite.run.metrics import Log
from torchtitan_lite.run.profiler import Profile


def scalars_of(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_tensorboard_has_each_step_once_also_after_a_resume(text: Path, tmp_path: Path) -> None:
    """With a profile of both ranks in the second attempt, which changes no loss."""
    run, command = tmp_path / "run", tiny(text, tmp_path, run__name="run", train__steps=8, checkpoint__every=4)
    command += ["--eval.every=4", '--log.trackers=["tensorboard"]']
    result = ranks(2, *command, fault="kill:0:8")  # 5, 6 and 7 are in the files, and come again
    assert result.returncode != 0
    before = losses(run)
    said = succeeded(ranks(2, *command, "--profile.steps=[6, 7]", "--profile.ranks=[0, 1]", "--spike.window=9"))
    assert said.count("spike.window = 9 needs") == 1, "a note is said by one rank"
    assert "resumed after step 4" in said
    assert {step: losses(run)[step] for step in before} == before
    assert before.keys() == {*range(1, 8)}
    files = "rank-N.json.gz for ui.perfetto.dev, operators-rank-N.txt (N = 0, 1)"
    assert f"\nprofile steps 6 to 7 are in {run / 'profile'}: {files}\n" in said
    _, table, _, trace = sorted((run / "profile").iterdir())
    assert (table.name, trace.name) == ("operators-rank-1.txt", "rank-1.json.gz")
    names = [str(event.get("name")) for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert table.read_text().count("\n") > 25 * ("aten::" in table.read_text()) > 0
    ours: dict[str, dict[int, float]] = {}
    for record in records(run):
        for key, value in trackers.scalars(record).items():
            ours.setdefault(key, {})[record["step"]] = value
    theirs = {key: scalars_of(run / "tensorboard", key) for key in ours.keys() - {"attempt"}}
    files_of = sorted((run / "tensorboard").iterdir())  # of rank 0, in two attempts; the config is there once
    assert [b"optim.lr = 0.004" in file.read_bytes() for file in files_of] == [True, False]
    assert [step for step, _ in theirs["loss"]] == list(range(1, 9))
    assert {key: dict(values) for key, values in theirs.items()} == {key: pytest.approx(ours[key]) for key in theirs}


@pytest.mark.extended
def test_wandb_offline_keeps_its_run(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", checkpoint__every=5, eval__every=0)
    command += ['--log.trackers=["wandb"]']
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    run = tmp_path / "run"
    succeeded(ranks(1, *command, fault="term:0:7", env=env))
    name = (run / "wandb-id.txt").read_text().strip()
    succeeded(ranks(1, *command, env=env))
    assert (run / "wandb-id.txt").read_text().strip() == name
    parts = [folder.name for folder in (run / "wandb").glob("offline-run-*")]
    assert len(parts) == 2
    assert all(part.endswith(name) for part in parts), "both are parts of one run"
    for part in parts:
        (file,) = (run / "wandb" / part).glob("*.wandb")
        assert b"train/grad_norm" in file.read_bytes()


@pytest.mark.parametrize("when", ["opens", "writes", "closes"])
def test_a_tracker_that_fails_is_reported_once(
    when: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fails = Mock(side_effect=SystemExit("no licence"))
    made = trackers.Tracker(fails if when == "writes" else Mock(), fails)
    monkeypatch.setattr(trackers, "tensorboard", fails if when == "opens" else Mock(return_value=made))
    other = Mock(write=Mock(side_effect=dict.clear))
    monkeypatch.setattr(trackers, "weights_and_biases", Mock(return_value=other))
    opened = Log(tmp_path, enabled=True)
    opened.track(LogConfig(trackers=["wandb", "tensorboard"]), TrainState())
    for file in ("samples.jsonl", "metrics.jsonl", "metrics.jsonl"):
        opened.record(values := {"step": 1, "loss": 10**400}, file)
    opened.close()
    opened.close()
    complaint = "log.trackers: tensorboard failed: no licence; training continues without it\n"
    assert capfd.readouterr().err == complaint
    assert (other.write.call_count, other.close.call_count, len(values)) == (2, 2, 2), "the other one goes on"


def test_a_profile_that_can_not_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "profile").touch()
    profile = Profile(ProfileConfig(steps=[2, 4]), tmp_path, Process(0, 1, torch.device("cpu"), 1))
    profile.start(2)
    assert profile.stop(2) == ""
    assert profile.stop(3, last=True).startswith(f"profile {tmp_path / 'profile'} can't be written: ")


@pytest.mark.parametrize(("rank", "given", "steps", "expected"), [
    (0, [], (1, 2, 3, 4), ["state", "all", "memory-rank-0.pickle", None]),
    (28, [], (3,), ["state", None]),  # a resume behind the first of the profiled steps
    (5, [5], (2, 3), ["state", "all", "memory-rank-5.pickle", None]),
    (32, [], (1, 2, 3, 4), []),  # of the ninth machine
    (1, [], (1, 2, 3, 4), []),
])  # fmt: skip
def test_some_ranks_keep_the_stacks_of_memory_from_before_the_model_to_the_end_of_the_profile(
    rank: int,
    given: list[int],
    steps: Sequence[int],
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: calls.append(Path(file).name))
    config = Config(profile=ProfileConfig(steps=[2, 3], ranks=given, memory_snapshot=True))
    profile = Profile(config.profile, tmp_path, Process(rank, 64, torch.device("cuda"), 1, 4))
    for step in steps:
        profile.start(step)
        profile.stop(step)
    assert calls == expected
    monkeypatch.setattr("torchtitan_lite.run.profiler.Profile", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(train, "Watchdog", Mock())
    with pytest.raises(KeyboardInterrupt):  # before the mesh, which would fail without a process group
        train.build(config, *[Mock()] * 3)
