"""Norms of gradients, weights and updates by block. They name the layer in which a problem began."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.optim.guarded import GuardedOptimizer


class Blocks:
    """The parameters of a sharded model by block.

    `names` has the B blocks in the order of forward: "inputs", "layers.0", ..., "head". A tied weight belongs to the
    inputs; so does whatever is not in a block, a final norm or the output matrix.

    Args:
        replicas: dp_replicate, the number of HSDP replicas, each of which has all parameters.
    """

    def __init__(self, model: nn.Module, replicas: int) -> None:
        ends = {"norm": "head", "output": "head"}
        self._blocks = {
            p: ".".join(name.split(".")[:2]) if name.startswith("layers.") else ends.get(name.split(".")[0], "inputs")
            for name, p in model.named_parameters()
        }
        self.names, self._replicas = [*dict.fromkeys(self._blocks.values())], replicas
        members = [[block == name for block in self._blocks.values()] for name in self.names]
        self._members = torch.tensor(members, device=next(model.parameters()).device)  # (B, parameters)

    def squares(self, norms: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Return this rank's parts of squared norms by block, (B,) float64. Their sums over all ranks are the whole.

        Args:
            norms: () float32, of this rank's part of each parameter, gradient or update. A missing one is 0.
        """
        zero = torch.zeros((), device=self._members.device)
        each = torch.stack([norms.get(p, zero) for p in self._blocks]).double().square() / self._replicas
        return torch.where(self._members, each, 0.0).sum(1)

    def of_weights(self) -> Tensor:
        """Return `squares` of the parameters."""
        norms = torch._foreach_norm([own_part(p.detach())[0] for p in self._blocks])
        return self.squares(dict(zip(self._blocks, norms, strict=True)))

    def of_update(self, optimizer: GuardedOptimizer) -> dict[str, Tensor]:
        """Return the squared norms of the last update as "update_norm", if they were measured. Collective."""
        if not optimizer.update_norms or optimizer.found_inf is None:
            return {}
        squares = self.squares(optimizer.update_norms)
        return {"update_norm": sum_over_ranks(torch.where(optimizer.found_inf != 0, 0.0, squares))}
