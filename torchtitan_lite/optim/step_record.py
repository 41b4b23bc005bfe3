"""What a step has computed: one record, the same on every rank, for the guards, the log and whoever asks to stop."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_lite.distributed.process_group import World, sum_over_ranks

MOST_RANKS = 1024  # above so many, a record in metrics.jsonl has no list of losses: it would be the most of each line


class Numbers(NamedTuple):
    """A record's numbers on the host."""

    loss: float
    grad_norm: float
    loss_scale: float
    stop_requests: float
    rank_losses: list[float]


class StepRecord:
    """The numbers of a step, as tensors on the device. Only `numbers` makes the host wait for them."""

    def __init__(
        self,
        step: int,
        samples: tuple[int, int],
        targets: int,
        loss: Tensor,
        squared_norm: Tensor,
        loss_scale: Tensor,
        loads: Tensor | None,
        stop: bool,
        world: World,
    ) -> None:
        """Sum the parts of all ranks, with one small all-reduce. Collective.

        Args:
            step: from 1.
            samples: of the run, in the global batch: the first, and the one after the last.
            targets: the valid ones of the global batch.
            loss: (), the summed loss of this rank.
            squared_norm: (), this rank's part, of gradients that still have the loss scale.
            loads: (L, E), the tokens of each layer's experts on this rank, in a model that has some.
            stop: whether this rank was asked to stop.
        """
        n = 3 + world.world_size
        sums = torch.zeros(n + (0 if loads is None else loads.numel()), dtype=torch.float64, device=loss.device)
        sums[0], sums[1] = loss, squared_norm
        sums[2:3].fill_(float(stop))  # sums[2] = 1.0 would make the host wait for the device
        sums[3 + world.rank] = loss  # the other ranks add 0 here
        if loads is not None:
            sums[n:] = loads.flatten()
        sum_over_ranks(sums)
        self.step, self.samples, self.targets = step, samples, targets
        self.loss_sum, self.rank_losses = sums[0], sums[3:n]  # (), (world_size,)
        self.loads = None if loads is None else sums[n:].view_as(loads)
        self.loss = sums[0].float() / targets  # (), the mean per target
        self.grad_norm = sums[1].sqrt().float() / loss_scale  # (), before clipping, without the loss scale
        self.finite = self.rank_losses.isfinite().all() & self.grad_norm.isfinite()  # () bool
        self._values = torch.cat([torch.stack([self.loss, self.grad_norm, loss_scale]).double(), sums[2:n]])
        self._copied: torch.cuda.Event | None = None
        if self._values.is_cuda:  # copied to the host without waiting
            pinned = torch.empty(self._values.shape, dtype=torch.float64, pin_memory=True)
            self._values = pinned.copy_(self._values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @functools.cached_property
    def numbers(self) -> Numbers:
        """Wait until the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        loss, grad_norm, loss_scale, stop_requests, *rank_losses = self._values.tolist()
        return Numbers(loss, grad_norm, loss_scale, stop_requests, rank_losses)

    def losses_of_ranks(self) -> dict[str, list[float]]:
        """For metrics.jsonl: the sum of each rank's losses, as "rank_losses". Empty above MOST_RANKS."""
        return {"rank_losses": self.numbers.rank_losses} if len(self.rank_losses) <= MOST_RANKS else {}
