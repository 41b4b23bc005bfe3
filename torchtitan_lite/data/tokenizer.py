"""Tokenizers of the `tokenizers` library: the user's own, or byte-level BPE trained on the text.

In byte-level BPE every text can be encoded, nothing is unknown, and decoding is exact.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_lite.config.paths import expanded, kind_of
from torchtitan_lite.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")


SMALLEST = 257  # a byte each, and the end mark
_LONGEST = 1 << 30  # bytes of a tokenizer.json


def byte_level() -> Tokenizer:
    """A token for each byte, and the end mark: nothing is learned, so any text will do."""
    return train([], SMALLEST)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` entries: the end mark, 256 bytes, merges.

    Raises:
        DataError: the text is too short to learn that many.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab_size()
    if learned != vocab_size:
        raise DataError(
            f"the text is too short for tokenizer.vocab_size = {vocab_size}: it yields {learned} entries; "
            f"use more text or tokenizer.vocab_size = {learned}"
        )
    return tokenizer


def load(path: Path) -> Tokenizer:
    """A tokenizer.json, without the truncation and padding that some files ask for: they would change the text.

    Raises:
        DataError: the file is no tokenizer.json.
    """
    file = expanded(path, "tokenizer.path")
    wrong = f"tokenizer.path: {path} can't be read as a tokenizer.json: "
    try:
        if file.exists() and not file.is_file():
            raise DataError(f"{wrong}it is {kind_of(file)}")
        if file.stat().st_size > _LONGEST:
            raise DataError(f"{wrong}it has {file.stat().st_size:,} bytes, and at most {_LONGEST:,} are read")
        tokenizer = Tokenizer.from_str(file.read_bytes().decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if not tokenizer.get_vocab_size():
            raise DataError(f"{wrong}its vocabulary is empty")
        return tokenizer
    except UnicodeDecodeError as error:
        raise DataError(f"{wrong}byte {error.start:,} is not UTF-8") from None
    except OSError as error:
        raise DataError(f"{wrong}{error.strerror}") from None
    except DataError:
        raise
    except BaseException as error:
        raise DataError(f"{wrong}{reason(error)}") from None


def literal(definition: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json. It does not look for special entries in a text; see literal.py."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def reason(error: BaseException) -> str:
    """What went wrong in the library, which raises plain exceptions, and a BaseException of its own when it panics."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        raise error
    return str(error)[:300]


def unknown(tokenizer: Tokenizer) -> int | None:
    """The id that stands for what the vocabulary does not have; None if it can spell everything.

    Raises:
        DataError: it has no such entry either, and silently drops what it does not know.
    """
    model = json.loads(tokenizer.to_str())["model"]
    index = model.get("unk_id") if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])
    if index is not None:
        return int(index)
    probe = "\u4e2d\U0001f600"
    try:
        spelled = tokenizer.decode(tokenizer.encode(probe).ids)
    except BaseException as error:
        raise DataError(
            f"the tokenizer can't encode what it does not know ({reason(error)}); use one with byte-level "
            "pre-tokenization, with byte_fallback, or with an unk_token that its vocabulary has"
        ) from None
    if not set(probe) <= set(spelled):
        raise DataError(
            "the tokenizer drops characters that it does not know, without a trace; use one with byte-level "
            "pre-tokenization, with byte_fallback, or with an unk_token"
        )
    return None


def end_token(tokenizer: Tokenizer, wanted: str = "") -> int:
    """The id of the entry that ends a document.

    Raises:
        DataError: the tokenizer has none of that name, or none that is known.
    """
    for token in (wanted,) if wanted else _KNOWN_ENDS:
        index = tokenizer.token_to_id(token)
        if index is not None:
            return int(index)
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:8]
    raise DataError(
        f"tokenizer.end_token: the tokenizer has no entry {wanted or ' or '.join(_KNOWN_ENDS)} to end a document with; "
        f"its special entries are {', '.join(special) or '-'}"
    )


def shown(tokenizer: Tokenizer, index: int) -> str:
    """A token in a message: its id and its entry."""
    return f"{tokenizer.id_to_token(index)!r} (id {index})"


def size(tokenizer: Tokenizer) -> int:
    """The number of embeddings it takes: the largest id, plus 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def sha256(tokenizer: Tokenizer) -> str:
    """The identity of a tokenizer: the hash of its whole definition, in hex."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def bytes_per_token(tokenizer: Tokenizer, end: int | None = None) -> NDArray[np.int64]:
    """How many bytes of text each token stands for, (size,) int64; 0 for special entries and for the end mark `end`.

    In a byte-level vocabulary each character of an entry is one byte of text. In others a character is itself, a word
    boundary is a space, and <0xAB> is a byte.
    """
    lengths = np.zeros(size(tokenizer), dtype=np.int64)
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_level = all(alphabet.issuperset(token) for token in vocabulary if token not in added)
    for token, index in vocabulary.items():
        if added.get(token, False):
            continue  # a special entry stands for no text
        if token in added:
            lengths[index] = len(token.encode())
        elif byte_level or (len(token) == 6 and token.startswith("<0x")):
            lengths[index] = len(token) if byte_level else 1
        else:
            lengths[index] = len(token.replace("\u2581", " ").encode())
    if end is not None:
        lengths[end] = 0
    return lengths
