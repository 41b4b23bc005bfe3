"""Pairs of a source and a target, as rows for an encoder-decoder or for a decoder.

    encoder-decoder   tokens   source <end>                     targets   target <end>
    decoder           tokens   <end> source <end> target        targets   (masked) target <end>

With a begin token, a decoder's row begins with it instead of the end mark.

A source has at most train.seq_len tokens with its end mark, and a target at most data.target_len; longer ones are cut
before the end mark. The rest of a row is padding: id 0, which encoder-decoders mask, and masked targets.

Most of a row would be padding. So `trimmed` cuts off columns that are padding in the whole batch, and batches have
similar lengths: each window of 4,096 samples of an epoch's permutation is sorted by length, and its blocks of 128 are
permuted. The order stays a function of (seed, i). Validation is not sorted: its first samples are a random subset.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from tokenizers import Tokenizer

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, ModelConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.order import Indices, Permutation, sample_indices
from torchtitan_lite.data.samples import Array, Rows, Samples
from torchtitan_lite.data.spans import require_pad
from torchtitan_lite.data.token_files import PAIRS, TokenFiles, document_ends, read_meta
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.models.loss import IGNORE

WINDOW, BLOCK = 4096, 128
_SIDES = "sources", "targets"
_MULTIPLE = 8  # columns are rounded up to a multiple of this


class PairSamples(Samples):
    """The pairs of one split of a prepared folder."""

    def __init__(self, folder: Path, split: str, config: Config) -> None:
        """
        Raises:
            DataError: the folder holds no pairs, is damaged, or its tokenizer has no pad.
        """
        meta = read_meta(folder)
        if PAIRS not in meta.files:
            raise DataError(
                f'{folder} holds texts, but data.objective = "pairs" needs sources with targets; prepare them with '
                '--source-key and --target-key, or use data.objective = "causal" or "span_corruption"'
            )
        self._joined = not FAMILIES[config.model.family].encoder_decoder
        if not self._joined:
            require_pad(folder)
        self.seq_len, self.target_len = config.input_len, config.target_len
        self._longest = np.array([config.train.seq_len, config.data.target_len])  # source and target
        self._blind, self._sorted = config.data.blind_source, split == "train"
        self._stream, self._marks = TokenFiles(folder, meta, split), meta.marks
        self._ends = document_ends(folder, meta, split)
        self.n_samples = len(self._ends) // 2
        self.mean_tokens = (meta.tokens(split) - 1) / self.n_samples
        self._window = functools.lru_cache(maxsize=4)(self._sorted_window)
        if split == "train":
            self.notes = (self._note(),)

    def lengths(self, pairs: Indices, *, cut: bool = True) -> Array:
        """Return the tokens of source and target with end marks, (n, 2); `cut` limits them to the maximum lengths."""
        begins = np.where(pairs, self._ends[2 * pairs - 1], 1)
        ends = np.stack((self._ends[2 * pairs], self._ends[2 * pairs + 1]), axis=1)
        lengths = np.diff(ends, axis=1, prepend=begins[:, None]) + 1 - len(self._marks)
        if self._blind:
            lengths[:, 0] = 1
        return np.minimum(lengths, self._longest) if cut else lengths

    def _note(self) -> str:
        cut = (self.lengths(np.arange(self.n_samples), cut=False) > self._longest).sum(axis=0)
        cuts = [
            f"{n:,} {side} cut to {limit} tokens" for n, side, limit in zip(cut, _SIDES, self._longest, strict=True)
        ]
        return f"{self.n_samples:,} pairs; {' and '.join(cuts)}"

    def indices(self, run_samples: Indices, seed: int | None) -> Indices:
        if seed is None or not self._sorted:
            return super().indices(run_samples, seed)
        epochs, positions = np.divmod(run_samples, self.n_samples)
        windows, places = np.divmod(positions, WINDOW)
        pairs = np.empty_like(run_samples)
        for epoch, window in np.unique(np.stack((epochs, windows), axis=1), axis=0).tolist():
            here = (epochs == epoch) & (windows == window)
            pairs[here] = self._window(epoch, window, seed)[places[here]]
        return pairs

    def _sorted_window(self, epoch: int, window: int, seed: int) -> Indices:
        """Return the pairs of one window of an epoch: blocks of similar lengths, in random order."""
        first = epoch * self.n_samples + window * WINDOW
        run_samples = np.arange(first, min(first + WINDOW, (epoch + 1) * self.n_samples))
        pairs = sample_indices(run_samples, self.n_samples, seed)
        lengths = self.lengths(pairs)
        pairs = pairs[np.lexsort((lengths[:, 1], lengths[:, 0]))]
        blocks = -(-len(pairs) // BLOCK)
        order = Permutation(blocks, f"{seed}/{epoch}/{window}/blocks".encode())(np.arange(blocks))
        return np.concatenate([pairs[BLOCK * block : BLOCK * (block + 1)] for block in order.tolist()])

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        pairs = self.indices(run_samples, seed)
        rows = Rows.empty(len(pairs), self.seq_len, self.target_len)
        for row, (pair, (n_source, n_target)) in enumerate(
            zip(pairs.tolist(), self.lengths(pairs).tolist(), strict=True)
        ):
            source = self._tokens(2 * pair, n_source)
            target = self._tokens(2 * pair + 1, n_target)
            if self._joined:
                together = np.concatenate((self._marks[-1:], source, target))
                rows.tokens[row, : len(together) - 1] = together[:-1]
                rows.targets[row, n_source : len(together) - 1] = target
            else:
                rows.tokens[row, :n_source], rows.targets[row, :n_target] = source, target
        return rows

    def _tokens(self, document: int, length: int) -> Array:
        """Return the first tokens of a document, then the end mark: (length,)."""
        first = int(self._ends[document - 1]) if document else 1
        return np.append(self._stream.read(first, first + length - 1).astype(np.int64), self._marks[0])

    def question(self, number: int, seed: int | None) -> tuple[list[int], list[int]]:
        """Return for generation the model's input, and the whole target without its end mark."""
        pair = self.indices(np.array([number]), seed)
        n_source, n_target = int(self.lengths(pair)[0, 0]), int(self.lengths(pair, cut=False)[0, 1])
        source, target = self._tokens(2 * int(pair[0]), n_source), self._tokens(2 * int(pair[0]) + 1, n_target)
        return [*self._marks[-1:] * self._joined, *source.tolist()], target.tolist()[:-1]

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        return int(self.lengths(self.indices(run_samples, seed))[:, 1].sum())

    def trimmed(self, rows: Rows) -> Rows:
        n_targets = _columns(rows.targets != IGNORE)
        # a decoder has equally many tokens and targets; an encoder's tokens end before the padding
        n_tokens = n_targets if self._joined else _columns(rows.tokens != 0)
        return Rows(rows.tokens[:, :n_tokens], rows.targets[:, :n_targets], rows.begins[:, :n_tokens])


def questions(samples: Mixture, n: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return the `question` of a mixture's first n samples, or fewer if pairs would repeat."""
    which, numbers = samples.locate(np.arange(samples.longest_prefix(n)))
    sources = cast(list[PairSamples], samples.sources)
    return [sources[k].question(number, seed) for k, number in zip(which.tolist(), numbers.tolist(), strict=True)]


def _columns(used: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> int:
    """Return the columns up to the last used one, rounded up: few batch shapes are faster on a GPU and compile less."""
    last = int(np.flatnonzero(used.any(axis=0))[-1:].sum()) + 1 if used.size else 1
    return min(-(-last // _MULTIPLE) * _MULTIPLE, used.shape[1])


def encode_prompt(
    tokenizer: Tokenizer, prompt: str, model: ModelConfig, prefix: str, begin: Sequence[int], mark: list[int]
) -> list[int]:
    """Return the tokens of a text to continue, or of an encoder-decoder's source, as training has them.

    Args:
        prefix: of each source.
        begin: the token that begins each document, if any.
        mark: ends a source, and stands for an empty prompt; may be empty.

    Raises:
        ConfigError: the prompt is empty, or too long for the model.
    """
    answers, limit = FAMILIES[model.family].encoder_decoder, model.max_seq_len
    text = prefix + prompt if answers and not prompt.startswith(prefix) else prompt
    ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    if answers:
        ids += [] if ids[-1:] == mark else mark
    else:
        ids = bpe.begun(ids, tuple(begin)) or mark
    if not ids:
        raise ConfigError("the prompt is empty, and the model has no token that begins a text: give it one")
    if len(ids) > (longest := limit if answers else limit - 1):
        raise ConfigError(
            f"the prompt {prompt[:40]!r} has {len(ids)} tokens, and the model takes {limit} (max_seq_len; of a "
            f"decoder, with the answer): a prompt of at most {longest} works"
        )
    return ids


def source_prefix(folder: Path) -> str:
    """Return the prefix of each source in a run or prepared folder of pairs; empty for other folders."""
    file = folder / PAIRS
    return str(json.loads(file.read_bytes())["source_prefix"]) if file.is_file() else ""
