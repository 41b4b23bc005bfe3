"""The data of a run: one prepared folder, or several that are mixed by weight."""

from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.data.meta import Meta, read_meta
from torchtitan_lite.errors import DataError


@dataclass(frozen=True)
class Source:
    """A prepared folder and its weight in the mixture."""

    name: str  # as the config has it
    weight: float
    folder: Path
    meta: Meta


@dataclass(frozen=True)
class DataSet:
    """All sources of a run. They have one tokenizer."""

    sources: tuple[Source, ...]

    @classmethod
    def of(cls, folders: dict[str, tuple[float, Path]]) -> "DataSet":
        """The data set of {name: (weight, folder)}.

        Raises:
            DataError: a folder is damaged, or two were made with different tokenizers.
        """
        found = tuple(Source(name, weight, folder, read_meta(folder)) for name, (weight, folder) in folders.items())
        first = found[0]
        for other in found[1:]:
            if other.meta.tokenizer_sha256 != first.meta.tokenizer_sha256:
                raise DataError(
                    f"data.sources: {first.name} and {other.name} were prepared with different tokenizers "
                    f"({first.meta.tokenizer_sha256[:12]} and {other.meta.tokenizer_sha256[:12]}); prepare one of them "
                    f"again with --tokenizer {first.folder / 'tokenizer.json'}"
                )
        return cls(found)

    @property
    def folder(self) -> Path:
        """Where the tokenizer is."""
        return self.sources[0].folder

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer."""
        return self.sources[0].meta.vocab_size

    @property
    def tokenizer_sha256(self) -> str:
        """Of the tokenizer."""
        return self.sources[0].meta.tokenizer_sha256

    def tokens(self, split: str) -> int:
        """Of all sources."""
        return sum(source.meta.tokens(split) for source in self.sources)

    def identity(self) -> dict[str, str]:
        """What a resume is held against: the hash of the tokens; in a mixture, hash and weight of each by name."""
        if len(self.sources) == 1:
            return {"data": self.sources[0].meta.tokens_sha256}
        return {f"data.sources {s.name}": f"{s.meta.tokens_sha256[:16]} x {s.weight}" for s in self.sources}
