"""optim.ema_decay: the average is that of its formula on any mesh, in any checkpoint, and changes nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpointing.reload_worker import MESHES, fsdp
from tests.helpers import (
    assert_same_end,
    checkpoint,
    forget_after,
    losses,
    python,
    ranks,
    records,
    run_distributed,
    succeeded,
    tensors,
    tiny,
)
from tests.optim.on_ranks import DECAY, FROZEN, OPTIMIZERS, TIED, after, follow_averages, load_averages
from torchtitan_lite.config.schema import Config, OptimConfig
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.optim.average import averaged
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.tools.estimate.simulate import OPTIMIZER, simulate
from torchtitan_lite.tools.report import runs as report_runs

EMA = {"optim__ema_decay": DECAY}
WAY = {
    "train__steps": 4,
    "checkpoint__every": 1,
    "checkpoint__state_dict": "sharded",
    "checkpoint__api": "dcp",
}


@pytest.mark.parametrize("mesh", ["2x2", pytest.param("3c", marks=pytest.mark.extended)])
def test_it_follows_the_formula_on_any_mesh_bit_for_bit(mesh: str) -> None:
    """With uneven and empty shards, copies, tied and frozen parameters, every optimizer, and a withheld update.

    `plan` counts its memory.
    """
    n, _ = MESHES[mesh]
    measured = run_distributed(follow_averages, n, mesh)[0]
    for label in ("adamw", "muon"):
        values = {"freeze": [FROZEN], "ema_decay": DECAY, "lr": 0.01} | OPTIMIZERS[label]
        model = TIED.model_dump() | {"size": "1M"}
        keys = {"model": model, "optim": values, "train": {"seq_len": 8}, "fsdp": fsdp(mesh)}
        assert simulate(Config.model_validate(keys), n, 517, on_gpu=False).peak[OPTIMIZER] == measured[label]


@pytest.mark.parametrize("values", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_loop_of_ones_own_averages_also_after_its_state_was_loaded(values: dict[str, Any]) -> None:
    """Through `ttl.build_optimizer` no FiniteGuard sets the number of the step."""

    def built() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        model = nn.Linear(3, 4, bias=False)
        config = OptimConfig.model_validate({"ema_decay": DECAY, "lr": 0.1} | values)
        return model.get_parameter("weight"), build_optimizer(model, config)

    weight, optimizer = built()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # it wraps the step
    mean = weight.detach().clone()
    gradients = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    for step, gradient in enumerate(gradients, start=1):
        if step == 4:
            kept, saved = weight.detach().clone(), optimizer.state_dict()
            weight, optimizer = built()
            optimizer.load_state_dict(saved)
            with torch.no_grad():
                weight.copy_(kept)
        weight.grad = gradient.clone()
        optimizer.step()
        mean = after(mean, weight.detach().clone(), step)
        assert optimizer.state[weight]["ema"].equal(mean), step
    last = weight.detach().clone()
    with pytest.raises(KeyError), averaged(optimizer):  # noqa: PT012
        assert weight.equal(mean)
        raise KeyError
    assert weight.equal(last)
    assert not mean.equal(weight)


def follows(run: Path, start: int, end: int) -> None:
    """Compare the averages in the checkpoints of a run with the formula; at its start there may be none."""
    saved = [tensors(checkpoint(run, step)) for step in range(start, end + 1)]
    names = [name for name in saved[-1] if f"state.{name}.ema" in saved[-1]]
    assert names
    for name in names:
        mean = saved[0].get(f"state.{name}.ema", saved[0][name])
        for step, later in enumerate(saved[1:], start=start + 1):
            mean = after(mean, later[name], step)
        assert saved[-1][f"state.{name}.ema"].equal(mean), name


@pytest.mark.extended
def test_a_resume_is_bitwise_and_changes_its_world_size(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", **EMA | WAY, eval__every=3)
    run, straight = tmp_path / "run", tmp_path / "straight"
    assert "eval    step 3  ema loss" in succeeded(ranks(2, *command))
    follows(run, 1, 4)
    succeeded(ranks(2, *command, "--run.name=plain", "--optim.ema_decay=0"))
    assert losses(run) == losses(tmp_path / "plain"), "it changes nothing else"
    scores = {record["step"]: record for record in records(run) if "ema_val_loss" in record}
    assert list(scores) == [3, 4]
    raw = {record["step"]: record for record in records(run) if "val_loss" in record}
    for step, record in scores.items():  # averages are closer to the initial weights
        assert 0 < record["ema_val_loss"] - raw[step]["val_loss"] < 0.5
        assert record["ema_val_bits_per_byte"] > raw[step]["val_bits_per_byte"]
    shutil.copytree(run, straight)
    for n in (2, 3):
        forget_after(run, 2)
        assert "resumed after step 2" in succeeded(ranks(n, *command))
        follows(run, 2, 4)
        if n == 2:
            assert_same_end(run, straight, 4)
    assert [record["step"] for record in report_runs.read_run(run).having("ema_val_loss")] == [3, 4]


def test_it_may_begin_or_end_with_a_load_in_all_ways_of_saving(tmp_path: Path) -> None:
    run_distributed(load_averages, 2, tmp_path)


def test_the_average_can_be_exported_scored_and_used(text: Path, tmp_path: Path) -> None:
    more = EMA | {"train__steps": 3, "eval__every": 0, "optim__freeze": '["pos_embeddings.*"]'}
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="run", **more)))
    run = tmp_path / "run"
    saved = tensors(checkpoint(run, 3))
    averages = {name: saved[f"state.{name}.ema"] for name in saved if f"state.{name}.ema" in saved}
    expected = saved | averages
    assert 0 < len(averages) < len(load_file(checkpoint(run, 3) / "model.safetensors"))
    found = hf.read_weights(checkpoint(run, 3), ema=True)
    assert all(found[name].equal(expected[name]) for name in found)
    out = tmp_path / "export run"
    succeeded(python("export", str(run), str(out), "--ema", script="checkpoint.py"))
    assert load_file(out / "model.safetensors")["transformer.wte.weight"].equal(expected["tok_embeddings.weight"])
    succeeded(python(str(run), "--prompt=a", "--ema", "--max-tokens=2", script="-m torchtitan_lite.generate"))
    scores = []
    for flags in ([], ["--ema"]):
        arguments = str(run), "--documents=1", "--json", str(tmp_path / "scores.json"), *flags
        succeeded(python(*arguments, script="-m torchtitan_lite.evaluate"))
        scores.append(json.loads((tmp_path / "scores.json").read_text())["models"][0]["texts"])
    assert scores[0] != scores[1]
