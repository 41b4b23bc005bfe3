"""Tokenizers of the `tokenizers` library: the user's own, or byte-level BPE trained on the text (lossless)."""

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
SMALLEST = 257  # 256 bytes and the end token
_LONGEST = 1 << 30  # bytes of a tokenizer.json


def byte_level() -> Tokenizer:
    """One token per byte, and the end token; nothing is trained."""
    return train([], SMALLEST)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` entries: the end token, 256 bytes, merges.

    Raises:
        DataError: the text is too short.
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
    """Load a tokenizer.json, with truncation and padding disabled.

    Raises:
        DataError: the file is not a valid tokenizer.json.
    """
    file = expanded(path, "tokenizer.path")
    wrong = f"tokenizer.path: {path} can't be read as a tokenizer.json: "
    try:
        if file.exists() and not file.is_file():
            raise DataError(f"{wrong}it is {kind_of(file)}")
        if file.stat().st_size > _LONGEST:
            raise DataError(f"{wrong}it has {file.stat().st_size:,} bytes; the limit is {_LONGEST:,}")
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
    """A tokenizer that does not look for special tokens in the text; see literal.py."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def reason(error: BaseException) -> str:
    """The message of an error in the library, whose panics are BaseExceptions."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        raise error
    return str(error)[:300]


def unknown(tokenizer: Tokenizer) -> int | None:
    """The id of the unknown token; None if the vocabulary can encode everything.

    Raises:
        DataError: the tokenizer silently drops unknown characters.
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
            f"the tokenizer can't encode unknown characters ({reason(error)}); use one with byte-level "
            "pre-tokenization, with byte_fallback, or with an unk_token in its vocabulary"
        ) from None
    if not set(probe) <= set(spelled):
        raise DataError(
            "the tokenizer silently drops unknown characters; use one with byte-level pre-tokenization, with "
            "byte_fallback, or with an unk_token"
        )
    return None


def end_token(tokenizer: Tokenizer, wanted: str = "") -> int:
    """The id of the token that ends a document.

    Raises:
        DataError: the tokenizer does not have the wanted token, or any known one.
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
    """A token for a message."""
    return f"{tokenizer.id_to_token(index)!r} (id {index})"


def size(tokenizer: Tokenizer) -> int:
    """The number of embeddings: the largest id plus 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def sha256(tokenizer: Tokenizer) -> str:
    """The hash of a tokenizer's definition, in hex."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def bytes_per_token(tokenizer: Tokenizer, end: int | None = None) -> NDArray[np.int64]:
    """The bytes of text of each token, (size,) int64; 0 for special tokens and for the end token `end`.

    In a byte-level vocabulary each character of a token is one byte. In others, U+2581 is a space and <0xAB> is a byte.
    """
    lengths = np.zeros(size(tokenizer), dtype=np.int64)
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_level = all(alphabet.issuperset(token) for token in vocabulary if token not in added)
    for token, index in vocabulary.items():
        if added.get(token, False):
            continue
        if token in added:
            lengths[index] = len(token.encode())
        elif byte_level or (len(token) == 6 and token.startswith("<0x")):
            lengths[index] = len(token) if byte_level else 1
        else:
            lengths[index] = len(token.replace("\u2581", " ").encode())
    if end is not None:
        lengths[end] = 0
    return lengths
