"""Summarizes a prepared folder for the terminal, and verifies it."""

from itertools import islice
from pathlib import Path

from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.token_files import (
    PAIRS,
    PREPARE_AGAIN,
    Meta,
    changed,
    documents,
    read_meta,
)
from torchtitan_lite.terminal import counted


def summary(meta: Meta) -> str:
    """Return one line of statistics."""
    tokens = meta.train_tokens + meta.val_tokens
    size, what = (2, "pair") if PAIRS in meta.files else (1, "document")
    return (
        f"{meta.text_bytes:,} bytes -> {tokens:,} tokens of {meta.text_bytes / tokens:.2f} bytes; "
        f"{counted(meta.documents // size, what)}, {meta.val_documents // size:,} of them for validation"
    )


def report(folder: Path) -> str:
    """Return statistics, skipped texts, and the decoded start of three documents, line by line."""
    meta, tokenizer = read_meta(folder), bpe.load(folder / "tokenizer.json")
    lines = [summary(meta)]
    if meta.unknown_tokens:
        lines.append(f"unknown {meta.unknown_tokens:>14,}  tokens for text that the tokenizer does not know")
    for reason, count in meta.skipped.items():
        lines.append(f"skipped {count:>14,}  {reason} (listed in {folder / 'skipped.log'})")
    for ids in islice(documents(folder, meta, "train", -(-(meta.documents - meta.val_documents) // 3), 60), 3):
        lines.append(f"document: {tokenizer.decode(ids)[:150]!r}")
    return "\n".join(lines)


def verify(folder: Path) -> list[str]:
    """Read every byte of a prepared folder and its packing indices. Returns a line for each problem.

    Raises:
        DataError: meta.json is invalid.
    """
    from torchtitan_lite.data.packing import damage  # needs torch

    meta = read_meta(folder)
    problems = changed(folder, meta.files, in_full=True)
    lines = [f"{folder}: the prepared data is damaged ({problem}); {PREPARE_AGAIN}" for problem in problems]
    indices = sorted(folder.glob(f"packed-*-{meta.tokens_sha256[:12]}"))
    return [*lines, *(line for index in indices for line in damage(index, in_full=True))]
