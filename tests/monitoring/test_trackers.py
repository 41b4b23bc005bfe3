"""Profiles, trackers, and MFU in the step line."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import losses, ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config, FsdpConfig, LogConfig
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.monitoring import mfu, trackers
from torchtitan_lite.monitoring.console import step_line
from torchtitan_lite.monitoring.mfu import peak_flops


@pytest.mark.extended
def test_a_profile_has_a_trace_per_rank_and_does_not_change_training(text: Path, tmp_path: Path) -> None:
    """A trace and a table for each rank, and the same training as without."""
    command = tiny(text, tmp_path, train__steps=6, run__name="run", eval__every=0)
    output = succeeded(ranks(2, *command, "--profile.steps=[3, 4]"))
    folder = tmp_path / "run/profile"
    assert f"profile steps 3 to 4 are in {folder}" in output
    for rank in (0, 1):
        events = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))["traceEvents"]
        names = [event.get("name") for event in events]
        assert names.count("Optimizer.step#AdamW.step") == 2
        assert any("all_gather" in str(name) for name in names)
        assert "aten::" in (folder / f"operators-rank-{rank}.txt").read_text()
    succeeded(ranks(2, *command, "--run.name=without"))
    assert losses(tmp_path / "run") == losses(tmp_path / "without")


def scalars_of(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


@pytest.mark.extended
def test_tensorboard_has_each_step_once_also_after_a_resume(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", checkpoint__every=5, eval__every=10)
    trackers = '--log.trackers=["tensorboard"]'
    result = ranks(1, *command, trackers, fault="kill:0:8")  # 6 and 7 are in the files, and come again
    assert result.returncode != 0
    assert "resumed after step 5" in succeeded(ranks(1, *command, trackers))
    run = tmp_path / "run"
    ours = [(r["step"], r["loss"]) for r in records(run) if "loss" in r]
    theirs = scalars_of(run / "tensorboard", "loss")
    assert [step for step, _ in theirs] == [step for step, _ in ours] == list(range(1, 21))
    assert [value for _, value in theirs] == pytest.approx([value for _, value in ours])
    assert len(scalars_of(run / "tensorboard", "val_loss")) == 2


@pytest.mark.extended
def test_wandb_offline_keeps_its_run(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", checkpoint__every=5, eval__every=0)
    command += ['--log.trackers=["wandb"]']
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    run = tmp_path / "run"
    succeeded(ranks(1, *command, fault="term:0:7", env=env))
    name, names = (run / "wandb-id.txt").read_text().split()
    assert names == "grouped"
    succeeded(ranks(1, *command, env=env))
    assert (run / "wandb-id.txt").read_text().split() == [name, names]
    parts = [folder.name for folder in (run / "wandb").glob("offline-run-*")]
    assert len(parts) == 2
    assert all(part.endswith(name) for part in parts), "both are parts of one run"
    for part in parts:
        (file,) = (run / "wandb" / part).glob("*.wandb")
        assert b"train/grad_norm" in file.read_bytes()


class Run:
    """Stands for a run of the package wandb."""

    def __init__(self, sent: list[tuple[int, dict[str, float]]]) -> None:
        self.id, self.sent = "abc", sent

    def log(self, values: dict[str, float], step: int) -> None:
        self.sent.append((step, values))

    def finish(self) -> None:
        pass


def test_wandb_names_are_in_groups_unless_the_run_began_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: Run(sent)))

    def logged(values: dict[str, Any]) -> list[str]:
        found = trackers.Trackers(LogConfig(trackers=["wandb"]), tmp_path, storage.TrainState())
        found.record({"step": 7, **values})
        found.close()
        step, scalars = sent.pop()
        assert step == 7
        return list(scalars)

    step = {"loss": 1.0, "rank_losses": [1.0], "lr": 1.0, "tokens_per_second": 1.0, "seconds": 1.0, "data_s": 0.0}
    assert logged(step) == ["train/loss", "train/lr", "time/tokens_per_second", "time/seconds", "time/data_s"]
    score = {"val_loss": 1.0, "val_bits_per_byte/web": 1.0, "unigram_bits_per_byte": 1.0, "eval_s": 1.0, "time": 1.7e9}
    assert logged(score) == ["val/loss", "val/bits_per_byte/web", "val/unigram_bits_per_byte", "time/eval_s"]
    others = {"ema_val_loss": 1.0, "task/brackets": 1.0, "task_stderr/brackets": 1.0, "save_s": 1.0, "bytes": 5}
    assert logged(others) == ["val/ema_loss", "task/brackets", "task/stderr/brackets", "time/save_s", "train/bytes"]
    (tmp_path / "wandb-id.txt").write_text("abc\n")  # of an older version
    assert logged(step)[:2] == ["loss", "lr"], "its series continue"
    assert logged(step)[:2] == ["loss", "lr"], "and after another resume"
    (tmp_path / "wandb-id.txt").write_text("")  # the disk was full
    assert logged(step)[:2] == ["train/loss", "train/lr"]


def test_a_failing_tracker_is_reported_and_training_continues(text: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("a file where the folder should be")
    result = ranks(1, *tiny(text, tmp_path, run__name="run", train__steps=4), '--log.trackers=["tensorboard"]')
    assert "log.trackers: tensorboard failed: " in result.stderr
    assert "step    4/4" in succeeded(result)


def test_a_tracker_that_is_not_installed_is_a_mistake_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    given = {"log.trackers": load.ConfigValue(["wandb"], "command line")}
    with pytest.raises(ConfigError, match=r'run pip install -e "\.\[wandb\]"'):
        load.load(None, given)


@pytest.mark.parametrize("steps", [[3], [4, 3], [0, 1]])
def test_an_invalid_range_of_steps_is_an_error(steps: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"profile\.steps"):
        load.load(None, {"profile.steps": load.ConfigValue(steps, "command line")})


RECORD: dict[str, Any] = {
    "step": 7,
    "loss": 2.0,
    "mean_loss": 2.0,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "tokens_per_second": 5000.0,
}


def test_mfu_is_logged_only_if_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    record = RECORD | {"peak_memory_gib": 1.0}
    assert "mfu" not in step_line(record, 10, 0.0, 1.0)
    assert "tok/s 5,000  mfu 41.3 %  mem" in step_line(record | {"mfu": 0.413}, 10, 0.0, 1.0)
    cpu = World(0, 4, torch.device("cpu"), 1)
    assert peak_flops(Config(), cpu) == 0
    gpu = World(0, 4, torch.device("cuda"), 1)
    for name, expected in {"NVIDIA H100 80GB HBM3": 4 * mfu.DEVICES["h100"].bf16_flops, "Some GPU": 0.0}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(Config(fsdp=FsdpConfig(param_dtype="bfloat16")), gpu) == expected
