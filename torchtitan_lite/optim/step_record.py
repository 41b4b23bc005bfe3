"""The record of a step's numbers, equal on every rank, which guards, log and stop requests read."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_lite.distributed.process_group import Process, sum_over_ranks

MOST_RANKS = 1024  # with more ranks, metrics.jsonl omits their losses, which would be most of each line


class Numbers(NamedTuple):
    """A record's numbers on the host."""

    loss: float
    grad_norm: float
    loss_scale: float
    stop_requests: float
    rank_losses: list[float]
    block_norms: dict[str, float]  # of the gradient, in the order of forward


class StepRecord:
    """A step's numbers, as tensors on the device. Only reading `numbers` makes the host wait for them."""

    def __init__(
        self,
        step: int,
        samples: tuple[int, int],
        targets: int,
        loss: Tensor,
        squared_norm: Tensor,
        loss_scale: Tensor,
        stop: bool,
        blocks: Sequence[str],
        squares: Mapping[str, Tensor],
        parts: Sequence[Tensor],
        process: Process,
    ) -> None:
        """Sum the parts of all ranks, with one small all-reduce. Collective.

        Args:
            samples: the global batch's range of run samples: first, and last + 1.
            targets: number of valid targets in the global batch.
            loss: (), this rank's summed loss.
            squared_norm: (), this rank's part, before dividing by the loss scale.
            blocks, squares: names of blocks, and this rank's parts of their squared norms (B,). The key "grad_norm" is
                always there, before dividing by the loss scale.
            parts: this rank's parts of metrics, of any shapes.
        """
        n, parts = 3 + process.world_size, [*squares.values(), *parts]
        own = torch.zeros(n, dtype=torch.float64, device=loss.device)
        own[0], own[1] = loss, squared_norm
        own[2:3].fill_(float(stop))  # own[2] = 1.0 would make the host wait for the device
        own[3 + process.rank] = loss  # the other ranks add 0 here
        # loss, squared norm, stop requests, loss of each rank, squared norms of blocks, metrics
        sums = torch.cat([own, *(part.flatten().to(own) for part in parts)])
        sum_over_ranks(sums)
        summed = [s.view_as(part) for s, part in zip(sums[n:].split([p.numel() for p in parts]), parts, strict=True)]
        self.step, self.samples, self.targets = step, samples, targets
        self.loss_sum, self.rank_losses = sums[0], sums[3:n]  # (), (world_size,)
        self.metrics = summed[len(squares) :]  # float64, with the shapes of the parts
        self.blocks, self.squares = blocks, dict(zip(squares, summed, strict=False))
        self.squares["grad_norm"] = self.squares["grad_norm"] / loss_scale.double().square()
        self.loss = sums[0].float() / targets  # (), the mean per target
        self.grad_norm = sums[1].sqrt().float() / loss_scale  # (), before clipping, without the loss scale
        self.finite = self.rank_losses.isfinite().all() & self.grad_norm.isfinite()  # () bool
        three = torch.stack([self.loss, self.grad_norm, loss_scale]).double()
        self._values = torch.cat([three, sums[2:n], self.squares["grad_norm"].sqrt()])
        self._copied: torch.cuda.Event | None = None
        if self._values.is_cuda:  # copied to the host without waiting
            pinned = torch.empty(self._values.shape, dtype=torch.float64, pin_memory=True)
            self._values = pinned.copy_(self._values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @functools.cached_property
    def numbers(self) -> Numbers:
        """The numbers on the host. Waits until the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        (loss, norm, scale, stop_requests, *rest), n = self._values.tolist(), len(self.rank_losses)
        return Numbers(loss, norm, scale, stop_requests, rest[:n], dict(zip(self.blocks, rest[n:], strict=True)))

    def norms_of_blocks(self) -> dict[str, float]:
        """Return the norms of blocks as "grad_norm/layers.0" and so on, for metrics.jsonl. Waits for the device."""
        return {
            f"{key}/{block}": norm
            for key, squares in self.squares.items()
            for block, norm in zip(self.blocks, squares.sqrt().tolist(), strict=True)
        }

    def losses_of_ranks(self) -> dict[str, list[float]]:
        """Return each rank's summed loss as "rank_losses", for metrics.jsonl; empty above MOST_RANKS."""
        return {"rank_losses": self.numbers.rank_losses} if len(self.rank_losses) <= MOST_RANKS else {}
