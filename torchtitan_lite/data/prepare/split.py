"""Selects the validation documents, and the documents to train the tokenizer on."""

import re
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_lite.data.prepare import corpus as corpora
from torchtitan_lite.data.prepare import plan, worker
from torchtitan_lite.data.prepare.corpus import Corpus
from torchtitan_lite.data.prepare.encode import refusal
from torchtitan_lite.data.prepare.plan import Options
from torchtitan_lite.data.prepare.readers import chunks
from torchtitan_lite.data.tokenizer import END_OF_DOCUMENT, N_SENTINELS, PAD, SMALLEST, sentinel
from torchtitan_lite.errors import DataError

_LONG_WORD = re.compile(r"(\S{1000})")  # the trainer's time is quadratic in the length of a word
TRAINED_ON_BYTES = 128 << 20  # approximate; a tokenizer learns little from more text


def documents(corpus: Corpus, options: Options) -> Iterator[str]:
    """The documents of all files, in order; of pairs, the sources. Those of a .txt file join to its text."""
    for first, *_ in _texts(corpus, options):
        yield first


def _texts(corpus: Corpus, options: Options) -> Iterator[worker.Texts]:
    for chunk in chunks(corpus, options.max_document_bytes):
        texts, problems = worker.texts(chunk, corpus.text_key, corpus.target_key, corpus.source_prefix)
        if problems and options.on_error == "stop":
            raise refusal(corpus.files[chunk.file], problems[0])
        yield from texts


def held_out_below(corpus: Corpus, fraction: float, options: Options) -> int:
    """The hash below which documents are for validation: above the lowest hash, so at least one document is."""
    below, lowest, n = int(fraction * plan.HASH_RANGE), plan.HASH_RANGE, 0
    for text in documents(corpus, options):
        lowest, n = min(lowest, plan.document_hash(text.encode())), n + 1
        if lowest < below and n > 1:
            return below
    if n < 2:
        blocks = "blocks of 1 KiB" if all(corpora.kind(file) in ("", ".txt") for file in corpus.files) else "documents"
        raise DataError(f"the text has {n} {blocks}; at least 2 are needed, to train and to validate")
    return max(below, lowest + 1)


def training_texts(texts: list[Corpus], below: list[int], options: Options) -> Iterator[str]:
    """About TRAINED_ON_BYTES of training documents, selected by hash."""
    share = min(1.0, TRAINED_ON_BYTES / max(sum(corpus.size() for corpus in texts), 1))
    for corpus, limit in zip(texts, below, strict=True):
        for together in _texts(corpus, options):
            number = plan.document_hash(together[0].encode())
            if number >= limit and number % 2**32 < share * 2**32:
                yield from together


def train(texts: Iterable[str], vocab_size: int, *, sentinels: bool = False) -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` entries: the end token, 256 bytes, merges.

    Args:
        sentinels: T5's special tokens instead: pad and the end token first, the sentinels last, in descending order.

    Raises:
        DataError: the text is too short.
    """
    special, last = [END_OF_DOCUMENT], list[str]()
    if sentinels:
        special, last = [PAD, "</s>"], [sentinel(i) for i in reversed(range(N_SENTINELS))]
    if vocab_size < (smallest := 256 + len(special) + len(last)):
        raise DataError(
            f"tokenizer.vocab_size = {vocab_size} has no room for 256 bytes, pad, the end token and {len(last)} "
            f"sentinels; tokenizer.vocab_size = {smallest} works"
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
            f"the text is too short for tokenizer.vocab_size = {vocab_size}: it yields {learned} entries; "
            f"use more text or tokenizer.vocab_size = {learned}"
        )
    return tokenizer


def byte_level(*, sentinels: bool = False) -> Tokenizer:
    """One token per byte, and the end token; nothing is trained."""
    return train([], SMALLEST + (1 + N_SENTINELS) * sentinels, sentinels=sentinels)
