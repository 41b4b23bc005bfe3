"""The command that prepares text, or verifies a prepared folder.

python -m torchtitan_lite.data.prepare my_text --out data/mine
python -m torchtitan_lite.data.prepare 'web/*.jsonl.zst' --out data/web --tokenizer data/mine/tokenizer.json
python -m torchtitan_lite.data.prepare news.csv --source-key text --target-key headline --out data/news
python -m torchtitan_lite.data.prepare --verify data/mine
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from torchtitan_lite import commands
from torchtitan_lite.commands import SEVERAL, Options
from torchtitan_lite.config import paths
from torchtitan_lite.config.sections.data import READERS, DataConfig, TokenizerConfig
from torchtitan_lite.data.prepare.folder import prepare
from torchtitan_lite.data.prepare.job import BYTES, Job
from torchtitan_lite.data.prepare.summary import report, summary, verify
from torchtitan_lite.data.prepare.texts import READABLE, TEXT_KEY, TEXT_SUFFIXES, Corpus, find, ignored_notes
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.data.tokenizer import SMALLEST
from torchtitan_lite.errors import ConfigError, DataError

OPTIONS: Options = {
    "sources": {"nargs": "*", "metavar": "SOURCE", "help": f"{READABLE}, folders or globs"},
    "--out": {"type": paths.expand, "help": "the folder to create"},
    "--end-token": {"default": "", "help": "the token that ends a document; default: as [tokenizer] end_token"},
    "--begin-token": {"default": "", "help": "the token that begins each document; default: none"},
    "--sentinels": {"action": "store_true", "help": "the trained tokenizer gets T5's pad and sentinels"},
    "--text-key": TEXT_KEY,
    "--text-suffixes": TEXT_SUFFIXES,
    "--source-key": {"default": "", "metavar": "NAME", "help": "pairs: the key or column of the source"},
    "--target-key": {"default": "", "metavar": "NAME", "help": "pairs: the key or column of the target"},
    "--source-prefix": {
        "default": "",
        "metavar": "TEXT",
        "help": 'pairs: put before each source, e.g. "summarize: "',
    },
    "--on-error": {
        "choices": ("stop", "skip"),
        "default": "stop",
        "help": "skip: leave out unusable text, and list it",
    },
    "--verify": {
        "type": paths.expand,
        "metavar": "FOLDER",
        "help": "check every byte of a prepared folder, and exit",
    },
}
TOKENIZERS: Options = {
    "--tokenizer": {
        "default": "",
        "metavar": "FILE",
        "help": 'a tokenizer.json, or "bytes" for one token per byte',
    },
    "--train-tokenizer": {
        "type": int,
        "metavar": "N",
        "help": "train byte-level BPE with N entries (default: 4096)",
    },
}
HELD_OUT: Options = {
    "--held-out": {
        **SEVERAL,
        "metavar": "FILE",
        "help": "validation text in its own files, instead of a fraction",
    },
    "--val-fraction": {
        "type": float,
        "default": DataConfig().val_fraction,
        "help": "fraction of the documents held out (default: 0.05)",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return commands.run(
        "data.prepare",
        argv,
        OPTIONS,
        lambda given: _verify(given.verify) if given.verify else _make(given),
        exclusive=[TOKENIZERS, HELD_OUT],
        description="Tokenize text for training, on all cores. If it is interrupted, run the same command again to "
        "resume.",
    )


def _verify(folder: Path) -> int:
    if problems := verify(folder):
        raise DataError("\n  ".join(problems))
    print(f"{folder}: complete and undamaged. {summary(read_meta(folder))}")
    return 0


def _make(arguments: argparse.Namespace) -> int:
    if problem := _problem(arguments):
        raise ConfigError(problem)
    corpus, out = _corpus(arguments), arguments.out
    config = TokenizerConfig(
        path=arguments.tokenizer,
        end_token=arguments.end_token,
        begin_token=arguments.begin_token,
        vocab_size=arguments.train_tokenizer or TokenizerConfig().vocab_size,
    )
    job = Job.from_config(config, arguments.val_fraction, sentinels=arguments.sentinels or len(corpus.keys) == 2)
    for note in ignored_notes([corpus]):
        print(f"data    {note}")
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.parent / f".{out.name}.lock"
    try:
        with FileLock(lock, blocking=False):
            try:
                if not out.exists():
                    prepare(corpus, job, out, arguments.on_error, [corpus])
                elif not paths.is_prepared(out) or read_meta(out).made_from != job.made_from(corpus, [corpus]):
                    raise DataError(
                        f"{out} exists, made from different text or options, or by an older version; choose a "
                        "different --out"
                    )
            finally:
                lock.unlink()
    except Timeout:
        raise DataError(f"{out} is being prepared by another process") from None
    print(report(out))
    return 0


def _problem(arguments: argparse.Namespace) -> str:
    """Return what is wrong with the options: one is missing, out of range, or conflicts."""
    source, target = arguments.source_key, arguments.target_key
    if not arguments.sources or not arguments.out:
        return "needs text and an output folder, e.g. prepare my_text --out data/mine"
    if not 0 < arguments.val_fraction < 1:
        return f"--val-fraction {arguments.val_fraction} should be between 0 and 1, e.g. 0.05"
    if arguments.train_tokenizer is not None and not SMALLEST <= arguments.train_tokenizer < 2**31:
        return f"--train-tokenizer {arguments.train_tokenizer} should be at least {SMALLEST}"
    if arguments.sentinels and arguments.tokenizer not in ("", BYTES):
        return "--sentinels is for a tokenizer that is trained here; leave it out with --tokenizer"
    if bool(source) != bool(target) or (arguments.source_prefix and not target) or (source and source == target):
        return "pairs need two keys or columns, e.g. --source-key text --target-key summary"
    if source and arguments.text_key is not None:
        return "--text-key is for texts; pairs have --source-key and --target-key"
    return ""


def _corpus(arguments: argparse.Namespace) -> Corpus:
    """Return the files, read as texts or as pairs; those of --held-out are last."""
    source, target = arguments.source_key, arguments.target_key
    keys = (source, target) if source else (arguments.text_key or "text",)
    for name in arguments.text_suffixes:
        READERS.add(name)
    corpus = find(arguments.sources, keys, arguments.text_suffixes)
    if arguments.held_out:
        held_out = find(arguments.held_out, keys, arguments.text_suffixes)
        files, ignored = corpus.files + held_out.files, corpus.ignored + held_out.ignored
        corpus = replace(corpus, files=files, ignored=ignored, n_held_out=len(held_out.files))
    return replace(corpus, source_prefix=arguments.source_prefix)


if __name__ == "__main__":
    raise SystemExit(main())
