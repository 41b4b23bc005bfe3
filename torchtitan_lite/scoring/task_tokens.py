"""Questions as tokens.

A context and its continuation are encoded together and then split, as a tokenizer may merge over the boundary: the
tokens after as many as the context alone has are the continuation. Spaces at the end of a context belong to the
continuation, as most tokenizers join them to the next word. (lm-evaluation-harness does the same.)

A context that is too long loses its beginning. A continuation that is longer than the model's window is predicted piece
by piece, each from the last token of the piece before.
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
    """What precedes a context, and the length of the model's window."""

    prefix: list[int]  # before every context; may be empty
    alone: list[int]  # in place of a context without tokens, if the prefix is empty
    length: int  # tokens


@dataclass(frozen=True)
class Encoded:
    """A task in tokens."""

    task: Task
    windows: list[Window]  # the item of each is a choice, numbered over all questions
    n_tokens: NDArray[np.int64]  # of each choice
    n_bytes: NDArray[np.int64]  # of each choice's text in UTF-8


def text_encoder(tokenizer: Tokenizer, ends: Collection[int], what: str) -> Encode:
    """Encodes texts without special tokens: what looks like one is text.

    Args:
        what: names a text in messages.

    Raises (when called):
        DataError: a text can't be encoded.
    """
    plain = as_text(tokenizer.to_str())

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            encoded = [encoding.ids for encoding in plain.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:  # the library's panics are no Exception
            raise DataError(f"the tokenizer can't encode {what}: {bpe.reason(error)}") from None
        for text, ids in zip(texts, encoded, strict=True):
            if inside := [end for end in ends if end in ids]:
                name = plain.id_to_token(inside[0])
                raise DataError(f"{what} would be encoded with the end token {name!r} inside: {text[:40]!a}")
        return encoded

    return encode


def encoded(task: Task, encode: Encode, inputs: Inputs) -> Encoded:
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
        # a choice that merges into the last token of its context would have none
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
    """Context and choice, the spaces at the end of the context moved."""
    kept = [context.rstrip() for context in question.contexts]
    return [
        (context, whole[len(context) :] + choice)
        for context, whole, choice in zip(kept, question.contexts, question.choices, strict=True)
    ]


def _windows(number: int, stream: list[int], start: int, length: int) -> list[Window]:
    """The windows that predict stream[start:] once, the context cut on its left."""
    windows = []
    while start < len(stream):
        end = min(len(stream), start + length)
        first = max(end - length - 1, 0)
        windows.append(Window(number, np.array(stream[first:end], np.int32), start - first))
        start = end
    return windows
