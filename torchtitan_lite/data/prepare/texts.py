"""The text to prepare: which files, in which order, and which files of a folder are not read.

This module imports no reader and no encoder: a run whose text is in the cache needs neither.
"""

import inspect
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.paths import files_below, kind_of, matching, reading
from torchtitan_lite.config.registry import is_own
from torchtitan_lite.config.sections.data import READERS
from torchtitan_lite.errors import DataError

COMPRESSED = ".gz", ".zst"
READABLE = ".txt, .jsonl, .csv and .tsv files (also .gz and .zst) and .parquet files"
_MAX_BLOCK = 64 * 1024  # bytes
_MIN_BLOCK = 1024
_ENOUGH_BLOCKS = 16
_LISTED = 10  # kinds of files in a note
# Tests are two thirds of the library and missing in many distributions; the other folders are not part of the library.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Names(NamedTuple):
    """What messages call the options: those of the command, or those of a config."""

    text_key: str
    pair_keys: str
    text_suffixes: str
    vocab_size: str
    end_token: str
    val_fraction: str
    or_skip: str  # how to go on without an unusable text


COMMAND = Names(
    text_key="--text-key",
    pair_keys="--source-key and --target-key",
    text_suffixes="--text-suffixes",
    vocab_size="--train-tokenizer",
    end_token="--end-token",
    val_fraction="--val-fraction",
    or_skip=", or leave it out with --on-error skip",
)
CONFIG = Names(
    text_key="data.text_key",
    pair_keys="data.source_key and data.target_key",
    text_suffixes="data.text_suffixes",
    vocab_size="tokenizer.vocab_size =",
    end_token="tokenizer.end_token",
    val_fraction="data.val_fraction",
    or_skip=", or prepare the text without it (python -m torchtitan_lite.data.prepare ... --on-error skip)",
)


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order, and how to read them."""

    files: tuple[Path, ...]
    keys: tuple[str, ...] = ("text",)  # of a .jsonl line, or columns of a table: of a text, or of a source and a target
    source_prefix: str = ""  # pairs: put before each source
    text_suffixes: tuple[str, ...] = ()  # of plain text, besides .txt; and own readers
    python_source: bool = False  # decode by the encoding that a source file declares (PEP 263), else strict UTF-8
    n_held_out: int = 0  # the last files, which are the validation text; 0: documents are held out by hash
    ignored: tuple[Path, ...] = ()  # other files of the folders
    names: Names = COMMAND

    def identity(self) -> list[object]:
        """Path, size, mtime and ctime (ns) of each file and own reader, and all that decides how they are read."""
        own = [Path(inspect.getfile(READERS[name].load())) for name in self.text_suffixes if is_own(name)]
        stats = [(file, stat_of(file)) for file in (*self.files, *own)]
        files = [[os.path.abspath(file), s.st_size, s.st_mtime_ns, s.st_ctime_ns] for file, s in stats]
        options = self.keys, self.source_prefix, sorted(self.text_suffixes), self.python_source, self.n_held_out
        return [files, *options]

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(stat_of(file).st_size for file in self.files)

    @property
    def block(self) -> int:
        """The maximum bytes of a .txt document: 64 KiB, or less if the text would have too few documents."""
        return min(_MAX_BLOCK, max(self.size // _ENOUGH_BLOCKS, _MIN_BLOCK))

    def where(self, file: int, place: int) -> str:
        """A place in the text for messages: the file, and the line or row unless it is 0."""
        name = self.files[file]
        return f"{name}: {unit_of(name)} {place}" if place else str(name)


def stat_of(file: Path) -> os.stat_result:
    """
    Raises:
        DataError: the file is missing or unreadable.
    """
    with reading(file):
        return file.stat()


def unit_of(file: Path) -> str:
    """What the place of a document in this file is."""
    return "row" if kind(file) == ".parquet" else "line"


def kind(file: Path, text_suffixes: Collection[str] = ()) -> str:
    """Its entry of READERS, by the suffix without that of a compression; empty: it is not read."""
    suffix = file.suffix.lower()
    if suffix in COMPRESSED:
        suffix = Path(file.stem).suffix.lower()
        if suffix == ".parquet":  # which compresses its columns itself
            return ""
    own = {READERS[name].suffix: name for name in text_suffixes if name in READERS}
    default = suffix if suffix in READERS else ".txt" if suffix in text_suffixes else ""
    return own.get(suffix, default)


def checked_suffixes(text_suffixes: Iterable[str], names: Names) -> tuple[str, ...]:
    """The suffixes in lower case, and the names of readers of the user's own.

    Raises:
        DataError: one is no suffix of plain text, or a name that no command has given.
    """
    suffixes = tuple(dict.fromkeys(name if is_own(name) else name.lower() for name in text_suffixes))
    for suffix in suffixes:
        if is_own(suffix):
            if suffix not in READERS:
                raise DataError(f"{names.text_suffixes}: {READERS.not_imported(suffix)}")
        elif not re.fullmatch(r"\.[^./\s]+", suffix) or suffix in (*list(READERS)[1:], *COMPRESSED):
            raise DataError(
                f'{names.text_suffixes}: "{suffix}" should be the suffix of plain text, with its dot, e.g. .md; '
                ".jsonl, .csv, .tsv and .parquet have readers of their own, .gz and .zst follow it"
            )
    return suffixes


def find(
    entries: str | Sequence[str],
    keys: Sequence[str] = ("text",),
    text_suffixes: Iterable[str] = (),
    names: Names = COMMAND,
) -> Corpus:
    """The text at a file, a folder (recursive), a glob, or several of these. Each file is read once.

    Raises:
        DataError: nothing was found, or something is unreadable.
    """
    suffixes = checked_suffixes(text_suffixes, names)
    files: dict[str, Path] = {}  # by the real path, which a link or another spelling leads to, too
    ignored: dict[Path, None] = {}
    for entry in [entries] if isinstance(entries, str) else entries:
        if not entry:
            raise DataError("one of the names of the text is empty")
        texts, others = list[Path](), list[Path]()
        for path in matching(entry):
            if path.is_dir():
                for file in files_below(path):
                    (texts if kind(file, suffixes) and file.is_file() else others).append(file)
            elif not path.is_file():
                raise DataError(f"{path} is {kind_of(path)}; supported: {READABLE}")
            elif not kind(path, suffixes):
                raise DataError(f"{path}: only {READABLE} can be read; {_other_suffixes(names)}")
            else:
                texts.append(path)
        if not texts:
            raise _nothing(entry, others, names)
        ignored |= dict.fromkeys(others)
        for file in texts:
            files.setdefault(os.path.realpath(file), file)
    return Corpus(
        tuple(files.values()), tuple(keys), text_suffixes=suffixes, ignored=tuple(sorted(ignored)), names=names
    )


def _other_suffixes(names: Names) -> str:
    return f"{names.text_suffixes} names other suffixes of plain text, e.g. .md"


def _nothing(entry: str, others: list[Path], names: Names) -> DataError:
    if {"tokenizer.json", "train.idx"} <= {file.name for file in others}:
        return DataError(f"{entry} looks like a prepared folder, but its meta.json is missing; prepare the text again")
    has = f" (it has {_listed(others)})" if others else ""
    return DataError(f"no text at {entry}{has}; supported: {READABLE}; {_other_suffixes(names)} (in {Path.cwd()})")


def not_read(texts: Iterable[Corpus], names: Names) -> list[str]:
    """A note on the other files in the folders of texts, if any."""
    ignored = [file for corpus in texts for file in corpus.ignored]
    other = f"{len(ignored):,} other files are not read: {_listed(ignored)}"
    note = f"{other}; {names.text_suffixes} names more suffixes of text"
    return [note] if ignored else []


def _listed(files: list[Path]) -> str:
    """Files that are not read, counted by suffix; those without one, and links and FIFOs named like text, by name."""
    counts = Counter(f"{file.name} ({kind_of(file)})" if kind(file) else file.suffix or file.name for file in files)
    entries = [f"{n:,} x {name}" for name, n in counts.most_common(_LISTED)]
    return ", ".join(entries + ["..."] * (len(counts) > _LISTED))


def standard_library() -> Corpus:
    """The default text: the source of this Python's standard library."""
    root = sysconfig.get_paths()["stdlib"]
    paths: list[str] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    # without empty __init__.py files
    files = sorted(Path(file) for file in paths if os.path.isfile(file) and os.stat(file).st_size)
    if not files:
        raise DataError(f"Python's standard library has no source files at {root}; set data.path to text of your own")
    return Corpus(tuple(files), python_source=True, names=CONFIG)
