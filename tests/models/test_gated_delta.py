"""Gated DeltaNet: both forms of the recurrence, and its precision."""

import pytest
import torch
from torch import Tensor

from tests.huggingface.test_hf import TOKENS
from tests.huggingface.test_parity import difference
from tests.models.test_model import HYBRID, make
from torchtitan_lite.models import gated_delta

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


def by_token(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """As in generation."""
    *given, memory = inputs
    outputs = []
    for t in range(T):
        q, k, v, g, b = (x[:, t : t + 1] for x in given)
        one, memory = gated_delta.chunked(q, k, v, g, b, memory, torch.zeros(1, 1).long())
        outputs.append(one)
    return torch.cat(outputs, 1), memory


def test_in_chunks_and_by_token_it_is_the_recurrence_of_transformers() -> None:
    """Across chunks, from a memory that is not empty, to the last memory; the rule of theirs has both forms too."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as theirs

    q, k, v, g, b, state = inputs()
    given = (q * K**0.5, k, v, g[..., 0], b[..., 0])
    o, last = gated_delta.chunked(q, k, v, g, b, state, torch.zeros(1, T, dtype=torch.int64))
    outputs, memory = by_token(q, k, v, g, b, state)
    assert difference(o, outputs) < 2e-6
    assert difference(last, memory) < 2e-6
    for rule in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        expected, end = rule(*given, initial_state=state, output_final_state=True)
        assert difference(o, expected) < 2e-6
        assert difference(last, end) < 2e-6


@pytest.mark.parametrize(("decay", "rate"), [(0.0, 2.0), (-1e4, 1.0), (-3.0, 0.0)])
def test_a_memory_that_never_fades_or_at_once_is_finite(decay: float, rate: float) -> None:
    """exp of the sums of these decays over a chunk overflows, above the diagonal. And a head's keys are all 0."""
    q, k, v, g, b, state = inputs()
    g, b = torch.full_like(g, decay).requires_grad_(), torch.full_like(b, rate)
    k = gated_delta.unit(torch.where(torch.arange(H)[:, None] == 0, 0.0, k))
    o, memory = gated_delta.chunked(q, k, v, g, b, state, torch.zeros(1, T, dtype=torch.int64))
    assert torch.autograd.grad(o.square().sum() + memory.sum(), g)[0].isfinite().all()
    torch.testing.assert_close((o, memory), by_token(q, k, v, g, b, state), rtol=1e-3, atol=1e-3)


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
