"""Profiles, trackers, and MFU in the step line."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.helpers import losses, ranks, records, succeeded, tiny
from torchtitan_lite import models
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config, DataConfig, FsdpConfig, LogConfig, ModelConfig, RunConfig, TrainConfig
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.run import mfu, trackers
from torchtitan_lite.run.between_steps import peak_tokens_per_second
from torchtitan_lite.run.mfu import peak_flops


def scalars_of(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_tensorboard_has_each_step_once_also_after_a_resume(text: Path, tmp_path: Path) -> None:
    """With a profile of the second attempt: a trace for each rank, which changes no loss."""
    run, command = tmp_path / "run", tiny(text, tmp_path, run__name="run", train__steps=8, checkpoint__every=4)
    command += ["--eval.every=4", '--log.trackers=["tensorboard"]']
    result = ranks(2, *command, fault="kill:0:8")  # 5, 6 and 7 are in the files, and come again
    assert result.returncode != 0
    before = losses(run)
    said = succeeded(ranks(2, *command, "--profile.steps=[6, 7]"))
    assert "resumed after step 4" in said
    assert {step: losses(run)[step] for step in before} == before
    assert before.keys() == {*range(1, 8)}
    files = "rank-N.json.gz for ui.perfetto.dev, operators-rank-N.txt"
    assert f"\nprofile steps 6 to 7 are in {run / 'profile'}: {files}\n" in said
    for rank in (0, 1):
        trace = gzip.decompress((run / f"profile/rank-{rank}.json.gz").read_bytes())
        names = [str(event.get("name")) for event in json.loads(trace)["traceEvents"]]
        assert names.count("Optimizer.step#AdamW.step") == 2
        assert "aten::" in (run / f"profile/operators-rank-{rank}.txt").read_text()
    ours = [(r["step"], r["loss"]) for r in records(run) if "loss" in r]
    theirs = scalars_of(run / "tensorboard", "loss")
    assert [step for step, _ in theirs] == [step for step, _ in ours] == list(range(1, 9))
    assert [value for _, value in theirs] == pytest.approx([value for _, value in ours])
    assert len(scalars_of(run / "tensorboard", "val_loss")) == 2


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


def test_wandb_has_one_run_with_the_whole_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stand-in for W&B: the first attempt makes its run, the second one goes on with it."""
    wandb = Mock(init=Mock(return_value=Mock(id="its-id")))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    state = TrainState(config={"optim.lr": 0.5, "log.every": 3})
    for name in (None, "its-id"):
        tracker = trackers.weights_and_biases(LogConfig(wandb_project="mine"), tmp_path, state)
        expected = {"project": "mine", "name": tmp_path.name, "id": name, "resume": "allow", "dir": str(tmp_path)}
        assert wandb.init.call_args.kwargs == expected | {"config": state.config}
    tracker.write({"step": 3, "loss": 2, "time": 9.5})
    wandb.init.return_value.log.assert_called_once_with({"train/loss": 2.0}, step=3)


def test_a_tracker_gets_the_numbers_by_group() -> None:
    values = {"step": 3, "time": 9.5, "loss": 2, "grad_norm": None, "attempt": 1, "sources": {"a": 1}, "on": True}
    assert trackers.scalars(values) == {"loss": 2.0, "attempt": 1.0}
    assert {name: trackers.grouped(name) for name in GROUPED} == GROUPED


GROUPED = {
    **{"loss": "train/loss", "lr": "train/lr", "seconds": "time/seconds", "mfu": "time/mfu"},
    **{"tokens_per_second": "time/tokens_per_second", "save_s": "time/save_s", "task_s": "time/task_s"},
    **{"val_loss": "val/loss", "ema_val_loss": "val/ema_loss", "val_bits_per_byte": "val/bits_per_byte"},
    **{"unigram_bits_per_byte": "val/unigram_bits_per_byte", "eval_samples": "val/eval_samples"},
    **{"task/x": "task/x", "task_stderr/x": "task/stderr/x", "task/in_s": "task/in_s"},
}


@pytest.mark.parametrize("when", ["opens", "writes", "closes"])
def test_a_tracker_that_fails_is_reported_once(
    when: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fails = Mock(side_effect=SystemExit("no licence"))
    made = trackers.Tracker(fails if when == "writes" else Mock(), fails)
    monkeypatch.setattr(trackers, "tensorboard", fails if when == "opens" else Mock(return_value=made))
    opened = trackers.Trackers(LogConfig(trackers=["tensorboard"]), tmp_path, TrainState())
    for _ in range(2):
        opened.record({"step": 1, "loss": 10**400})
    opened.close()
    opened.close()
    complaint = "log.trackers: tensorboard failed: no licence; training continues without it\n"
    assert capfd.readouterr().err == complaint


def test_mfu_is_logged_only_if_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Process(0, 4, torch.device("cpu"), 1)
    assert peak_flops(Config(), cpu) == 0
    gpu = Process(0, 4, torch.device("cuda"), 1)
    for name, expected in {"NVIDIA H100 80GB HBM3": 4 * mfu.DEVICES["h100"].half_flops, "Some GPU": 0.0}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        config = Config(fsdp=FsdpConfig(param_dtype="bfloat16"))
        assert peak_flops(config, gpu) == expected
        assert len(mfu.start_lines(config, gpu)) == (not expected)
        own = config.model_copy(update={"run": RunConfig(peak_tflops=100)})
        assert peak_flops(own, gpu) == peak_flops(own, cpu) == 4e14
        assert not mfu.start_lines(own, gpu)


@pytest.mark.parametrize(("device", "dtype", "tf32", "expected"), [
    ("h100", "bfloat16", False, 989e12), ("h100", "float16", True, 989e12), ("h100", "float32", False, 67e12),
    ("h100", "float32", True, 494.5e12), ("mi300x", "float32", True, 163.4e12), ("t4", "float32", True, 8.1e12),
    ("t4", "bfloat16", False, 8.1e12), ("t4", "float16", False, 65e12),
])  # fmt: skip
def test_the_peak_is_that_of_the_dtype(device: str, dtype: Any, tf32: bool, expected: float) -> None:
    """A T4 has neither bfloat16 nor TF32, and an MI300X no TF32 in torch."""
    config = Config(fsdp=FsdpConfig(param_dtype=dtype), run=RunConfig(tf32=tf32))
    assert mfu.DEVICES[device].computing(config).peak_flops(dtype) == expected


LLAMA: dict[str, Any] = {"family": "llama", "dim": 64, "n_heads": 4, "head_dim": 8, "n_layers": 3, "hidden_dim": 100}
ATTENTION, FEED_FORWARD = 4 * 64 * 32, 3 * 64 * 100
EXPERTS = LLAMA | {"family": "qwen3_moe", "n_experts": 4, "experts_per_token": 1}
PATTERN = {"window": 10, "layer_pattern": ["window", "full", "window"]}


@pytest.mark.parametrize(("values", "matrices", "seen"), [
    (LLAMA, 3 * (ATTENTION + FEED_FORWARD) + 97 * 64, 3 * 40),
    (LLAMA | PATTERN, 3 * (ATTENTION + FEED_FORWARD) + 97 * 64, 10 + 40 + 10),
    (EXPERTS, 3 * (ATTENTION + 4 * 64 + FEED_FORWARD) + 97 * 64, 3 * 40),
])  # fmt: skip
def test_the_flops_of_a_token(values: dict[str, Any], matrices: int, seen: int) -> None:
    """Without embeddings, idle experts and what is beyond a window. Of the peak they are the tokens per second."""
    of_model = ModelConfig.model_validate(values | {"max_seq_len": 64})
    config = Config(model=of_model, run=RunConfig(peak_tflops=2), train=TrainConfig(seq_len=40))
    with torch.device("meta"):
        model = models.build(config.model, 97)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert mfu.flops_per_token(model, 40) == 6 * (matrices + vectors) + 12 * 4 * 8 * seen
    process = Process(0, 3, torch.device("cpu"), 1)
    expected = 3 * 2e12 / mfu.flops_per_token(model, 40)
    assert peak_tokens_per_second(config, model, process) == pytest.approx(expected)
    for other in ({"run": RunConfig()}, {"data": DataConfig(objective="pairs")}):
        assert peak_tokens_per_second(config.model_copy(update=other), model, process) == 0


def test_the_flops_of_an_encoder_decoder() -> None:
    """Of 30 inputs and 7 targets, for each target. The keys and values of cross-attention are of the inputs."""
    shape = {"family": "t5", "dim": 64, "n_heads": 4, "head_dim": 8, "n_layers": 3, "n_decoder_layers": 2}
    config = ModelConfig.model_validate({**shape, "hidden_dim": 100, "gated": False, "max_seq_len": 64})
    with torch.device("meta"):
        model = models.build(config, 97)
    block, cross = 4 * 64 * 32 + 2 * 64 * 100, 2 * 64 * 32
    matrices = 30 * (3 * block + 2 * cross) + 7 * (2 * (block + cross) + 97 * 64)
    attention = 12 * 4 * 8 * (3 * 30 * 30 + 2 * (7 * 7 + 30 * 7))
    # the vectors of norms count, too, and the tables of positions
    assert mfu.flops_per_token(model, 30, 7) == pytest.approx((6 * matrices + attention) / 7, rel=0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "said"),
    [
        ("NVIDIA H100 80GB HBM3", "float32", False, "at 67 of 989 TFLOP/s; --mixed-precision or run.tf32 = true is"),
        ("Some GPU", "float32", False, "without tensor cores; --mixed-precision or run.tf32 = true is faster"),
        ("AMD Instinct MI300X", "float32", False, "at 163.4 of 1307.4 TFLOP/s; --mixed-precision is faster"),
        ("NVIDIA H100 80GB HBM3", "float32", True, ""),
        ("NVIDIA H100 80GB HBM3", "bfloat16", False, ""),
        ("Tesla T4", "bfloat16", False, 'Tesla T4 emulates bfloat16, no faster than float32; fsdp.param_dtype = "fl'),
        ("Tesla T4", "float32", True, 'at 8.1 of 65 TFLOP/s; fsdp.param_dtype = "float16" is faster'),
        ("Tesla T4", "float16", False, ""),
    ],
)
def test_the_start_names_a_dtype_that_is_slow_on_the_gpu(
    name: str, dtype: Any, tf32: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = (7, 5) if "T4" in name else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = Config(fsdp=FsdpConfig(param_dtype=dtype), run=RunConfig(tf32=tf32, peak_tflops=1))
    lines = mfu.start_lines(config, Process(0, 1, torch.device("cuda"), 1))
    assert len(lines) == bool(said)
    assert not said or said in lines[0]
