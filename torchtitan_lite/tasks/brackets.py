"""The task `brackets`: which bracket closes? It is made from held-out text, and is the default for Python's library.

The context is text up to a closing bracket whose partner is shortly before. The choices are the three brackets (those
that the text has enough of), and each is the right one equally often: a model that ignores the context scores a third.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.token_files import PAIRS, TokenFiles, document_ends
from torchtitan_lite.errors import DataError
from torchtitan_lite.tasks.questions import Question, Task

NAME = "brackets"
CHOICES = (")", "]", "}")
EACH = 66  # questions for each bracket
_FEWEST = 5
_CONTEXT, _APART = 120, 100  # characters: of a context, and between two partners
_DOCUMENTS, _TOKENS = 2000, 1 << 16  # that are read: documents, and tokens of each
_SEED = 0


def brackets(documents: Iterable[str]) -> Task:
    """The task.

    Raises:
        DataError: the documents have too few pairs.
    """
    found: dict[str, list[str]] = {bracket: [] for bracket in CHOICES}
    for text in documents:
        for place in _closing(text):
            found[text[place]].append(text[max(place - _CONTEXT, 0) : place])
    choices = tuple(bracket for bracket in CHOICES if len(found[bracket]) >= _FEWEST)
    if len(choices) < 2:
        counts = ", ".join(f"{len(contexts)} of {bracket}" for bracket, contexts in found.items())
        raise DataError(
            f"task {NAME}: the held-out text has too few closing brackets ({counts}); give it a .jsonl file"
        )
    each = min(EACH, *(len(found[bracket]) for bracket in choices))
    generator = np.random.default_rng(_SEED)
    questions = []
    for answer, bracket in enumerate(choices):
        for i in np.sort(generator.permutation(len(found[bracket]))[:each]):
            questions.append(Question((found[bracket][i],) * len(choices), choices, answer))
    return Task(NAME, "multiple choice", questions)


def _closing(text: str) -> Iterator[int]:
    """The places of closing brackets that have a partner, not directly before them."""
    opened: list[tuple[str, int]] = []
    partners = dict(zip(CHOICES, "([{", strict=True))
    for place, character in enumerate(text):
        if character in "([{":
            opened.append((character, place))
        elif character in partners:
            if not opened or opened[-1][0] != partners[character]:
                opened.clear()  # a bracket in a string or a comment
                continue
            _, before = opened.pop()
            if 1 < place - before <= _APART:
                yield place


def held_out(data: DataSet) -> Iterator[str]:
    """Held-out documents, evenly spaced.

    Raises:
        DataError: the data is damaged, or holds pairs.
    """
    tokenizer = bpe.load(data.folder / "tokenizer.json")
    for source in data.sources:
        if PAIRS in source.meta.files:
            raise DataError(f"task {NAME}: {source.name} holds pairs, and the task is made from text")
        ends = document_ends(source.folder, source.meta, "val")
        stream = TokenFiles(source.folder, source.meta, "val")
        for i in range(0, len(ends), -(-len(ends) // _DOCUMENTS)):
            first, end = int(ends[i - 1]) if i else 1, int(ends[i]) - 1
            yield tokenizer.decode(stream.read(first, min(end, first + _TOKENS)).tolist(), skip_special_tokens=False)
