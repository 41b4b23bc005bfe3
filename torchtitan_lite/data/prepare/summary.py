"""What a prepared folder holds: its summary for the terminal, its identity, and whether it is undamaged."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from torchtitan_lite.data.documents import document_ends
from torchtitan_lite.data.prepare.writer import read_origins
from torchtitan_lite.data.token_files import (
    _BLOCK,
    IN_PLACE,
    SPLITS,
    File,
    Meta,
    TokenFiles,
    read_meta,
    shard_lengths,
    shard_name,
    token_dtype,
)
from torchtitan_lite.errors import DataError
from torchtitan_lite.terminal import counted


def summary(meta: Meta) -> str:
    """One line of statistics."""
    tokens = meta.train_tokens + meta.val_tokens
    return (
        f"{meta.text_bytes:,} bytes -> {tokens:,} tokens of {meta.text_bytes / tokens:.2f} bytes; "
        f"{counted(meta.documents, 'document')}, {meta.val_documents:,} of them for validation"
    )


def report(folder: Path, tokenizer: Tokenizer) -> str:
    """A table of statistics, the skipped texts, and the decoded start of three documents."""
    meta = read_meta(folder)
    lines = [f"{'':8}{'documents':>14}{'tokens':>16}{'bytes':>18}{'bytes/token':>13}"]
    for split in SPLITS:
        tokens = meta.tokens(split)
        n_bytes = meta.val_text_bytes if split == "val" else meta.text_bytes - meta.val_text_bytes
        lines.append(f"{split:8}{meta.n_documents(split):>14,}{tokens:>16,}{n_bytes:>18,}{n_bytes / tokens:>13.2f}")
    if meta.unknown_tokens:
        lines.append(f"unknown {meta.unknown_tokens:>14,}  tokens for text that the tokenizer does not know")
    for reason, count in meta.skipped.items():
        lines.append(f"skipped {count:>14,}  {reason} (listed in {folder / 'skipped.log'})")
    lines.append(f"vocabulary {meta.vocab_size:,}, tokenizer {meta.tokenizer_sha256[:12]}, in {folder}")
    stream, ends = TokenFiles(folder, meta, "train"), document_ends(folder, meta, "train")
    for quarter in (1, 2, 3):
        number = len(ends) * quarter // 4
        first = int(ends[number - 1]) if number else 1
        ids = stream.read(first, min(int(ends[number]) - 1, first + 60))
        lines.append(f"document {number:,}: {tokenizer.decode(ids.tolist())[:150]!r}")
    return "\n".join(lines)


def all_files(folder: Path, names: list[str]) -> dict[str, File]:
    """Hash these files on all cores."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: File.of(folder / name), names), strict=True))


def identity(files: dict[str, File]) -> str:
    """`tokens_sha256` of these files."""
    shards = sorted((name, file.sha256) for name, file in files.items() if name.endswith(".bin"))
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()


def identity_in_place(files: dict[str, File]) -> str:
    """`tokens_sha256` of a folder whose tokens are in Megatron's files, wherever these are."""
    extents = [files[f"{split}.{what}"].sha256 for split in SPLITS for what in ("extents", "idx")]
    tokens = [file.sha256 for name, file in files.items() if name.endswith(".bin")]
    return hashlib.sha256(json.dumps([extents, tokens]).encode()).hexdigest()


def verify(folder: Path) -> list[str]:
    """Read every byte of a prepared folder, and return a line for each problem.

    Raises:
        DataError: meta.json is invalid.
    """
    meta = read_meta(folder)
    now = all_files(folder, list(meta.files))
    wrong = [f"{name}: its SHA-256 is not the one in meta.json" for name in now if now[name] != meta.files[name]]
    if (identity_in_place if meta.format_version == IN_PLACE else identity)(now) != meta.tokens_sha256:
        wrong.append("meta.json: tokens_sha256 is not that of the token files")
    try:
        read_origins(folder)
    except DataError as error:
        wrong.append(str(error))
    return wrong + wrong_documents(folder, meta)


def wrong_documents(folder: Path, meta: Meta) -> list[str]:
    """A line for each problem in the division into documents, independent of the hashes."""
    find = _wrong_in_place if meta.format_version == IN_PLACE else _wrong_documents
    return [line for split in SPLITS for line in find(folder, meta, split)]


def _wrong_in_place(folder: Path, meta: Meta, split: str) -> Iterator[str]:
    """The same as `_wrong_documents` for tokens in Megatron's files."""
    try:
        stream, ends = TokenFiles(folder, meta, split), document_ends(folder, meta, split)
        for first in range(0, meta.tokens(split), _BLOCK):
            last = min(first + _BLOCK, meta.tokens(split))
            found = np.flatnonzero(stream.read(first, last) == meta.end_token) + first + 1
            low, high = np.searchsorted(ends, [first + 1, last + 1])
            if not np.array_equal(found, np.concatenate(([1] * (first == 0), ends[low:high]))):
                yield f"{split}: the end tokens between tokens {first:,} and {last:,} are not where documents end"
    except DataError as error:
        yield str(error)


def _wrong_documents(folder: Path, meta: Meta, split: str) -> Iterator[str]:
    """Find tokens outside the vocabulary, documents without a final end token, and end tokens inside documents."""
    dtype = np.dtype(token_dtype(meta.vocab_size))
    ends = np.memmap(folder / f"{split}.idx", dtype=np.int64, mode="r") if meta.n_documents(split) else np.empty(0, int)
    if not len(ends) or ends[-1] != meta.tokens(split) or ends[0] < 1 or (np.diff(ends) <= 0).any():
        yield f"{split}.idx: does not divide the {meta.tokens(split):,} tokens into documents"
        return
    end_tokens = 0
    for number in range(len(shard_lengths(meta.tokens(split), meta.shard_tokens))):
        tokens = np.memmap(folder / shard_name(split, number), dtype=dtype, mode="r")
        if int(tokens.max()) >= meta.vocab_size:
            yield f"{shard_name(split, number)}: a token is not in the vocabulary of {meta.vocab_size}"
        first = number * meta.shard_tokens
        low, high = np.searchsorted(ends, [first + 1, first + len(tokens) + 1])
        if (tokens[ends[low:high] - 1 - first] != meta.end_token).any():
            yield f"{shard_name(split, number)}: a document does not end with the end token"
        end_tokens += sum(int((tokens[i : i + _BLOCK] == meta.end_token).sum()) for i in range(0, len(tokens), _BLOCK))
    if end_tokens != meta.n_documents(split) + 1:
        yield (
            f"{split}: {end_tokens:,} end tokens (id {meta.end_token}) for {meta.n_documents(split):,} documents, "
            f"where {meta.n_documents(split) + 1:,} should be: text was encoded as an end token, or one is missing"
        )
