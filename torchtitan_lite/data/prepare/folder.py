"""Makes a prepared folder: on all cores, in constant memory, resumable.

Documents are read in order (documents.py), encoded in batches by the tokenizer's threads, and written in order to
OUT.partial. Every few seconds the files are synced, then progress.json records their lengths and the next document.
After a kill, the same command truncates the files to these lengths and resumes: the result is byte-identical. At the
end all files are hashed, meta.json is written, and the folder is renamed.
"""

import contextlib
import itertools
import json
import os
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
from torchtitan_lite.data.prepare.texts import Corpus, unit_of
from torchtitan_lite.data.prepare.tokenizer import as_text, held_out_below, train, training_texts, unknown_token
from torchtitan_lite.data.token_files import ORIGINS, PAIRS, PLACE_BITS, SPLITS, Meta, token_dtype
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import flush_to_disk, naming, sync_folder, write_durably

BATCH_BYTES = 1 << 20  # of text encoded at a time: bounds the memory, as encodings are much larger than text
DOCUMENT_BYTES = 256  # overhead per encoding
COMMIT_EVERY_S = 3.0
SKIPPED = "skipped.log"
_SKIP = -1  # instead of a split
_FILES = SKIPPED, *(f"{split}.{what}" for split in SPLITS for what in ("bin", "idx", "origins"))
CHANGED = "the text was changed while it was being read; run the same command again to start over with the new text"


@dataclass
class Progress:
    """The content of progress.json: the next document, and what has been written."""

    made_from: str
    file: int = 0
    number: int = 0  # documents and problems of that file so far
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FILES, 0))  # bytes
    documents: list[int] = field(default_factory=lambda: [0, 0])  # per split
    text_bytes: list[int] = field(default_factory=lambda: [0, 0])
    unknown_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # by reason


Batch = list[Document | Problem]


def partial_folder(out: Path) -> Path:
    """Return the temporary folder of `out`."""
    return out.with_name(f"{out.name}.partial")


def prepare(
    corpus: Corpus, job: Job, out: Path, on_error: OnError, training: Sequence[Corpus], trained: str = ""
) -> Meta:
    """Create the prepared folder `out`, or resume creating it.

    Args:
        training: texts to train a tokenizer on, unless the job has one.
        trained: a tokenizer.json already trained on them.

    Raises:
        DataError: a text is unusable (with "stop"), or there are too few.
    """
    partial, made_from = partial_folder(out), job.made_from(corpus, training)
    partial.mkdir(parents=True, exist_ok=True)
    progress = _read_progress(partial, made_from)
    if progress is None:
        tokenizer = job.tokenizer or trained or _train(job, training, on_error)
        write_durably(partial / "tokenizer.json", tokenizer.encode())
        progress = Progress(made_from)
    done = sum(file.stat().st_size for file in corpus.files[: progress.file])
    with (
        contextlib.ExitStack() as files,
        tqdm(total=corpus.size, initial=done, unit="B", unit_scale=True, disable=None, leave=False) as bar,
        ThreadPoolExecutor(1) as thread,
    ):
        writer = Writer(partial, corpus, job, progress, on_error, files)
        # while a batch is encoded, the previous one is written and the next one is read
        waiting: tuple[Batch, Future[list[Encoding]]] | None = None
        for batch in itertools.chain(_batches(corpus, progress, bar.update), [None]):
            following = (batch, thread.submit(writer.encode, batch)) if batch else None
            if waiting:
                writer.add(waiting[0], waiting[1].result())
            waiting = following
        writer.commit()
    if job.made_from(corpus, training) != made_from:
        raise DataError(CHANGED)
    meta = writer.finish()
    partial.rename(out)
    sync_folder(out.parent)
    return meta


def _read_progress(partial: Path, made_from: str) -> Progress | None:
    """Return the progress to resume from; None if there is none, the inputs differ, or a file is too short."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        progress = Progress(**json.loads((partial / "progress.json").read_bytes()))
        complete = all((partial / name).stat().st_size >= size for name, size in progress.sizes.items())
        return progress if complete and progress.made_from == made_from else None
    return None


def _train(job: Job, training: Sequence[Corpus], on_error: OnError) -> str:
    """Train a tokenizer on these texts, and return its tokenizer.json."""
    limits = [held_out_below(corpus, job.val_fraction, on_error) for corpus in training]
    texts = training_texts(training, limits, on_error)
    return str(train(texts, job.vocab_size, sentinels=job.sentinels).to_str(pretty=True))


def _batches(corpus: Corpus, progress: Progress, count: Callable[[int], object]) -> Iterator[Batch]:
    """Yield the remaining documents."""
    batch, size = Batch(), 0
    for item in itertools.islice(documents(corpus, progress.file, count), progress.number, None):
        batch.append(item)
        size += DOCUMENT_BYTES + (item.n_bytes if isinstance(item, Document) else 0)
        if size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Writer:
    """Encodes documents, and appends them to the files in OUT.partial."""

    def __init__(
        self, folder: Path, corpus: Corpus, job: Job, progress: Progress, on_error: OnError, files: contextlib.ExitStack
    ) -> None:
        """
        Args:
            folder: OUT.partial, with a tokenizer.json.
            files: closes the files.
        """
        self._folder, self._corpus, self._progress, self._on_error = folder, corpus, progress, on_error
        self._tokenizer = as_text((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self._marks = bpe.marks(self._tokenizer, job.end_token, job.begin_token)
        self._unknown = unknown_token(self._tokenizer, self._marks[0])
        self._dtype = np.dtype(token_dtype(bpe.size(self._tokenizer)))
        self._below = held_out_below(corpus, job.val_fraction, on_error)
        # the documents in validation files, by hash
        self._first_held_out = len(corpus.files) - corpus.n_held_out
        held_out = usable(corpus, on_error, self._first_held_out)
        self._held_out = {document.hash: (document.file, document.place) for document in held_out}
        self._streams: dict[str, Any] = {}
        for name, size in progress.sizes.items():
            self._streams[name] = stream = files.enter_context((folder / name).open("ab"))
            stream.truncate(size)
            if name.endswith(".bin") and not size:  # each stream begins with the token before a document
                self._write(name, np.array(self._marks[-1:], self._dtype).tobytes())
        self.commit()

    def encode(self, batch: Batch) -> list[Encoding]:
        """Return the tokens of each text. `unknown_token` has seen that the tokenizer encodes any character."""
        texts = [text for item in batch if isinstance(item, Document) for text in item.texts]
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    def add(self, batch: Batch, encodings: list[Encoding]) -> None:
        """Write the next documents.

        Raises:
            DataError: one of them is unusable, with "stop".
        """
        p, stream = self._progress, array("I")  # all texts, each followed by the marks
        for encoding in encodings:
            stream.fromlist(encoding.ids)
            stream.extend(self._marks)
        tokens, lengths = np.asarray(stream), np.array([len(one) + len(self._marks) for one in encodings], np.int64)
        is_mark, firsts = np.isin(tokens, self._marks), np.cumsum(lengths) - lengths
        n_marks = iter(np.add.reduceat(is_mark, firsts, dtype=np.int64).tolist())
        splits, origins = list[int](), list[int]()  # per text
        for item in batch:
            if isinstance(item, Problem):
                self._skip(item)
                continue
            if problem := self._problem(item, [next(n_marks) for _ in item.texts]):
                self._skip(problem)
                split = _SKIP
            else:
                split = int(item.file >= self._first_held_out or item.hash < self._below)
                p.text_bytes[split] += item.n_bytes
            splits += [split] * len(item.texts)
            origins += [item.file << PLACE_BITS | item.place] * len(item.texts)
        for i, name in enumerate(SPLITS):
            chosen = np.array(splits) == i
            ids = tokens[np.repeat(chosen, lengths)]
            before = p.sizes[f"{name}.bin"] // self._dtype.itemsize
            self._write(f"{name}.idx", (before + np.cumsum(lengths[chosen])).tobytes())
            self._write(f"{name}.bin", ids.astype(self._dtype).tobytes())
            self._write(f"{name}.origins", np.array(origins, np.int64)[chosen].tobytes())
            p.documents[i] += int(chosen.sum())
            p.unknown_tokens += int((ids == self._unknown).sum())
        last = batch[-1].file
        p.number = sum(item.file == last for item in batch) + (p.number if last == p.file else 0)
        p.file = last
        if time.monotonic() - self._committed >= COMMIT_EVERY_S:
            self.commit()

    def _problem(self, document: Document, n_marks: list[int]) -> Problem | None:
        """Return why this document is not written, given the number of marks in and after each text."""
        if max(n_marks) > len(self._marks):
            names = " or begin token ".join(repr(self._tokenizer.id_to_token(mark)) for mark in self._marks)
            detail = f"would be encoded with the end token {names} inside (--end-token can name another one)"
            return Problem(document.file, document.place, "a text that contains the end token", detail)
        if document.hash in self._held_out and document.file < self._first_held_out:
            detail = f"is also held out: {self._corpus.where(*self._held_out[document.hash])}"
            return Problem(document.file, document.place, "a copy of a held-out document", detail)
        return None

    def _skip(self, problem: Problem) -> None:
        if self._on_error == "stop":
            raise refusal(self._corpus, problem)
        self._write(SKIPPED, f"{problem.message(self._corpus)}\n".encode(errors="backslashreplace"))
        self._progress.skipped[problem.reason] = self._progress.skipped.get(problem.reason, 0) + 1

    def _write(self, name: str, content: bytes) -> None:
        with naming(self._folder / name):
            self._streams[name].write(content)
        self._progress.sizes[name] += len(content)

    def commit(self) -> None:
        """Sync all files, then record the progress. A restart resumes after the last added batch."""
        for stream in self._streams.values():
            flush_to_disk(stream)
        write_durably(self._folder / "progress.json", json.dumps(asdict(self._progress)).encode())
        self._committed = time.monotonic()

    def finish(self) -> Meta:
        """Write the files that describe a complete folder.

        Raises:
            DataError: there are no documents to train or to validate.
        """
        folder, corpus, p = self._folder, self._corpus, self._progress
        if not all(p.documents):
            left_out = f"; {sum(p.skipped.values()):,} were left out: {folder / SKIPPED}" if p.skipped else ""
            raise DataError(
                f"the text has {p.documents[0] // len(corpus.keys):,} usable documents to train and "
                f"{p.documents[1] // len(corpus.keys):,} to validate, and "
                f"needs some of both{left_out}; use more text, or another --val-fraction (data.val_fraction)"
            )
        files = [[os.path.abspath(file), unit_of(file)] for file in corpus.files]
        write_durably(folder / ORIGINS, json.dumps(files).encode())
        names = ["tokenizer.json", ORIGINS, *(name for name, size in p.sizes.items() if size)]
        if len(corpus.keys) == 2:
            keys = {"source_key": corpus.keys[0], "target_key": corpus.keys[1], "source_prefix": corpus.source_prefix}
            write_durably(folder / PAIRS, json.dumps(keys).encode())
            names.append(PAIRS)
        files_hashed = metas.hashed(folder, names)
        meta = Meta(
            format_version=metas.FORMAT_VERSION,
            documents=sum(p.documents),
            val_documents=p.documents[1],
            text_bytes=sum(p.text_bytes),
            val_text_bytes=p.text_bytes[1],
            train_tokens=p.sizes["train.bin"] // self._dtype.itemsize,
            val_tokens=p.sizes["val.bin"] // self._dtype.itemsize,
            unknown_tokens=p.unknown_tokens,
            vocab_size=bpe.size(self._tokenizer),
            end_token=self._marks[0],
            tokenizer_sha256=bpe.sha256(self._tokenizer),
            tokens_sha256=metas.tokens_hash(files_hashed),
            made_from=p.made_from,
            files=files_hashed,
            skipped=dict(sorted(p.skipped.items())),
            begin_token=self._marks[1] if len(self._marks) > 1 else None,
        )
        content = {key: value for key, value in asdict(meta).items() if value is not None}
        write_durably(folder / "meta.json", (json.dumps(content, indent=2) + "\n").encode())
        for name in ("progress.json", *(name for name, size in p.sizes.items() if not size)):
            (folder / name).unlink()
        sync_folder(folder)
        return meta
