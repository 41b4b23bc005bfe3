"""Text becomes a prepared folder: by train.py, once, into a cache; or by the command, into a folder of one's choice.

    python -m torchtitan_lite.data.prepare my_text --out data/mine
    python -m torchtitan_lite.data.prepare 'web/*.jsonl.zst' --out data/web --tokenizer data/mine/tokenizer.json
    python -m torchtitan_lite.data.prepare --verify data/mine

Documents are split by a hash of their text: a document stays where it is when others are added (in a corpus of at least
1 MiB; a smaller one is cut into smaller blocks, see corpus.py). A byte-level BPE tokenizer is trained on the training
documents, unless one is given. encode.py does the rest.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError
from tokenizers import Tokenizer
from tqdm import tqdm

from torchtitan_lite import paths
from torchtitan_lite.config import DataConfig, TokenizerConfig
from torchtitan_lite.data import content, worker
from torchtitan_lite.data import corpus as corpora
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.dataset import DataSet, as_in, require_end_token
from torchtitan_lite.data.encode import Options, encode, plan_of, refusal, require_complete
from torchtitan_lite.data.meta import FORMAT_VERSION, Meta, is_prepared, read_meta, remedy, verify
from torchtitan_lite.data.paths import expanded
from torchtitan_lite.data.readers import MAX_DOCUMENT_BYTES, chunks
from torchtitan_lite.data.summary import report, summary
from torchtitan_lite.data.writer import write_durably
from torchtitan_lite.errors import ConfigError, DataError, run_cli

TRAINED_ON_BYTES = 128 << 20  # of text, about: a tokenizer learns little from more
MOST_WORKERS = 1024
BYTES = "bytes"  # instead of a tokenizer.json

Say = Callable[[str], None]


def cache_folder(data: DataConfig) -> Path:
    """Where prepared data lives."""
    if data.cache_dir:
        return expanded(data.cache_dir, "data.cache_dir")
    if given := os.environ.get("XDG_CACHE_HOME"):
        return expanded(given, "XDG_CACHE_HOME") / "torchtitan_lite"
    try:
        return Path.home() / ".cache" / "torchtitan_lite"
    except RuntimeError:
        raise DataError(
            "data.cache_dir: there is no place for prepared text, because HOME is not set and this user has no home "
            'folder; name one, e.g. data.cache_dir = "/tmp/cache"'
        ) from None


# --- for train.py -----------------------------------------------------------------------------------------------


def prepare_all(data: DataConfig, tokenizer: TokenizerConfig, say: Say) -> DataSet:
    """The data of a run: `[data] path`, or each of `[data.sources]`; what is text is prepared if it is not yet.

    Every rank may call it, before there is a process group: one makes it, the others wait.

    Raises:
        DataError: text that can't be used, or prepared data that is damaged or has another tokenizer.
    """
    if not data.sources:
        folder = prepare(data, tokenizer, say)
        name = data.path if isinstance(data.path, str) else ", ".join(data.path)
        return DataSet.of({name or "the standard library": (1.0, folder)})
    texts = {name: corpora.find(name, data.text_key) for name in data.sources if not is_prepared(name)}
    folders = {name: Path(name).expanduser() for name in data.sources if name not in texts}
    if texts:
        if folders:
            tokenizer = as_in(next(iter(folders.values())), tokenizer)
        made = _in_cache(list(texts.values()), data, tokenizer, say)
        folders |= dict(zip(texts, made, strict=True))
    found = DataSet.of({name: (weight, folders[name]) for name, weight in data.sources.items()})
    _require_tokenizer(tokenizer, found.folder, found.sources[0].meta)
    return found


def prepare(data: DataConfig, tokenizer: TokenizerConfig, say: Say) -> Path:
    """The prepared folder of `[data] path`: that folder itself, or one in the cache, made if it is not there yet.

    Raises:
        DataError: the text is missing, can't be used, or is too short.
    """
    if isinstance(data.path, str) and data.path and is_prepared(data.path):
        folder = Path(data.path).expanduser()
        _require_tokenizer(tokenizer, folder, read_meta(folder))
        return folder
    return _in_cache([corpora.find(data.path, data.text_key)], data, tokenizer, say)[0]


def _require_tokenizer(config: TokenizerConfig, folder: Path, meta: Meta) -> None:
    if config.path and (wanted := bpe.sha256(bpe.load(Path(config.path)))) != meta.tokenizer_sha256:
        raise DataError(
            f"{folder} was prepared with another tokenizer ({meta.tokenizer_sha256[:12]}) than tokenizer.path = "
            f"{config.path} ({wanted[:12]}); leave tokenizer.path out, or prepare the text again with that one"
        )
    require_end_token(config, folder, meta)


def _in_cache(texts: list[Corpus], data: DataConfig, config: TokenizerConfig, say: Say) -> list[Path]:
    """The prepared folders of some texts, which share a tokenizer."""
    cache = cache_folder(data)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        texts = [content.known(corpus, cache) for corpus in texts]
        plan = plan_for(texts, config, data.val_fraction, cache, Options(), say)
        folders = []
        for corpus, job in zip(texts, plan.jobs, strict=True):
            folder = cache / plan_of(corpus, job, Options())[:16]
            folders.append(folder)
            if folder.is_dir():
                continue
            with FileLock(cache / f"{folder.name}.lock"):
                if not folder.is_dir():
                    meta = _encode(corpus, plan.tokenizer, job, folder, Options())
                    say(f"data    {summary(meta)}")
        return folders
    except OSError as error:
        raise DataError(f"data.cache_dir: can't write to {cache}: {error}") from None


def _encode(corpus: Corpus, tokenizer: Tokenizer, job: worker.Job, out: Path, options: Options) -> Meta:
    """`encode` with a progress bar on a terminal."""
    with tqdm(total=corpus.size(), unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:
        return encode(corpus, tokenizer, job, out, options, lambda done: _move(bar, done))


def _move(bar: "tqdm[Any]", done: int) -> None:
    if bar.n == 0 and done:
        bar.initial = done  # of an earlier call: it does not count for the speed
    bar.update(done - bar.n)


# --- which tokenizer, and which documents are held out ----------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What has to be known before the first document is encoded."""

    tokenizer: Tokenizer
    jobs: list[worker.Job]  # one for each corpus


def plan_for(
    texts: list[Corpus], config: TokenizerConfig, val_fraction: float, folder: Path, options: Options, say: Say
) -> Plan:
    """The tokenizer, trained on the training documents of all texts if none is given, and the marks of validation.

    It is found once and kept in `folder`, as a file that is named by all that decides it.
    """
    given = None
    if config.path:
        given = bpe.byte_level() if config.path == BYTES else bpe.load(Path(config.path))
    decides = {
        "format": FORMAT_VERSION,
        "texts": [[corpus.identity(), corpus.text_key] for corpus in texts],
        "python": platform.python_version() if any(corpus.python_source for corpus in texts) else "",
        "tokenizer": [bpe.sha256(given), config.end_token] if given else config.vocab_size,
        "val_fraction": val_fraction,
    } | ({} if options.max_document_bytes == MAX_DOCUMENT_BYTES else {"longest": options.max_document_bytes})
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    kept = folder / f"{key}.plan.json"
    plan = _kept_plan(kept, len(texts))
    if plan is None:
        with FileLock(folder / f"{key}.lock"):
            if (plan := _kept_plan(kept, len(texts))) is None:
                _say_preparing(texts, say)
                below = [_held_out_below(corpus, val_fraction, options) for corpus in texts]
                found = given or bpe.train(_training_texts(texts, below, options), config.vocab_size)
                end = bpe.end_token(found, config.end_token)
                plan = {"below": below, "end": end, "tokenizer": found.to_str(pretty=True)}
                write_durably(kept, json.dumps(plan).encode())
    definition, end = plan["tokenizer"], plan["end"]
    tokenizer = bpe.literal(definition)
    unknown = bpe.unknown(tokenizer)
    if unknown is None or unknown == end:  # as the end mark it can't stand for anything else
        unknown = -1
    jobs = [
        worker.Job(definition, bpe.size(tokenizer), end, corpus.text_key, below, unknown)
        for corpus, below in zip(texts, plan["below"], strict=True)
    ]
    return Plan(tokenizer, jobs)


def _kept_plan(file: Path, n_texts: int) -> dict[str, Any] | None:
    """A plan that was made before; None if there is none, or if it is damaged."""
    try:
        plan = json.loads(file.read_bytes())
        return plan if len(plan["below"]) == n_texts and {"end", "tokenizer"} <= plan.keys() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _say_preparing(texts: list[Corpus], say: Say) -> None:
    what = "Python's standard library" if any(corpus.python_source for corpus in texts) else "your text"
    say(f"data    preparing {what}: {sum(len(corpus.files) for corpus in texts):,} files, once for all runs ...")
    if ignored := [file for corpus in texts for file in corpus.ignored]:
        say(f"data    {len(ignored):,} other files are not read: {corpora.listed(ignored)}")


def documents(corpus: Corpus, options: Options) -> Iterator[str]:
    """The documents of all files, in order; joined, those of a .txt file are its text."""
    for chunk in chunks(corpus, options.max_document_bytes):
        texts, problems = worker.texts(chunk, corpus.text_key)
        if problems and options.on_error == "stop":
            raise refusal(corpus.files[chunk.file], problems[0])
        yield from texts


def _held_out_below(corpus: Corpus, fraction: float, options: Options) -> int:
    """The mark below which documents are for validation; it is above the lowest mark, so that there always is one."""
    below, lowest, n = int(fraction * worker.MARKS), worker.MARKS, 0
    for text in documents(corpus, options):
        lowest, n = min(lowest, worker.mark(text.encode())), n + 1
        if lowest < below and n > 1:
            return below
    if n < 2:
        blocks = "blocks of 1 KiB" if all(corpora.kind(file) in ("", ".txt") for file in corpus.files) else "documents"
        raise DataError(f"the text has {n} {blocks}; it takes at least 2, to train and to validate")
    return max(below, lowest + 1)


def _training_texts(texts: list[Corpus], below: list[int], options: Options) -> Iterator[str]:
    """Training documents, so many that they come to about TRAINED_ON_BYTES, picked by their marks."""
    share = min(1.0, TRAINED_ON_BYTES / max(sum(corpus.size() for corpus in texts), 1))
    for corpus, limit in zip(texts, below, strict=True):
        for text in documents(corpus, options):
            mark = worker.mark(text.encode())
            if mark >= limit and mark % 2**32 < share * 2**32:
                yield text


# --- the command ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    return run_cli("prepare", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.verify:
            return _verify(arguments.verify)
        if not arguments.sources or not arguments.out:
            raise ConfigError("it takes text and a folder to make: prepare my_text --out data/mine")
        if not 0 < arguments.val_fraction < 1:
            raise ConfigError(f"--val-fraction {arguments.val_fraction} should be between 0 and 1, e.g. 0.05")
        return _make(arguments)
    except KeyboardInterrupt:
        print("prepare: stopped; the same command goes on from where it was", file=sys.stderr)
        return 130
    except OSError as error:
        if not arguments.out:
            raise
        print(f"prepare: {arguments.out}: {error}; the same command goes on from where it was", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m torchtitan_lite.data.prepare", description="Text -> a prepared folder.")
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE", help=f"{corpora.READABLE}, folders or globs")
    add("--out", type=paths.argument, help="the folder to make")
    add("--tokenizer", default="", metavar="FILE", help="a tokenizer.json, or the word bytes: one token for each byte")
    add("--end-token", default="", help="the entry that ends a document; default: as [tokenizer] end_token")
    add("--train-tokenizer", type=int, metavar="N", help="train byte-level BPE of N entries (the default, with 4096)")
    add("--text-key", default="text", help="the key of a .jsonl line, the column of a .csv or .parquet file")
    add("--val-fraction", type=float, default=0.05, help="share of the documents for validation (default 0.05)")
    add("--on-error", choices=("stop", "skip"), default="stop", help="skip: leave out what can't be used, and list it")
    add("--max-document-bytes", type=int, default=MAX_DOCUMENT_BYTES, help="a longer line or text is an error")
    add("--workers", type=int, default=0, help="processes; default: one per core")
    add("--verify", type=paths.argument, metavar="FOLDER", help="read every byte of a prepared folder, and stop")
    return parser


def _verify(folder: Path) -> int:
    wrong = verify(folder)
    if wrong:
        raise DataError("\n  ".join([f"{folder}: the prepared data is damaged; {remedy(folder)}", *wrong]))
    print(f"{folder}: whole. {summary(read_meta(folder))}")
    return 0


def _make(arguments: argparse.Namespace) -> int:
    if arguments.tokenizer and arguments.train_tokenizer is not None:
        raise ConfigError("--tokenizer and --train-tokenizer: leave one of the two out")
    for name, low, high in (
        ("train_tokenizer", bpe.SMALLEST, 2**31 - 1),
        ("max_document_bytes", 1, 2**40),
        ("workers", 0, MOST_WORKERS),
    ):
        value = getattr(arguments, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')} {value} should be at least {low} and at most {high:,}")
    out = _out(arguments.out)
    try:
        config = TokenizerConfig(
            path=arguments.tokenizer,
            end_token=arguments.end_token,
            vocab_size=arguments.train_tokenizer or TokenizerConfig().vocab_size,
        )
    except ValidationError as error:
        wrong = [f"--{e['loc'][0]} {e['input']!a}: {e['msg']}".replace("_", "-") for e in error.errors()]
        raise ConfigError("; ".join(wrong).replace("Value error, ", "")) from None
    options = Options(arguments.on_error, arguments.max_document_bytes, arguments.workers, keep_partial=True)
    corpus = corpora.find(arguments.sources, arguments.text_key)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.work")
    work.mkdir(exist_ok=True)
    try:
        with FileLock(work / "lock", blocking=False):
            corpus = content.known(corpus, _records(work))
            plan = plan_for([corpus], config, arguments.val_fraction, work, options, print)
            job = plan.jobs[0]
            if not out.exists():
                _encode(corpus, plan.tokenizer, job, out, options)
            elif not is_prepared(out) or read_meta(out).made_from != plan_of(corpus, job, options):
                raise DataError(f"{out} is there already, and was made from something else; choose another --out")
            else:
                require_complete(out, read_meta(out).skipped, options)
    except Timeout:
        raise DataError(f"{out} is being made by another process") from None
    shutil.rmtree(work)
    print(report(out, plan.tokenizer))
    return 0


def _records(work: Path) -> Path:
    """Where it is remembered what a text was, so that other text of the same size and time is not taken for it."""
    try:
        folder = cache_folder(DataConfig())
        folder.mkdir(parents=True, exist_ok=True)
    except (DataError, OSError):  # no home folder, or a read-only one: only this preparation remembers
        return work
    return folder


def _out(given: Path) -> Path:
    """The folder to make.

    Raises:
        ConfigError: it has no name.
    """
    out = expanded(given, "--out")
    if out.name in ("", ".."):
        raise ConfigError(f"--out {given} should name a folder that is not there yet, e.g. --out {out / 'prepared'}")
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
