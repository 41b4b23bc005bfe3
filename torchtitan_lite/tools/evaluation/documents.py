"""Scores models on documents: of texts, read as in `prepare`, or of prepared folders.

Encoder-decoders and models trained on pairs are scored on the rows of their objective instead.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.config import paths
from torchtitan_lite.data import token_files
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.prepare.documents import usable
from torchtitan_lite.data.prepare.texts import find
from torchtitan_lite.data.token_files import PAIRS, read_meta
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import Batch, Window, bytes_per_token, pad_batch, row_sizes, sums_by_item
from torchtitan_lite.scoring.statistics import Array
from torchtitan_lite.scoring.task_tokens import text_encoder
from torchtitan_lite.tools.load_model import Opened, out_of_range

T = TypeVar("T")
Split = Literal["val", "train"]
ENCODED_TOGETHER = 256  # documents
SORTED_TOGETHER = 1024  # windows sorted by length, so that a batch has little padding


@dataclass(frozen=True)
class Texts:
    """The texts to score, and how."""

    data: Sequence[str] = ()  # texts and prepared folders; empty: the run's own
    split: Split = "val"  # of prepared folders
    text_key: str | list[str] = "text"  # a list is tried in order
    text_suffixes: Sequence[str] = ()
    documents: int | None = None  # number per text; None: all
    seq_len: int = 0  # 0: as in training
    batch_size: int = 8

    def problems(self) -> list[str]:
        """Return a message for each option that is out of range."""
        return out_of_range(
            self,
            documents=(self.documents is None or self.documents >= 1, "at least 1"),
            batch_size=(self.batch_size >= 1, "at least 1"),
            seq_len=(self.seq_len >= 0, "0 (as in training) or more"),
        )


@dataclass(frozen=True)
class Document:
    """A text as the model's tokens, without end tokens."""

    tokens: list[int]
    n_bytes: int  # of the text in UTF-8
    hash: int  # of the text


def documents(opened: Opened, name: str, texts: Texts) -> Iterator[Document]:
    """Yield the documents of a text (file, folder or glob) or a prepared folder, in this model's tokens.

    Raises:
        DataError: a text can't be read or encoded.
        ConfigError: the folder holds pairs.
    """
    if not paths.is_prepared(name):
        corpus = find(name, (texts.text_key,), texts.text_suffixes)
        yield from _encoded(opened, islice((document.texts[0] for document in usable(corpus)), texts.documents))
        return
    folder = paths.expand(name)
    meta, own = read_meta(folder), bpe.load(folder / "tokenizer.json")
    if PAIRS in meta.files:
        raise ConfigError(f"{folder} holds pairs, and {opened.source} is a decoder: give it texts")
    lengths = bytes_per_token(own, meta.marks)
    stored = islice(token_files.documents(folder, meta, texts.split), texts.documents)
    if bpe.sha256(own) != bpe.sha256(opened.tokenizer):
        yield from _encoded(opened, (own.decode(tokens, skip_special_tokens=False) for tokens in stored))
        return
    for tokens in stored:
        text = own.decode(tokens, skip_special_tokens=False)
        yield Document(tokens, int(lengths[tokens].sum()), hash_of(text.encode()))


def _encoded(opened: Opened, texts: Iterable[str]) -> Iterator[Document]:
    encode, remaining = text_encoder(opened.tokenizer, opened.ends, "a document"), iter(texts)
    while together := list(islice(remaining, ENCODED_TOGETHER)):
        for text, ids in zip(together, encode(together), strict=True):
            yield Document(ids, len(text.encode()), hash_of(text.encode()))


def hash_of(content: bytes) -> int:
    """Return a hash of 48 bits, which a float64 holds exactly."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")


# --- scores -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Per document: summed negative log-likelihood in nats, scored tokens, bytes, and a hash of the text."""

    nats: Array
    tokens: Array
    n_bytes: Array
    hashes: Array = field(default_factory=lambda: np.zeros(0))
    seq_len: int = field(default=0, kw_only=True)  # tokens in a window

    def same_documents(self, other: "Scores") -> bool:
        """Return whether both have scores of the same documents."""
        return np.array_equal(self.hashes, other.hashes)


def score_documents(
    model: Transformer, documents: Iterable[Document], prefix: list[int], length: int, process: Process, batch_size: int
) -> Scores:
    """Score documents. Collective: the ranks share the batches, and all get the same result.

    Each document is cut into windows, and every token is predicted once, from all earlier tokens of its window. The
    first token of a window is predicted from the last token of the previous window.

    Args:
        prefix: tokens before each document. Without them, a document's first token is not predicted.
        length: tokens in a window; at most the model's max_seq_len.
    """
    sizes: list[tuple[int, ...]] = []  # tokens, bytes and hash of each document

    def windows() -> Iterator[Window]:
        for number, document in enumerate(documents):
            stream = np.array(prefix + document.tokens, np.int32)
            n_targets = max(len(stream) - 1, 0)
            sizes.append((n_targets, document.n_bytes, document.hash))
            for start in range(0, n_targets, length):
                yield Window(number, stream[start : start + length + 1])

    def batches() -> Iterator[list[Window]]:
        remaining = windows()
        while together := list(islice(remaining, SORTED_TOGETHER)):
            together.sort(key=len, reverse=True)
            for first in range(0, len(together), batch_size):
                yield together[first : first + batch_size]

    return _scores(model, batches(), pad_batch, sizes, process, length)


def score_rows(
    model: Transformer, samples: Mixture, n: int | None, lengths: Tensor, process: Process, batch_size: int
) -> Scores:
    """Score the targets of rows: pairs, or spans that an encoder-decoder fills in. Collective.

    Args:
        n: number of rows; None: all.
        lengths: bytes of each token's text, (V,) int64.
    """
    sizes: list[tuple[int, ...]] = []

    def batches() -> Iterator[Batch]:
        end = min(samples.n_samples, n or samples.n_samples)
        for first in range(0, end, batch_size):
            numbers = np.arange(first, min(first + batch_size, end))
            drawn = samples.draw(numbers, None)
            rows = MicroBatch(torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.targets))
            hashes = [hash_of(row[row != IGNORE].tobytes()) for row in drawn.targets]
            sizes.extend(zip(*row_sizes(rows, lengths).tolist(), hashes, strict=True))
            yield Batch(torch.from_numpy(numbers), rows)

    return _scores(model, batches(), lambda batch: batch, sizes, process, samples.sources[0].seq_len)


def _scores(
    model: Transformer,
    batches: Iterable[T],
    load: Callable[[T], Batch],
    sizes: list[tuple[int, ...]],
    process: Process,
    length: int,
) -> Scores:
    """Score items. Loading their batches fills `sizes`."""
    (nats,) = sums_by_item(model, batches, load, sizes, process)
    return Scores(nats.numpy(), *np.array(sizes, dtype=np.float64).reshape(-1, 3).T, seq_len=length)
