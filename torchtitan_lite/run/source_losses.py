"""The training loss of each source of a mixture, for the records of logged steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torchtitan_lite.config.sections.log import Metric
from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE


class SourceLosses:
    """Adds up the losses of a step's micro-batches by source. Gradients and the summed loss stay as they are."""

    def __init__(self, model: Transformer, names: Sequence[str], device: torch.device) -> None:
        self._head, self._device = model.output, device
        self._sums = torch.zeros(2, len(names), dtype=torch.float64, device=device)  # losses and targets by source
        self.metric = Metric(
            lambda *_, **__: self._sums,
            lambda sums: {f"loss/{name}": float(value) for name, value in zip(names, sums[0] / sums[1], strict=True)},
        )

    @contextmanager
    def adding(self, micro: MicroBatch, *, first: bool) -> Iterator[None]:
        """Add the losses of the forward in this context, which is the `first` of a step or a later one."""
        if micro.sources is None:
            yield
            return
        tokens = torch.empty(micro.targets.numel(), device=self._device)
        self._head.token_losses = tokens
        yield
        self._head.token_losses = None
        known = (micro.targets != IGNORE).sum(1).to(self._device, non_blocking=True)
        rows = torch.stack([tokens.view(len(known), -1).sum(1), known]).double()  # (2, B)
        self._sums *= not first
        self._sums.index_add_(1, micro.sources.to(self._device, non_blocking=True), rows)
