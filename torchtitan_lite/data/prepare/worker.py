"""Encodes chunks of documents into tokens: as a function, and in a worker process.

The workers are plain subprocesses that receive pickled chunks on stdin and return pickled results on stdout. A pool of
multiprocessing would import the main module in each worker (for train.py that means torch, seconds and 300 MB a core;
a script without a `__main__` guard would run again), and its workers survive if the parent is killed. These exit when
their input closes.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.data.prepare import special_tokens
from torchtitan_lite.data.prepare.plan import Job, document_hash
from torchtitan_lite.data.prepare.readers import Chunk, Problem, decode
from torchtitan_lite.data.prepare.special_tokens import LiteralEncoder, LiteralError
from torchtitan_lite.data.token_files import token_dtype
from torchtitan_lite.errors import DataError

_BATCH_CHARACTERS = 1 << 17  # encoded at a time


@dataclass
class Encoded:
    """A chunk's tokens of one split."""

    tokens: NDArray[Any]  # documents, each followed by the end token
    lengths: NDArray[np.int32]  # of the documents, including end tokens
    places: NDArray[np.int64]  # the line or row of each document
    text_bytes: int
    unknown: int  # number of unknown tokens


@dataclass
class Result:
    """The encoded chunk."""

    train: Encoded
    val: Encoded
    problems: list[Problem]


def load(job: Job) -> LiteralEncoder:
    return LiteralEncoder(special_tokens.literal(job.tokenizer), job.tokenizer, job.end_token, job.unknown)


def encode(chunk: Chunk, job: Job, encoder: LiteralEncoder) -> Result:
    """The tokens of all documents, by split."""
    problems = list(chunk.problems)
    documents: list[tuple[int, tuple[str, ...]]] = []  # place, and one text or the two of a pair
    for place, text in decode(chunk, [key for key in (job.text_key, job.target_key) if key], job.source_prefix):
        if isinstance(text, Problem):
            problems.append(text)
        else:
            documents.append((place, text))
    encoded = iter(_encode_all((text for _, texts in documents for text in texts), encoder))
    splits: tuple[list[_Document], list[_Document]] = ([], [])
    for place, texts in documents:
        tokens = [next(encoded) for _ in texts]
        errors = [error for error in tokens if isinstance(error, LiteralError)]
        if errors:
            problems.append(Problem(f"{chunk.unit} {place}", "a text that the tokenizer can't encode", str(errors[0])))
            continue
        held_out = chunk.file >= job.first_held_out or document_hash(texts[0].encode()) < job.held_out_below
        split = splits[held_out]  # a pair stays together
        split += [(place, len(text.encode()), ids) for text, ids in zip(texts, tokens, strict=True)]
    train, val = (_joined(split, job) for split in splits)
    return Result(train, val, problems)


_Document = tuple[int, int, Any]  # place, bytes of text, token ids


def _joined(documents: list[_Document], job: Job) -> Encoded:
    dtype = token_dtype(job.vocab_size)
    end = np.array([job.end_token], dtype)
    parts = [part for _, _, ids in documents for part in (ids.astype(dtype), end)]
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
    return Encoded(
        tokens,
        lengths=np.array([len(ids) + 1 for _, _, ids in documents], np.int32),
        places=np.array([place for place, _, _ in documents], np.int64),
        text_bytes=sum(size for _, size, _ in documents),
        unknown=int((tokens == job.unknown).sum()) if job.unknown >= 0 else 0,
    )


def _encode_all(texts: Iterable[str], encoder: LiteralEncoder) -> Iterator[NDArray[Any] | LiteralError]:
    """Encode in batches with a bounded number of characters: the library's encodings are much larger than the text."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if size and size + len(text) > _BATCH_CHARACTERS:
            yield from encoder.batch(batch)
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield from encoder.batch(batch)


# --- the process ------------------------------------------------------------------------------------------------


class Worker:
    """A process that encodes chunks."""

    def __init__(self, job: Job) -> None:
        root = str(Path(__file__).parents[3])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TOKENIZERS_PARALLELISM": "false",  # there is a process for each core
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._job: Job | None = job  # until it is sent

    def encode(self, chunk: Chunk) -> Result:
        """Send a chunk and wait for its result.

        Raises:
            WorkerError: the process has died.
        """
        requests, results = self._process.stdin, self._process.stdout
        assert requests is not None
        assert results is not None
        try:
            if self._job is not None:
                pickle.dump(self._job, requests)
                self._job = None
            pickle.dump(chunk, requests)
            requests.flush()
            result: Result = pickle.load(results)
            return result
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self._process.wait()
            raise WorkerError(
                f"a worker of the preparation ended with exit code {code}"
                f"{' (killed, perhaps for lack of memory: try fewer --workers)' if code < 0 else ''}; "
                "run the same command again to resume"
            ) from None

    def close(self) -> None:
        """Close the pipes and wait for the process to exit."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()


class WorkerError(DataError):
    """A worker process died. Finished chunks are kept."""

    exit_code = 1


def main() -> None:
    """The worker process: encode chunks until the input ends."""
    # Ctrl-C reaches the whole process group; the main process ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    # the parent has ended, perhaps in the middle of a request
    with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        job: Job = pickle.load(requests)
        encoder = load(job)
        while True:
            pickle.dump(encode(pickle.load(requests), job, encoder), results)
            results.flush()
