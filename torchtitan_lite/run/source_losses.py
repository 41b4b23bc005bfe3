"""The training loss of each source of a mixture, for the records of logged steps."""

from collections.abc import Sequence

import torch

from torchtitan_lite.config.sections.log import Metric
from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE


class SourceLosses:
    """Adds up the losses of a step's micro-batches by source. The summed loss and its gradients stay as they are."""

    def __init__(self, model: Transformer, names: Sequence[str]) -> None:
        self._head, self._n = model.output, len(names)
        self._head.keeps_losses = len(names) > 1
        self._sums = torch.zeros(2, len(names))  # losses and targets by source
        metric = Metric(
            lambda *_, **__: self._sums,
            lambda sums: {f"loss/{name}": float(value) for name, value in zip(names, sums[0] / sums[1], strict=True)},
        )
        self.metrics = [metric] * self._head.keeps_losses  # of several sources

    def add(self, micro: MicroBatch, *, first: bool) -> None:
        """Add the losses of the last forward, which was the `first` of a step or a later one."""
        losses = self._head.token_losses
        if losses is not None and micro.sources is not None:
            known = (micro.targets != IGNORE).sum(1).to(losses.device, non_blocking=True)
            rows = torch.stack([losses.view(len(known), -1).sum(1), known]).double()  # (2, B)
            before = rows.new_zeros(2, self._n) if first else self._sums
            self._sums = before.index_add(1, micro.sources.to(losses.device, non_blocking=True), rows)
