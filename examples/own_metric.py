"""A metric of your own: `train.py --log.metrics=examples.own_metric:LAYER_NORMS` (docs/extending.md).

The gradient norm of each block. It shows whether the first blocks learn, and in which block a spike begins.
"""

import torch
from torch import Tensor

from torchtitan_lite.config.sections.log import Metric
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.models import Transformer


def squares(model: Transformer, replicas: int, loss_scale: Tensor) -> Tensor:
    """Return each block's squared gradient norm over this rank's shards, (L,) float64."""
    grads = [[own_part(p.grad)[0] for p in layer.parameters() if p.grad is not None] for layer in model.layers]
    norms = torch.stack([torch.nn.utils.get_total_norm(of_block) for of_block in grads])
    return (norms / loss_scale).double().square() / replicas  # each replica has all gradients


def norms(squares: Tensor) -> dict[str, float]:
    """Return the norms by name, from the squares summed over all ranks."""
    return {f"grad_norm/layers.{i}": norm for i, norm in enumerate(squares.sqrt().tolist())}


LAYER_NORMS = Metric(squares, norms)
