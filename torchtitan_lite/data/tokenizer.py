"""Byte-level BPE by the `tokenizers` library: every text can be encoded, nothing is unknown, decoding is exact."""

import hashlib
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_lite.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"


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


def sha256(tokenizer: Tokenizer) -> str:
    """The identity of a tokenizer: the hash of its whole definition, in hex."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def bytes_per_token(tokenizer: Tokenizer) -> torch.Tensor:
    """How many bytes of text each token stands for, (vocab_size,) int64; 0 for the end mark.

    In a byte-level vocabulary each character of an entry is one byte of text.
    """
    lengths = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.int64)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if token in special else len(token)
    return lengths
