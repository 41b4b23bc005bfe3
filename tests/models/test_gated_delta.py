"""Gated DeltaNet: both forms of the recurrence, its precision, initial values, and what optimizes its parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.huggingface.test_hf import TOKENS, config_of, ours
from tests.huggingface.test_parity import HYBRID as THEIR_HYBRID
from tests.huggingface.test_parity import difference, save_as_released
from tests.models.test_model import HYBRID, make
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import gated_delta
from torchtitan_lite.optim.groups import parameter_groups

transformers = pytest.importorskip("transformers")

B, T, H, K, V = 2, 150, 3, 7, 14


def inputs() -> tuple[Tensor, ...]:
    """q, k, v, g, b and S. The memory fades by half with a token, or hardly, and most corrections overshoot."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, state = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), normal(B, H, K, V)
    g, b = -(normal(B, T, H, 1) - 1).exp(), 2 * normal(B, T, H, 1).add(1).sigmoid()
    return gated_delta.unit(q) * K**-0.5, gated_delta.unit(k), v, g, b, state


def test_both_forms_are_the_recurrence_of_transformers() -> None:
    """Across chunks, from a memory that is not empty, to the last memory; the rule of theirs has both forms too."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as theirs

    q, k, v, g, b, state = inputs()
    given = (q * K**0.5, k, v, g[..., 0], b[..., 0])
    o, last = gated_delta.chunked(q, k, v, g, b, state, torch.zeros(1, T, dtype=torch.int64))
    outputs, memory = [], state
    for t in range(T):
        one, memory = gated_delta.step(q[:, t], k[:, t], v[:, t], g[:, t], b[:, t], memory)
        outputs.append(one)
    assert difference(o, torch.stack(outputs, 1)) < 2e-6
    assert difference(last, memory) < 2e-6
    for rule in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        expected, end = rule(*given, initial_state=state, output_final_state=True)
        assert difference(o, expected) < 2e-6
        assert difference(last, end) < 2e-6


def test_a_deep_model_differs_from_that_of_transformers_by_less_than_one_rounding(tmp_path: Path) -> None:
    """Of the embeddings, in their model: the norm of what a memory answers enlarges rounding errors.

    With layer_types as published, which is what a config.json without them means.
    """
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.OlmoHybridConfig(**THEIR_HYBRID)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        save_as_released(theirs, tmp_path)
        config = config_of(tmp_path)
        assert config.layer_kinds == ["delta", "delta", "delta", "full", "delta"]
        logits = theirs(TOKENS).logits
        found = difference(ours(config, hf.open_weights(tmp_path, config))(TOKENS), logits)
        theirs.model.embed_tokens.weight.mul_(1 + 2**-23 * torch.randn_like(theirs.model.embed_tokens.weight))
        assert found < difference(theirs(TOKENS).logits, logits) < 2e-5


def test_the_recurrence_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(HYBRID)
    expected = model(TOKENS[:, :16])
    seen: list[Tensor] = []
    rule = gated_delta.chunked

    def chunked(*args: Tensor) -> tuple[Tensor, Tensor]:
        seen.extend(args)
        return rule(*args)

    monkeypatch.setattr(gated_delta, "chunked", chunked)
    logits = model.bfloat16()(TOKENS[:, :16])
    assert logits.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in seen[:6]} == {torch.float32}
    assert difference(logits.float(), expected) < 0.02


def test_initial_rates_of_decay_are_spread_as_published() -> None:
    model = make(HYBRID.model_copy(update={"dim": 512, "n_heads": 128}))
    layer: Any = model.layers[0]
    rates = layer.delta.A_log.detach().exp()
    steps = torch.nn.functional.softplus(layer.delta.dt_bias.detach())
    assert 0 < rates.min() < 1
    assert 15 < rates.max() < 16
    assert rates.mean().item() == pytest.approx(8, rel=0.2)
    assert 0.001 <= steps.min() < 0.0015
    assert 0.07 < steps.max() <= 0.1
    assert steps.log().mean().item() == pytest.approx(torch.tensor([0.001, 0.1]).log().mean().item(), rel=0.05)
    assert layer.delta.conv_q.weight.std().item() == pytest.approx(0.5, rel=0.05)


def test_muon_takes_the_projections_and_only_matrices_decay() -> None:
    model = make(HYBRID)
    of = {parameter: name.partition("layers.0.delta.")[2] for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(name="muon", weight_decay=0.3))
    by_muon = {of[p] for group in groups if group["muon"] for p in group["params"]} - {""}
    decayed = {of[p] for group in groups if group["weight_decay"] for p in group["params"]} - {""}
    projections = {f"w{letter}.weight" for letter in "qkvabgo"}
    assert by_muon == projections
    assert decayed == projections | {f"conv_{letter}.weight" for letter in "qkv"}
    assert set(of.values()) - {""} - decayed == {"A_log", "dt_bias", "o_norm.weight"}
