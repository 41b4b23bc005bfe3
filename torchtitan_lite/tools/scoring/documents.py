"""The documents that a model is scored on: texts, read as `prepare` reads them, and prepared folders."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from torchtitan_lite.config.paths import expand, is_prepared
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare import corpus, split
from torchtitan_lite.data.prepare.plan import Options
from torchtitan_lite.data.token_files import PAIRS, Meta, TokenFiles, document_ends, read_meta
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.tasks.encode import text_encoder
from torchtitan_lite.tools.opening import Opened
from torchtitan_lite.training.evaluate import bytes_per_token

Split = Literal["val", "train", "all"]
_TOGETHER = 256  # documents encoded at a time


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
            texts = split.documents(corpus.find(self.name, self.text_key, self.text_suffixes), Options())
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


def place(
    name: str,
    text_key: str = "text",
    text_suffixes: Sequence[str] = (),
    split_name: Split = "val",
    most: int | None = None,
) -> Place:
    """What a name on the command line stands for.

    Raises:
        DataError: there is no such text.
    """
    if not name:
        raise DataError("an empty name is no text to score")
    if is_prepared(name):
        return Place(name, expand(name), split_name, most=most)
    found = corpus.find(name, text_key, text_suffixes)  # before any other text is scored
    notes = tuple(corpus.not_read([found], "--text-suffixes"))
    return Place(name, None, split_name, text_key, tuple(text_suffixes), most, notes)


def _encoded(opened: Opened, texts: Iterable[str]) -> Iterator[Document]:
    encode, left = text_encoder(opened.tokenizer, opened.ends, "a document"), iter(texts)
    while some := list(islice(left, _TOGETHER)):
        for text, ids in zip(some, encode(some), strict=True):
            yield Document(ids, len(text.encode()), hash_of(text.encode()))


def hash_of(content: bytes) -> int:
    """A hash of 48 bits, which a float64 holds exactly."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")
