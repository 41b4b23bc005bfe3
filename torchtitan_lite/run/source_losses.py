"""The training loss of each source of a mixture, for the records of logged steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_lite.config.sections.log import Metric
from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE


class SourceLosses:
    """Adds up the losses of a step's micro-batches by source. The summed loss and its gradients stay as they are."""

    def __init__(self, model: Transformer, names: Sequence[str]) -> None:
        self._head = model.output
        self.metric = Metric(lambda *_, **__: self._sums, self._values)
        self.begin(names)

    def begin(self, names: Sequence[str]) -> None:
        """Use these sources from now on. The loss of a single one is the loss of the step, so it is not added up."""
        self._names = names if len(names) > 1 else ()
        self._sums = torch.zeros(2, len(self._names))  # losses and targets by source

    def _values(self, sums: Tensor) -> dict[str, float]:
        return {f"loss/{name}": float(value) for name, value in zip(self._names, sums[0] / sums[1], strict=True)}

    def add(self, micro: MicroBatch, *, first: bool) -> None:
        """Add the losses of the last forward, which was the `first` of a step or a later one."""
        losses = self._head.token_losses
        if self._names and losses is not None and micro.sources is not None:
            known = (micro.targets != IGNORE).sum(1).to(losses.device, non_blocking=True)
            rows = torch.stack([losses.view(len(known), -1).sum(1), known]).double()  # (2, B)
            before = rows.new_zeros(2, len(self._names)) if first else self._sums
            self._sums = before.index_add(1, micro.sources.to(losses.device, non_blocking=True), rows)
