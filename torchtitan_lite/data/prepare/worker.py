"""Encodes chunks of documents into tokens: as a function, and as a worker process driven over pipes.

A worker is stateless and exits when its input closes, so it does not outlive the main process. It does not import
torch, which would add a second of start-up per core.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.data.prepare import literal as literal_module
from torchtitan_lite.data.prepare.literal import LiteralEncoder, LiteralError
from torchtitan_lite.data.prepare.plan import Job, document_hash
from torchtitan_lite.data.prepare.readers import Chunk, Problem
from torchtitan_lite.data.token_files import token_dtype
from torchtitan_lite.errors import DataError

_BATCH_BYTES = 1 << 20
_HOW = "data.text_key names the key (or --text-key)"


@dataclass
class Encoded:
    """A chunk's tokens of one split."""

    tokens: NDArray[Any]  # documents, each followed by the end token
    lengths: NDArray[np.int32]  # of the documents, including end tokens
    places: NDArray[np.int64]  # the line or row of each document
    text_bytes: int = 0
    unknown: int = 0  # number of unknown tokens


@dataclass
class Result:
    """The encoded chunk."""

    train: Encoded
    val: Encoded
    problems: list[Problem]


Texts = tuple[str, ...]  # of a document: one, or a source and its target


def texts(chunk: Chunk, key: str, target_key: str = "", prefix: str = "") -> tuple[list[Texts], list[Problem]]:
    """The texts of the valid documents of a chunk, and the problems of the others."""
    found = [what for _, what in _read(chunk, [key, target_key] if target_key else [key], prefix)]
    problems = [what for what in found if isinstance(what, Problem)]
    return [what for what in found if isinstance(what, tuple)], chunk.problems + problems


def _read(chunk: Chunk, keys: list[str], prefix: str) -> Iterator[tuple[int, Texts | Problem]]:
    """The line or row of each document, and its texts or its problem."""
    for number, document in zip(chunk.places, chunk.documents, strict=True):
        if chunk.texts == "json" and not document.strip():
            continue  # an empty line holds no text
        what = _json_texts(document, keys) if chunk.texts == "json" else _plain_text(document, number, chunk.unit)
        if isinstance(what, Problem):
            yield number, what if what.place else Problem(f"{chunk.unit} {number}", what.reason, what.detail)
        else:
            yield number, (prefix + what[0], *what[1:])


def _plain_text(document: bytes, number: int, unit: str) -> Texts | Problem:
    if not document:
        return Problem("", "an empty text", "the text is empty")
    try:
        return (document.decode(),)
    except UnicodeDecodeError as error:
        return Problem(
            f"{unit} {number + (document.count(10, 0, error.start) if unit == 'line' else 0)}",
            "not UTF-8",
            f"byte {document[error.start]:#04x} is not utf-8",
        )


def _json_texts(line: bytes, keys: list[str]) -> Texts | Problem:
    """The texts of a line, which must be a JSON object with a non-empty string under each key.

    A side of a pair that is only white space is empty too: there is nothing to answer, or to learn.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        return Problem("", "not JSON", f"not JSON: {error}")
    for key in keys:
        if not isinstance(record, dict) or key not in record:
            found = (
                f"its keys are {', '.join(record)[:200] or '-'}" if isinstance(record, dict) else "it is not an object"
            )
            how = (
                "--source-key and --target-key (or data.source_key and data.target_key) name the keys"
                if len(keys) == 2
                else _HOW
            )
            return Problem("", f'no "{key}"', f'no "{key}": {found}; {how}')
        text = record[key]
        if not isinstance(text, str) or not text or (len(keys) == 2 and not text.strip()):
            return Problem("", "no text", f'"{key}" should be text, but is {json.dumps(text)[:40]}')
        try:
            text.encode()
        except UnicodeEncodeError as error:  # "\\ud83d", half of a surrogate pair, is valid JSON
            return Problem("", "no text", f'"{key}" is not valid text: {error.reason}')
    return tuple(record[key] for key in keys)


def encode(chunk: Chunk, job: Job, literal: LiteralEncoder) -> Result:
    """The tokens of all documents, by split."""
    ids: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
    places: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    problems = list(chunk.problems)
    dtype = token_dtype(job.vocab_size)
    end = np.array([job.end_token], dtype=dtype)
    documents: list[tuple[int, str]] = []
    keys = [job.text_key, job.target_key] if job.target_key else [job.text_key]
    for place, what in _read(chunk, keys, job.source_prefix):
        if isinstance(what, Problem):
            problems.append(what)
        else:
            documents += [(place, text) for text in what]
    encoded = [one for batch in _batches(documents) for one in literal.batch([text for _, text in batch])]
    for i in range(0, len(documents), len(keys)):  # a pair stays together
        place, first = documents[i]
        split = document_hash(first.encode()) < job.held_out_below
        together = encoded[i : i + len(keys)]
        if wrong := [str(one) for one in together if isinstance(one, LiteralError)]:
            where = f"{chunk.unit} {place}"
            problems.append(Problem(where, "a text that the tokenizer can't encode", wrong[0]))
            continue
        for (_, text), tokens in zip(documents[i : i + len(keys)], together, strict=True):
            sizes[split] += len(text.encode())
            places[split].append(place)
            ids[split].append(np.append(np.asarray(tokens, dtype), end))
    none = np.empty(0, dtype)
    train, val = (
        _joined(np.concatenate(x) if x else none, [len(i) for i in x], p, n, job.unknown)
        for x, p, n in zip(ids, places, sizes, strict=True)
    )
    return Result(train, val, problems)


def _joined(tokens: NDArray[Any], lengths: list[int], places: list[int], text_bytes: int, unknown: int) -> Encoded:
    n_unknown = int((tokens == unknown).sum()) if unknown >= 0 else 0
    return Encoded(tokens, np.array(lengths, np.int32), np.array(places, np.int64), text_bytes, n_unknown)


def _batches(documents: list[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """Batches with a bounded number of characters: the library's encodings are much larger than the text."""
    batches: list[list[tuple[int, str]]] = [[]]
    size = 0
    for place, text in documents:
        if size and size + len(text) > _BATCH_BYTES // 8:
            batches.append([])
            size = 0
        batches[-1].append((place, text))
        size += len(text)
    return [batch for batch in batches if batch]


def load(job: Job) -> LiteralEncoder:
    """The encoder of a job."""
    return LiteralEncoder(literal_module.literal(job.tokenizer), job.tokenizer, job.end_token, job.unknown)


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
        command = [sys.executable, "-m", "torchtitan_lite.data.prepare.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._job = job
        self._started = False

    def encode(self, chunk: Chunk) -> Result:
        """Send a chunk and wait for its result.

        Raises:
            WorkerError: the process has died.
        """
        to, out = self._process.stdin, self._process.stdout
        assert to is not None
        assert out is not None
        try:
            if not self._started:
                _send(to, asdict(self._job))
                self._started = True
            fields = {key: value for key, value in vars(chunk).items() if key not in ("documents", "problems")}
            lengths = [len(document) for document in chunk.documents]
            _send(to, fields | {"lengths": lengths}, *chunk.documents)
            header, payload = _receive(out)
        except (OSError, EOFError):
            code = self._process.wait()
            raise WorkerError(
                f"a worker of the preparation ended with exit code {code}"
                f"{' (killed, perhaps for lack of memory: try fewer --workers)' if code < 0 else ''}; "
                "run the same command again to resume"
            ) from None
        splits, at = [], 0
        dtype = np.dtype(token_dtype(self._job.vocab_size))
        for n_tokens, n_documents, text_bytes, n_unknown in header["splits"]:
            tokens = np.frombuffer(payload, dtype, n_tokens, at)
            at += tokens.nbytes
            lengths_of = np.frombuffer(payload, np.int32, n_documents, at)
            at += lengths_of.nbytes
            places = np.frombuffer(payload, np.int64, n_documents, at)
            at += places.nbytes
            splits.append(Encoded(tokens, lengths_of, places, text_bytes, n_unknown))
        problems = [Problem(**problem) for problem in header["problems"]]
        return Result(splits[0], splits[1], chunk.problems + problems)

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


def _send(stream: IO[bytes], header: dict[str, Any], *payload: bytes) -> None:
    """Write two lengths, a JSON header and the payload."""
    head = json.dumps(header).encode()
    stream.write(struct.pack("<QQ", len(head), sum(map(len, payload))) + head)
    stream.writelines(payload)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    head, rest = struct.unpack("<QQ", _exactly(stream, 16))
    return json.loads(_exactly(stream, head)), _exactly(stream, rest)


def _exactly(stream: IO[bytes], n: int) -> bytes:
    data = stream.read(n)
    if len(data) != n:
        raise EOFError
    return data


def main() -> None:
    """Encode chunks until the input ends."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole process group; the main process ends this one
    source, to = sys.stdin.buffer, sys.stdout.buffer
    try:
        job = Job(**_receive(source)[0])
        literal = load(job)
        while True:
            header, payload = _receive(source)
            documents, at = [], 0
            for length in header.pop("lengths"):
                documents.append(payload[at : at + length])
                at += length
            result = encode(Chunk(**header, documents=documents), job, literal)
            splits = result.train, result.val
            head = {
                "splits": [(len(s.tokens), len(s.lengths), s.text_bytes, s.unknown) for s in splits],
                "problems": [vars(problem) for problem in result.problems],
            }
            _send(to, head, *(part.tobytes() for s in splits for part in (s.tokens, s.lengths, s.places)))
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
