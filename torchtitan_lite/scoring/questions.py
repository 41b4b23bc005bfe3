"""Reads the questions of a task from a JSONL file. docs/tasks.md describes the format."""

import codecs
import hashlib
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from torchtitan_lite.config.paths import expand, problem
from torchtitan_lite.errors import DataError, shortened

Kind = Literal["multiple choice", "last word"]
METRICS: dict[Kind, tuple[str, ...]] = {  # the first is the default
    "multiple choice": ("plain", "per_byte", "per_token"),
    "last word": ("accuracy",),
}
_EXAMPLES = (
    'multiple choice: {"context": "The sky is", "choices": [" blue", " green"], "answer": 0}; '
    'last word: {"context": "Once upon a", "continuation": " time"}'
)
_SEED = 0  # of subsets


@dataclass(frozen=True)
class Question:
    """One question. A last word is a choice without alternatives."""

    contexts: tuple[str, ...]  # one per choice
    choices: tuple[str, ...]
    answer: int = 0  # the index of the right choice

    def __post_init__(self) -> None:
        if not (0 <= self.answer < len(self.choices) == len(self.contexts) and all(self.choices)):
            raise DataError(
                "a question needs a context for each choice, choices that are not empty, and the index of the right "
                f"one: {shortened(self)}"
            )


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
    def digest(self) -> str:
        """A hash of kind, main score and questions."""
        digest = hashlib.sha256(f"{self.kind} {self.main}".encode())
        for question in self.questions:
            digest.update(repr(question).encode())
        return digest.hexdigest()

    @property
    def chance(self) -> float:
        """The expected score of a random choice."""
        if self.kind != "multiple choice":
            return 0.0
        return float(np.mean([1 / len(question.choices) for question in self.questions]))

    def subset(self, n: int) -> "Task":
        """Return a fixed random subset of n questions, in their order; all if n is 0 or there are fewer."""
        if not 0 < n < len(self.questions):
            return self
        which = np.sort(np.random.default_rng(_SEED).permutation(len(self.questions))[:n])
        return replace(self, questions=[self.questions[i] for i in which])


# --- lines of a file --------------------------------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: Any = None  # for the user, like `meta`
    meta: Any = None


class _LastWord(_Line):
    context: str
    continuation: str = Field(pattern=r"\S")  # not blank

    def question(self) -> tuple[Kind, Question]:
        return "last word", Question((self.context,), (self.continuation,))


class _MultipleChoice(_Line):
    context: str | None = None
    contexts: list[str] | None = None
    choices: list[Annotated[str, Field(min_length=1)]] = Field(min_length=2)
    answer: int = Field(ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        n = len(self.choices)
        if self.answer >= n:
            raise ValueError(f'"answer" is {self.answer} and should be the index of the right choice, 0 to {n - 1}')
        if (self.context is None) == (self.contexts is None) or len(self.contexts or self.choices) != n:
            raise ValueError(f'give "context", or "contexts", a list of {n} texts, one for each choice')
        right = self.choices[self.answer]
        if self.contexts is None and self.choices.count(right) > 1:
            raise ValueError(f'"choices" has the right one, {shortened(right, 40)!r}, more than once')
        return self

    def question(self) -> tuple[Kind, Question]:
        contexts = self.contexts or [self.context or ""] * len(self.choices)
        return "multiple choice", Question(tuple(contexts), tuple(self.choices), self.answer)


def _question(values: Any) -> tuple[Kind, Question]:
    """Return the kind of a question and the question. Raises ValueError with what is wrong."""
    if not isinstance(values, dict) or not ("continuation" in values or "choices" in values):
        raise ValueError(f"no known kind of question. {_EXAMPLES}")
    try:
        return (_LastWord if "continuation" in values else _MultipleChoice).model_validate(values).question()
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        found = f'"{key}" is {shortened(repr(first["input"]), 40)}: ' if key else ""
        raise ValueError(found + first["msg"].removeprefix("Value error, ")) from None


def read(path: str) -> Task:
    """Read a task from a JSONL file. The task is named after the file.

    Raises:
        DataError: the first problem, with its line.
    """
    file = expand(path)
    if wrong := problem(path) or ("" if file.is_file() else "not a file; a task is a .jsonl file (docs/tasks.md)"):
        raise DataError(f"task {path}: {wrong}")
    questions: list[Question] = []
    kinds, metric = set[Kind](), ""
    for number, line in enumerate(file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            values = from_json(line)
            if not questions and isinstance(values, dict) and values.keys() == {"score"}:
                metric = values["score"]
                continue
            kind, question = _question(values)
            kinds.add(kind)
            if len(kinds) > 1:
                raise ValueError(f"a {kind} question after others; put each kind into a separate file")
            if metric and metric not in METRICS[kind]:
                raise ValueError(f'"score": {metric!r} does not exist; {" or ".join(METRICS[kind])} works')
        except ValueError as error:
            raise DataError(f"task {path} can't be read: line {number}: {error}") from None
        questions.append(question)
    if not questions:
        raise DataError(f"task {path} can't be read: no questions; each line is one. {_EXAMPLES}")
    return Task(file.name.removesuffix(".jsonl"), kinds.pop(), questions, metric)
