"""What a prepared folder holds: its summary for the terminal, and whether it is undamaged."""

from pathlib import Path

from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.token_files import SPLITS, Meta, TokenFiles, document_ends, hashed, identity, read_meta
from torchtitan_lite.terminal import counted


def summary(meta: Meta) -> str:
    """One line of statistics."""
    tokens = meta.train_tokens + meta.val_tokens
    return (
        f"{meta.text_bytes:,} bytes -> {tokens:,} tokens of {meta.text_bytes / tokens:.2f} bytes; "
        f"{counted(meta.documents, 'document')}, {meta.val_documents:,} of them for validation"
    )


def report(folder: Path) -> str:
    """A table of statistics, the skipped texts, and the decoded start of three documents."""
    meta, tokenizer = read_meta(folder), bpe.load(folder / "tokenizer.json")
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


def verify(folder: Path) -> list[str]:
    """Read every byte of a prepared folder, and return a line for each problem.

    Raises:
        DataError: meta.json is invalid.
    """
    meta = read_meta(folder)
    now = hashed(folder, meta.files)
    problems = [f"{name}: its SHA-256 is not the one in meta.json" for name in now if now[name] != meta.files[name]]
    if identity(now) != meta.tokens_sha256:
        problems.append("meta.json: tokens_sha256 is not that of the token files")
    return problems
