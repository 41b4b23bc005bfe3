"""The text to prepare: which files, in which order, which are skipped, and whether they have changed.

Without `[data] path`, it is the standard library of this Python; for pairs, its functions and their docstrings.

Prepared data is looked up by path, size and mtime, without reading the files. A restored backup or `touch -r` can
reproduce these three, but not inode and ctime. A record in the cache holds the latter two and a hash of each file. If
they differ, the file is hashed again; if the hash differs too, it becomes part of the text's identity. Text of less
than 256 MiB is hashed in full. For larger text, the size and 64 blocks of each file are hashed.
"""

import ast
import contextlib
import hashlib
import json
import os
import platform
import re
import sysconfig
import textwrap
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from torchtitan_lite.config import find_text
from torchtitan_lite.data.token_files import HASHED_BYTES, spots
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import write_durably

KINDS = ".txt", ".jsonl", ".csv", ".tsv", ".parquet"
COMPRESSED = ".gz", ".zst"
READABLE = ".txt, .jsonl, .csv and .tsv files (also .gz and .zst) and .parquet files"
_OTHERS = 'data.text_suffixes (prepare: --text-suffixes) names other suffixes of plain text, e.g. [".md"]'
_MAX_BLOCK = 64 * 1024  # bytes
_MIN_BLOCK = 1024
_ENOUGH_BLOCKS = 16
CHANGED = "the text was changed while it was being read; run the same command again to start over with the new text"
# Tests are two thirds of the library and missing in many distributions; the other folders are not part of the library.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Content:
    """The hashes of the files, as recorded in the cache."""

    first: list[str]  # when the text was first prepared
    last: list[str]  # at the last check
    stamps: list[list[int]]  # inode and ctime of each file at the last check


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order."""

    files: tuple[Path, ...]
    text_key: str = "text"  # the key in .jsonl lines, or the column in .csv and .parquet
    python_source: bool = False  # decode by the encoding that a source file declares (PEP 263), else strict UTF-8
    content: Content | None = None
    target_key: str = ""  # pairs: text_key is that of the source
    source_prefix: str = ""  # pairs: put before each source
    text_suffixes: tuple[str, ...] = ()  # of plain text, besides .txt
    ignored: tuple[Path, ...] = ()  # other entries of the folders: other kinds of files, broken links, FIFOs
    n_held_out: int = 0  # the last files, which are the validation text; 0: documents are held out by hash

    def identity(self) -> list[list[str | int]]:
        """Path, size and mtime (ns) of each file; also its hash, if other text had the same ones before."""
        stats = [(file, stat_of(file)) for file in self.files]
        identity: list[list[str | int]] = [[str(file.resolve()), i.st_size, i.st_mtime_ns] for file, i in stats]
        if self.content and self.content.last != self.content.first:
            return [[*entry, digest] for entry, digest in zip(identity, self.content.last, strict=True)]
        return identity

    @property
    def keys(self) -> list[str]:
        """The key or column of the text, or those of a source and its target."""
        return [key for key in (self.text_key, self.target_key) if key]

    def size(self) -> int:
        return sum(stat_of(file).st_size for file in self.files)

    def block(self) -> int:
        """The maximum bytes of a .txt document: 64 KiB, or less if the text would have too few documents."""
        return min(_MAX_BLOCK, max(self.size() // _ENOUGH_BLOCKS, _MIN_BLOCK))


def stat_of(file: Path) -> os.stat_result:
    """
    Raises:
        DataError: the file is missing or unreadable.
    """
    with find_text.reading(file):
        return file.stat()


def _suffix(file: Path) -> str:
    """The suffix in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSED:
        inner = suffixes[0] if len(suffixes) == 2 else ""
        return inner if inner != ".parquet" else ""
    return suffixes[-1] if suffixes else ""


def kind(file: Path, text_suffixes: Collection[str] = ()) -> str:
    """How a file is read: as .txt, .jsonl, .csv or .parquet, compressed or not; empty: not at all."""
    suffix = _suffix(file)
    if suffix == ".tsv":
        return ".csv"
    return suffix if suffix in KINDS else ".txt" if suffix in text_suffixes else ""


def checked_suffixes(text_suffixes: Collection[str]) -> tuple[str, ...]:
    """The suffixes in lower case. Raises DataError for what is no suffix of plain text."""
    suffixes = tuple(dict.fromkeys(suffix.lower() for suffix in text_suffixes))
    for suffix in suffixes:
        if not re.fullmatch(r"\.[^./\0\s]+", suffix) or suffix in (*KINDS[1:], *COMPRESSED):
            raise DataError(
                f'data.text_suffixes (prepare: --text-suffixes): "{suffix}" should be the suffix of plain text, with '
                "its dot, e.g. .md; .jsonl, .csv, .tsv and .parquet have readers of their own, .gz and .zst follow it"
            )
    return suffixes


def find(path: str | list[str], text_key: str = "text", text_suffixes: Collection[str] = ()) -> Corpus:
    """The files of `[data] path`: a file, a folder (recursive), a glob, or a list of these.

    Raises:
        DataError: nothing was found, or something is unreadable.
    """
    text_suffixes = checked_suffixes(text_suffixes)
    if path == "":
        return _standard_library()
    files: dict[Path, None] = {}
    ignored: set[Path] = set()
    if not isinstance(path, str) and "" in path:
        raise DataError("data.path: a name in the list is empty; remove it")
    for entry in [path] if isinstance(path, str) else path:
        files |= dict.fromkeys(_texts(entry, text_suffixes, ignored))
    for file in files:
        if not kind(file, text_suffixes):
            raise DataError(f"{file}: only {READABLE} can be read; {_OTHERS}; convert other formats")
    return Corpus(tuple(files), text_key, text_suffixes=text_suffixes, ignored=tuple(sorted(ignored)))


def _texts(entry: str, text_suffixes: Collection[str], ignored: set[Path]) -> list[Path]:
    """The files of one entry of `[data] path`, each once, even if a link leads to it as well."""
    files: list[tuple[Path, bool]] = []
    for path, linked in find_text.matching(find_text.expanded(entry, "data.path")):
        if find_text.is_folder(path):
            files += [(file, linked or through_link) for file, through_link in _below(path, text_suffixes, ignored)]
        elif find_text.is_file(path):
            files.append((path, linked))
        else:
            ignored.add(path)
    if not files:
        raise _nothing(entry, ignored)
    places = {_place(path) for path, linked in files if not linked}
    texts = []
    for path, linked in files:
        if not linked or _place(path) not in places:
            texts.append(path)
            places.add(_place(path))
    return texts


def _place(file: Path) -> str:
    return os.path.join(os.path.realpath(file.parent), file.name)


def _below(folder: Path, text_suffixes: Collection[str], ignored: set[Path]) -> list[tuple[Path, bool]]:
    files = []
    for below in find_text.folders_below(folder, hidden=True):
        for file in (below.path / name for name in below.names):
            if _suffix(file) in (*KINDS, *text_suffixes) and find_text.is_file(file):
                files.append((file, below.linked))
            else:
                ignored.add(file)
    return sorted(files)


def _nothing(entry: str, ignored: set[Path]) -> DataError:
    path = find_text.expanded(entry, "data.path")
    if path in ignored:
        return DataError(f"{path} is {find_text.kind_of(path)}; supported: {READABLE}")
    if find_text.is_folder(path) and (path / "tokenizer.json").exists() and (path / "train.idx").exists():
        return DataError(f"{path} looks like a prepared folder, but its meta.json is missing; prepare the text again")
    others = f" (it has {listed(sorted(ignored))})" if ignored else ""
    return DataError(f"no text at {entry}{others}; supported: {READABLE}; {_OTHERS} (looked in {Path.cwd()})")


def not_read(texts: Iterable[Corpus], option: str) -> list[str]:
    """A note on the other files in the folders of texts, if any."""
    ignored = [file for corpus in texts for file in corpus.ignored]
    note = f"{len(ignored):,} other files are not read: {listed(ignored)}; {option} names more suffixes of text"
    return [note] if ignored else []


def listed(ignored: list[Path]) -> str:
    """A list of ignored files for a message: counts by suffix, or names; at most ten."""
    suffixes = Counter(file.suffix if file.suffix and _suffix(file) not in KINDS else "" for file in ignored)
    entries = [f"{count:,} x {suffix}" for suffix, count in suffixes.most_common() if suffix]
    for file in ignored:
        if _suffix(file) in KINDS:
            entries.append(f"{file.name} ({find_text.kind_of(file)})")
        elif not file.suffix:
            entries.append(file.name)
    return ", ".join(entries[:10] + ["..."] * (len(entries) > 10))


# --- changed text -------------------------------------------------------------------------------------------------


def with_content(corpus: Corpus, folder: Path) -> Corpus:
    """The corpus with its content, compared with the record in this folder, which is updated.

    Raises:
        DataError: a file is missing or unreadable.
    """
    file = folder / f"{hashlib.sha256(json.dumps(corpus.identity()).encode()).hexdigest()[:16]}.content.json"
    stamps = _stamps(corpus)
    record = _read_record(file, len(stamps))
    if record is None or record.stamps != stamps:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a read-only cache
                stack.enter_context(FileLock(file.with_suffix(".lock")))
            record = _updated_record(corpus, _read_record(file, len(stamps)), stamps)
            with contextlib.suppress(OSError):
                write_durably(file, json.dumps(vars(record)).encode())
    return replace(corpus, content=record)


def is_unchanged(corpus: Corpus) -> bool:
    """Whether the text is as it was for `with_content`."""
    content = corpus.content
    return not content or _stamps(corpus) == content.stamps or _hashes(corpus, corpus.files) == content.last


def _updated_record(corpus: Corpus, record: Content | None, stamps: list[list[int]]) -> Content:
    if record is None:
        hashes = _hashes(corpus, corpus.files)
        return Content(hashes, hashes, stamps)
    changed = [i for i, stamp in enumerate(stamps) if stamp != record.stamps[i]]
    new = dict(zip(changed, _hashes(corpus, tuple(corpus.files[i] for i in changed)), strict=True))
    return Content(record.first, [new.get(i, old) for i, old in enumerate(record.last)], stamps)


def _stamps(corpus: Corpus) -> list[list[int]]:
    """Inode and ctime of each file."""
    return [[(info := stat_of(file)).st_ino, info.st_ctime_ns] for file in corpus.files]


def _hashes(corpus: Corpus, files: tuple[Path, ...]) -> list[str]:
    in_full = corpus.size() < HASHED_BYTES  # all files together

    def of(file: Path) -> str:
        with find_text.reading(file):
            if not in_full:
                return spots(file)[:32]
            with file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()[:32]

    with ThreadPoolExecutor() as pool:
        return list(pool.map(of, files))


def _read_record(file: Path, n_files: int) -> Content | None:
    """The record; None if it is missing or damaged."""
    try:
        record = Content(**json.loads(file.read_bytes()))
        return record if {n_files} == {len(record.first), len(record.last), len(record.stamps)} else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


# --- the default text -----------------------------------------------------------------------------------------------


def functions(cache: Path) -> Corpus:
    """The standard library's functions as pairs: the body without its docstring, and the docstring's first sentence.

    They are written to a file in the cache, once for this version of Python. Of functions with the same body, the first
    is kept.
    """
    library = _standard_library()
    key = hashlib.sha256(json.dumps([2, library.identity(), platform.python_version()]).encode()).hexdigest()[:16]
    file = cache / f"functions-{key}.jsonl"
    with FileLock(cache / f"{file.name}.lock"):
        if not file.is_file():
            pairs: dict[str, str] = {}
            for text in library.files:
                for body, sentence in _functions_of(text):
                    pairs.setdefault(body, sentence)
            lines = (json.dumps({"body": body, "docstring": sentence}) + "\n" for body, sentence in pairs.items())
            write_durably(file, "".join(lines).encode())
    return Corpus((file,), "body", target_key="docstring")


def _functions_of(file: Path) -> list[tuple[str, str]]:
    """The body and the first sentence of the docstring of each function in a source file."""
    with tokenize.open(file) as stream:
        text = stream.read()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # written for another version of Python
        return []
    lines, pairs = text.split("\n"), []  # as ast counts them: splitlines() also splits at form feeds
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            begin = min(one.lineno for one in (node.body[1], *getattr(node.body[1], "decorator_list", ())))
            body = textwrap.dedent("\n".join(lines[begin - 1 : node.body[-1].end_lineno]))
            paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
            if sentence:
                pairs.append((body, sentence))
    return pairs


def _standard_library() -> Corpus:
    root = sysconfig.get_paths()["stdlib"]
    paths: list[str] = []
    for folder, below, names in os.walk(root):  # much faster than Path.rglob
        below[:] = [name for name in below if name not in _SKIPPED]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    # without empty __init__.py files
    files = sorted(Path(file) for file in paths if os.path.isfile(file) and os.stat(file).st_size)
    if not files:
        raise DataError(f"Python's standard library has no source files at {root}; set data.path to text of your own")
    return Corpus(tuple(files), python_source=True)
