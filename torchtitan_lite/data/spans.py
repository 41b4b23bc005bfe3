"""Span corruption (T5, arXiv 1910.10683): the encoder reads text with spans removed, the decoder predicts the spans.

Sample j is tokens[1 + j R : 1 + (j + 1) R] of the stream. Sentinels replace some of its spans. R follows from
train.seq_len, the noise density and the mean span length, so that the inputs are full:

    text      the cat sat on the mat and slept
    inputs    the cat <0> the mat <1> <end>            <0>, <1>, ...: sentinels, each used once
    targets   <0> sat on <1> and slept <end>

The numbers of replaced tokens and spans are fixed (span_lengths in config/sections/data.py). The lengths of the spans,
and of the text before each, are random compositions of these numbers. A sample begins with text.

The spans are a function of the seed and the sample's number in the run, so each epoch draws new ones. They use raw
random bits, because numpy may change the algorithms of its distributions.
"""

import hashlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.schema import Config, DataConfig
from torchtitan_lite.config.sections.data import SpanLengths, span_lengths
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Array, Rows, Samples
from torchtitan_lite.errors import DataError


class SpanSamples(Samples):
    """The samples of one split of a prepared folder."""

    def __init__(self, folder: Path, split: str, seq_len: int, config: DataConfig) -> None:
        """
        Raises:
            DataError: the split is shorter than one sample, or the tokenizer has no pad or too few sentinels.
        """
        self.lengths = span_lengths(seq_len, config.noise_density, config.mean_span_length)
        super().__init__(folder, split, seq_len, self.lengths.targets, self.lengths.raw)
        self._sentinels = sentinels(folder, self.lengths.spans)

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        indices = self.indices(run_samples, seed).tolist()
        rows = Rows.empty(len(indices), self.seq_len, self.target_len)
        for row, (number, index) in enumerate(zip(run_samples.tolist(), indices, strict=True)):
            first = 1 + index * self.lengths.raw
            text = self._stream.read(first, first + self.lengths.raw).astype(np.int64)
            gaps = mask(self.lengths, f"{seed}/{number}/{index}")
            for side, cut in ((rows.tokens, gaps), (rows.targets, ~gaps)):
                tokens = replaced(text, cut, self._sentinels)
                side[row, : len(tokens)], side[row, len(tokens)] = tokens, self._end
        return rows


def mask(lengths: SpanLengths, key: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which tokens are replaced, (raw,): `lengths.noise` tokens in `lengths.spans` runs, not the first token."""
    bits = np.random.Philox(key=int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest()))
    kept, noise = (_composition(total, lengths.spans, bits) for total in (lengths.raw - lengths.noise, lengths.noise))
    runs = np.stack((kept, noise), axis=1).ravel()
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def _composition(total: int, parts: int, bits: np.random.Philox) -> Array:
    """Return a random composition of `total` into positive parts, (parts,), all equally likely."""
    cuts = np.argsort(bits.random_raw(total - 1), kind="stable")[: parts - 1] + 1
    return np.diff(np.concatenate(([0], np.sort(cuts), [total])))


def replaced(text: Array, cut: np.ndarray[tuple[int], np.dtype[np.bool_]], sentinels: Array) -> Array:
    """Return the tokens (n,) with the i-th run of cut tokens replaced by the i-th sentinel."""
    begins = cut & ~np.concatenate(([False], cut[:-1]))
    marked = np.where(begins, sentinels[np.minimum(np.cumsum(begins) - 1, len(sentinels) - 1)], text)
    return marked[~cut | begins]


def sentinels(folder: Path, n: int) -> Array:
    """Return the ids of the first n sentinels, (n,). T5's vocabularies number them from the end.

    Args:
        folder: a prepared folder or a tokenizer.json.

    Raises:
        DataError: the tokenizer has no pad with id 0, or too few sentinels.
    """
    tokenizer = require_pad(folder)
    ids = [tokenizer.token_to_id(bpe.sentinel(i)) for i in range(n)]
    if None in ids:
        raise DataError(
            f"{folder}: a sample has {n} spans, but the tokenizer has {ids.index(None)} sentinels "
            f"({bpe.sentinel(0)} to {bpe.sentinel(n - 1)} are needed); use a smaller train.seq_len or a larger "
            "data.mean_span_length"
        )
    return np.array(ids, np.int64)


def require_pad(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder or file. Raises DataError unless pad has id 0, which encoder-decoders mask."""
    tokenizer = bpe.load(folder)
    if tokenizer.token_to_id(bpe.PAD) != 0:
        raise DataError(f"{folder}: the tokenizer has no {bpe.PAD} with id 0, {bpe.NO_SENTINELS}")
    return tokenizer


def wrong_tokenizer(config: Config) -> dict[str, str]:
    """Return why `tokenizer.path` does not suit the objective, before preparation; a dict as from `broken_rules`."""
    path, data = expand(config.tokenizer.path), config.data
    try:
        if data.objective == "span_corruption":
            sentinels(path, span_lengths(config.train.seq_len, data.noise_density, data.mean_span_length).spans)
        elif FAMILIES[config.model.family].encoder_decoder:
            require_pad(path)
    except DataError as error:
        return {"tokenizer.path data.objective": str(error)}
    return {}
