"""A resumed run equals an uninterrupted one, bit for bit: checkpoint APIs, optimizers, and what the bits depend on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import assert_same_end, checkpoint, forget_after, losses, ranks, records, succeeded, tensors, tiny
from torchtitan_lite.run import attempts
from torchtitan_lite.tools import load_model

LLAMA = {
    **{"model__family": "llama", "model__n_heads": 4, "model__n_kv_heads": 1, "model__hidden_dim": 50},
    **{"model__window": 9, "model__layer_pattern": "window,nope"},
}
HYBRID = {
    **{"model__family": "olmo_hybrid", "model__dim": 36, "model__n_heads": 3, "model__n_kv_heads": 1},
    **{"model__layer_pattern": "delta,full"},
}
SHARDED = {"checkpoint__state_dict": "sharded"}
DCP = {"checkpoint__api": "dcp"}
T5 = {
    **{"model__family": "t5", "model__head_dim": 5, "model__hidden_dim": 50, "model__n_layers": 3},
    "model__n_decoder_layers": 2,
    "data__objective": "span_corruption",
}
EXPERTS = {
    "model__family": "olmoe",
    "model__n_experts": 5,
    "model__hidden_dim": 50,
    "model__n_kv_heads": 2,
    "model__router_bias": True,
}
ONE_AT_A_TIME = {"train__micro_batch_size": 1}
BF16 = {"fsdp__param_dtype": "bfloat16"}
RECOMPUTED = {"activation_checkpointing__mode": "selective", "fsdp__explicit_prefetching": True}
# name -> mark, number of ranks and options. Sizes that don't divide by 2, accumulation, dropout where there is any, and
# a scaled loss that overflows and recovers
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dcp": ("", 2, HYBRID | DCP | BF16 | RECOMPUTED | {"model__tie_embeddings": True}),
    "dtensor, float16": ("extended", 2, {
        **ONE_AT_A_TIME, "model__dropout": 0.1, "fsdp__grad_sync": "last", "fsdp__param_dtype": "float16",
        "grad_scaler__init_scale": 2.0**20, "grad_scaler__growth_interval": 2,
    }),
    "muon, experts, averages": ("", 2, {"optim__name": "muon", "optim__ema_decay": 0.8, **SHARDED, **DCP, **EXPERTS}),
    "experts": ("extended", 2, EXPERTS | ONE_AT_A_TIME),
    "t5": ("extended", 2, T5 | SHARDED | DCP | BF16 | RECOMPUTED | {"model__dropout": 0.1}),
    "t5, v1.0": ("extended", 2, T5 | ONE_AT_A_TIME | {
        "model__gated": False, "model__tie_embeddings": True, "model__scale_output": True, "train__z_loss": 1e-4,
        "fsdp__grad_sync": "last",
    }),
    "float32": ("slow", 2, LLAMA),
    "sums in bfloat16": ("slow", 2, LLAMA | BF16 | {"fsdp__reduce_dtype": "bfloat16"}),
    "two copies": ("slow", 4, {"fsdp__dp_replicate": 2, "fsdp__grad_sync": "all_reduce_last", "model__dropout": 0.1}),
    "saved in the background": ("slow", 2, SHARDED | DCP | {"checkpoint__async_save": True, "model__dropout": 0.1}),
    "compiled": ("slow", 2, LLAMA | SHARDED | {"compile__enabled": True}),
    "compiled, recomputed": ("slow", 2, {"compile__enabled": True, "activation_checkpointing__mode": "full"}),
    "sgd": ("slow", 3, LLAMA | {"optim__name": "sgd", "optim__lr": 0.6, "fsdp__reshard_after_forward": False}),
}  # fmt: skip
SAMPLES = ["--sample.every=2", '--sample.prompts=["def ", "The"]', "--sample.max_tokens=8"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[getattr(pytest.mark, mark)] if mark else []) for name, (mark, *_) in RUNS.items()],
)
def test_8_steps_equal_4_steps_and_a_resume(name: str, text: Path, tmp_path: Path) -> None:
    _, n, more = RUNS[name]
    straight, run = tmp_path / "straight", tmp_path / "run"
    command = tiny(text, tmp_path, **{"train__steps": 8, "checkpoint__every": 2, "eval__every": 3, **more})
    # one run has samples only before the resume, the others only after it: they change nothing, bit for bit
    before, after = (SAMPLES, []) if name == "dtensor, float16" else ([], SAMPLES)
    succeeded(ranks(n, *command, "--run.name=straight", *before))
    shutil.copytree(straight, run)
    forget_after(run, 4)
    output = succeeded(ranks(n, *command, "--run.name=run", *after))
    assert [text for text in ("resumed after step 4", "\ndone    4 steps in ") if text not in output] == []
    assert "not bit for bit" not in output
    assert_same_end(run, straight, 8)
    assert len(records(run)) == len(records(straight)), "a step stands twice in metrics.jsonl"
    samples = attempts.records(run, "samples.jsonl")
    expected = [4, 6, 8] if after else [2, 4]  # later ones do not count
    assert [(s["step"], s["prompt"]) for s in samples] == [(at, p) for at in expected for p in ("def ", "The")]
    assert ('sample  step 8  "The" -> "' in output) == bool(after)

    first, last = (tensors(checkpoint(straight, step)) for step in (2, 8))
    assert not [key for key in last if first[key].equal(last[key])], "the comparison would hold trivially"
    assert losses(straight)[8][0] < losses(straight)[1][0] - 0.05
    if name == "muon, experts, averages":  # what scores and generates reads the biases of routers too
        loaded = dict(load_model.open_model(run, torch.device("cpu"), torch.bfloat16).model.named_buffers())
        biases = {key: bias for key, bias in loaded.items() if key.endswith("router.bias")}
        assert len(biases) == 2
        for key, bias in biases.items():
            assert bias.abs().sum() > 0
            assert bias.equal(last[key])
    if name == "dtensor, float16":  # a forgotten scale would show above
        skipped = {r["step"]: r["skipped_steps"] for r in records(straight) if "skipped_steps" in r}
        assert 0 < skipped[4] < skipped[8], skipped
        assert len({r["loss_scale"] for r in records(straight) if "loss_scale" in r}) > 1


def test_the_mean_loss_covers_the_steps_since_the_last_line(text: Path, tmp_path: Path) -> None:
    """Also if the run was preempted in between, or the world size has changed."""
    more = {"train__steps": 8, "eval__every": 0, "checkpoint__every": 3, "optim__schedule": "constant"}

    def command(name: str, every: int = 4) -> list[str]:
        return tiny(text, tmp_path, run__name=name, log__every=every, **more)

    def means(name: str) -> dict[int, float]:
        return {r["step"]: r["mean_loss"] for r in records(tmp_path / name) if "loss" in r}

    succeeded(ranks(1, *command("each", 1)))
    each = {step: loss for step, (loss, _) in losses(tmp_path / "each").items()}
    assert means("each") == pytest.approx(each)
    said = succeeded(ranks(1, *command("rare")))
    straight = means("rare")
    expected = {4: sum(each[s] for s in (1, 2, 3, 4)) / 4, 8: sum(each[s] for s in (5, 6, 7, 8)) / 4}
    assert straight == pytest.approx(expected)
    assert straight[8] != pytest.approx(each[8], abs=1e-4)
    assert f"step    8/8  loss {straight[8]:.4f}" in said

    succeeded(ranks(1, *command("stopped"), fault="term:0:5"))
    left = max(means("stopped"))
    assert 5 <= left < 8, "a line of its own"
    succeeded(ranks(1, *command("stopped")))
    again = means("stopped")
    assert again.pop(left) == pytest.approx(sum(each[s] for s in range(5, left + 1)) / (left - 4))
    assert again == straight

    shutil.copytree(tmp_path / "rare", tmp_path / "resized")
    forget_after(tmp_path / "resized", 6)
    succeeded(ranks(2, *command("resized")))
    assert means("resized") == pytest.approx(straight)
