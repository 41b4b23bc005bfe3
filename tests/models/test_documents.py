"""Attention that stays within documents: nothing of one reaches another, in both families and under all wrappers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_model import make
from torchtitan_lite.config.schema import ActivationCheckpointingConfig, CompileConfig, ModelConfig
from torchtitan_lite.distributed.recompute_and_compile import apply_activation_checkpointing, apply_compile
from torchtitan_lite.models import Transformer, gated_delta
from torchtitan_lite.models.masks import within_documents

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama", "n_kv_heads": 1, "qk_norm": True},
    "resformer": {"family": "resformer", "n_kv_heads": 1},
    "gemma3": {"family": "gemma3", "n_kv_heads": 1, "window": 3, "layer_pattern": ["window", "full"]},
    "hybrid": {"family": "olmo_hybrid", "n_kv_heads": 1, "layer_pattern": ["delta", "full"]},
    "windows": {"family": "llama", "n_kv_heads": 1, "window": 4, "layer_pattern": ["window", "nope"]},
}
TOKENS = torch.arange(3, 35).reshape(2, 16) % 61
# documents of 5, 3 and 8 tokens; one of 16
POSITIONS = torch.tensor([[*range(5), *range(3), *range(8)], [*range(16)]])


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some with the ends of two documents, and documents of several."""
    monkeypatch.setattr(gated_delta, "CHUNK", 6)


def of_family(family: str) -> Transformer:
    config = {"dim": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 16, **FAMILIES[family]}
    return make(ModelConfig.model_validate(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_is_as_if_it_were_alone(family: str) -> None:
    model = of_family(family)
    together = model(TOKENS, None, None, POSITIONS)
    for begin, end in ((0, 5), (5, 8), (8, 16)):
        alone = model(TOKENS[:1, begin:end])
        torch.testing.assert_close(together[:1, begin:end], alone)
    torch.testing.assert_close(together[1:], model(TOKENS[1:]))
    assert not torch.allclose(model(TOKENS)[0, 5:], together[0, 5:]), "without the mask the document before counts"


@pytest.mark.parametrize("family", ["gpt", "llama", "hybrid"])
@pytest.mark.parametrize("mode", ["none", "full", "selective", pytest.param("compiled", marks=pytest.mark.extended)])
def test_no_gradient_flows_between_documents(family: str, mode: str) -> None:
    model = of_family(family)
    apply_activation_checkpointing(
        model, ActivationCheckpointingConfig.model_validate({"mode": "none" if mode == "compiled" else mode})
    )
    if mode == "compiled":
        apply_compile(model, CompileConfig(enabled=True, backend="aot_eager"))
    kept: list[Tensor] = []
    model.tok_embeddings.register_forward_hook(lambda _module, _args, embedded: kept.append(embedded))
    targets = torch.full_like(TOKENS, -100)
    targets[0, 5:8] = 7
    (gradient,) = torch.autograd.grad(model(TOKENS, targets, None, POSITIONS), kept)
    assert gradient[0, 5:8].abs().min() > 0
    assert gradient[0, :5].abs().max() == gradient[0, 8:].abs().max() == gradient[1].abs().max() == 0


@pytest.mark.parametrize(
    ("length", "window"), [*((n, 0) for n in (16, 128, 300, 1024)), *((1000, n) for n in (1, 128, 129, 255, 256, 2000))]
)
def test_the_mask_for_gpus_is_what_create_block_mask_makes(length: int, window: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    generator = torch.Generator().manual_seed(length)
    begins = torch.rand(3, length, generator=generator) < torch.tensor([[0.0], [0.003], [0.1]])
    places = torch.arange(length).expand(3, length)
    positions = places - torch.where(begins, places, 0).cummax(1).values
    found = within_documents(positions, dense=False, window=window)
    dense = within_documents(positions, dense=True, window=window)[:, 0]
    assert window == 0 or dense.sum(-1).max() == min(window, length)
    expected = create_block_mask(lambda b, _, q, k: dense[b, q, k], 3, None, length, length, device="cpu")
    assert (found.seq_lengths, found.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)
    assert found.mask_mod(torch.arange(3)[:, None, None], 0, places[0, :, None], places[0]).equal(dense)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert ours.equal(theirs), name
    assert found.to_dense().equal(expected.to_dense())
