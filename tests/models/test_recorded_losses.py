"""The loss of each family with another value of each [model] key: recorded_losses.json.

Nothing else holds: the losses with most values of the keys, such as other rope_* and dropout; read their diffs. In the
shapes of test_parity.py and test_t5.py the numbers are those of transformers; test_mup.py and test_resformer.py have
the formulas that transformers lacks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import get_total_norm

from tests.config.parsing import only_built_in
from tests.models.test_model import make
from tests.recorded import assert_recorded
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import ModelConfig

SMALL: dict[str, Any] = {"dim": 40, "n_layers": 3, "n_heads": 2, "max_seq_len": 16}
OTHERS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 12, "hidden_dim": 20, "norm_eps": 0.1},
    **{"n_kv_heads": 1, "head_dim": 8, "rope_theta": 50.0, "mup_base_dim": 8},
    **{"rope_factor": 4.0, "rope_low_freq_factor": 2.0, "rope_high_freq_factor": 8.0, "rope_original_max_seq_len": 4},
    **{"window": 3, "layer_pattern": ["nope", "full"], "window_rope_theta": 50.0},
    **{"n_experts": 5, "experts_per_token": 1},
    **{"n_decoder_layers": 2, "dropout": 0.3},
}
NEEDS: dict[str, dict[str, Any]] = {  # to be of use
    **{key: {"rope_factor": 3.0} for key in ("rope_low_freq_factor", "rope_high_freq_factor")},
    **{"rope_original_max_seq_len": {"rope_factor": 3.0}, "window": {"layer_pattern": ["full", "window"]}},
}


def test_each_key_has_the_effect_on_the_loss_of_each_family_that_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, norm of its gradient, and the size of the initial weights: in float32, of a padded sequence and a whole."""
    only_built_in(monkeypatch)
    found = {}
    for name, family in FAMILIES.items():
        small = {**SMALL, **family.defaults, "family": name} | (
            {"n_decoder_layers": 3} if family.encoder_decoder else {}
        )
        if pattern := family.defaults.get("layer_pattern"):
            small |= {"layer_pattern": pattern[-2:], "window": 5 * ("window" in pattern)}  # each kind in three layers
        switches = {key: not value for key, value in ModelConfig(**small).resolved().items() if isinstance(value, bool)}
        for key in ["", *SMALL, "hidden_dim", "norm_eps", "tie_embeddings", *family.keys]:
            needs = {k: value for k, value in NEEDS.get(key, {}).items() if k in family.keys}
            values = small | needs | ({key: (OTHERS | switches)[key]} if key else {})
            found[f"{name}: {key}"] = measured(ModelConfig(**values))
    assert_recorded(found, Path(__file__).with_name("recorded_losses.json"))


def measured(config: ModelConfig) -> list[float]:
    model = make(config, vocab_size=61)
    size = sum(p.detach().abs().sum().item() for p in model.parameters())
    tokens, targets = torch.randint(61, (2, 2, 12), generator=torch.Generator().manual_seed(3))
    targets[1, 9:] = -100
    torch.manual_seed(5)  # of dropout, too
    with torch.no_grad():
        for p in (*model.parameters(), *model.buffers()):  # some begin with zeros, which hide others
            if p.is_floating_point():
                p += 0.1 * torch.randn(p.shape)
    loss = model(tokens, targets)
    loss.backward()
    return [loss.item(), get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item(), size]
