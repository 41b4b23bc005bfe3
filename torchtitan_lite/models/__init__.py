"""Models: pure PyTorch, no torch.distributed in here. Parallelism is applied from outside (parallelize.py).

A family is a common.Transformer with `layers`, `norm` and `output`; its other children make what the layers take.
"""

from collections.abc import Callable

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models import gpt, llama
from torchtitan_lite.models.transformer import Transformer

__all__ = ["Transformer", "build"]

_FAMILIES: dict[str, Callable[[ModelConfig, int], Transformer]] = {
    "gpt": gpt.GPT,
    "llama": llama.Llama,
}


def build(config: ModelConfig, vocab_size: int) -> Transformer:
    """The model of `[model]`, on torch's current device: use `torch.device("meta")`, and materialise it sharded.

    Args:
        vocab_size: the tokenizer's; `[model] vocab_size` counts if it is set.
    """
    return _FAMILIES[config.family](config, config.vocab_size or vocab_size)
