"""Preparation of text into the cache, for train.py. The command (__main__.py) uses parts of it for any folder.

A hash of each document's text decides its split, so adding documents does not move others (below 1 MiB the size of
blocks changes, see corpus.py). A byte-level BPE tokenizer is trained on the training documents, unless one is given.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from tokenizers import Tokenizer
from tqdm import tqdm

from torchtitan_lite.config.find_text import expanded
from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.prepare import content, literal
from torchtitan_lite.data.prepare import corpus as corpora
from torchtitan_lite.data.prepare.corpus import Corpus
from torchtitan_lite.data.prepare.plan import MAX_DOCUMENT_BYTES, Job, Options, plan_of
from torchtitan_lite.data.token_files import FORMAT_VERSION, Meta, read_meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import write_durably
from torchtitan_lite.terminal import counted

MOST_WORKERS = 1024
BYTES = "bytes"  # instead of a tokenizer.json

Info = Callable[[str], None]


def cache_folder(data: DataConfig) -> Path:
    """The cache folder of prepared data."""
    if data.cache_dir:
        return expanded(data.cache_dir, "data.cache_dir")
    if given := os.environ.get("XDG_CACHE_HOME"):
        return expanded(given, "XDG_CACHE_HOME") / "torchtitan_lite"
    try:
        return Path.home() / ".cache" / "torchtitan_lite"
    except RuntimeError:
        raise DataError(
            "data.cache_dir: there is no default folder, because HOME is not set and this user has no home folder; "
            'set one, e.g. data.cache_dir = "/tmp/cache"'
        ) from None


def prepared_in_cache(
    paths: Sequence[str | list[str]], data: DataConfig, config: TokenizerConfig, info: Info
) -> list[Path]:
    """The prepared folders of texts that share a tokenizer, created if needed.

    Raises:
        DataError: a text is missing, unusable or too short.
    """
    cache = cache_folder(data)
    given = " ".join(path if isinstance(path, str) else " ".join(path) for path in paths)
    pairs, default = data.objective == "pairs", data.objective == "pairs" and not given
    if pairs and given and not data.target_key:
        raise DataError(
            f'data.objective = "pairs" needs prepared pairs, and {given} is not: run python -m '
            f"torchtitan_lite.data.prepare {given} --source-key NAME --target-key NAME --out data/pairs, "
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
            info("data    functions of Python's standard library: the source is a body, the target its docstring")
            texts = [corpora.functions(cache)]
        texts = [content.with_content(corpus, cache) for corpus in texts]
        sentinels = data.objective != "causal"
        plan = plan_for(texts, config, data.val_fraction, cache, Options(), info, sentinels=sentinels)
        folders = []
        for corpus, job in zip(texts, plan.jobs, strict=True):
            folder = cache / plan_of(corpus, job, Options())[:16]
            folders.append(folder)
            if folder.is_dir():
                continue
            with FileLock(cache / f"{folder.name}.lock"):
                if not folder.is_dir():
                    from torchtitan_lite.data.prepare.summary import summary

                    meta = encode_with_bar(corpus, plan.tokenizer, job, folder, Options())
                    info(f"data    {summary(meta)}")
        return folders
    except OSError as error:
        raise DataError(f"data.cache_dir: can't write to {cache}: {error}") from None


def as_in(folder: Path, config: TokenizerConfig) -> TokenizerConfig:
    """The config for text that is mixed with a prepared folder: its tokenizer and end token, unless already set."""
    path = config.path or str(folder / "tokenizer.json")
    end = bpe.load(folder / "tokenizer.json").id_to_token(read_meta(folder).end_token)
    return config.model_copy(update={"path": path, "end_token": config.end_token or end})


def encode_with_bar(corpus: Corpus, tokenizer: Tokenizer, job: Job, out: Path, options: Options) -> Meta:
    """`encode` with a progress bar on a terminal."""
    from torchtitan_lite.data.prepare.encode import encode  # imports the text readers

    with tqdm(total=corpus.size(), unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:
        return encode(corpus, tokenizer, job, out, options, lambda done: _move(bar, done))


def _move(bar: "tqdm[Any]", done: int) -> None:
    if bar.n == 0 and done:
        bar.initial = done  # done by an earlier call, so not part of the speed
    bar.update(done - bar.n)


# --- the tokenizer and the validation split ---------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The tokenizer, and the job of each corpus."""

    tokenizer: Tokenizer
    jobs: list[Job]


def _byte_level(*, sentinels: bool) -> Tokenizer:
    from torchtitan_lite.data.prepare.split import byte_level  # which loads the text readers

    return byte_level(sentinels=sentinels)


def plan_for(
    texts: list[Corpus],
    config: TokenizerConfig,
    val_fraction: float,
    folder: Path,
    options: Options,
    info: Info,
    *,
    sentinels: bool = False,
) -> Plan:
    """Train the tokenizer, unless one is given, and choose the validation documents.

    The result is stored in `folder`, in a file named by a hash of its inputs, and reused.

    Args:
        sentinels: a tokenizer that is trained gets pad and sentinels.
    """
    given = None
    if config.path:
        given = _byte_level(sentinels=sentinels) if config.path == BYTES else bpe.load(Path(config.path))
    decides = {
        "format": FORMAT_VERSION,
        "texts": [[corpus.identity(), corpus.text_key] for corpus in texts],
        "python": platform.python_version() if any(corpus.python_source for corpus in texts) else "",
        "tokenizer": [bpe.sha256(given), config.end_token] if given else config.vocab_size,
        "val_fraction": val_fraction,
    } | ({"sentinels": True} if sentinels and not given else {})
    if pairs := [[corpus.target_key, corpus.source_prefix] for corpus in texts if corpus.target_key]:
        decides["pairs"] = pairs
    if suffixes := sorted({suffix for corpus in texts for suffix in corpus.text_suffixes}):
        decides["text_suffixes"] = suffixes
    if options.max_document_bytes != MAX_DOCUMENT_BYTES:
        decides["longest"] = options.max_document_bytes
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    file = folder / f"{key}.plan.json"
    plan = _stored_plan(file, len(texts))
    if plan is None:
        with FileLock(folder / f"{key}.lock"):
            if (plan := _stored_plan(file, len(texts))) is None:
                from torchtitan_lite.data.prepare.split import held_out_below, train, training_texts

                _log_preparation(texts, info)
                below = [held_out_below(corpus, val_fraction, options) for corpus in texts]
                found = given or train(training_texts(texts, below, options), config.vocab_size, sentinels=sentinels)
                end = bpe.end_token(found, config.end_token)
                plan = {"below": below, "end": end, "tokenizer": found.to_str(pretty=True)}
                write_durably(file, json.dumps(plan).encode())
    definition, end = plan["tokenizer"], plan["end"]
    tokenizer = literal.literal(definition)
    unknown = literal.unknown(tokenizer)
    if unknown is None or unknown == end:  # the end token can't be the unknown token as well
        unknown = -1
    jobs = [
        Job(
            *(definition, bpe.size(tokenizer), end, corpus.text_key, below, unknown),
            target_key=corpus.target_key,
            source_prefix=corpus.source_prefix,
        )
        for corpus, below in zip(texts, plan["below"], strict=True)
    ]
    return Plan(tokenizer, jobs)


def _stored_plan(file: Path, n_texts: int) -> dict[str, Any] | None:
    """A stored plan; None if there is none, or if it is damaged."""
    try:
        plan = json.loads(file.read_bytes())
        return plan if len(plan["below"]) == n_texts and {"end", "tokenizer"} <= plan.keys() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _log_preparation(texts: list[Corpus], info: Info) -> None:
    what = "Python's standard library" if any(corpus.python_source for corpus in texts) else "your text"
    files = counted(sum(len(corpus.files) for corpus in texts), "file")
    info(f"data    preparing {what}: {files}, once for all runs ...")
    for note in corpora.not_read(texts, "data.text_suffixes"):
        info(f"data    {note}")


def record_folder(work: Path) -> Path:
    """The folder of content.py's records: the cache, or `work` if there is no writable cache."""
    try:
        folder = cache_folder(DataConfig())
        folder.mkdir(parents=True, exist_ok=True)
    except (DataError, OSError):
        return work
    return folder
