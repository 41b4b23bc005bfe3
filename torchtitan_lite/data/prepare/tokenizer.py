"""Trains the tokenizer of a preparation, and encodes text that looks like a special token."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare.documents import HASH_RANGE, OnError, usable
from torchtitan_lite.data.prepare.texts import Corpus
from torchtitan_lite.data.tokenizer import END_OF_DOCUMENT, N_SENTINELS, PAD, SMALLEST, sentinel
from torchtitan_lite.errors import DataError
from torchtitan_lite.terminal import counted

_VOCAB_SIZE = "tokenizer.vocab_size (--train-tokenizer)"
TRAINED_ON_BYTES = 128 << 20  # approximate; more text barely changes a tokenizer
_LONG_WORD = re.compile(r"(\S{1000})")  # the trainer's time is quadratic in the length of a word


def as_text(definition: str) -> Tokenizer:
    """Copy a loaded tokenizer, to encode text which looks like a special token as ordinary text.

    The end token is still produced by a Unigram or WordLevel vocabulary that contains it as a piece, and by added
    tokens with `"special": false`.
    """
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.encode_special_tokens = True
    return tokenizer


def unknown_token(tokenizer: Tokenizer, end: int) -> int:
    """Return the id of the unknown token; -1 if everything can be encoded, or if it is the end token.

    Raises:
        DataError: the tokenizer fails on unknown characters, or drops them.
    """
    model = json.loads(tokenizer.to_str())["model"]
    index = model.get("unk_id") if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])
    if index is not None:
        return -1 if index == end else int(index)
    probe, remedy = "\u4e2d\U0001f600", "use one with byte-level pre-tokenization, with byte_fallback, or an unk_token"
    try:
        decoded = tokenizer.decode(tokenizer.encode(probe).ids)
    except BaseException as error:
        raise DataError(f"the tokenizer can't encode unknown characters ({bpe.reason(error)}); {remedy}") from None
    if not set(probe) <= set(decoded):
        raise DataError(f"the tokenizer silently drops unknown characters; {remedy}")
    return -1


def training_texts(texts: Sequence[Corpus], below: Sequence[int], on_error: OnError = "stop") -> Iterator[str]:
    """Yield about TRAINED_ON_BYTES of training documents, selected by hash.

    Args:
        below: for each corpus, documents with a smaller hash are for validation.
    """
    share = min(1.0, TRAINED_ON_BYTES / max(sum(corpus.size for corpus in texts), 1))
    for corpus, limit in zip(texts, below, strict=True):
        training = replace(corpus, files=corpus.files[: len(corpus.files) - corpus.n_held_out])
        for document in usable(training, on_error):
            if document.hash >= limit and document.hash % 2**32 < share * 2**32:
                yield from document.texts


def held_out_below(corpus: Corpus, fraction: float, on_error: OnError = "stop") -> int:
    """Return the hash below which documents are for validation, above the lowest so that at least one is.

    Raises:
        DataError: there are too few documents.
    """
    if corpus.n_held_out:  # whole files are held out
        return 0
    below, lowest, n = int(fraction * HASH_RANGE), HASH_RANGE, 0
    for document in usable(corpus, on_error):
        lowest, n = min(lowest, document.hash), n + 1
        if lowest < below and n > 1:
            return below
    if n < 2:
        raise DataError(
            f"the text has {counted(n, 'usable document')}; at least 2 are needed, to train and to validate (plain "
            f"text is cut into documents of at most {corpus.block:,} bytes)"
        )
    return max(below, lowest + 1)


def train(texts: Iterable[str], vocab_size: int, *, sentinels: bool = False) -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` entries: the end token, 256 bytes, merges.

    Args:
        sentinels: use T5's special tokens: pad and the end token first, the sentinels last, in descending order.

    Raises:
        DataError: the text is too short.
    """
    special, last = [END_OF_DOCUMENT], list[str]()
    if sentinels:
        special, last = [PAD, "</s>"], [sentinel(i) for i in reversed(range(N_SENTINELS))]
    if vocab_size < (smallest := 256 + len(special) + len(last)):
        raise DataError(
            f"{_VOCAB_SIZE} = {vocab_size} has no room for 256 bytes, {', '.join(special)} and {len(last)} sentinels; "
            f"{smallest} works"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(last),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in _LONG_WORD.split(text) if piece), trainer)
    tokenizer.add_special_tokens(last)
    learned = tokenizer.get_vocab_size()
    if learned != vocab_size:
        raise DataError(
            f"the text is too short for {_VOCAB_SIZE} = {vocab_size}: it yields {learned} entries; use more text or "
            f"{learned}"
        )
    return tokenizer


def byte_level(*, sentinels: bool = False) -> Tokenizer:
    """Return a tokenizer of one token per byte and the end token; nothing is trained."""
    return train([], SMALLEST + (1 + N_SENTINELS) * sentinels, sentinels=sentinels)
