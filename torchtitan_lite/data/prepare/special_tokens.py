"""Encodes text that looks like a special token as ordinary text.

The library's `encode_special_tokens` is enough for byte-level BPE. Other tokenizers still produce special tokens: a
Unigram, WordLevel or WordPiece vocabulary may contain the end token as a piece, and added tokens may have
`"special": false`.

So the ids of each document are checked. If they contain the end token or another special token, the document is encoded
again with these strings removed from the tokenizer: `</s>` becomes `<`, `/`, `s`, `>`. If the end token remains, or the
rest of the vocabulary can't spell the text, the document is refused.
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
from torchtitan_lite.errors import DataError

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class LiteralError(Exception):
    """A text can't be encoded without special tokens."""


class LiteralEncoder:
    """Encodes texts without producing the end token."""

    def __init__(self, tokenizer: Tokenizer, definition: str, end: int, unknown: int) -> None:
        """
        Args:
            tokenizer: `literal(definition)`.
            unknown: the id of the unknown token; -1: none.
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
        """The ids of each text, (n,) int64, or an error."""
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
        """Encode the text without special tokens.

        Raises:
            LiteralError: this is not possible.
        """
        inside = f'would be encoded with the end token "{self._end_text}" inside'
        if not _can_be_spelled(self._end_text):
            raise LiteralError(f"{inside}; choose one that no text contains (tokenizer.end_token or --end-token)")
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
    """Whether other tokens may spell this one: it is neither a single character nor a byte."""
    return len(text) > 1 and not _BYTE.fullmatch(text)


def _covered(text: str, encoding: Encoding) -> set[int]:
    """The non-space characters that some token covers. (Some vocabularies do not encode the spaces between words.)"""
    return {i for first, end in encoding.offsets for i in range(first, end) if not text[i].isspace()}


@lru_cache(maxsize=2)
def _without(definition: str, strings: frozenset[str]) -> Tokenizer:
    """The tokenizer with these tokens renamed to strings that occur in no text; ids are unchanged."""
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
        model["merges"] = [[a, b] for a, b in model["merges"] if not {a, b, a + b.removeprefix(prefix)} & names.keys()]
    for entry in content["added_tokens"]:
        entry["content"] = names.get(entry["content"], entry["content"])
    content["post_processor"] = None
    return literal(json.dumps(content))


def literal(definition: str) -> Tokenizer:
    """A tokenizer that does not look for special tokens in the text; see above."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def unknown(tokenizer: Tokenizer, end: int) -> int:
    """The id of the unknown token; -1 if the vocabulary can encode everything, or the end token stands for it.

    Raises:
        DataError: the tokenizer silently drops unknown characters.
    """
    model = json.loads(tokenizer.to_str())["model"]
    index = model.get("unk_id") if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])
    if index is not None:
        return -1 if index == end else int(index)
    probe = "\u4e2d\U0001f600"
    try:
        decoded = tokenizer.decode(tokenizer.encode(probe).ids)
    except BaseException as error:
        raise DataError(
            f"the tokenizer can't encode unknown characters ({bpe.reason(error)}); use one with byte-level "
            "pre-tokenization, with byte_fallback, or with an unk_token in its vocabulary"
        ) from None
    if not set(probe) <= set(decoded):
        raise DataError(
            "the tokenizer silently drops unknown characters; use one with byte-level pre-tokenization, with "
            "byte_fallback, or with an unk_token"
        )
    return -1
