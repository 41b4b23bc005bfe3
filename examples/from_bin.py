"""Copies the token files of nanoGPT, llm.c and modded-nanogpt into a prepared folder.

    python examples/from_bin.py old/train_*.bin --held-out old/val_*.bin --tokenizer old/tokenizer.json --out data/old

nanoGPT's files are plain uint16. Those of llm.c and modded-nanogpt begin with a header of 256 numbers (int32): a magic
number, the version and the number of tokens. 20240520 and version 1 mean uint16, as for GPT-2; 20240801 and version 7
mean uint32, as for Llama 3. All are little-endian.

The end token, or the begin token, comes before or after each document, and a document may continue in the next file.
Empty documents are left out. If the tokenizer is byte-level, the folder equals the one that `data.prepare --held-out`
makes of these texts.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare.summary import report
from torchtitan_lite.data.prepare.tokenizer import as_text, unknown_token
from torchtitan_lite.errors import DataError, run_cli
from torchtitan_lite.scoring.likelihood import bytes_per_token

HEADER = 256  # int32
DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by magic number and version
BLOCK = 1 << 22  # tokens copied at a time


def tokens_of(file: Path) -> NDArray[Any]:
    """Return the tokens of a file, memory-mapped. Raises DataError if it is truncated or of a different version."""
    magic, version, n = [*np.fromfile(file, "<i4", 3).tolist(), 0, 0, 0][:3]
    has_header, size = magic in {known for known, _ in DTYPES}, file.stat().st_size
    dtype, at = DTYPES.get((magic, version), ""), 4 * HEADER
    if not has_header:
        dtype, at, n = "<u2", 0, size // 2
    if not dtype:
        raise DataError(
            f"{file} has version {version} of its format; {', '.join(f'{v} of {m}' for m, v in DTYPES)} work"
        )
    if not n or size != at + n * np.dtype(dtype).itemsize:
        raise DataError(f"{file} is empty, truncated or not a file of tokens: it has {size:,} bytes")
    return np.memmap(file, dtype, "r", at, n)


def copy(train: Sequence[Path], held_out: Sequence[Path], tokenizer_json: Path, names: Sequence[str], out: Path) -> int:
    """Write the folder `out`, and return 0. `names` are the end token and the begin token, or empty.

    Raises:
        DataError: a file is damaged or does not suit the tokenizer.
    """
    tokenizer = as_text(bpe.load(tokenizer_json).to_str(pretty=True))
    marks, vocab_size = bpe.marks(tokenizer, *names), bpe.size(tokenizer)
    unknown, dtype = unknown_token(tokenizer, marks[0]), metas.token_dtype(vocab_size)
    lengths = bytes_per_token(tokenizer, marks)
    n_tokens, n_documents, n_bytes, n_unknown = [1, 1], [0, 0], [0, 0], 0  # train and val
    for file in (*train, *held_out):
        tokens_of(file)  # refuses a damaged one before anything is written
    if out.exists():
        raise DataError(f"{out} exists: delete it if it is of an earlier attempt, or name another folder")
    out.mkdir(parents=True)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    for i, (split, files) in enumerate(zip(metas.SPLITS, (train, held_out), strict=True)):
        with (out / f"{split}.bin").open("wb") as stream, (out / f"{split}.idx").open("wb") as index:
            stream.write(dtype(marks[-1]).tobytes())
            inside = False  # a document
            blocks = (
                tokens_of(file)[at : at + BLOCK] for file in files for at in range(0, len(tokens_of(file)), BLOCK)
            )
            for block in (*blocks, np.array(marks[:1], "<u4")):
                if int(block.max()) >= vocab_size:
                    raise DataError(f"a file of {split} has a token outside the tokenizer's {vocab_size} entries")
                is_mark = np.isin(block, marks)
                closes = is_mark & np.append(inside, ~is_mark[:-1])  # the first mark after a document
                inside = not is_mark[-1]
                kept = closes | ~is_mark
                repeats = np.where(closes, len(marks), 1)[kept]
                ids, ends = np.repeat(block[kept].astype(np.uint32), repeats), np.cumsum(repeats)[closes[kept]]
                for k, mark in enumerate(marks):
                    ids[ends - len(marks) + k] = mark
                stream.write(ids.astype(dtype).tobytes())
                index.write((n_tokens[i] + ends).astype(np.int64).tobytes())
                n_tokens[i] += len(ids)
                n_documents[i] += len(ends)
                n_bytes[i] += int(lengths[ids].sum())
                n_unknown += int((ids == unknown).sum())
    hashes = metas.hashed(out, ["tokenizer.json", *(f"{s}.{what}" for what in ("idx", "bin") for s in metas.SPLITS)])
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
        made_from=f"token files: {' '.join(map(str, (*train, *held_out)))}",
        files=hashes,
        skipped={},
        begin_token=marks[1] if len(marks) > 1 else None,
    )
    (out / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n")
    print(report(out))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Copy token files of nanoGPT, llm.c or modded-nanogpt.")
    add = parser.add_argument
    add("train", nargs="+", type=Path, metavar="FILE", help="files to train on, in their order")
    add("--held-out", nargs="+", type=Path, required=True, metavar="FILE", help="files for validation")
    add("--tokenizer", type=Path, required=True, help="the tokenizer.json that made the tokens")
    add("--out", type=Path, required=True, help="the folder to create")
    add("--end-token", default="", help="the token that ends a document; default: as [tokenizer] end_token")
    add("--begin-token", default="", help="the token that begins each document; default: none")
    args = parser.parse_args(argv)
    names = args.end_token, args.begin_token
    return run_cli("from_bin", lambda: copy(args.train, args.held_out, args.tokenizer, names, args.out))


if __name__ == "__main__":
    raise SystemExit(main())
