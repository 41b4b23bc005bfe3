"""The options that decide the content of a prepared folder, and their hash. A run on cached data needs no reader."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_lite.config.sections.data import TokenizerConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare.texts import Corpus
from torchtitan_lite.data.token_files import FORMAT_VERSION

BYTES = "bytes"  # instead of a tokenizer.json


@dataclass(frozen=True)
class Job:
    """The options of a preparation, without its text."""

    tokenizer: str  # the content of a tokenizer.json; empty: train one
    end_token: str  # its name; empty: a usual one
    vocab_size: int  # of the trained tokenizer
    sentinels: bool  # train with T5's pad and sentinels
    val_fraction: float
    begin_token: str = ""  # its name; empty: none

    @classmethod
    def from_config(cls, config: TokenizerConfig, val_fraction: float, *, sentinels: bool) -> "Job":
        """
        Raises:
            DataError: the tokenizer.json can't be read.
        """
        if not config.path:
            return cls("", config.end_token, config.vocab_size, sentinels, val_fraction, config.begin_token)
        if config.path == BYTES:
            from torchtitan_lite.data.prepare.tokenizer import byte_level

            tokenizer = byte_level(sentinels=sentinels)
        else:
            tokenizer = bpe.load(Path(config.path))
        return cls(
            tokenizer.to_str(pretty=True),
            config.end_token,
            0,
            False,
            val_fraction,
            # without effect if it is the end token
            config.begin_token if len(bpe.marks(tokenizer, config.end_token, config.begin_token)) > 1 else "",
        )

    def made_from(self, corpus: Corpus, training: Sequence[Corpus]) -> str:
        """Return a hash of everything that decides the content of a folder.

        Args:
            training: the texts to train a tokenizer on.
        """
        trained_on = [] if self.tokenizer else [one.fingerprint() for one in training]
        # without begin_token, the hash is that of version 1.0
        options = {key: value for key, value in asdict(self).items() if value or key != "begin_token"}
        inputs = [FORMAT_VERSION, corpus.fingerprint(), options, trained_on]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
