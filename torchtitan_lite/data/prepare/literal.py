"""Text that looks like a special token stays text, whatever the tokenizer.

The library can be told not to look for special entries in a text (`encode_special_tokens`), which is all that a
byte-level BPE needs. Others find them nevertheless: a Unigram, WordLevel or WordPiece vocabulary that holds the string
of the end mark as a piece, and entries that were added with `"special": false`.

So the ids of every document are looked at. One that has the id of the end mark, or of another special entry, is encoded
again, by the same tokenizer without these strings: `</s>` then becomes `<`, `/`, `s`, `>`. If the end mark is still
there, or the rest of the vocabulary can't spell the text, the document is refused.
"""

import hashlib
import json
import re
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from torchtitan_lite.data import tokenizer as bpe

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class LiteralError(Exception):
    """A text that can't be encoded as the text that it is; the message says why."""


class Literal:
    """Encodes texts so that none has the end mark in it."""

    def __init__(self, tokenizer: Tokenizer, definition: str, end: int, unknown: int) -> None:
        """
        Args:
            tokenizer: one that does not look for special entries, made from `definition`.
            unknown: the id for what the vocabulary does not have; -1: there is none.
        """
        self._tokenizer, self._definition = tokenizer, definition
        self._end, self._unknown = end, unknown
        entries = json.loads(definition)["added_tokens"]
        special = {entry["id"]: entry["content"] for entry in entries if entry["special"]}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._end_text = next((text for text, index in vocabulary.items() if index == end), "")
        self._unknown_text = next((text for text, index in vocabulary.items() if index == unknown), "")
        ids = {end, *(index for index, text in special.items() if _can_be_spelled(text))} - {unknown}
        self._watched = np.zeros(max(vocabulary.values()) + 1, np.bool_)
        self._watched[list(ids | {end})] = True
        self._strings = {text for text, index in vocabulary.items() if self._watched[index]}
        if len(self._unknown_text) > 1:
            self._strings.add(self._unknown_text)

    def batch(self, texts: list[str]) -> list[NDArray[Any] | LiteralError]:
        """The ids of each text, (n,) int64; or why it has none."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            why = bpe.reason(error)
            if len(texts) > 1:
                return [result for text in texts for result in self.batch([text])]
            return [LiteralError(f"the tokenizer can't encode it: {why}")]
        return [self._checked(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _checked(self, text: str, encoding: Encoding) -> NDArray[Any] | LiteralError:
        ids = np.fromiter(encoding.ids, np.int64, len(encoding))
        if not self._watched[ids].any() and not (len(self._unknown_text) > 1 and self._unknown_text in text):
            return ids
        try:
            again = self._spelled(text)
            return np.array(again.ids, np.int64)
        except LiteralError as error:
            return error if (ids == self._end).any() else ids

    def _spelled(self, text: str) -> Encoding:
        """The text without its special entries.

        Raises:
            LiteralError: that can't be.
        """
        inside = f'would be encoded with the end mark "{self._end_text}" inside'
        if not _can_be_spelled(self._end_text):
            raise LiteralError(f"{inside}; choose an entry that no text holds (tokenizer.end_token or --end-token)")
        no_other = f"{inside}, and the rest of the vocabulary can't spell it"
        try:
            before = self._tokenizer.encode(text, add_special_tokens=False)
            after = _without(self._definition, frozenset(self._strings)).encode(text, add_special_tokens=False)
        except BaseException as error:
            raise LiteralError(f"{no_other} ({bpe.reason(error)})") from None
        if self._end in after.ids or not _covered(text, before) <= _covered(text, after):
            raise LiteralError(no_other)
        return after


def _can_be_spelled(text: str) -> bool:
    """Whether the rest of a vocabulary may spell an entry: single characters and bytes are what others are made of."""
    return len(text) > 1 and not _BYTE.fullmatch(text)


def _covered(text: str, encoding: Encoding) -> set[int]:
    """The characters that some token stands for. (What separates words stands for nothing in some vocabularies.)"""
    return {i for first, end in encoding.offsets for i in range(first, end) if not text[i].isspace()}


@lru_cache(maxsize=2)
def _without(definition: str, strings: frozenset[str]) -> Tokenizer:
    """The tokenizer with other names for these entries, which no text has; ids stay as they are."""
    names = {s: f"\ue000{hashlib.sha256((definition + s).encode()).hexdigest()}" for s in strings}
    content = json.loads(definition)
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): index for text, index in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [
            [a, b] for a, b in pairs if not {a, b, a + b.removeprefix(prefix)} & names.keys()
        ]  # fmt: skip
    for entry in content["added_tokens"]:
        entry["content"] = names.get(entry["content"], entry["content"])
    content["post_processor"] = None
    return bpe.literal(json.dumps(content))
