"""The command that prepares text, or verifies a prepared folder.

python -m torchtitan_lite.data.prepare my_text --out data/mine
python -m torchtitan_lite.data.prepare 'web/*.jsonl.zst' --out data/web --tokenizer data/mine/tokenizer.json
python -m torchtitan_lite.data.prepare news.csv --source-key text --target-key headline --out data/news
python -m torchtitan_lite.data.prepare --verify data/mine
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from torchtitan_lite.config import paths
from torchtitan_lite.config.find_text import expanded
from torchtitan_lite.config.paths import is_prepared
from torchtitan_lite.config.schema import TokenizerConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.packing import damaged_indices
from torchtitan_lite.data.prepare import corpus as corpora
from torchtitan_lite.data.prepare.cache import record_folder
from torchtitan_lite.data.prepare.encode import encode, require_complete
from torchtitan_lite.data.prepare.plan import MAX_DOCUMENT_BYTES, Options, plan_of
from torchtitan_lite.data.prepare.split import plan_for
from torchtitan_lite.data.prepare.summary import report, summary, verify
from torchtitan_lite.data.token_files import read_meta, remedy
from torchtitan_lite.errors import ConfigError, DataError, run_cli

_MOST_WORKERS = 1024


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    arguments = _parser().parse_args(argv)
    return run_cli("prepare", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.verify:
            return _verify(arguments.verify)
        if not arguments.sources or not arguments.out:
            raise ConfigError("needs text and an output folder, e.g. prepare my_text --out data/mine")
        if not 0 < arguments.val_fraction < 1:
            raise ConfigError(f"--val-fraction {arguments.val_fraction} should be between 0 and 1, e.g. 0.05")
        return _make(arguments)
    except KeyboardInterrupt:
        print("prepare: stopped; run the same command again to resume", file=sys.stderr)
        return 130
    except OSError as error:
        if not arguments.out:
            raise
        print(f"prepare: {arguments.out}: {error}; run the same command again to resume", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m torchtitan_lite.data.prepare", description="Tokenize text for training."
    )
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE", help=f"{corpora.READABLE}, folders or globs")
    add("--out", type=paths.argument, help="the folder to create")
    add("--tokenizer", default="", metavar="FILE", help='a tokenizer.json, or "bytes" for one token per byte')
    add("--end-token", default="", help="the token that ends a document; default: as [tokenizer] end_token")
    add("--train-tokenizer", type=int, metavar="N", help="train byte-level BPE with N entries (default: 4096)")
    add("--sentinels", action="store_true", help="the trained tokenizer gets T5's pad and sentinels")
    add("--text-key", default="text", help="the key of a .jsonl line, or the column of a .csv, .tsv or .parquet file")
    add(
        "--text-suffixes",
        nargs="+",
        action="extend",
        default=[],
        metavar="SUFFIX",
        help="further suffixes of plain text, e.g. .md .py",
    )
    add("--source-key", default="", metavar="NAME", help="pairs: the key or column of the source")
    add("--target-key", default="", metavar="NAME", help="pairs: the key or column of the target")
    add("--source-prefix", default="", metavar="TEXT", help='pairs: put before each source, e.g. "summarize: "')
    add(
        "--held-out",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="validation text in its own files, instead of a fraction",
    )
    add("--val-fraction", type=float, default=0.05, help="fraction of the documents for validation (default: 0.05)")
    add("--on-error", choices=("stop", "skip"), default="stop", help="skip: leave out unusable text, and list it")
    add("--max-document-bytes", type=int, default=MAX_DOCUMENT_BYTES, help="a longer line or text is an error")
    add("--workers", type=int, default=0, help="number of processes; default: one per core")
    add("--verify", type=paths.argument, metavar="FOLDER", help="check every byte of a prepared folder, and exit")
    return parser


def _verify(folder: Path) -> int:
    problems = verify(folder)
    if problems:
        raise DataError("\n  ".join([f"{folder}: the prepared data is damaged; {remedy(folder)}", *problems]))
    if damaged := list(damaged_indices(folder, read_meta(folder))):
        raise DataError("\n  ".join(damaged))
    print(f"{folder}: complete and undamaged. {summary(read_meta(folder))}")
    return 0


def _make(arguments: argparse.Namespace) -> int:
    if arguments.tokenizer and arguments.train_tokenizer is not None:
        raise ConfigError("--tokenizer and --train-tokenizer: leave one of the two out")
    if arguments.sentinels and arguments.tokenizer not in ("", "bytes"):
        raise ConfigError("--sentinels is for a tokenizer that is trained here; leave it out with --tokenizer")
    for name, low, high in (
        ("train_tokenizer", bpe.SMALLEST, 2**31 - 1),
        ("max_document_bytes", 1, 2**40),
        ("workers", 0, _MOST_WORKERS),
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
        problems = [f"--{e['loc'][0]} {e['input']!a}: {e['msg']}".replace("_", "-") for e in error.errors()]
        raise ConfigError("; ".join(problems).replace("Value error, ", "")) from None
    options = Options(arguments.on_error, arguments.max_document_bytes, arguments.workers, keep_partial=True)
    corpus = _corpus(arguments)
    sentinels = arguments.sentinels or bool(corpus.target_key)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.work")
    work.mkdir(exist_ok=True)
    try:
        with FileLock(work / "lock", blocking=False):
            corpus = corpora.with_content(corpus, record_folder(work))
            tokenizer, (job,) = plan_for(
                [corpus], config, arguments.val_fraction, work, options, print, sentinels=sentinels
            )
            for note in corpora.not_read([corpus], "--text-suffixes"):
                print(f"data    {note}")
            if not out.exists():
                encode(corpus, tokenizer, job, out, options)
            elif not is_prepared(out) or read_meta(out).made_from != plan_of(corpus, job, options):
                raise DataError(f"{out} exists, and was made from other text or options; choose another --out")
            else:
                require_complete(out, read_meta(out).skipped, options)
    except Timeout:
        raise DataError(f"{out} is being prepared by another process") from None
    shutil.rmtree(work)
    print(report(out, tokenizer))
    return 0


def _corpus(arguments: argparse.Namespace) -> corpora.Corpus:
    """The files, read as texts or as pairs."""
    source, target, prefix = arguments.source_key, arguments.target_key, arguments.source_prefix
    if bool(source) != bool(target) or (prefix and not target):
        raise ConfigError("pairs need both --source-key and --target-key, e.g. --source-key text --target-key summary")
    if source and source == target:
        raise ConfigError(f"--source-key and --target-key are both {source!r}; they name two keys or columns")
    if target and arguments.text_key != "text":
        raise ConfigError("--text-key is for texts; pairs have --source-key and --target-key")
    corpus = corpora.find(arguments.sources, source or arguments.text_key, arguments.text_suffixes)
    if arguments.held_out:
        held_out = corpora.find(arguments.held_out, corpus.text_key, arguments.text_suffixes)
        if both := {file.resolve() for file in corpus.files} & {file.resolve() for file in held_out.files}:
            raise ConfigError(f"{min(both)} is both text to train on and --held-out; name it once")
        files, ignored = corpus.files + held_out.files, corpus.ignored + held_out.ignored
        corpus = replace(corpus, files=files, ignored=ignored, n_held_out=len(held_out.files))
    return replace(corpus, target_key=target, source_prefix=prefix)


def _out(path: Path) -> Path:
    """Raise ConfigError if the path has no name."""
    out = expanded(path, "--out")
    if out.name in ("", ".."):
        raise ConfigError(f"--out {path} should name a new folder, e.g. --out {out / 'prepared'}")
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
