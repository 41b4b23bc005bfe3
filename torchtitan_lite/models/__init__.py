"""Models in pure PyTorch, listed in config/families.py. distributed/fsdp.py applies parallelism from outside."""

import pkgutil

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.loss import LossOptions
from torchtitan_lite.models.transformer import Transformer

PLAIN = LossOptions()
__all__ = ["LossOptions", "Transformer", "build"]


def build(config: ModelConfig, vocab_size: int, losses: LossOptions = PLAIN) -> Transformer:
    """Build the model of `[model]` on torch's current device. A nonzero `config.vocab_size` overrides `vocab_size`."""
    model: Transformer = pkgutil.resolve_name(FAMILIES[config.family].model)(
        config, config.vocab_size or vocab_size, losses
    )
    return model
