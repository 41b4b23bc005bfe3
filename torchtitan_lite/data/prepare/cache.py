"""Prepares text for train.py, in the cache."""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from filelock import FileLock

from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare.job import Job
from torchtitan_lite.data.prepare.texts import Corpus, find, ignored_notes, standard_library
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.terminal import counted


def cache_folder(data: DataConfig) -> Path:
    """Return the cache folder of prepared data."""
    if data.cache_dir:
        return expand(data.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchtitan_lite"


def prepared_in_cache(
    paths: Sequence[str | list[str]],
    data: DataConfig,
    config: TokenizerConfig,
    info: Callable[[str], None],
    used: Mapping[str, object],
) -> tuple[list[Path], list[str]]:
    """Prepare texts that share a tokenizer, if needed.

    Args:
        used: the hashes of the data that the run has used so far. If version 1.0 prepared it, the run keeps it.

    Returns:
        the prepared folders, and notes on ignored files and unusable text.

    Raises:
        DataError: a text is missing, unusable or too short.
    """
    cache = cache_folder(data)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        texts = [_text(path, data, cache) for path in paths]
        job = Job.from_config(config, data.val_fraction, sentinels=data.objective != "causal")
        skips = "-skip" if data.on_error == "skip" else ""
        folders = [cache / f"{job.made_from(corpus, texts)[:16]}{skips}" for corpus in texts]
        before = list[Corpus]()
        with contextlib.suppress(DataError):  # there is nothing that version 1.0 would have read
            before = [_text(path, data, cache, as_1_0=True) for path in paths] if used else []
        for i, corpus in enumerate(before):
            old = cache / job.made_from(corpus, before)[:16]
            if old != folders[i] and old.is_dir() and read_meta(old).tokens_sha256[:16] in str(used):
                texts[i], folders[i] = corpus, old
        for corpus, folder in zip(texts, folders, strict=True):
            if not folder.is_dir():
                with FileLock(cache / f"{folder.name}.lock"):
                    if not folder.is_dir():
                        _prepare(corpus, job, folder, texts, folders[0], info, data.on_error)
    except OSError as error:
        raise DataError(f"data.cache_dir: can't write to {cache}: {error}") from None
    skipped = [(sum(read_meta(folder).skipped.values()), folder / "skipped.log") for folder in folders]
    left_out = [f"{counted(n, 'unusable text')} left out, see {log}" for n, log in skipped if n]
    return folders, [*ignored_notes(texts), *left_out]


def _text(path: str | list[str], data: DataConfig, cache: Path, *, as_1_0: bool = False) -> Corpus:
    """Find the text of `[data] path` or of one of `[data.sources]`, as texts or as pairs."""
    if data.objective != "pairs":
        return find(path, (data.text_key,), data.text_suffixes, as_1_0=as_1_0) if path else standard_library()
    if path and not data.target_key:
        name = path if isinstance(path, str) else " ".join(path)
        raise DataError(
            f'data.objective = "pairs" needs prepared pairs, and {name} is not: run python -m '
            f"torchtitan_lite.data.prepare {name} --source-key NAME --target-key NAME --out data/pairs, "
            "and use data.path = data/pairs; or name its columns or keys with data.source_key and data.target_key"
        )
    if path:
        keys = data.source_key, data.target_key
        return replace(find(path, keys, data.text_suffixes, as_1_0=as_1_0), source_prefix=data.source_prefix)
    if data.source_key:
        raise DataError(f'data.source_key = "{data.source_key}" names a column, but data.path names no file to read')
    from torchtitan_lite.data.prepare.functions import functions

    return replace(functions(cache), source_prefix=data.source_prefix)


def _prepare(
    corpus: Corpus,
    job: Job,
    folder: Path,
    texts: list[Corpus],
    first: Path,
    info: Callable[[str], None],
    on_error: Literal["stop", "skip"],
) -> None:
    """Prepare a folder of the cache. The others take their tokenizer from the first folder."""
    from torchtitan_lite.data.prepare.folder import partial_folder, prepare
    from torchtitan_lite.data.prepare.summary import summary

    info(f"data    preparing {counted(len(corpus.files), 'file')}, once for all runs ...")
    given = (first / "tokenizer.json").read_text(encoding="utf-8") if folder != first else ""
    try:
        meta = prepare(corpus, job, folder, on_error, texts, given)
    except DataError:  # once the text is corrected, it gets a different folder, so this one is useless
        shutil.rmtree(partial_folder(folder))
        raise
    info(f"data    {summary(meta)}")


def with_tokenizer_of(folder: Path, config: TokenizerConfig) -> TokenizerConfig:
    """Return the config for text mixed with a prepared folder: the folder's tokenizer, end and begin token, unless
    set."""
    file, marks = folder / "tokenizer.json", read_meta(folder).marks
    end, begin = map(bpe.load(file).id_to_token, (marks[0], marks[-1]))
    of_folder = {"path": str(file), "end_token": end, "begin_token": begin}
    return config.model_copy(update={key: getattr(config, key) or value for key, value in of_folder.items()})
