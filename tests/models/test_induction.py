"""model.induction_head: initial values from which a model soon predicts what followed the current token before."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_model import make
from torchtitan_lite import models
from torchtitan_lite.config.schema import ModelConfig

VOCABULARY, REPEATED = 256, 32
SIZES: dict[str, Any] = {"dim": 64, "n_heads": 4, "n_layers": 2, "qk_norm": True, "induction_head": True}


def built(**keys: Any) -> models.Transformer:
    return make(ModelConfig.model_validate(SIZES | keys), vocab_size=VOCABULARY)


def nats(model: models.Transformer, n: int, generator: torch.Generator) -> Tensor:
    """Of each token but the first, in n sequences of 32 tokens, which differ, and the same ones again: (n, 63)"""
    once = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:REPEATED] for _ in range(n)])
    tokens = torch.cat((once, once), dim=1)
    return F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


@pytest.mark.parametrize("keys", [
    {}, {"induction_head": False},
    pytest.param(
        {"family": "resformer", "mup_base_dim": 32, "n_kv_heads": 2, "n_layers": 3, "rope_theta": 5e5},
        marks=pytest.mark.extended,
    ),
])  # fmt: skip
def test_repetitions_are_learned_in_100_steps(keys: dict[str, Any]) -> None:
    model, generator = built(**keys), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        nats(model, 8, generator).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = nats(model, 32, generator)[:, REPEATED:].mean()
    assert found < 1 if "induction_head" not in keys else found > 5, "a guess among 256 tokens costs 5.5 nats"


@pytest.mark.parametrize("keys", [
    {"qk_norm": False}, {"tie_embeddings": True}, {"n_layers": 1}, {"n_heads": 1}, {"n_heads": 16},
    {"layer_pattern": ["full", "nope"]}, {"window": 1}, {"family": "gpt"}, {"family": "mistral", "window": 8},
])  # fmt: skip
def test_models_without_room_for_it_begin_without(keys: dict[str, Any]) -> None:
    given, plain = (built(**keys, induction_head=on).state_dict() for on in (True, False))
    assert all(torch.equal(given[name], plain[name]) for name in plain)
