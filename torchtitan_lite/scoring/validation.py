"""Validation on a fixed random subset of the held-out sequences: loss per token and bits per byte.

Sequences are made as in training, in micro-batches of one shape. Each rank reads only its own.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Loader, MicroBatch, PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.distributed.evaluating import evaluating
from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.models.loss import IGNORE, bits_per_byte
from torchtitan_lite.scoring.likelihood import bytes_per_token, row_sizes
from torchtitan_lite.scoring.statistics import Array, plus_minus, ratio

# The seed of the subset; not run.seed, so that runs with different seeds are comparable.
SUBSET_SEED = 0
CPU = torch.device("cpu")


@dataclass
class Validation:
    """The first n_samples of a fixed permutation of the validation split."""

    loader: Loader
    n_samples: int
    bytes_per_token: Tensor  # (V,) int64
    samples: Mixture  # if it has several sources, each also gets a score
    unigram: float | None = None  # bits per byte; the first evaluation computes it

    @classmethod
    def from_config(
        cls, config: Config, data: DataSet, micro_batch_size: int, rank: int, world_size: int
    ) -> "Validation":
        """Select eval.samples random sequences, or all if there are fewer; sources are mixed as in training."""
        samples = open_samples(data, "val", config)
        n_samples = samples.longest_prefix(config.eval.samples)
        loader = Loader(
            samples,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=SUBSET_SEED,
            document_mask=config.data.document_mask,
        )
        tokenizer = Tokenizer.from_file(str(data.folder / "tokenizer.json"))
        lengths = torch.from_numpy(bytes_per_token(tokenizer, data.sources[0].meta.marks))
        return cls(loader, n_samples, lengths, samples)

    def description(self) -> dict[str, int]:
        """Return what identifies the subset: losses on different subsets are not comparable."""
        return {"samples": self.n_samples, "of": self.samples.n_samples, "seed": SUBSET_SEED}

    def micro_batches(self, device: torch.device = CPU) -> Iterator[MicroBatch]:
        """Yield this rank's sequences in micro-batches; every rank gets the same number.

        They are loaded as in training: the next one in a thread, pinned for a GPU.
        """
        per_round = self.loader.micro_batch_size * self.loader.world_size
        loader = PrefetchingLoader(replace(self.loader, pin=device.type == "cuda"), device)
        try:
            for first in range(0, self.n_samples, per_round):
                size = min(per_round, self.n_samples - first)
                yield from loader.batch(first, size, self.n_samples).micro_batches
        finally:
            loader.close()

    def numbers(self) -> Tensor:
        """Return the numbers of this rank's sequences in order, (N,). Masked surplus ones repeat the last number."""
        size = self.loader.micro_batch_size
        firsts = np.arange(0, self.n_samples, size * self.loader.world_size) + self.loader.rank * size
        numbers = (firsts[:, None] + np.arange(size)).ravel()
        return torch.from_numpy(np.minimum(numbers, self.n_samples - 1))


@dataclass(frozen=True)
class Score:
    """The result of a validation. Undefined values are NaN, such as the standard error of one sequence."""

    loss: float  # nats per token
    loss_stderr: float  # standard error over sequences, as if they were drawn independently
    bits_per_byte: float
    bits_per_byte_stderr: float
    unigram_bits_per_byte: float  # entropy of the targets: the score of the best model without context
    sources: dict[str, tuple[float, float]] = field(default_factory=dict)  # loss and bits per byte by source

    def record(self) -> dict[str, float | None]:
        """Return the values for metrics.jsonl."""
        values = {
            "val_loss": self.loss,
            "val_loss_stderr": self.loss_stderr,
            "val_bits_per_byte": self.bits_per_byte,
            "val_bits_per_byte_stderr": self.bits_per_byte_stderr,
            "unigram_bits_per_byte": self.unigram_bits_per_byte,
        }
        for name, (loss, bits) in self.sources.items():
            values |= {f"val_loss/{name}": loss, f"val_bits_per_byte/{name}": bits}
        return {key: value if math.isfinite(value) else None for key, value in values.items()}


@torch.no_grad()
def evaluate(model: nn.Module, validation: Validation, device: torch.device) -> Score:
    """Score the model on the validation set. Collective: every rank gets the same score."""
    nats, sizes = [], []  # for this rank's sequences
    counts = torch.zeros(len(validation.bytes_per_token), dtype=torch.int64)  # how often each token is a target
    with evaluating(model, compiled=True):
        for micro in validation.micro_batches(device):
            nats.append(model(**micro.on(device), per_sequence=True))
            sizes.append(row_sizes(micro, validation.bytes_per_token))
            if validation.unigram is None:
                counts += micro.targets[micro.targets != IGNORE].bincount(minlength=len(counts))
    if validation.unigram is None:
        validation.unigram = unigram_bits_per_byte(sum_over_ranks(counts.to(device)).cpu(), validation.bytes_per_token)

    # nats, tokens and bytes of this rank's N sequences, (3, N). Masked rows are zeros.
    values = torch.cat((torch.cat(nats).double().cpu()[None], torch.cat(sizes, dim=1).double()))
    own = torch.zeros(3, validation.n_samples, dtype=torch.float64).index_add_(1, validation.numbers(), values)
    every: Array = sum_over_ranks(own.to(device)).cpu().numpy()
    sources = {}
    if len(validation.samples.sources) > 1:
        which, _ = validation.samples.locate(np.arange(validation.n_samples))
        for k, name in enumerate(validation.samples.names):
            (loss, _), (bits, _) = _figures(every[:, which == k])
            sources[name] = loss, bits
    (loss, loss_stderr), (bits, bits_stderr) = _figures(every)
    return Score(loss, loss_stderr, bits, bits_stderr, validation.unigram, sources)


def _figures(values: Array) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return loss and bits per byte, each with its standard error, from nats, tokens and bytes (3, N) of sequences."""
    nats, tokens, n_bytes = values
    bits, bits_stderr = ratio(nats, n_bytes)
    return ratio(nats, tokens), (bits_per_byte(bits, 1), bits_per_byte(bits_stderr, 1))


def evaluate_average(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, validation: Validation, device: torch.device
) -> tuple[dict[str, Any], str]:
    """Validate the averaged weights (optim.ema_decay). Returns the record and the log line. Collective.

    Restores the weights afterwards.
    """
    from torchtitan_lite.optim.average import averaged  # only runs with averages load it

    started = time.perf_counter()
    with averaged(optimizer):
        score = evaluate(model, validation, device)
    seconds = time.perf_counter() - started
    record = {f"ema_{key}": value for key, value in score.record().items() if key.startswith("val_")}
    line = eval_line(step, score, validation, seconds).replace("  loss", "  ema loss", 1)
    return {"step": step, **record, "eval_s": seconds}, line


def eval_line(step: int, score: Score, validation: Validation, seconds: float, *, best: bool = False) -> str:
    """Return the log line of a validation, which marks the best one. Leaves out undefined values (see Score)."""
    parts = [f"eval    step {step}", f"loss {plus_minus(score.loss, score.loss_stderr, 4)}{' (best so far)' * best}"]
    notes = f"{validation.n_samples} of {validation.samples.n_samples} sequences, {seconds:.1f} s"
    bits, unigram = score.bits_per_byte, score.unigram_bits_per_byte
    if not math.isnan(unigram):
        parts.append(f"bits/byte {plus_minus(bits, score.bits_per_byte_stderr, 3)}")
        notes = f"unigram {unigram:.3f}; {notes}"
        if unigram > 0 and math.isfinite(bits):
            gain = 100 * (1 - bits / unigram)
            notes = f"{abs(gain):.0f} % {'below' if gain >= 0 else 'above'} {notes}"
    lines = ["  ".join([*parts, f"({notes})"])]
    for name, (loss, bits) in score.sources.items():
        lines.append(f"        {name}: loss {loss:.4f}" + (f"  bits/byte {bits:.3f}" if math.isfinite(bits) else ""))
    return "\n".join(lines)


def unigram_bits_per_byte(counts: Tensor, lengths: Tensor) -> float:
    """Return the entropy of the targets in bits per byte of text; NaN if they have no text.

    Args:
        counts: (V,) int64, how often each token is a target.
        lengths: (V,) int64, bytes of text of each token.
    """
    n_bytes = int((counts * lengths).sum())
    weights = counts.double()
    nats = torch.xlogy(weights, weights.sum() / weights).sum().item()
    return bits_per_byte(nats, n_bytes) if n_bytes else math.nan
