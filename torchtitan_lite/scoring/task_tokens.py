"""Encodes questions.

A tokenizer may merge across the boundary of context and continuation. So both are encoded together, and the number of
tokens of the context alone is where the continuation starts. Spaces at the end of a context move to the continuation,
as most tokenizers join them to the next word. (lm-evaluation-harness does the same.)

A context that is too long is cut at its beginning. A continuation longer than the model's window is predicted in
pieces, each from the last token of the previous piece.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare.tokenizer import as_text
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.scoring.likelihood import Window
from torchtitan_lite.scoring.questions import Question, Task

Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class Inputs:
    """The tokens before a context, and the length of the model's window."""

    prefix: list[int]  # before every context; may be empty
    alone: list[int]  # replaces a context without tokens, if the prefix is empty
    length: int  # tokens


@dataclass(frozen=True)
class Encoded:
    """A task in tokens."""

    task: Task
    windows: list[Window]  # their items are choices, numbered over all questions
    n_tokens: NDArray[np.int64]  # per choice
    n_bytes: NDArray[np.int64]  # per choice, of its text in UTF-8


def text_encoder(tokenizer: Tokenizer, ends: Collection[int], what: str) -> Encode:
    """Return a function that encodes texts without special tokens, even if the text looks like one.

    Args:
        what: names a text in messages.

    Raises (when called):
        DataError: a text can't be encoded.
    """
    plain = as_text(tokenizer.to_str())

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            encoded = [encoding.ids for encoding in plain.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:  # the library's panics are BaseExceptions
            raise DataError(f"the tokenizer can't encode {what}: {bpe.reason(error)}") from None
        for text, ids in zip(texts, encoded, strict=True):
            if inside := [end for end in ends if end in ids]:
                name = plain.id_to_token(inside[0])
                raise DataError(f"{what} would be encoded with the end token {name!r} inside: {text[:40]!a}")
        return encoded

    return encode


def encode_task(task: Task, encode: Encode, inputs: Inputs) -> Encoded:
    """Encode a task.

    Raises:
        DataError: see `text_encoder`.
        ConfigError: a question does not suit the model.
    """
    pairs = [(i, *pair) for i, question in enumerate(task.questions) for pair in _pairs(question)]
    together = encode([context + choice for _, context, choice in pairs])
    before = dict.fromkeys(context for _, context, _ in pairs)
    lengths = dict(zip(before, map(len, encode(list(before))), strict=True))
    windows: list[Window] = []
    n_tokens = []
    for number, ((question, context, _), ids) in enumerate(zip(pairs, together, strict=True)):
        # a choice that merges into the last token of its context must still have a token
        start = min(lengths[context], len(ids) - 1)
        if not ids:
            raise ConfigError(f"task {task.name}: question {question + 1}: the tokenizer drops all of a choice")
        stream = [*inputs.prefix, *ids]
        start += len(inputs.prefix)
        if not start:
            stream, start = [*inputs.alone, *ids], len(inputs.alone)
        if not start:
            raise ConfigError(
                f"task {task.name}: question {question + 1} has an empty context, and the model has no token that "
                "begins a text; give it a context"
            )
        windows += _windows(number, stream, start, inputs.length)
        n_tokens.append(len(stream) - start)
    n_bytes = [len(choice.encode()) for question in task.questions for choice in question.choices]
    return Encoded(task, windows, np.array(n_tokens), np.array(n_bytes))


def _pairs(question: Question) -> list[tuple[str, str]]:
    """Return context and choice, with spaces moved from the context's end to the choice."""
    kept = [context.rstrip() for context in question.contexts]
    return [
        (context, whole[len(context) :] + choice)
        for context, whole, choice in zip(kept, question.contexts, question.choices, strict=True)
    ]


def _windows(number: int, stream: list[int], start: int, length: int) -> list[Window]:
    """Return the windows that predict stream[start:] once, with the context cut on its left."""
    windows = []
    while start < len(stream):
        end = min(len(stream), start + length)
        first = max(end - length - 1, 0)
        windows.append(Window(number, np.array(stream[first:end], np.int32), start - first))
        start = end
    return windows
