"""Text becomes token files, once.

1. The key of the result is a hash of everything that decides it: files with size and time of change, the Python
   version, tokenizer size, split, format. It names a folder in the cache.
2. If that folder is there, it is used. Otherwise whoever gets the lock makes it, and the others wait for it: every
   rank may simply call `prepare`, before there is a process group.
3. Documents are split by a hash of their text: a document stays where it is when others are added (in a corpus of at
   least 1 MiB; a smaller one is cut into smaller blocks, see corpus.py).
4. A byte-level BPE tokenizer is trained on the training documents, unless one is given, and all are encoded. Each
   document ends with the end mark. The tokens go to train.bin and val.bin, uint16 or uint32.
5. Everything is written beside and renamed last, so that half a folder is never taken for a whole one.
"""

import hashlib
import itertools
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer

from torchtitan_lite.config import DataConfig, TokenizerConfig
from torchtitan_lite.data import corpus as corpora
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.errors import DataError

FORMAT_VERSION = 1
_BATCH = 256  # documents that are encoded at a time, on all cores


@dataclass(frozen=True)
class Meta:
    """What a prepared folder says of itself (meta.json)."""

    format_version: int
    documents: int
    val_documents: int
    text_bytes: int
    train_tokens: int
    val_tokens: int
    vocab_size: int
    tokenizer_sha256: str
    tokens_sha256: str  # of train.bin, then val.bin: two corpora with this in common are the same data


def cache_folder(data: DataConfig) -> Path:
    """Where prepared data lives."""
    if data.cache_dir:
        return Path(data.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan_lite"


def prepare(data: DataConfig, tokenizer: TokenizerConfig, say: Callable[[str], None]) -> Path:
    """The folder with tokenizer.json, train.bin, val.bin and meta.json for this text; made if it is not there yet.

    Raises:
        DataError: the text is missing, not UTF-8, or too short.
    """
    corpus = corpora.find(data.path, data.text_key)
    given = bpe.load(Path(tokenizer.path)) if tokenizer.path else None
    decides = {
        "format": FORMAT_VERSION,
        "files": corpus.identity(),
        "text_key": data.text_key,
        "python": platform.python_version() if corpus.python_source else "",
        "tokenizer": [bpe.sha256(given), tokenizer.end_token] if given else tokenizer.vocab_size,
        "val_fraction": data.val_fraction,
    }
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    cache = cache_folder(data)
    folder = cache / key
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{key}.lock"):
                if not folder.is_dir():
                    _make(folder, corpus, data, tokenizer, given, say)
        except OSError as error:
            raise DataError(f"data.cache_dir: can't write to {cache}: {error}") from None
    return folder


def read_meta(folder: Path) -> Meta:
    """The meta.json of a prepared folder.

    Raises:
        DataError: the folder is damaged.
    """
    try:
        meta = Meta(**json.loads((folder / "meta.json").read_text()))
        for name, tokens in (("train.bin", meta.train_tokens), ("val.bin", meta.val_tokens)):
            size, wanted = (folder / name).stat().st_size, tokens * np.dtype(token_dtype(meta.vocab_size)).itemsize
            if size != wanted:
                raise ValueError(f"{name} has {size:,} bytes instead of {wanted:,}")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{folder}: the prepared data is damaged ({error}); delete this folder, and it is made again"
        ) from None
    return meta


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The dtype of a token file."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def _make(
    folder: Path,
    corpus: corpora.Corpus,
    data: DataConfig,
    tokenizer_config: TokenizerConfig,
    given: Tokenizer | None,
    say: Callable[[str], None],
) -> None:
    source = "Python's standard library" if corpus.python_source else "your text"
    say(f"data    preparing {source}: {len(corpus.files):,} files, once for all runs ...")
    held_out = _held_out(corpora.documents(corpus), data.val_fraction)
    tokenizer = given or bpe.train(
        (text for text, held in zip(corpora.documents(corpus), held_out, strict=True) if not held),
        tokenizer_config.vocab_size,
    )
    beside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)  # of a killed process that had our number
    beside.mkdir()
    try:
        tokenizer.save(str(beside / "tokenizer.json"))
        end = bpe.end_token(tokenizer, tokenizer_config.end_token)
        meta = _encode(beside, corpora.documents(corpus), held_out, tokenizer, end)
        if not meta.train_tokens:
            raise DataError("all of the text was held out; use more text, or a smaller data.val_fraction")
        (beside / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n")
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    say(
        f"data    {meta.text_bytes:,} bytes -> {meta.train_tokens + meta.val_tokens:,} tokens of "
        f"{meta.text_bytes / (meta.train_tokens + meta.val_tokens):.2f} bytes; {meta.documents:,} documents, "
        f"{meta.val_documents:,} of them for validation"
    )


def _held_out(texts: Iterable[str], fraction: float) -> list[bool]:
    """For each document, whether it is for validation: its hash, read as a number in [0, 1), is below the fraction.

    If that holds for none, the document with the smallest hash is taken: there is always something to validate on.
    """
    marks = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64 for text in texts]
    if len(marks) < 2:
        raise DataError(f"the text has {len(marks)} blocks of 1 KiB; it takes at least 2, to train and to validate")
    limit = max(fraction, min(marks) * (1 + 1e-9))
    return [mark < limit for mark in marks]


def _encode(folder: Path, texts: Iterator[str], held_out: list[bool], tokenizer: Tokenizer, end: int) -> Meta:
    dtype = token_dtype(bpe.size(tokenizer))
    counts, text_bytes = {True: 0, False: 0}, 0
    with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
        marked = zip(texts, held_out, strict=True)
        while batch := list(itertools.islice(marked, _BATCH)):
            encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
            for (text, held), encoding in zip(batch, encodings, strict=True):
                tokens = np.array([*encoding.ids, end], dtype=dtype)
                (val if held else train).write(tokens.tobytes())
                counts[held] += len(tokens)
                text_bytes += len(text.encode())
    digest = hashlib.sha256()
    for name in ("train.bin", "val.bin"):
        with (folder / name).open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return Meta(
        format_version=FORMAT_VERSION,
        documents=len(held_out),
        val_documents=sum(held_out),
        text_bytes=text_bytes,
        train_tokens=counts[False],
        val_tokens=counts[True],
        vocab_size=bpe.size(tokenizer),
        tokenizer_sha256=bpe.sha256(tokenizer),
        tokens_sha256=digest.hexdigest(),
    )
