"""The documents that models are scored on, and their scores: texts, read as `prepare` reads them, and prepared folders.

An encoder-decoder, or a decoder that was trained on pairs, is scored on the rows of its objective instead.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.prepare.documents import usable
from torchtitan_lite.data.prepare.texts import COMMAND, find
from torchtitan_lite.data.token_files import PAIRS, Meta, TokenFiles, document_ends, read_meta
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import Batch, Window, bytes_per_token, padded, row_nats, row_sizes, sums_by_item
from torchtitan_lite.scoring.statistics import Array
from torchtitan_lite.scoring.task_tokens import text_encoder
from torchtitan_lite.tools.load_model import Opened

Split = Literal["val", "train", "all"]
ENCODED_TOGETHER = 256  # documents
SORTED_TOGETHER = 1024  # windows, sorted by length so that a batch has little padding


@dataclass(frozen=True)
class Document:
    """A text as tokens of the model, without end tokens."""

    tokens: list[int]
    n_bytes: int  # of the text in UTF-8
    hash: int  # of the text


@dataclass(frozen=True)
class Place:
    """A text (a file, a folder or a glob), or a split of a prepared folder."""

    name: str
    folder: Path | None = None  # prepared
    split: Split = "val"
    text_key: str = "text"
    text_suffixes: tuple[str, ...] = ()
    most: int | None = None  # documents
    notes: tuple[str, ...] = ()  # files of the text's folder that are not read

    def documents(self, opened: Opened) -> Iterator[Document]:
        """The documents in tokens of this model.

        Raises:
            DataError: a text can't be read or encoded.
            ConfigError: the folder holds pairs.
        """
        if self.folder is None:
            corpus = find(self.name, (self.text_key,), self.text_suffixes, COMMAND._replace(or_skip=""))
            texts = (document.texts[0] for document in usable(corpus))
            yield from _encoded(opened, islice(texts, self.most))
            return
        meta = read_meta(self.folder)
        if PAIRS in meta.files:
            raise ConfigError(f"{self.folder} holds pairs, and {opened.source} is a decoder: give it texts")
        own = bpe.load(self.folder / "tokenizer.json")
        spans = islice(self._spans(meta), self.most)
        if bpe.sha256(own) != bpe.sha256(opened.tokenizer):
            yield from _encoded(opened, (own.decode(tokens, skip_special_tokens=False) for tokens in spans))
            return
        lengths = bytes_per_token(own, meta.end_token)
        for tokens in spans:
            text = own.decode(tokens, skip_special_tokens=False)
            yield Document(tokens, int(lengths[tokens].sum()), hash_of(text.encode()))

    def n_bytes(self) -> int | None:
        """The bytes of the raw text, if a prepared folder is read in full. A tokenizer may not keep every byte."""
        if self.folder is None or self.most is not None:
            return None
        meta = read_meta(self.folder)
        parts = {"all": meta.text_bytes, "val": meta.val_text_bytes, "train": meta.text_bytes - meta.val_text_bytes}
        return parts[self.split]

    def _spans(self, meta: Meta) -> Iterator[list[int]]:
        assert self.folder is not None
        for name in ("train", "val") if self.split == "all" else (self.split,):
            if not meta.n_documents(name):
                continue
            stream, first = TokenFiles(self.folder, meta, name), 1
            for end in document_ends(self.folder, meta, name):
                yield stream.read(first, int(end) - 1).tolist()
                first = int(end)


def _encoded(opened: Opened, texts: Iterable[str]) -> Iterator[Document]:
    encode, remaining = text_encoder(opened.tokenizer, opened.ends, "a document"), iter(texts)
    while together := list(islice(remaining, ENCODED_TOGETHER)):
        for text, ids in zip(together, encode(together), strict=True):
            yield Document(ids, len(text.encode()), hash_of(text.encode()))


def hash_of(content: bytes) -> int:
    """A hash of 48 bits, which a float64 holds exactly."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")


# --- scores -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """By document: summed negative log-likelihood in nats, scored tokens, bytes, and a hash of the text."""

    nats: Array
    tokens: Array
    n_bytes: Array
    hashes: Array = field(default_factory=lambda: np.zeros(0))
    seq_len: int = field(default=0, kw_only=True)  # tokens in a window

    def __len__(self) -> int:
        return len(self.nats)

    def __add__(self, other: "Scores") -> "Scores":
        parts = zip(self._arrays(), other._arrays(), strict=True)
        return Scores(*(np.concatenate(pair) for pair in parts), seq_len=self.seq_len)

    def first(self, n: int | None) -> "Scores":
        """The scores of the first n documents; None: of all."""
        return Scores(*(part[:n] for part in self._arrays()), seq_len=self.seq_len)

    def of_the_same(self, other: "Scores") -> bool:
        """Whether both are of the same documents."""
        return len(self) == len(other) and np.array_equal(self.hashes, other.hashes)

    def _arrays(self) -> tuple[Array, ...]:
        return self.nats, self.tokens, self.n_bytes, self.hashes


def score_documents(
    model: Transformer, documents: Iterable[Document], prefix: list[int], length: int, world: World, batch_size: int
) -> Scores:
    """Score documents. Collective: the ranks share the batches, and all get the same result.

    Each document is cut into windows, and every token is predicted once: from all tokens of its window before it, and
    the first of a window from the last of the window before.

    Args:
        prefix: tokens before each document. Without them, a document's first token has no prediction.
        length: tokens of a window; at most the model's max_seq_len.
    """
    sizes: list[tuple[int, int, int]] = []  # tokens, bytes and hash of each document

    def windows() -> Iterator[Window]:
        for number, document in enumerate(documents):
            stream = prefix + document.tokens
            inputs, targets = stream[:-1], stream[1:]
            sizes.append((len(targets), document.n_bytes, document.hash))
            for start in range(0, len(targets), length):
                yield Window(number, inputs[start : start + length], targets[start : start + length])

    def batches() -> Iterator[list[Window]]:
        remaining = windows()
        while together := list(islice(remaining, SORTED_TOGETHER)):
            together.sort(key=lambda window: -len(window.tokens))
            for first in range(0, len(together), batch_size):
                yield together[first : first + batch_size]

    (nats,) = sums_by_item(model, batches(), padded, sizes, world)
    return Scores(nats.numpy(), *np.array(sizes, dtype=np.float64).reshape(-1, 3).T, seq_len=length)


def score_rows(model: Transformer, samples: Mixture, lengths: Tensor, world: World, batch_size: int) -> Scores:
    """Score the targets of all rows: pairs, or spans that an encoder-decoder has to fill in. Collective.

    Args:
        lengths: bytes of text of each token, (V,) int64.
    """

    def load(first: int) -> Batch:
        numbers = np.arange(first, min(first + batch_size, samples.n_samples))
        rows = samples.draw(numbers, None)
        return Batch(
            torch.from_numpy(numbers), MicroBatch(torch.from_numpy(rows.tokens), torch.from_numpy(rows.targets))
        )

    def measure(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
        nats = row_nats(model, batch.rows, device).double().cpu()
        hashes = [hash_of(row[row != IGNORE].tobytes()) for row in batch.rows.targets.numpy()]
        return torch.stack((nats, *row_sizes(batch.rows, lengths).double(), torch.tensor(hashes, dtype=torch.float64)))

    n = samples.n_samples
    return Scores(
        *sums_by_item(model, range(0, n, batch_size), load, range(n), world, measure, n_values=4).numpy(),
        seq_len=samples.seq_len,
    )
