"""Chooses what a preparation needs before it encodes: the validation documents, and the tokenizer.

A hash of each document's text decides its split, so adding documents does not move others (below 1 MiB the size of
blocks changes, see corpus.py). A byte-level BPE tokenizer is trained on the training documents, unless one is given.
"""

import hashlib
import json
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_lite.config.schema import TokenizerConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare import corpus as corpora
from torchtitan_lite.data.prepare import plan, readers, special_tokens
from torchtitan_lite.data.prepare.corpus import Corpus
from torchtitan_lite.data.prepare.plan import Options
from torchtitan_lite.data.token_files import FORMAT_VERSION
from torchtitan_lite.data.tokenizer import END_OF_DOCUMENT, N_SENTINELS, PAD, SMALLEST, sentinel
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import write_durably
from torchtitan_lite.terminal import counted

BYTES = "bytes"  # instead of a tokenizer.json

Info = Callable[[str], None]
_LONG_WORD = re.compile(r"(\S{1000})")  # the trainer's time is quadratic in the length of a word
TRAINED_ON_BYTES = 128 << 20  # approximate; a tokenizer learns little from more text


def plan_for(
    texts: list[Corpus],
    config: TokenizerConfig,
    val_fraction: float,
    folder: Path,
    options: Options,
    info: Info,
    *,
    sentinels: bool = False,
) -> tuple[Tokenizer, list[plan.Job]]:
    """Train the tokenizer, unless one is given, and choose the validation documents.

    Both are stored in `folder`, in a file named by a hash of their inputs, and reused.

    Args:
        sentinels: a tokenizer that is trained gets pad and sentinels.
    """
    loaded = None
    if config.path:
        loaded = byte_level(sentinels=sentinels) if config.path == BYTES else bpe.load(Path(config.path))
    inputs = {
        "format": FORMAT_VERSION,
        "texts": [[c.identity(), c.text_key, c.target_key, c.source_prefix, c.n_held_out] for c in texts],
        "text_suffixes": [sorted(c.text_suffixes) for c in texts],
        "python": platform.python_version() if any(corpus.python_source for corpus in texts) else "",
        "tokenizer": [bpe.sha256(loaded), config.end_token] if loaded else config.vocab_size,
        "val_fraction": val_fraction,
        "sentinels": sentinels and not loaded,
        "max_document_bytes": options.max_document_bytes,
    }
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    file = folder / f"{key}.plan.json"
    stored = _stored_plan(file, len(texts))
    if stored is None:
        with FileLock(folder / f"{key}.lock"):
            stored = _stored_plan(file, len(texts))  # another process may have made it
            if stored is None:
                name = "Python's standard library" if any(corpus.python_source for corpus in texts) else "your text"
                files = counted(sum(len(corpus.files) for corpus in texts), "file")
                info(f"data    preparing {name}: {files}, once for all runs ...")
                below = [held_out_below(corpus, val_fraction, options) for corpus in texts]
                chosen = loaded or train(training_texts(texts, below, options), config.vocab_size, sentinels=sentinels)
                end = bpe.end_token(chosen, config.end_token)
                stored = {"below": below, "end": end, "tokenizer": chosen.to_str(pretty=True)}
                write_durably(file, json.dumps(stored).encode())
    tokenizer = special_tokens.literal(stored["tokenizer"])
    unknown = special_tokens.unknown(tokenizer, stored["end"])
    jobs = [
        plan.Job(
            tokenizer=stored["tokenizer"],
            vocab_size=bpe.size(tokenizer),
            end_token=stored["end"],
            text_key=corpus.text_key,
            held_out_below=below,
            unknown=unknown,
            target_key=corpus.target_key,
            source_prefix=corpus.source_prefix,
            first_held_out=len(corpus.files) - corpus.n_held_out if corpus.n_held_out else sys.maxsize,
        )
        for corpus, below in zip(texts, stored["below"], strict=True)
    ]
    return tokenizer, jobs


def _stored_plan(file: Path, n_texts: int) -> dict[str, Any] | None:
    """A stored plan; None if there is none, or if it is damaged."""
    try:
        stored = json.loads(file.read_bytes())
        return stored if len(stored["below"]) == n_texts and {"end", "tokenizer"} <= stored.keys() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


# --- the validation documents -----------------------------------------------------------------------------------


def documents(corpus: Corpus, options: Options) -> Iterator[str]:
    """The documents of all files, in order; of pairs, the sources. Those of a .txt file join to its text."""
    for first, *_ in _texts(corpus, options):
        yield first


def _texts(corpus: Corpus, options: Options) -> Iterator[readers.Texts]:
    for chunk in readers.chunks(corpus, options.max_document_bytes):
        decoded = [text for _, text in readers.decode(chunk, corpus.keys, corpus.source_prefix)]
        problems = chunk.problems + [problem for problem in decoded if isinstance(problem, readers.Problem)]
        if problems and options.on_error == "stop":
            raise readers.refusal(corpus.files[chunk.file], problems[0])
        yield from (text for text in decoded if isinstance(text, tuple))


def held_out_below(corpus: Corpus, fraction: float, options: Options) -> int:
    """The hash below which documents are for validation: above the lowest hash, so at least one document is."""
    if corpus.n_held_out:  # whole files are
        return 0
    below, lowest, n = int(fraction * plan.HASH_RANGE), plan.HASH_RANGE, 0
    for text in documents(corpus, options):
        lowest, n = min(lowest, plan.document_hash(text.encode())), n + 1
        if lowest < below and n > 1:
            return below
    if n < 2:
        plain = all(corpora.kind(file) in ("", ".txt") for file in corpus.files)
        found = f"{counted(n, 'block')} of 1 KiB" if plain else counted(n, "document")
        raise DataError(f"the text has {found}; at least 2 are needed, to train and to validate")
    return max(below, lowest + 1)


# --- the tokenizer ----------------------------------------------------------------------------------------------


def training_texts(texts: list[Corpus], below: list[int], options: Options) -> Iterator[str]:
    """About TRAINED_ON_BYTES of training documents, selected by hash."""
    share = min(1.0, TRAINED_ON_BYTES / max(sum(corpus.size() for corpus in texts), 1))
    for corpus, limit in zip(texts, below, strict=True):
        training = replace(corpus, files=corpus.files[: len(corpus.files) - corpus.n_held_out])
        for together in _texts(training, options):
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
