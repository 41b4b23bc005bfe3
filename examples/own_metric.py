"""A metric of your own: `train.py --log.metrics=examples.own_metric:KIND_NORMS` (docs/extending.md).

The gradient norm of all attention layers, and of all feed-forward layers. It shows which kind a change of the model
upsets. (The log has the norm of each block anyway.)
"""

import torch
from torch import Tensor

from torchtitan_lite.config.sections.log import Metric
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.models import Transformer

KINDS = "attention", "feed_forward"


def squares(model: Transformer, replicas: int, loss_scale: Tensor) -> Tensor:
    """Return the squared gradient norm of each kind over this rank's shards, (2,) float64."""
    grads = {name: own_part(p.grad)[0] for name, p in model.named_parameters() if p.grad is not None}
    norms = [torch.nn.utils.get_total_norm([g for name, g in grads.items() if f".{kind}." in name]) for kind in KINDS]
    return (torch.stack(norms) / loss_scale).double().square() / replicas  # each replica has all gradients


def norms(squares: Tensor) -> dict[str, float]:
    """Return the norms by name, from the squares summed over all ranks."""
    return {f"grad_norm_of/{kind}": norm for kind, norm in zip(KINDS, squares.sqrt().tolist(), strict=True)}


KIND_NORMS = Metric(squares, norms)
