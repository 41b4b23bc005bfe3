"""The task `brackets`: which bracket closes? Made from held-out text; the default task for the default text.

The context is text up to a closing bracket that was opened shortly before. The choices are the three brackets, without
those that are too rare in the text. Each is right equally often, so a model that ignores the context scores 1 / their
number.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from torchtitan_lite.errors import DataError
from torchtitan_lite.scoring.questions import Question, Task

CHOICES = (")", "]", "}")
EACH = 66  # questions for each bracket
FEWEST = 5
CONTEXT, APART = 120, 100  # maximum characters of a context, and between opening and closing bracket
SEED = 0


def brackets(documents: Iterable[str]) -> Task:
    """Make the task.

    Raises:
        DataError: the documents have too few pairs of brackets.
    """
    contexts: dict[str, list[str]] = {bracket: [] for bracket in CHOICES}
    for text in documents:
        for place in _closing(text):
            contexts[text[place]].append(text[max(place - CONTEXT, 0) : place])
    choices = tuple(bracket for bracket in CHOICES if len(contexts[bracket]) >= FEWEST)
    if len(choices) < 2:
        counts = ", ".join(f"{len(texts)} of {bracket}" for bracket, texts in contexts.items())
        raise DataError(
            f"task brackets: the held-out text has too few closing brackets ({counts}); give it a .jsonl file"
        )
    each = min(EACH, *(len(contexts[bracket]) for bracket in choices))
    generator = np.random.default_rng(SEED)
    questions = []
    for answer, bracket in enumerate(choices):
        for i in np.sort(generator.permutation(len(contexts[bracket]))[:each]):
            questions.append(Question((contexts[bracket][i],) * len(choices), choices, answer))
    return Task("brackets", "multiple choice", questions)


def _closing(text: str) -> Iterator[int]:
    """Yield the positions of closing brackets whose opening one is near, but not directly before."""
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
            if 1 < place - before <= APART:
                yield place
