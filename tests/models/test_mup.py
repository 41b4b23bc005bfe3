"""model.mup_base_dim: rates and initial values of a wide model, derived from those of a narrow one."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_model import make
from torchtitan_lite import models
from torchtitan_lite.config.schema import ModelConfig, OptimConfig
from torchtitan_lite.optim import guarded
from torchtitan_lite.optim import optimizer as optim
from torchtitan_lite.optim.groups import parameter_groups

WIDTHS = 64, 128, 256, 512, 1024
VOCABULARY = 64


def built(width: int, base: int) -> models.Transformer:
    """A model of two blocks with heads of one size, with initial values of one seed."""
    sizes = {"dim": width, "n_layers": 2, "n_heads": width // 32, "n_kv_heads": width // 64, "max_seq_len": 32}
    return make(ModelConfig.model_validate(sizes | {"mup_base_dim": base}), vocab_size=VOCABULARY)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def sizes_after(model: models.Transformer, steps: int, **config: Any) -> dict[str, float]:
    """The root mean square of each module's output after some steps on the same batch, by the module's name."""
    settings = OptimConfig.model_validate({"lr": 4e-3, "warmup_steps": 0, **config})
    optimizer = optim.build_optimizer(model, settings)
    guarded.set_learning_rate(optimizer, settings.lr)
    for _ in range(steps):
        model(*batch()).div(4 * 32).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, float] = {}
    wanted = "wq", "wk", "wv", "wo", "w1", "w2", "layers.0", "layers.1", "output"
    for name, module in model.named_modules():
        if name.endswith(wanted):
            module.register_forward_hook(
                lambda _, __, out, name=name: found.update({name: out.square().mean().sqrt().item()})
            )
    with torch.no_grad():
        model(batch()[0])
    return found


def powers(widths: tuple[int, ...], by_width: list[dict[str, float]]) -> dict[str, float]:
    """The power of the width with which each value grows, by least squares."""
    x = torch.tensor([math.log(width) for width in widths])
    x = x - x.mean()
    return {
        name: (x @ torch.tensor([math.log(one[name]) for one in by_width]) / (x @ x)).item() for name in by_width[0]
    }


@pytest.mark.parametrize("widths", [WIDTHS[:3], pytest.param(WIDTHS, marks=pytest.mark.extended)], ids=["3", "5"])
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_activations_have_one_size_at_every_width(name: str, widths: tuple[int, ...]) -> None:
    """The coordinate check of muP (Yang et al., 2022, appendix D); in the extended test for widths 64 to 1,024."""
    scaled, plain = (
        powers(widths, [sizes_after(built(width, base), 3, name=name) for width in widths]) for base in (64, 0)
    )
    assert max(abs(power) for power in scaled.values()) < 0.2, scaled
    assert min(plain.values()) > 0.3, "without the scaling, every activation grows"


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_the_base_width_itself_is_the_plain_model(name: str) -> None:
    """Bit for bit, after steps of the optimizer."""
    same, plain, half = (sizes_after(built(64, base), 3, name=name) for base in (64, 0, 32))
    assert same == plain != half


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_rates_fall_with_the_width_and_decay_does_not(name: str) -> None:
    """Four times as wide."""
    groups = [{"match": "output*", "lr_factor": 10.0}]
    settings = OptimConfig.model_validate({"name": name, "weight_decay": 0.1, "groups": groups})
    model = built(256, 64)
    of = {id(parameter): group for group in parameter_groups(model, settings) for parameter in group["params"]}
    groups_by_name = {name: of[id(parameter)] for name, parameter in model.named_parameters()}
    factors = {name: group["lr_factor"] for name, group in groups_by_name.items()}
    decays = {name: factors[name] * group["weight_decay"] for name, group in groups_by_name.items()}
    matrices = {"muon": 0.5, "adamw": 0.25}[name]
    assert factors["layers.0.attention.wq.weight"] == factors["layers.1.feed_forward.w2.weight"] == matrices
    assert factors["output.weight"] == 2.5
    assert factors["tok_embeddings.weight"] == (3.0 if name == "muon" else 1.0)
    assert factors["norm.weight"] == factors["layers.0.attention_norm.weight"] == 1.0
    assert decays["layers.0.attention.wq.weight"] == pytest.approx(0.1)
    assert decays["output.weight"] == pytest.approx(1.0), "a group multiplies both"
    assert decays["norm.weight"] == 0
