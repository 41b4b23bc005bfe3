"""The model by itself: no processes, no shards."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import meta_model
from tests.models.published import CHECKPOINTS
from torchtitan_lite.config.families import FAMILIES as REGISTRY
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.distributed import initialize
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE

SMALL = ModelConfig(family="gpt", dim=32, n_heads=2, n_layers=2, max_seq_len=16)
LLAMA = ModelConfig(family="llama", dim=32, n_heads=4, n_kv_heads=2, hidden_dim=48, n_layers=2, max_seq_len=16)
GEMMA3 = LLAMA.model_copy(update={"family": "gemma3", "window": 3, "layer_pattern": ["window", "full"]})
EXPERTS = LLAMA.model_copy(update={"family": "qwen3_moe", "n_experts": 5})
HYBRID = LLAMA.model_copy(update={"family": "olmo_hybrid", "layer_pattern": ["delta", "full"]})
ALL = {"gpt": SMALL, "llama": LLAMA, "gemma3": GEMMA3, "experts": EXPERTS, "hybrid": HYBRID}
EACH = pytest.mark.parametrize("config", ALL.values(), ids=ALL)


def make(config: ModelConfig = SMALL, seed: int = 0, vocab_size: int = 97) -> Transformer:
    model = meta_model(config, vocab_size)
    initialize.materialize(model, torch.device("cpu"), seed)
    return model


@EACH
def test_a_token_sees_only_those_before_it(config: ModelConfig) -> None:
    model = make(config)
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    one, other = model(tokens), model(changed)
    assert one.shape == (2, 16, 97)
    torch.testing.assert_close(one[:, :9], other[:, :9])  # experts: another number of rows may round otherwise
    assert not one[:, 9:].allclose(other[:, 9:])


@EACH
def test_loss_is_the_sum_over_valid_targets(config: ModelConfig) -> None:
    model = make(config)
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(1))
    targets[1, 3:] = IGNORE
    picked = F.log_softmax(model(tokens), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -picked[targets != IGNORE].sum()
    torch.testing.assert_close(model(tokens, targets), expected)


def test_dropout_is_active_in_training_only() -> None:
    model = make(SMALL.model_copy(update={"dropout": 0.5}))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    assert not model(tokens).equal(model(tokens))
    model.eval()
    assert model(tokens).equal(model(tokens))


def test_initial_values_have_the_documented_distribution() -> None:
    model = make(ModelConfig(family="gpt", dim=128, n_heads=2, n_layers=8, max_seq_len=512))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (1 if "norm.weight" in name else 0)).all(), name
        else:
            residual = name.endswith(("wo.weight", "w2.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.001, name
    rows = model.get_parameter("layers.0.attention.wq.weight")
    assert len({tuple(row.tolist()) for row in rows}) == len(rows), "rows are copies of each other"
    vectors = [p for p in make(GEMMA3).parameters() if p.ndim == 1]  # norms that multiply by 1 + weight
    assert not any(p.any() for p in vectors)


@EACH
def test_loss_at_the_start_is_that_of_guessing(config: ModelConfig) -> None:
    tokens = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(0))
    assert make(config)(tokens, tokens).item() / tokens.numel() == pytest.approx(math.log(97), rel=0.02)


def test_initial_values_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is reproducible by a later version only if these numbers stay, however many are drawn at a time."""
    model, first = make(seed=3), [0.00024976918939501047, -0.040128130465745926, 0.03604385629296303]
    assert model.output.weight.flatten()[:3].tolist() == first
    monkeypatch.setattr("torchtitan_lite.distributed.normal_values._CHUNK", 100)
    assert all(p.equal(q) for p, q in zip(make(seed=3).parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("family", "name"), CHECKPOINTS)
def test_named_sizes_have_the_size_of_their_name(family: str, name: str) -> None:
    vocabulary, *expected = CHECKPOINTS[family, name]
    values = {"family": family, "tie_embeddings": family == "gpt"}
    values |= {**REGISTRY[family].defaults, **REGISTRY[family].sizes[name]}
    config = ModelConfig.model_validate(values)
    model = meta_model(config, vocabulary)
    count = sum(p.numel() for p in model.parameters())
    assert [count, config.n_heads, config.window, config.rope_theta] == expected
