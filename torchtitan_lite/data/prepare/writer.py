"""Writes the files of a folder in preparation, with commits.

Each second the files are synced, and then progress.json records their lengths and the next chunk. After a kill, the
next run truncates the files to the last commit.

Where each document came from is kept in files of their own, which training never reads:

    origins.json                    the files of the text, the units of places in them, and hashes of the arrays below
    train.origins, val.origins      for each document: number of the file << 36 | line or row, int64

meta.json does not list them: a folder without them is complete.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data.prepare import plan as plan_module
from torchtitan_lite.data.prepare import worker
from torchtitan_lite.data.prepare.corpus import Corpus
from torchtitan_lite.data.prepare.readers import Chunk, unit_of
from torchtitan_lite.data.token_files import foreign
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import flush_to_disk, naming, write_durably

COMMIT_EVERY_S = 1.0
ORIGINS = "origins.json"
PLACE_BITS = 36
_WITHOUT = f"training does not need it: delete {ORIGINS} to go without, or prepare the text again"


@dataclass
class Progress:
    """The content of progress.json: the next chunk, and what has been written, by split."""

    plan: str
    file: int = 0
    chunk: int = 0  # index in the file
    tokens: list[int] = field(default_factory=lambda: [1, 1])  # each stream begins with an end token
    documents: list[int] = field(default_factory=lambda: [0, 0])
    text_bytes: list[int] = field(default_factory=lambda: [0, 0])
    unknown_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_bytes: int = 0  # of skipped.log


def read_progress(folder: Path, plan: str, itemsize: int, shard_tokens: int) -> Progress:
    """The progress to resume from. Start over if there is none, the inputs changed, or a file is too short.

    Raises:
        DataError: the folder has foreign files.
    """
    try:
        progress = Progress(**json.loads((folder / "progress.json").read_bytes()))
        if progress.plan == plan and not (short := _shorter(folder, progress, itemsize, shard_tokens)):
            return progress
        if progress.plan == plan:
            print(f"data    {folder / short} has been truncated: starting over", file=sys.stderr, flush=True)
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    names = sorted(file.name for file in folder.iterdir())
    others = foreign(folder)
    if not others and not {"progress.json", metas.shard_name("train", 0)} & set(names):
        others = names  # names that other programs use too: our preparation creates a shard first
    if others:
        raise DataError(
            f"{folder} contains {others[0]}, which is not part of a preparation; move it, or choose another --out"
        )
    for name in names:
        (folder / name).unlink()
    return Progress(plan)


def _shorter(folder: Path, progress: Progress, itemsize: int, shard_tokens: int) -> str:
    """The name of a file that is shorter than committed; empty if there is none."""
    sizes = {"skipped.log": progress.skipped_bytes}
    for split, tokens, documents in zip(metas.SPLITS, progress.tokens, progress.documents, strict=True):
        sizes[f"{split}.idx"] = documents * 8
        sizes[origins_name(split)] = documents * 8
        for number, length in enumerate(metas.shard_lengths(tokens, shard_tokens) if tokens > 1 else []):
            sizes[metas.shard_name(split, number)] = length * itemsize
    for name, size in sizes.items():
        file = folder / name
        if size and (not file.is_file() or file.stat().st_size < size):
            return name
    return ""


class Writer:
    """The files of OUT.partial."""

    def __init__(self, folder: Path, job: plan_module.Job, shard_tokens: int, progress: Progress) -> None:
        self._folder, self._progress = folder, progress
        self._dtype = np.dtype(metas.token_dtype(job.vocab_size))
        self._shard_tokens = shard_tokens
        self._files = contextlib.ExitStack()
        self._indices, self._shards, self._written = [], [], list(progress.tokens)
        self._origins = []
        for split, tokens, documents in zip(metas.SPLITS, progress.tokens, progress.documents, strict=True):
            lengths = metas.shard_lengths(tokens, self._shard_tokens)
            for file in folder.glob(f"{split}-*.bin"):
                if file.name not in [metas.shard_name(split, i) for i in range(len(lengths))]:
                    file.unlink()
            size = lengths[-1] * self._dtype.itemsize if tokens > 1 else 0
            self._shards.append(self._open(metas.shard_name(split, len(lengths) - 1), size))
            if tokens == 1:
                _write(self._shards[-1], np.array([job.end_token], self._dtype).tobytes())
            self._indices.append(self._open(f"{split}.idx", documents * 8))
            self._origins.append(self._open(origins_name(split), documents * 8))
        self._skipped = self._open("skipped.log", progress.skipped_bytes)
        write_durably(folder / "tokenizer.json", job.tokenizer.encode())
        if job.target_key:
            keys = {"source_key": job.text_key, "target_key": job.target_key, "source_prefix": job.source_prefix}
            write_durably(folder / metas.PAIRS, json.dumps(keys).encode())
        self._committed = time.monotonic()

    def _open(self, name: str, size: int) -> Any:
        """Open a file for appending, truncated to this size."""
        (self._folder / name).touch()
        stream = (self._folder / name).open("r+b")
        self._files.callback(_close, stream)
        stream.truncate(size)
        stream.seek(size)
        return stream

    def add(self, chunk: Chunk, result: worker.Result, corpus: Corpus) -> None:
        """Write the result of the next chunk."""
        p = self._progress
        for i, encoded in enumerate((result.train, result.val)):
            ends = p.tokens[i] + np.cumsum(encoded.lengths, dtype=np.int64)
            _write(self._indices[i], ends.tobytes())
            self._append(i, encoded.tokens)
            _write(self._origins[i], (encoded.places | chunk.file << PLACE_BITS).tobytes())
            p.tokens[i] += len(encoded.tokens)
            p.documents[i] += len(encoded.lengths)
            p.text_bytes[i] += encoded.text_bytes
            p.unknown_tokens += encoded.unknown
        for problem in result.problems:
            line = json.dumps({"file": str(corpus.files[chunk.file]), **vars(problem)}).encode() + b"\n"
            _write(self._skipped, line)
            p.skipped_bytes += len(line)
            p.skipped[problem.reason] = p.skipped.get(problem.reason, 0) + 1
        p.file, p.chunk = (chunk.file + 1, 0) if chunk.last else (chunk.file, chunk.number + 1)
        if time.monotonic() - self._committed >= COMMIT_EVERY_S:
            self.commit()

    def _append(self, i: int, tokens: Any) -> None:
        while len(tokens):
            number, used = divmod(self._written[i], self._shard_tokens)
            if used == 0:
                flush_to_disk(self._shards[i])
                self._shards[i].close()
                self._shards[i] = self._open(metas.shard_name(metas.SPLITS[i], number), 0)
            part, tokens = tokens[: self._shard_tokens - used], tokens[self._shard_tokens - used :]
            _write(self._shards[i], part.tobytes())
            self._written[i] += len(part)

    def commit(self) -> None:
        """Sync all files, then record the progress. A restart resumes after the last added chunk."""
        for stream in (*self._shards, *self._indices, *self._origins, self._skipped):
            flush_to_disk(stream)
        write_durably(self._folder / "progress.json", json.dumps(asdict(self._progress)).encode())
        self._committed = time.monotonic()

    def close(self) -> None:
        """Close the files without a commit."""
        self._files.close()


def _close(stream: Any) -> None:
    with naming(stream.name):  # closing writes again what could not be written
        stream.close()


def _write(stream: Any, content: bytes) -> None:
    with naming(stream.name):
        stream.write(content)


def origins_name(split: str) -> str:
    """The name of a split's array of origins."""
    return f"{split}.origins"


def write_origins(folder: Path, corpus: Corpus) -> None:
    """Complete the origins of a folder's documents."""
    names = [origins_name(split) for split in metas.SPLITS]
    files = [[os.path.abspath(file), unit_of(file)] for file in corpus.files]
    arrays = {name: asdict(metas.File.of(folder / name)) for name in names}
    write_durably(folder / ORIGINS, json.dumps({"files": files, "arrays": arrays}).encode())


def read_origins(folder: Path) -> list[list[str]] | None:
    """The files of a folder's text, each with its unit of places; None if it has no origins.

    Raises:
        DataError: they are damaged.
    """
    file = folder / ORIGINS
    try:
        content = json.loads(file.read_bytes())
        for name, array in content["arrays"].items():
            if metas.File.of(folder / name) != metas.File(**array):
                raise ValueError(f"{name} has changed since it was made")
        return [[str(name), str(unit)] for name, unit in content["files"]]
    except FileNotFoundError as error:
        if Path(error.filename) == file:
            return None
        raise DataError(f"{file} is damaged: {error.filename} is missing; {_WITHOUT}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is damaged: {error}; {_WITHOUT}") from None
