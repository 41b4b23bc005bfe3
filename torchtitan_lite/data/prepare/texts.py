"""Finds the files to prepare, and decides how to read each. Reads no text."""

import inspect
import os
import pkgutil
import re
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan_lite.commands import SEVERAL
from torchtitan_lite.config.paths import files_below, matching, problem, unfound
from torchtitan_lite.config.registry import is_module_name
from torchtitan_lite.config.sections.data import JSON_LINES, READERS
from torchtitan_lite.errors import DataError
from torchtitan_lite.terminal import counted

COMPRESSED = ".gz", ".zst"
READABLE = ".txt, .jsonl, .json, .csv and .tsv files (also .gz and .zst) and .parquet files"
# of the commands that read texts
TEXT_KEY: dict[str, Any] = {
    "type": lambda text: text.split(",") if "," in text else text,
    "metavar": "NAME",
    "help": "the key of a .jsonl line, or the column of a table, that holds the text (default: text); several, with "
    "commas, are tried in order",
}
TEXT_SUFFIXES = SEVERAL | {
    "metavar": "SUFFIX",
    "help": "more suffixes of plain text, e.g. .md .py, '' for files without one; or your own readers, module:Name",
}
_NAMES_MORE = "--text-suffixes (data.text_suffixes) names more suffixes of plain text: .md, '' for files without one"
_MAX_BLOCK = 64 * 1024  # bytes
_MIN_BLOCK = 1024
_ENOUGH_BLOCKS = 16
_LISTED = 10  # file kinds in a note
# Tests are two thirds of the library and missing in many distributions; the other folders are not part of the library.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order, and how to read them."""

    files: tuple[Path, ...]
    # .jsonl keys or table columns: of a text (several are tried in order), or of a source and a target
    keys: tuple[str | list[str], ...] = ("text",)
    source_prefix: str = ""  # pairs: put before each source
    text_suffixes: tuple[str, ...] = ()  # of plain text, in addition to .txt; and the user's readers
    n_held_out: int = 0  # number of last files that are validation text; 0: documents are held out by hash
    ignored: tuple[str, ...] = ()  # for each other file in the folders, and each hidden folder: its kind, or its name
    as_1_0: bool = False  # has the files and the fingerprint of version 1.0, to find what it prepared

    def fingerprint(self) -> list[object]:
        """Return path, size, mtime and ctime (ns) of each file and user's reader, and all reading options."""
        readers = [pkgutil.resolve_name(READERS[name].read) for name in self.text_suffixes if is_module_name(name)]
        modules = [Path(inspect.getfile(reader)) for reader in readers]
        stats = [(file, file.stat()) for file in (*self.files, *modules)]
        files = [[os.path.abspath(file), s.st_size, s.st_mtime_ns, s.st_ctime_ns] for file, s in stats]
        options = self.keys, self.source_prefix, sorted(self.text_suffixes), self.n_held_out
        by_line = not self.as_1_0 and any(kind(file, self.text_suffixes) == ".tsv" for file in self.files)
        return [files, *options, *[".tsv by line"] * by_line]

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def block(self) -> int:
        """The maximum bytes of a .txt document: 64 KiB, or less if the text would have too few documents."""
        return min(_MAX_BLOCK, max(self.size // _ENOUGH_BLOCKS, _MIN_BLOCK))

    def where(self, file: int, place: int) -> str:
        """Return a place in the text for messages: the file, and the line or row unless it is 0."""
        name = self.files[file]
        return f"{name}: {unit_of(name)} {place}" if place else str(name)


def unit_of(file: Path) -> str:
    """Return "row" or "line": the unit of a document's place in this file."""
    return "row" if kind(file) == ".parquet" else "line"


def kind(file: Path, text_suffixes: Collection[str] = ()) -> str:
    """Return the file's key in READERS, by its suffix without compression suffix; empty: not readable.

    Args:
        text_suffixes: those of plain text, "" for files without a suffix; and the user's readers.
    """
    suffix = file.suffix.lower()
    if suffix in COMPRESSED:
        suffix = Path(file.stem).suffix.lower()
    readers = {READERS[name].suffix: name for name in text_suffixes if is_module_name(name) and name in READERS}
    default = (".txt" if suffix else "no suffix") if suffix in text_suffixes else suffix if suffix in READERS else ""
    return readers.get(suffix, default)


def checked_suffixes(text_suffixes: Iterable[str]) -> tuple[str, ...]:
    """Return the suffixes in lower case, and the names of the user's readers.

    Raises:
        DataError: an entry is not a suffix of plain text, or a reader that was not imported.
    """
    suffixes = tuple(dict.fromkeys(name if is_module_name(name) else name.lower() for name in text_suffixes))
    for suffix in suffixes:
        if is_module_name(suffix):
            if suffix not in READERS:
                raise DataError(READERS.not_imported(suffix))
        elif not re.fullmatch(r"(\.[^./\s]+)?", suffix) or suffix in {*READERS, *COMPRESSED} - {".txt", *JSON_LINES}:
            raise DataError(
                f'data.text_suffixes (--text-suffixes): "{suffix}" should be the suffix of plain text, with its dot, '
                "e.g. .md; .jsonl, .csv, .tsv and .parquet have readers of their own, .gz and .zst follow it"
            )
    return suffixes


def find(
    entries: str | Sequence[str],
    keys: Sequence[str | list[str]] = ("text",),
    text_suffixes: Iterable[str] = (),
    *,
    as_1_0: bool = False,
) -> Corpus:
    """Find the text at a file, a folder (recursive), a glob, or several of these. Each file is read once.

    Args:
        as_1_0: find the files that version 1.0 read: also hidden ones, and no JSON_LINES.

    Raises:
        DataError: nothing was found, or something is unreadable.
    """
    suffixes = checked_suffixes(text_suffixes)
    files: dict[str, Path] = {}  # by real path, as links and spellings may lead to the same file
    ignored: dict[Path, str] = {}
    for entry in [entries] if isinstance(entries, str) else entries:
        if not entry:
            raise DataError("one of the names of the text is empty")
        found = {
            file: _left_out(file, suffixes, named=file == path, as_1_0=as_1_0)
            for path in matching(entry)
            for file in (files_below(path, hidden=as_1_0) if path.is_dir() else [path])
        }
        if not {"", "empty"} & {*found.values()}:
            has = f" (it has {_listed(found.values())})" if found else ""
            raise DataError(
                unfound(entry) or f"no text at {entry}{has}; supported: {READABLE}; {_NAMES_MORE} (in {Path.cwd()})"
            )
        for file, why in found.items():
            if why:
                ignored[file] = why
            else:
                files.setdefault(os.path.realpath(file), file)
    return Corpus(
        tuple(files.values()),
        tuple(keys),
        text_suffixes=suffixes,
        ignored=tuple(ignored[file] for file in sorted(ignored)),
        as_1_0=as_1_0,
    )


def _left_out(file: Path, suffixes: Sequence[str], *, named: bool, as_1_0: bool) -> str:
    """Return why a file is not read: "hidden", "empty", its suffix or, without one, its name; empty: it is read.

    Raises:
        DataError: nothing can read it, and it is named itself or one of a data set.
    """
    if file.suffix == ".arrow" and (file.parent / "dataset_info.json").is_file():
        raise DataError(
            f"{file.parent} was written by save_to_disk, and .arrow files are not read; "
            f"datasets.load_from_disk({str(file.parent)!r}).to_parquet('text.parquet') writes one that is"
        )
    if file.name.startswith(".") and not (named or as_1_0):
        return "hidden"
    reader = kind(file, (*suffixes, "") if named else suffixes)
    if not reader or not file.is_file() or (as_1_0 and reader in JSON_LINES):
        if named:
            raise DataError(problem(file) or f"{file}: only {READABLE} can be read; {_NAMES_MORE}")
        return file.suffix or file.name
    return "" if as_1_0 or file.stat().st_size else "empty"


def ignored_notes(texts: Iterable[Corpus]) -> list[str]:
    """Return a note on the other files and on hidden folders in the folders of texts, if any."""
    ignored = [kind for corpus in texts for kind in corpus.ignored]
    note = f"{counted(len(ignored), 'other file')} not read: {_listed(ignored)}; {_NAMES_MORE}"
    return [note + "; hidden ones are read if they are named" * ("hidden" in ignored)] if ignored else []


def _listed(kinds: Iterable[str]) -> str:
    """Count files that are not read by kind: hidden, empty, their suffix, or their name without a suffix."""
    counts = Counter(kinds)
    entries = [f"{n:,} x {name}" for name, n in counts.most_common(_LISTED)]
    return ", ".join(entries + ["..."] * (len(counts) > _LISTED))


def standard_library() -> Corpus:
    """Return the default text: the source of this Python's standard library."""
    files: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_paths()["stdlib"]):
        below[:] = [name for name in below if name not in _SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    # without empty __init__.py files
    with_text = sorted(file for file in files if file.is_file() and file.stat().st_size)
    return Corpus(tuple(with_text), text_suffixes=(".py",))
