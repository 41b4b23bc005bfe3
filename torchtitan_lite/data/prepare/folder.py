"""Makes a prepared folder: on all cores, in constant memory, resumable.

Documents are read in order (documents.py), encoded in batches by the tokenizer's own threads, and written in order to
OUT.partial. Every few seconds the files are synced, and then progress.json records their lengths and the next document.
After a kill, the same command truncates the files to that and resumes: the result is byte-identical. At the end all
files are hashed, meta.json is written, and the folder is renamed.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding
from tqdm import tqdm

from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare.documents import Document, OnError, Problem, documents, refusal, usable
from torchtitan_lite.data.prepare.job import Job
from torchtitan_lite.data.prepare.texts import Corpus, stat_of, unit_of
from torchtitan_lite.data.prepare.tokenizer import as_text, held_out_below, train, training_texts, unknown_token
from torchtitan_lite.data.token_files import ORIGINS, PAIRS, PLACE_BITS, SPLITS, Meta, token_dtype
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import flush_to_disk, naming, sync_folder, write_durably

BATCH_BYTES = 1 << 20  # of text, encoded at a time: it bounds the memory, as encodings are much larger than the text
DOCUMENT_BYTES = 256  # that an encoding takes besides
COMMIT_EVERY_S = 3.0
SKIPPED = "skipped.log"
_FILES = SKIPPED, *(f"{split}.{what}" for split in SPLITS for what in ("bin", "idx", "origins"))
CHANGED = "the text was changed while it was being read; run the same command again to start over with the new text"


@dataclass
class Progress:
    """The content of progress.json: the next document, and what has been written."""

    made_from: str
    file: int = 0
    number: int = 0  # documents and problems of that file so far
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FILES, 0))  # bytes
    documents: list[int] = field(default_factory=lambda: [0, 0])  # by split
    text_bytes: list[int] = field(default_factory=lambda: [0, 0])
    unknown_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(frozen=True)
class Batch:
    """Consecutive documents and problems, and the place after them."""

    items: list[Document | Problem]
    file: int
    number: int  # documents and problems of that file so far


def partial_folder(out: Path) -> Path:
    """The temporary folder of `out`."""
    return out.with_name(f"{out.name}.partial")


def prepare(
    corpus: Corpus, job: Job, out: Path, on_error: OnError, training: Sequence[Corpus], trained: str = ""
) -> Meta:
    """Create the prepared folder `out`, or resume creating it.

    Args:
        training: the texts to train a tokenizer on, unless the job has one.
        trained: a tokenizer.json that was trained on them already.

    Raises:
        DataError: a text is unusable (with "stop"), or there are too few.
    """
    partial, made_from = partial_folder(out), job.made_from(corpus, training)
    partial.mkdir(parents=True, exist_ok=True)
    for unfinished in partial.glob("*.new"):  # of a write that a kill has cut off
        unfinished.unlink()
    progress = _read_progress(partial, made_from)
    if progress is None:
        definition = job.tokenizer or trained or _train(job, training, on_error)
        write_durably(partial / "tokenizer.json", definition.encode())
        progress = Progress(made_from)
    encoder = Encoder(corpus, job, (partial / "tokenizer.json").read_text(encoding="utf-8"), on_error)
    done = sum(stat_of(file).st_size for file in corpus.files[: progress.file])
    with (
        Writer(partial, encoder, progress, on_error) as writer,
        tqdm(total=corpus.size, initial=done, unit="B", unit_scale=True, disable=None, leave=False) as bar,
        ThreadPoolExecutor(1) as thread,
    ):
        # while a batch is encoded, the one before it is written and the next one is read
        waiting: tuple[Batch, Future[list[Encoding]]] | None = None
        for batch in itertools.chain(_batches(corpus, progress, bar.update), [None]):
            following = (batch, thread.submit(encoder.encode, batch)) if batch else None
            if waiting:
                writer.add(waiting[0], waiting[1].result())
            waiting = following
        writer.commit()
    if job.made_from(corpus, training) != made_from:
        raise DataError(CHANGED)
    meta = _finish(partial, encoder, progress)
    partial.rename(out)
    sync_folder(out.parent)
    return meta


def _read_progress(partial: Path, made_from: str) -> Progress | None:
    """The progress to resume from; None if there is none, the inputs were others, or a file is too short."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        progress = Progress(**json.loads((partial / "progress.json").read_bytes()))
        if progress.made_from == made_from:
            short = [name for name, size in progress.sizes.items() if (partial / name).stat().st_size < size]
            if not short:
                return progress
            print(f"data    {partial / short[0]} has been truncated: starting over", file=sys.stderr, flush=True)
    return None


def _train(job: Job, training: Sequence[Corpus], on_error: OnError) -> str:
    """A tokenizer.json, trained on these texts."""
    limits = [held_out_below(corpus, job.val_fraction, on_error) for corpus in training]
    texts, option = training_texts(training, limits, on_error), training[0].names.vocab_size
    return str(train(texts, job.vocab_size, sentinels=job.sentinels, option=option).to_str(pretty=True))


def _batches(corpus: Corpus, progress: Progress, count: Callable[[int], object]) -> Iterator[Batch]:
    """The remaining documents."""
    file, number, size = progress.file, progress.number, 0
    items = list[Document | Problem]()
    for item in itertools.islice(documents(corpus, file, count), number, None):
        file, number = item.file, number + 1 if item.file == file else 1
        items.append(item)
        size += DOCUMENT_BYTES + (item.n_bytes if isinstance(item, Document) else 0)
        if size > BATCH_BYTES:
            yield Batch(items, file, number)
            items, size = [], 0
    if items:
        yield Batch(items, file, number)


class Encoder:
    """From documents to tokens, and to their split."""

    def __init__(self, corpus: Corpus, job: Job, definition: str, on_error: OnError) -> None:
        """
        Args:
            definition: the content of the folder's tokenizer.json.
        """
        self.corpus = corpus
        self.tokenizer = as_text(definition)
        self.end = bpe.end_token(self.tokenizer, job.end_token)
        self.unknown = unknown_token(self.tokenizer, self.end)
        self.vocab_size = bpe.size(self.tokenizer)
        self.dtype = np.dtype(token_dtype(self.vocab_size))
        self._below = held_out_below(corpus, job.val_fraction, on_error)
        self._first_held_out = len(corpus.files) - corpus.n_held_out
        # the documents of files of validation text, by hash
        held_out = usable(corpus, on_error, self._first_held_out)
        self._held_out = {document.hash: (document.file, document.place) for document in held_out}

    def encode(self, batch: Batch) -> list[Encoding]:
        """The tokens of each text.

        Raises:
            DataError: the tokenizer fails.
        """
        texts = [text for item in batch.items if isinstance(item, Document) for text in item.texts]
        try:
            return self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:  # the library's panics are no Exception
            first = batch.items[0]
            where = self.corpus.where(first.file, first.place)
            raise DataError(f"{where}, or after it: the tokenizer can't encode a text: {bpe.reason(error)}") from None

    def split_of(self, document: Document) -> int:
        """0: training, 1: validation."""
        return int(document.file >= self._first_held_out or document.hash < self._below)

    def problem_of(self, document: Document, tokens: list[list[int]]) -> Problem | None:
        """Why this document is not written with these tokens."""
        if any(self.end in ids for ids in tokens):
            name, option = self.tokenizer.id_to_token(self.end), self.corpus.names.end_token
            detail = f"would be encoded with the end token {name!r} inside ({option} can name another one)"
            return Problem(document.file, document.place, "a text that contains the end token", detail)
        if document.hash in self._held_out and document.file < self._first_held_out:
            detail = f"is held out, too: {self.corpus.where(*self._held_out[document.hash])}"
            return Problem(document.file, document.place, "a copy of a held-out document", detail)
        return None


class Writer:
    """The files of OUT.partial, which are appended to."""

    def __init__(self, folder: Path, encoder: Encoder, progress: Progress, on_error: OnError) -> None:
        self._folder, self._encoder, self._progress, self._on_error = folder, encoder, progress, on_error
        self._streams: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        self._committed = time.monotonic()

    def __enter__(self) -> "Writer":
        for name, size in self._progress.sizes.items():
            (self._folder / name).touch()
            stream = self._stack.enter_context((self._folder / name).open("r+b"))
            stream.truncate(size)
            stream.seek(size)
            self._streams[name] = stream
            if name.endswith(".bin") and not size:  # each stream begins with an end token
                self._write(name, np.array([self._encoder.end], self._encoder.dtype).tobytes())
        self.commit()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _write(self, name: str, content: bytes) -> None:
        with naming(self._folder / name):
            self._streams[name].write(content)
        self._progress.sizes[name] += len(content)

    def add(self, batch: Batch, encodings: list[Encoding]) -> None:
        """Write the next documents.

        Raises:
            DataError: one of them is unusable, with "stop".
        """
        p, remaining = self._progress, iter(encodings)
        tokens, lengths, origins = (array("I"), array("I")), (array("q"), array("q")), (array("q"), array("q"))
        for item in batch.items:
            if isinstance(item, Problem):
                self._skip(item)
                continue
            encoded = [next(remaining).ids for _ in item.texts]
            if problem := self._encoder.problem_of(item, encoded):
                self._skip(problem)
                continue
            split = self._encoder.split_of(item)
            for one in encoded:
                tokens[split].fromlist(one)
                tokens[split].append(self._encoder.end)
                lengths[split].append(len(one) + 1)
                origins[split].append(item.file << PLACE_BITS | item.place)
            p.text_bytes[split] += item.n_bytes
        for i, name in enumerate(SPLITS):
            ids = np.asarray(tokens[i])
            before = p.sizes[f"{name}.bin"] // self._encoder.dtype.itemsize
            self._write(f"{name}.idx", (before + np.cumsum(lengths[i], dtype=np.int64)).tobytes())
            self._write(f"{name}.bin", ids.astype(self._encoder.dtype).tobytes())
            self._write(f"{name}.origins", origins[i].tobytes())
            p.documents[i] += len(lengths[i])
            p.unknown_tokens += int((ids == self._encoder.unknown).sum())
        p.file, p.number = batch.file, batch.number
        if time.monotonic() - self._committed >= COMMIT_EVERY_S:
            self.commit()

    def _skip(self, problem: Problem) -> None:
        corpus, skipped = self._encoder.corpus, self._progress.skipped
        if self._on_error == "stop":
            raise refusal(corpus, problem)
        self._write(SKIPPED, f"{problem.of(corpus)}\n".encode(errors="backslashreplace"))
        skipped[problem.reason] = skipped.get(problem.reason, 0) + 1

    def commit(self) -> None:
        """Sync all files, then record the progress. A restart resumes after the last added batch."""
        for stream in self._streams.values():
            flush_to_disk(stream)
        write_durably(self._folder / "progress.json", json.dumps(asdict(self._progress)).encode())
        self._committed = time.monotonic()


def _finish(folder: Path, encoder: Encoder, progress: Progress) -> Meta:
    """Write the files that describe a complete folder.

    Raises:
        DataError: there are no documents to train or to validate.
    """
    corpus, p = encoder.corpus, progress
    if not all(p.documents):
        left_out = f"; {sum(p.skipped.values()):,} were left out: {folder / SKIPPED}" if p.skipped else ""
        raise DataError(
            f"the text has {p.documents[0]:,} usable documents to train and {p.documents[1]:,} to validate, and needs "
            f"some of both{left_out}; use more text, or another {corpus.names.val_fraction}"
        )
    files = [[os.path.abspath(file), unit_of(file)] for file in corpus.files]
    write_durably(folder / ORIGINS, json.dumps(files).encode())
    names = ["tokenizer.json", ORIGINS, *(name for name, size in p.sizes.items() if size)]
    if len(corpus.keys) == 2:
        keys = {"source_key": corpus.keys[0], "target_key": corpus.keys[1], "source_prefix": corpus.source_prefix}
        write_durably(folder / PAIRS, json.dumps(keys).encode())
        names.append(PAIRS)
    files_hashed = metas.hashed(folder, names)
    itemsize = encoder.dtype.itemsize
    meta = Meta(
        format_version=metas.FORMAT_VERSION,
        documents=sum(p.documents),
        val_documents=p.documents[1],
        text_bytes=sum(p.text_bytes),
        val_text_bytes=p.text_bytes[1],
        train_tokens=p.sizes["train.bin"] // itemsize,
        val_tokens=p.sizes["val.bin"] // itemsize,
        unknown_tokens=p.unknown_tokens,
        vocab_size=encoder.vocab_size,
        end_token=encoder.end,
        tokenizer_sha256=bpe.sha256(encoder.tokenizer),
        tokens_sha256=metas.identity(files_hashed),
        made_from=p.made_from,
        files=files_hashed,
        skipped=dict(sorted(p.skipped.items())),
    )
    write_durably(folder / "meta.json", (json.dumps(asdict(meta), indent=2) + "\n").encode())
    for name in ("progress.json", *(name for name, size in p.sizes.items() if not size)):
        (folder / name).unlink()
    sync_folder(folder)
    return meta
