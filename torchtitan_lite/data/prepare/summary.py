"""What a prepared folder holds: its summary for the terminal, its identity, and whether it is undamaged."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from torchtitan_lite.data.prepare.writer import read_origins
from torchtitan_lite.data.token_files import SPLITS, File, Meta, TokenFiles, document_ends, read_meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.terminal import counted

_BLOCK = 1 << 22  # tokens checked at a time


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


def verify(folder: Path) -> list[str]:
    """Read every byte of a prepared folder, and return a line for each problem.

    Raises:
        DataError: meta.json is invalid.
    """
    meta = read_meta(folder)
    now = all_files(folder, list(meta.files))
    problems = [f"{name}: its SHA-256 is not the one in meta.json" for name in now if now[name] != meta.files[name]]
    if identity(now) != meta.tokens_sha256:
        problems.append("meta.json: tokens_sha256 is not that of the token files")
    try:
        read_origins(folder)
    except DataError as error:
        problems.append(str(error))
    return problems + wrong_documents(folder, meta)


def wrong_documents(folder: Path, meta: Meta) -> list[str]:
    """A line for each problem in the division into documents, independent of the hashes."""
    return [line for split in SPLITS for line in _wrong_documents(folder, meta, split)]


def _wrong_documents(folder: Path, meta: Meta, split: str) -> Iterator[str]:
    """Find tokens outside the vocabulary, documents without a final end token, and end tokens inside documents."""
    n_tokens, n_documents, end_tokens = meta.tokens(split), meta.n_documents(split), 0
    try:
        ends = document_ends(folder, meta, split)
    except DataError:
        yield f"{split}.idx: does not divide the {n_tokens:,} tokens into documents"
        return
    try:
        stream = TokenFiles(folder, meta, split)
        for first in range(0, n_tokens, _BLOCK):
            tokens = stream.read(first, min(first + _BLOCK, n_tokens))
            low, high = np.searchsorted(ends, [first + 1, first + len(tokens) + 1])
            if (tokens[ends[low:high] - 1 - first] != meta.end_token).any():
                yield f"{split}: a document that ends in tokens {first:,} to {first + len(tokens):,} has no end token"
            end_tokens += int((tokens == meta.end_token).sum())
    except DataError as error:
        yield str(error)
        return
    if end_tokens != n_documents + 1:
        yield (
            f"{split}: {end_tokens:,} end tokens (id {meta.end_token}) for {n_documents:,} documents, "
            f"where {n_documents + 1:,} should be: text was encoded as an end token, or one is missing"
        )
