"""The data of a run: one prepared folder, or a weighted mixture of several.

Text is prepared first (prepare/cache.py). A run on prepared data does not import prepare/.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_lite.config.paths import expand, is_prepared
from torchtitan_lite.config.schema import Config, DataConfig, TokenizerConfig
from torchtitan_lite.data.token_files import Meta, read_meta
from torchtitan_lite.errors import DataError


@dataclass(frozen=True)
class Source:
    """A prepared folder and its weight in the mixture."""

    name: str  # as written in the config
    weight: float
    folder: Path
    meta: Meta


@dataclass(frozen=True)
class DataSet:
    """All sources of a run. They share a tokenizer."""

    sources: tuple[Source, ...]
    later: tuple[Source, ...] = ()  # those that only later phases use, with a weight of 0
    notes: tuple[str, ...] = ()  # on ignored files of the text, and unusable text

    @classmethod
    def open(cls, folders: dict[str, tuple[float, Path]], notes: Iterable[str] = ()) -> "DataSet":
        """Read the meta.json of each folder of {name: (weight, folder)}.

        Raises:
            DataError: a folder is damaged, or two of them differ in tokenizer, end token or begin token.
        """
        sources = tuple(Source(name, weight, folder, read_meta(folder)) for name, (weight, folder) in folders.items())
        tokens = [(each.name, each.meta.tokenizer_sha256[:12], *each.meta.marks) for each in sources]
        if different := [other for other in tokens if other[1:] != tokens[0][1:]]:
            raise DataError(
                f"data.sources have different tokenizers, end or begin tokens (name, hash, ids): {tokens[0]} and "
                f"{different[0]}; prepare one of them again with --tokenizer {sources[0].folder / 'tokenizer.json'}, "
                "--end-token and --begin-token"
            )
        return cls(
            tuple(source for source in sources if source.weight),
            tuple(source for source in sources if not source.weight),
            tuple(notes),
        )

    def mixed(self, phase: Config) -> "DataSet":
        """Return the data of a phase; the first one may have a path instead of sources."""
        known = {source.name: source for source in (*self.sources, *self.later)}
        mixed = (replace(known[name], weight=weight) for name, weight in phase.data.sources.items())
        return replace(self, sources=tuple(mixed) or self.sources)

    @property
    def folder(self) -> Path:
        """The folder with the tokenizer."""
        return self.sources[0].folder

    @property
    def vocab_size(self) -> int:
        return self.sources[0].meta.vocab_size

    @property
    def end_token(self) -> int:
        """The id of the token that ends a document, fixed when the text was prepared."""
        return self.sources[0].meta.end_token

    @property
    def tokenizer_sha256(self) -> str:
        return self.sources[0].meta.tokenizer_sha256

    def tokens(self, split: str) -> int:
        """Return the number of tokens in a split of all sources."""
        return sum(source.meta.tokens(split) for source in self.sources)

    def hashes(self) -> dict[str, str]:
        """Return the hash of the tokens; of a mixture, the hash and weight of each source. Compared on resume."""
        if len(self.sources) == 1:
            return {"data": self.sources[0].meta.tokens_sha256}
        return {f"data.sources {s.name}": f"{s.meta.tokens_sha256[:16]} x {s.weight}" for s in self.sources}


def prepare_all(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    info: Callable[[str], None],
    used: Mapping[str, object] | None = None,
    later: Iterable[str] = (),
) -> DataSet:
    """Open the data of a run, `[data] path` or `[data.sources]`. Prepares text that is not in the cache.

    All ranks may call this before the process group exists: one prepares, the others wait for its lock.

    Args:
        used: `hashes()` of the data that the run has used so far, if any.
        later: names of the sources of later phases.

    Raises:
        DataError: text is missing, unusable or too short, or prepared data is damaged or has a different tokenizer.
    """
    name = data.path if isinstance(data.path, str) else ", ".join(data.path)
    default = f"{'functions of ' * (data.objective == 'pairs')}Python's standard library"
    first = data.sources or {name or default: 1.0}
    weights = first | {name: 0.0 for name in later if name not in first}
    folders = {name: expand(name) for name in weights if is_prepared(name)}
    prepared = next(iter(folders.values()), None)
    notes: list[str] = []
    if texts := [name for name in weights if name not in folders]:
        from torchtitan_lite.data.prepare.cache import prepared_in_cache, with_tokenizer_of

        chosen = with_tokenizer_of(prepared, tokenizer) if prepared else tokenizer
        named = [text if data.sources or text not in first else data.path for text in texts]
        made, notes = prepared_in_cache(named, data, chosen, info, used or {})
        folders |= dict(zip(texts, made, strict=True))
    if prepared:
        notes += _require_configured_tokenizer(tokenizer, prepared)
    return DataSet.open({name: (weight, folders[name]) for name, weight in weights.items()}, notes)


def _require_configured_tokenizer(config: TokenizerConfig, folder: Path) -> Iterator[str]:
    """Yield a note if the config's begin token differs from this prepared folder's, whose documents keep their own.

    Raises:
        DataError: the config's tokenizer or end token differs.
    """
    if not (config.path or config.end_token or config.begin_token):
        return
    from torchtitan_lite.data import tokenizer as bpe

    meta = read_meta(folder)
    if config.path and (configured := bpe.sha256(bpe.load(Path(config.path)))) != meta.tokenizer_sha256:
        raise DataError(
            f"{folder} was prepared with a tokenizer ({meta.tokenizer_sha256[:12]}) that differs from tokenizer.path = "
            f"{config.path} ({configured[:12]}); leave tokenizer.path out, or prepare the text again with that "
            "tokenizer"
        )
    tokenizer = bpe.load(folder / "tokenizer.json")
    if config.end_token and tokenizer.token_to_id(config.end_token) != meta.end_token:
        raise DataError(
            f"documents in {folder} end with {bpe.shown(tokenizer, meta.end_token)}, but tokenizer.end_token is "
            f"{config.end_token!r}; leave tokenizer.end_token out, or prepare the text again with that --end-token"
        )
    if config.begin_token and tokenizer.token_to_id(config.begin_token) != meta.marks[-1]:
        yield (
            f"the documents in {folder} have {bpe.shown(tokenizer, meta.marks[-1])} before them, not "
            f"tokenizer.begin_token = {config.begin_token!r}; for a model that was pretrained with it, prepare the "
            f"text again with --begin-token {config.begin_token!r}"
        )
