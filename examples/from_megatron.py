"""Copies the tokens of Megatron's PREFIX.bin and PREFIX.idx into a prepared folder.

    python examples/from_megatron.py old/text_document --tokenizer old/tokenizer.json --out data/old

PREFIX.idx is little-endian. A header of 34 bytes has "MMIDIDX" and two zeros, the version 1 (uint64), the code of the
tokens' dtype (uint8), the number of sequences and the number of boundaries (uint64). Then come the length of each
sequence in tokens (int32), its first byte in PREFIX.bin (int64), and the boundaries: the first sequence of each
document, and last the number of sequences (int64).

Documents are cut at end tokens; begin tokens and empty documents are left out. --begin-token names the token to put
before each document. The hash of a document's text decides whether it is held out,
as in `data.prepare`. If the tokenizer is lossless, the folder equals the one that `data.prepare` makes of these texts.
"""

import argparse
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare.documents import HASH_RANGE
from torchtitan_lite.data.prepare.summary import report
from torchtitan_lite.data.prepare.tokenizer import as_text, unknown_token
from torchtitan_lite.errors import DataError, run_cli

HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def documents(prefix: str, marks: Sequence[int]) -> Iterator[NDArray[Any]]:
    """Yield the tokens of each document, without the end token and the begin token."""
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, n, n_boundaries = HEADER.unpack(index[: HEADER.size].ljust(HEADER.size, b"\0"))
    if (magic, version) != (b"MMIDIDX\0\0", 1) or code not in DTYPES:
        raise DataError(f"{prefix}.idx is not an index of Megatron's version 1 for whole numbers")
    if len(index) != HEADER.size + 12 * n + 8 * n_boundaries:
        raise DataError(f"{prefix}.idx is truncated, damaged or of multimodal data: it has {len(index):,} bytes")
    lengths = np.frombuffer(index, "<i4", n, HEADER.size)
    firsts = np.frombuffer(index, "<i8", n, HEADER.size + 4 * n) // np.dtype(DTYPES[code]).itemsize
    boundaries = np.frombuffer(index, "<i8", n_boundaries, HEADER.size + 12 * n)
    tokens = np.memmap(f"{prefix}.bin", DTYPES[code], "r")
    divided = [*boundaries[:1], *boundaries[-1:]] == [0, n] and (np.diff(boundaries) >= 0).all()
    if not (n and divided) or min(lengths.min(), firsts.min()) < 0 or (firsts + lengths).max() != len(tokens):
        raise DataError(f"{prefix}.idx is damaged, or not the index of {prefix}.bin, which has {len(tokens):,} tokens")
    for low, high in pairwise(boundaries):
        parts = [tokens[at : at + k] for at, k in zip(firsts[low:high], lengths[low:high], strict=True)]
        document = np.concatenate([tokens[:0], *parts])
        for piece in np.split(document, np.flatnonzero(document == marks[0])):
            if len(piece := piece[~np.isin(piece, marks)]):
                yield piece


def copy(prefixes: Sequence[str], tokenizer_json: Path, out: Path, val_fraction: float, begin: str = "") -> int:
    """Write the folder `out`, and return 0. Raises DataError if a file is damaged or does not suit the tokenizer."""
    tokenizer = as_text(bpe.load(tokenizer_json).to_str(pretty=True))
    marks, vocab_size = bpe.marks(tokenizer, begin=begin), bpe.size(tokenizer)
    unknown, dtype = unknown_token(tokenizer, marks[0]), metas.token_dtype(vocab_size)
    n_tokens, n_documents, n_bytes, n_unknown = [1, 1], [0, 0], [0, 0], 0  # train and val
    out.mkdir(parents=True)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    names = ["tokenizer.json", *(f"{s}.idx" for s in metas.SPLITS), *(f"{s}.bin" for s in metas.SPLITS)]
    with ExitStack() as files:
        *ends, train, val = (files.enter_context((out / name).open("wb")) for name in names[1:])
        for stream in (train, val):
            stream.write(dtype(marks[-1]).tobytes())
        for prefix in prefixes:
            for tokens in documents(prefix, marks):
                if not 0 <= tokens.min() <= tokens.max() < vocab_size:
                    raise DataError(f"{prefix}.bin has a token outside the tokenizer's {vocab_size} entries")
                text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False).encode()
                split = int(int.from_bytes(sha256(text).digest()[:8]) < int(val_fraction * HASH_RANGE))
                (train, val)[split].write(np.append(tokens, marks).astype(dtype).tobytes())
                n_tokens[split] += len(tokens) + len(marks)
                ends[split].write(np.int64(n_tokens[split]).tobytes())
                n_documents[split] += 1
                n_bytes[split] += len(text)
                n_unknown += int((tokens == unknown).sum())
    if not all(n_documents):
        raise DataError(f"{n_documents[0]} documents to train and {n_documents[1]} to validate: --val-fraction")
    hashes = metas.hashed(out, names)
    meta = metas.Meta(
        format_version=metas.FORMAT_VERSION,
        documents=sum(n_documents),
        val_documents=n_documents[1],
        text_bytes=sum(n_bytes),
        val_text_bytes=n_bytes[1],
        train_tokens=n_tokens[0],
        val_tokens=n_tokens[1],
        unknown_tokens=n_unknown,
        vocab_size=vocab_size,
        end_token=marks[0],
        tokenizer_sha256=bpe.sha256(tokenizer),
        tokens_sha256=metas.tokens_hash(hashes),
        made_from=f"Megatron: {' '.join(prefixes)}",
        files=hashes,
        skipped={},
        begin_token=marks[1] if len(marks) > 1 else None,
    )
    (out / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n")
    print(report(out))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Copy Megatron's tokens into a prepared folder.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="of PREFIX.bin and PREFIX.idx")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the tokenizer.json that made the tokens")
    parser.add_argument("--out", type=Path, required=True, help="the folder to create")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="of the documents, for validation")
    parser.add_argument("--begin-token", default="", help="the token that begins each document; default: none")
    args = parser.parse_args(argv)
    given = args.prefixes, args.tokenizer, args.out, args.val_fraction, args.begin_token
    return run_cli("from_megatron", lambda: copy(*given))


if __name__ == "__main__":
    raise SystemExit(main())
