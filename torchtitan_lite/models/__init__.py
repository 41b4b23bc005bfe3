"""Models: pure PyTorch, no torch.distributed in here. Parallelism is applied from outside (distributed/parallelize.py).

A family is a transformer.Transformer with `layers`, `norm` and `output`; its other children make what the layers take.
config/families.py is the registry.
"""

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.transformer import Transformer

__all__ = ["Transformer", "build"]


def build(config: ModelConfig, vocab_size: int) -> Transformer:
    """The model of `[model]`, on torch's current device: use `torch.device("meta")`, and materialise it sharded.

    Args:
        vocab_size: the tokenizer's; `[model] vocab_size` replaces it if it is set.
    """
    model: Transformer = FAMILIES[config.family].load()(config, config.vocab_size or vocab_size)
    return model
