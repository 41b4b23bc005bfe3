"""The questions of a task, read from a JSONL file. docs/tasks.md describes the format."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchtitan_lite.config.paths import expand, problem
from torchtitan_lite.errors import DataError, shortened
from torchtitan_lite.terminal import counted

Kind = Literal["multiple choice", "last word"]
METRICS: dict[Kind, tuple[str, ...]] = {  # the first is the default
    "multiple choice": ("plain", "per_byte", "per_token"),
    "last word": ("accuracy",),
}
_KEYS: dict[Kind, tuple[str, ...]] = {
    "multiple choice": ("context", "contexts", "choices", "answer"),
    "last word": ("context", "continuation"),
}
_UNREAD = "id", "meta"
_EXAMPLES: dict[Kind, str] = {
    "multiple choice": '{"context": "The sky is", "choices": [" blue", " green"], "answer": 0}',
    "last word": '{"context": "Once upon a", "continuation": " time"}',
}
_LONGEST_LINE = 1 << 24  # bytes
_SHOWN = 5  # problems of a file
_SEED = 0  # of a subset


@dataclass(frozen=True)
class Question:
    """A question. A last word is a choice without alternatives."""

    contexts: tuple[str, ...]  # of each choice
    choices: tuple[str, ...]
    answer: int = 0  # the index of the right choice


@dataclass(frozen=True)
class Task:
    """Questions of one kind."""

    name: str
    kind: Kind
    questions: list[Question]
    metric: str = ""  # the main score, one of METRICS; empty: the first

    @property
    def main(self) -> str:
        return self.metric or METRICS[self.kind][0]

    @property
    def chance(self) -> float:
        """The expected score of a random choice."""
        if self.kind != "multiple choice":
            return 0.0
        return float(np.mean([1 / len(question.choices) for question in self.questions]))

    def some(self, n: int) -> "Task":
        """A fixed random subset of n questions, in their order; all if n is 0 or there are fewer."""
        if not 0 < n < len(self.questions):
            return self
        which = np.sort(np.random.default_rng(_SEED).permutation(len(self.questions))[:n])
        return replace(self, questions=[self.questions[i] for i in which])


def read(path: str) -> Task:
    """Read a task from a JSONL file. It is named after the file.

    Raises:
        DataError: lists the first problems, each with its line.
    """
    if error := problem(path):
        raise DataError(f"task {path}: {error}")
    file = expand(path)
    if not file.is_file():
        raise DataError(f"task {path}: not a file; a task is a .jsonl file (docs/tasks.md)")
    questions: list[Question] = []
    first_lines: dict[Kind, int] = {}
    problems, metric = [], ""
    for number, line in _lines(file):
        try:
            values = _parsed(line)
            if values.keys() == {"score"} and not questions:
                metric = values["score"]
                continue
            kind, question = _question(values)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        questions.append(question)
        first_lines.setdefault(kind, number)
    if len(first_lines) > 1:
        (kind, line_of_first), (other, line_of_other) = list(first_lines.items())[:2]
        problems.append(
            f"line {line_of_other}: {other}, but line {line_of_first} is {kind}; put each kind into a file of its own"
        )
    if not questions and not problems:
        problems.append(f"no questions; each line is one, e.g. {_EXAMPLES['multiple choice']}")
    for kind in list(first_lines)[:1]:
        if metric not in ("", *METRICS[kind]):
            works = " or ".join(f'"{name}"' for name in METRICS[kind])
            problems.append(f'line 1: "score": {json.dumps(metric)} is not a score of {kind}; {works} works')
    if problems:
        more = [f"... and {counted(len(problems) - _SHOWN, 'more problem')}"] if len(problems) > _SHOWN else []
        raise DataError("\n  ".join([f"task {path} can't be read:", *problems[:_SHOWN], *more]))
    (kind,) = first_lines
    return Task(file.name.removesuffix(".jsonl"), kind, questions, metric)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    try:
        with file.open("rb") as stream:
            number = 0
            while line := stream.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE:
                    raise DataError(f"task {file}: line {number} has more than {_LONGEST_LINE:,} bytes")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"task {file} can't be read: {error.strerror or error}") from None


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({shortened(error, 80)}); each line is one question") from None
    if not isinstance(values, dict):
        raise ValueError(f"should be an object, e.g. {_EXAMPLES['multiple choice']}")
    return values


def _question(values: dict[str, Any]) -> tuple[Kind, Question]:
    """The kind of a question and the question itself. Raises ValueError with what is wrong."""
    kind: Kind = "last word" if "continuation" in values else "multiple choice"
    if kind == "multiple choice" and "choices" not in values:
        examples = "; ".join(f"{name}: {text}" for name, text in _EXAMPLES.items())
        raise ValueError(f"no known kind of question. {examples}")
    if unknown := [key for key in values if key not in (*_KEYS[kind], *_UNREAD)]:
        known = ", ".join(_KEYS[kind])
        raise ValueError(f'unknown key "{shortened(unknown[0], 40)}" of {kind}; known: {known}; other data: "meta"')
    if kind == "multiple choice":
        return kind, _multiple_choice(values)
    context = _text_of("context", values.get("context"))
    word = _text_of("continuation", values["continuation"])
    if not word.strip():
        raise ValueError('"continuation" is blank')
    return kind, Question((context,), (word,))


def _multiple_choice(values: dict[str, Any]) -> Question:
    choices, answer = values["choices"], values.get("answer")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError('"choices" should be a list of at least two texts, e.g. [" blue", " green"]')
    texts = tuple(_text_of("choices", text) for text in choices)
    if not all(texts):
        raise ValueError('"choices" has an empty text, which no model can predict')
    if type(answer) is not int or not 0 <= answer < len(texts):
        raise ValueError(
            f'"answer" is {shortened(json.dumps(answer), 40)} and should be the index of the right choice, '
            f"0 to {len(texts) - 1}"
        )
    if "contexts" not in values:
        if texts.count(texts[answer]) > 1:
            raise ValueError(f'"choices" has the right one, {shortened(json.dumps(texts[answer]), 40)}, more than once')
        return Question((_text_of("context", values.get("context")),) * len(texts), texts, answer)
    contexts = values["contexts"]
    if "context" in values or not isinstance(contexts, list) or len(contexts) != len(texts):
        raise ValueError(
            f'"contexts" should be a list of {len(texts)} texts, one for each choice, and replaces "context"'
        )
    return Question(tuple(_text_of("contexts", text) for text in contexts), texts, answer)


def _text_of(key: str, value: Any) -> str:
    """The value of a key that holds text. Raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f'"{key}" is {shortened(json.dumps(value), 40)} and should be text in quotes')
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f'"{key}" has half of a surrogate pair, which UTF-8 can\'t represent')
    return value
