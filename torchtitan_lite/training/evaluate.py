"""Validation on a fixed random subset of the held-out sequences: loss per token and bits per byte."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor, nn

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Loader, MicroBatch
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.samples import Mixture
from torchtitan_lite.distributed.parallelize import reshard
from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.models.loss import IGNORE, bits_per_byte

# The seed of the subset. It is not run.seed, so that runs with different seeds are comparable.
SUBSET_SEED = 0
UNIGRAM = "unigram: the score of guessing each token by its frequency alone; a model that has learned is below it"


@dataclass
class Validation:
    """The first n_samples of a fixed permutation of the validation split."""

    loader: Loader
    n_samples: int
    bytes_per_token: Tensor  # (V,) int64
    n_available: int = 0  # sequences in the split
    unigram: float | None = None  # bits per byte, computed by the first evaluation
    mixture: Mixture | None = None  # of several sources, which are scored one by one too
    explained: bool = False  # whether the log has said what that is

    @classmethod
    def of(cls, config: Config, data: DataSet, micro_batch_size: int, rank: int, world_size: int) -> "Validation":
        """eval.samples random sequences, or all if there are fewer; sources are mixed as in training."""
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
        lengths = torch.from_numpy(bytes_per_token(Tokenizer.from_file(str(data.folder / "tokenizer.json"))))
        lengths[data.end_token] = 0  # stands for no text, even if it is an ordinary vocabulary entry
        mixture = samples if len(samples.sources) > 1 else None
        return cls(loader, n_samples, lengths, samples.n_samples, mixture=mixture)

    def identity(self) -> dict[str, int]:
        """Identifies the subset: losses on different subsets are not comparable."""
        return {"samples": self.n_samples, "of": self.n_available, "seed": SUBSET_SEED}

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Read this rank's sequences, one micro-batch at a time. Every rank gets the same number."""
        per_round = self.loader.micro_batch_size * self.loader.world_size
        for first in range(0, self.n_samples, per_round):
            yield from self.loader.batch(first, min(per_round, self.n_samples - first)).micro_batches

    def by_source(self) -> Tensor:
        """Which source each of this rank's sequences belongs to, in order: (N, sources) float64 ones and zeros."""
        assert self.mixture is not None
        size = self.loader.micro_batch_size
        firsts = np.arange(0, self.n_samples, size * self.loader.world_size) + self.loader.rank * size
        rows = (firsts[:, None] + np.arange(size)).ravel()  # the last ones may be surplus, which are masked
        which, _ = self.mixture.interleave.locate(np.minimum(rows, self.n_samples - 1))
        return torch.from_numpy(which)[:, None].eq(torch.arange(len(self.mixture.names))).double()


@dataclass(frozen=True)
class Score:
    """The result of a validation. Undefined values are NaN: the standard error of one sequence, bits of no bytes."""

    loss: float  # nats per token
    loss_stderr: float  # standard error over sequences, as if they were drawn independently
    bits_per_byte: float
    bits_per_byte_stderr: float
    unigram_bits_per_byte: float  # entropy of the targets: the score of the best model without context
    sources: dict[str, tuple[float, float]] = field(default_factory=dict)  # of a mixture: loss and bits per byte

    def record(self) -> dict[str, float | None]:
        """For metrics.jsonl."""
        values = {
            "val_loss": self.loss,
            "val_loss_stderr": self.loss_stderr,
            "val_bits_per_byte": self.bits_per_byte,
            "val_bits_per_byte_stderr": self.bits_per_byte_stderr,
            "unigram_bits_per_byte": self.unigram_bits_per_byte,
        }
        for name, both in self.sources.items():
            values |= zip((f"val_loss/{name}", f"val_bits_per_byte/{name}"), both, strict=True)
        return {key: value if math.isfinite(value) else None for key, value in values.items()}


@torch.no_grad()
def evaluate(model: nn.Module, validation: Validation, device: torch.device) -> Score:
    """Score the model on the validation set. Collective: every rank gets the same score."""
    losses, tokens, n_bytes = [], [], []  # by sequence of this rank
    counts = torch.zeros(len(validation.bytes_per_token), dtype=torch.int64)  # how often each token is a target
    model.eval()
    for micro in validation.micro_batches():
        losses.append(model(*micro.on(device), per_sequence=True))
        known = micro.targets != IGNORE
        tokens.append(known.sum(1))
        n_bytes.append((validation.bytes_per_token[micro.targets.clamp(min=0)] * known).sum(1))
        if validation.unigram is None:
            counts += micro.targets[known].bincount(minlength=len(counts))
    model.train()
    reshard(model)
    if validation.unigram is None:
        validation.unigram = unigram_bits_per_byte(sum_over_ranks(counts.to(device)).cpu(), validation.bytes_per_token)
    # (3, N), float64: N sequences of this rank. Masked rows are zeros.
    values = torch.stack([torch.cat(part).double().cpu() for part in (losses, tokens, n_bytes)])
    n = (values[1] > 0).sum().double()
    of_sources = (values @ validation.by_source()).T.flatten() if validation.mixture else values[:0, 0]
    sums = torch.cat((n[None], values.sum(1), (values @ values.T).flatten(), of_sources))
    found = sum_over_ranks(sums.to(device)).cpu()
    totals, products = found[1:4], found[4:13].reshape(3, 3)
    loss, loss_stderr = _ratio(totals, products, 1, int(found[0]))
    nats, nats_stderr = _ratio(totals, products, 2, int(found[0]))
    bits, stderr = bits_per_byte(nats, 1), bits_per_byte(nats_stderr, 1)
    names = validation.mixture.names if validation.mixture else []
    parts = dict(zip(names, found[13:].view(-1, 3).tolist(), strict=True))
    sources = {
        name: (summed / targets if targets else math.nan, bits_per_byte(summed, text) if text else math.nan)
        for name, (summed, targets, text) in parts.items()
    }
    return Score(loss, loss_stderr, bits, stderr, validation.unigram, sources)


def eval_line(step: int, score: Score, validation: Validation, seconds: float) -> str:
    """The log line of a validation. Undefined values (see Score) are left out."""
    loss, stderr = score.loss, score.loss_stderr
    parts = [f"eval    step {step}", f"loss {loss:.4f}" + (f" +- {stderr:.4f}" if math.isfinite(stderr) else "")]
    of = f"{validation.n_samples} of {validation.n_available} sequences, {seconds:.1f} s"
    bits, stderr, unigram = score.bits_per_byte, score.bits_per_byte_stderr, score.unigram_bits_per_byte
    if not math.isnan(unigram):
        parts.append(f"bits/byte {bits:.3f}" + (f" +- {stderr:.3f}" if math.isfinite(stderr) else ""))
        of = f"unigram {unigram:.3f}; {of}"
    if unigram > 0 and math.isfinite(bits):
        gain = 100 * (1 - bits / unigram)
        of = f"{abs(gain):.0f} % {'below' if gain >= 0 else 'above'} {of}"
    if not validation.explained and not math.isnan(unigram):
        validation.explained, of = True, f"{of})\n        ({UNIGRAM}"
    lines = ["  ".join([*parts, f"({of})"])]
    for name, (loss, bits) in score.sources.items():
        lines.append(f"        {name}: loss {loss:.4f}" + (f"  bits/byte {bits:.3f}" if math.isfinite(bits) else ""))
    return "\n".join(lines)


def unigram_bits_per_byte(counts: Tensor, lengths: Tensor) -> float:
    """The entropy of the targets in bits per byte of text; NaN if they have no text.

    Args:
        counts: (V,) int64, how often each token is a target.
        lengths: (V,) int64, bytes of text of each token.
    """
    n_bytes = int((counts * lengths).sum())
    weights = counts.double()
    nats = torch.xlogy(weights, weights.sum() / weights).sum().item()
    return bits_per_byte(nats, n_bytes) if n_bytes else math.nan


def _ratio(totals: Tensor, products: Tensor, of: int, n: int) -> tuple[float, float]:
    """The summed loss over another sum, and the standard error of that ratio over n sequences.

    To first order, the error of a ratio R = sum(y) / sum(x) is that of the mean residual y - R x. For sequences of
    equal length this is the usual standard error of a mean.

    Args:
        totals: (3,) sums over sequences of loss, tokens, bytes.
        products: (3, 3) sums of their products.
        of: the index of the sum to divide by.
    """
    total = float(totals[of])
    if not total:
        return math.nan, math.nan
    ratio = float(totals[0]) / total
    squares = float(products[0, 0] - 2 * ratio * products[0, of] + ratio**2 * products[of, of])
    return ratio, math.sqrt(max(squares, 0.0) * n / (n - 1)) / total if n > 1 else math.nan


def bytes_per_token(tokenizer: Tokenizer, end: int | None = None) -> NDArray[np.int64]:
    """The bytes of text of each token, (size,) int64; 0 for special tokens and for the end token `end`.

    In a byte-level vocabulary each character of a token is one byte. In others, U+2581 is a space and <0xAB> is a byte.
    """
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    byte_level = all(alphabet.issuperset(token) for token in vocabulary if token not in added)
    for token, index in vocabulary.items():
        if added.get(token, False):
            continue
        if token in added:
            lengths[index] = len(token.encode())
        elif byte_level or (len(token) == 6 and token.startswith("<0x")):
            lengths[index] = len(token) if byte_level else 1
        else:
            lengths[index] = len(token.replace("\u2581", " ").encode())
    if end is not None:
        lengths[end] = 0
    return lengths
