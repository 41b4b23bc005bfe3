"""Preparation of text into the cache, for train.py: all that train.py uses of this folder."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from torchtitan_lite.config.find_text import expanded
from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare import corpus as corpora
from torchtitan_lite.data.prepare.encode import encode
from torchtitan_lite.data.prepare.plan import Options, plan_of
from torchtitan_lite.data.prepare.split import Info, plan_for
from torchtitan_lite.data.prepare.summary import summary
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.errors import DataError


def cache_folder(data: DataConfig) -> Path:
    """The cache folder of prepared data."""
    if data.cache_dir:
        return expanded(data.cache_dir, "data.cache_dir")
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return expanded(folder, "XDG_CACHE_HOME") / "torchtitan_lite"
    try:
        return Path.home() / ".cache" / "torchtitan_lite"
    except RuntimeError:
        raise DataError(
            "data.cache_dir: there is no default folder, because HOME is not set and this user has no home folder; "
            'set one, e.g. data.cache_dir = "/tmp/cache"'
        ) from None


def prepared_in_cache(
    paths: Sequence[str | list[str]], data: DataConfig, config: TokenizerConfig, info: Info
) -> tuple[list[Path], list[str]]:
    """Prepare texts that share a tokenizer, if needed.

    Returns:
        the prepared folders, and notes on files that were left out.

    Raises:
        DataError: a text is missing, unusable or too short.
    """
    cache = cache_folder(data)
    names = " ".join(path if isinstance(path, str) else " ".join(path) for path in paths)
    pairs, default = data.objective == "pairs", data.objective == "pairs" and not names
    if pairs and names and not data.target_key:
        raise DataError(
            f'data.objective = "pairs" needs prepared pairs, and {names} is not: run python -m '
            f"torchtitan_lite.data.prepare {names} --source-key NAME --target-key NAME --out data/pairs, "
            "and use data.path = data/pairs; or name its columns or keys with data.source_key and data.target_key"
        )
    if default and data.source_key:
        raise DataError(f'data.source_key = "{data.source_key}" names a column, but data.path names no file to read')
    key = data.source_key if pairs else data.text_key
    texts = [] if default else [corpora.find(path, key, data.text_suffixes) for path in paths]
    if pairs:
        target, prefix = data.target_key, data.source_prefix
        texts = [replace(corpus, target_key=target, source_prefix=prefix) for corpus in texts]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if default:
            texts = [corpora.functions(cache)]
        texts = [corpora.with_content(corpus, cache) for corpus in texts]
        sentinels = data.objective != "causal"
        trained, jobs = plan_for(texts, config, data.val_fraction, cache, Options(), info, sentinels=sentinels)
        folders = []
        for corpus, job in zip(texts, jobs, strict=True):
            folder = cache / plan_of(corpus, job, Options())[:16]
            folders.append(folder)
            if folder.is_dir():
                continue
            with FileLock(cache / f"{folder.name}.lock"):
                if not folder.is_dir():
                    meta = encode(corpus, trained, job, folder, Options())
                    info(f"data    {summary(meta)}")
        return folders, corpora.not_read(texts, "data.text_suffixes")
    except OSError as error:
        raise DataError(f"data.cache_dir: can't write to {cache}: {error}") from None


def as_in(folder: Path, config: TokenizerConfig) -> TokenizerConfig:
    """The config for text that is mixed with a prepared folder: its tokenizer and end token, unless already set."""
    path = config.path or str(folder / "tokenizer.json")
    end = bpe.load(folder / "tokenizer.json").id_to_token(read_meta(folder).end_token)
    return config.model_copy(update={"path": path, "end_token": config.end_token or end})


def record_folder(work: Path) -> Path:
    """The folder of the records of `with_content`: the cache, or `work` if there is no writable cache."""
    try:
        folder = cache_folder(DataConfig())
        folder.mkdir(parents=True, exist_ok=True)
    except (DataError, OSError):
        return work
    return folder
