"""A task of your own: `train.py --eval.tasks=examples.own_task:recall` (docs/extending.md).

Asks for the last word of a held-out line, which also occurs earlier in the text.
"""

import re
from collections.abc import Iterable

from torchtitan_lite.errors import DataError
from torchtitan_lite.scoring.questions import Question, Task


def recall(documents: Iterable[str]) -> Task:
    """Make the task. Raises DataError if the documents have no such line."""
    questions = []
    for text in documents:
        for word in re.finditer(r" \w{4,}(?=\n)", text):
            context = text[max(word.start() - 200, 0) : word.start()]
            if word[0] in context:
                questions.append(Question((context,), (word[0],)))
    if not questions:
        raise DataError("task recall: no line of the held-out text ends in a word that occurs before it")
    return Task("recall", "last word", questions).subset(200)
