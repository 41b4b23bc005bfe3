"""Models: pure PyTorch, no torch.distributed in here. Parallelism is applied from outside (parallelize.py).

A model is an nn.Module with `layers`, `norm` and `output`; its other children make the input of the first layer. Its
`forward(tokens, targets=None)` returns logits or the summed loss, and `reset_parameters(normal_)` initialises it all.
"""

from torchtitan_lite.config import ModelConfig
from torchtitan_lite.models import gpt

Transformer = gpt.Transformer  # the one family so far
_FAMILIES = {"gpt": gpt.Transformer}


def build(config: ModelConfig, vocab_size: int) -> Transformer:
    """The model of `[model]`, on torch's current device: use `torch.device("meta")`, and materialise it sharded."""
    return _FAMILIES[config.family](config, vocab_size)
