"""What decides the content of a prepared folder, and its hash. Imports no reader: a run on cached data needs none."""

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
    """The options of a preparation, besides its text."""

    tokenizer: str  # the content of a tokenizer.json; empty: one is trained
    end_token: str  # its name; empty: one of the usual ones
    vocab_size: int  # of a tokenizer that is trained
    sentinels: bool  # it gets T5's pad and sentinels
    val_fraction: float

    @classmethod
    def of(cls, config: TokenizerConfig, val_fraction: float, *, sentinels: bool) -> "Job":
        """
        Raises:
            DataError: the tokenizer.json can't be read.
        """
        if not config.path:
            return cls("", config.end_token, config.vocab_size, sentinels, val_fraction)
        if config.path == BYTES:
            from torchtitan_lite.data.prepare.tokenizer import byte_level

            tokenizer = byte_level(sentinels=sentinels)
        else:
            tokenizer = bpe.load(Path(config.path))
        return cls(tokenizer.to_str(pretty=True), config.end_token, 0, False, val_fraction)

    def made_from(self, corpus: Corpus, training: Sequence[Corpus]) -> str:
        """A hash of all that decides the content of a folder.

        Args:
            training: the texts that a tokenizer is trained on.
        """
        trained_on = [] if self.tokenizer else [one.fingerprint() for one in training]
        inputs = [FORMAT_VERSION, corpus.fingerprint(), asdict(self), trained_on]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
