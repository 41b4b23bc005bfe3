"""plan, --inspect and --dry-run of an encoder-decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import python, ranks, succeeded, tiny
from tests.tools.memory import T5, VOCABULARY, config_with
from tests.tools.test_plan import counted_flops
from torchtitan_lite import plan
from torchtitan_lite.config.schema import Config
from torchtitan_lite.monitoring.mfu import DEVICES, flops_per_token
from torchtitan_lite.tools.estimate import simulate
from torchtitan_lite.tools.estimate.planned_run import make_plan


def config_of(world_size: int, **more: Any) -> Config:
    return config_with(T5 | {key.replace("__", "."): value for key, value in more.items()}, world_size)


@pytest.mark.parametrize("more", [{}, {"tie_embeddings": True, "scale_output": True}], ids=["untied", "tied"])
def test_flops_match_those_counted_by_torch(more: dict[str, Any]) -> None:
    """On the CPU, attention with a bias is two products; torch counts the efficient kernel's in another way."""
    values = {"family": "t5", "dim": 64, "n_heads": 4, "n_layers": 3, "n_decoder_layers": 2, "hidden_dim": 160} | more
    ones = torch.ones(2, 48, dtype=torch.int64)
    model, products = counted_flops(values, ones, ones[:, :32])
    # self-attention is counted as products, cross-attention, which has a kernel, is not
    scores = 12 * 64 * 2 * 32 * 48
    assert flops_per_token(model, 48, 32) == pytest.approx((products / 2 + scores) / 32, rel=0.02)


def test_a_gpu_does_not_store_the_scores() -> None:
    config = config_of(1, train__seq_len=512)
    kept = {on_gpu: simulate.simulate(config, 1, VOCABULARY, on_gpu=on_gpu).kept for on_gpu in (True, False)}
    heads, scores = 4 * config.model.n_heads, 512**2 * 4
    # CPU: the probabilities of two encoder blocks; GPU: the bias that both read
    assert kept[False] - kept[True] > heads * scores
    assert kept[True] > heads * scores


def test_the_collectives_are_those_of_both_stacks() -> None:
    """Each group is gathered in forward and in backward, but for the inputs, and the head, which stays."""
    config = config_of(2, model__n_layers=3, model__n_decoder_layers=2)
    (found,) = simulate.simulate(config, 2, VOCABULARY, on_gpu=False).collectives
    calls = {kind: sum(n for c, n in found.items() if c.kind == kind) for kind in {c.kind for c in found}}
    assert calls["all-gather, forward"] == 1 + 5 + 1
    assert calls["all-gather, backward"] == 5
    assert calls["reduce-scatter"] == 7


@pytest.mark.extended
def test_the_printed_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.family=t5", "--model.size=t5-v1_1-base", "--model.vocab_size=32128", "--train.seq_len=512"]
    words += ["--data.objective=span_corruption", "--fsdp.param_dtype=bfloat16", "--sample.every=0"]
    assert plan.main([*words, "--world-size=8"]) == 0
    out = capsys.readouterr().out
    assert "247,577,856 parameters" in out
    assert "at most 512 tokens and 114 targets" in out
    assert "FLOPs per token (of the encoder's inputs and the decoder's targets, by target)" in out
    assert f"fits: {DEVICES['h100'].memory_gib:.1f} GiB" in out


SHAPE: dict[str, Any] = {"model__family": "t5", "data__objective": "span_corruption", "model__n_decoder_layers": 1}


@pytest.mark.extended
def test_inspect_lists_the_groups_of_both_stacks(text: Path, tmp_path: Path) -> None:
    out = succeeded(python(*tiny(text, tmp_path, **SHAPE), "--inspect"))
    table = [line.split("  ")[0] for line in out.splitlines()[-7:]]
    assert table == [
        *("group", "tok_embeddings, encoder_bias, decoder_bias", "layers.0", "layers.1, encoder_norm", "layers.2"),
        *("norm, output", "total"),
    ]


@pytest.mark.extended
def test_a_dry_run_is_as_planned(text: Path, tmp_path: Path) -> None:
    values = {"model__dim": 128, "model__n_heads": 4, "train__seq_len": 128, "model__max_seq_len": 128}
    out = succeeded(ranks(2, *tiny(text, tmp_path, **SHAPE, **values), "--dry-run"))
    (line,) = (line for line in out.splitlines() if line.strip().startswith("total at the peak"))
    assert 0.9 < float(line.split()[-1]) < 1.1, out


@pytest.mark.extended
def test_a_plan_has_the_memory_of_the_z_loss() -> None:
    """Computed from all logits, it keeps more of them for backward."""
    for chunked, grows in ((False, True), (True, False)):
        off, on = (make_plan(config_of(1, train__z_loss=z, speed__chunked_loss=chunked), 1, None) for z in (0, 0.1))
        assert (sum(on.device_bytes.values()) > sum(off.device_bytes.values())) == grows
