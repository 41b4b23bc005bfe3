"""Validation: always the same sequences, summed over all ranks, per token and per byte."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from torchtitan_lite.config import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.samples import open_samples
from torchtitan_lite.data.tokenizer import bytes_per_token
from torchtitan_lite.distributed import sum_over_ranks
from torchtitan_lite.loss import IGNORE, bits_per_byte
from torchtitan_lite.parallelize import reshard


@dataclass(frozen=True)
class Validation:
    """A fixed set of sequences: the first n_samples of the validation split."""

    loader: Loader
    n_samples: int
    bytes_per_token: Tensor  # (V,) int64

    @classmethod
    def of(cls, config: Config, data: DataSet, micro_batch_size: int, rank: int, world_size: int) -> "Validation":
        """The first eval.samples sequences of the held-out text, or all if there are fewer, mixed as in training."""
        samples = open_samples(data, "val", config.train.seq_len, config.data.packing)
        n_samples = samples.longest_prefix(config.eval.samples)
        loader = Loader(samples, micro_batch_size, rank, world_size, None, config.data.document_mask)
        tokenizer = Tokenizer.from_file(str(data.folder / "tokenizer.json"))
        return cls(loader, n_samples, torch.from_numpy(bytes_per_token(tokenizer)))

    def targets(self) -> Tensor:
        """All target tokens, (N,) int64, of all ranks."""
        targets = self.loader.samples.draw(np.arange(self.n_samples), None).targets
        return torch.from_numpy(targets[targets != IGNORE])

    def unigram_bits_per_byte(self) -> float:
        """What the best model without context would reach on these targets: their entropy, in bits per byte."""
        targets = self.targets()
        counts = targets.bincount(minlength=len(self.bytes_per_token)).double()
        nats = -torch.xlogy(counts, counts / counts.sum()).sum().item()
        return bits_per_byte(nats, int(self.bytes_per_token[targets].sum()))


@dataclass(frozen=True)
class Score:
    """The result of a validation."""

    loss: float  # nats per token
    bits_per_byte: float


@torch.no_grad()
def evaluate(model: nn.Module, validation: Validation, device: torch.device) -> Score:
    """Score the model on the validation set. Every rank must call it, and gets the same score."""
    batch = validation.loader.batch(0, validation.n_samples)
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # nats, bytes
    model.eval()
    for micro in batch.micro_batches:
        known = micro.targets[micro.targets != IGNORE]
        sums[0] += model(*micro.on(device))
        sums[1] += validation.bytes_per_token[known].sum()
    model.train()
    reshard(model)
    nats, n_bytes = sum_over_ranks(sums).tolist()
    return Score(nats / batch.global_tokens, bits_per_byte(nats, int(n_bytes)) if n_bytes else math.nan)
