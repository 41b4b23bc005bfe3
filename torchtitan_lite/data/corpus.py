"""Which text: the user's files, or the standard library of the Python that runs this."""

import glob
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.errors import DataError

KINDS = ".txt", ".jsonl", ".csv", ".parquet"
COMPRESSED = ".gz", ".zst"
READABLE = ".txt, .jsonl and .csv files (also .gz and .zst) and .parquet files"
_MAX_BLOCK = 64 * 1024  # bytes
_MIN_BLOCK = 1024
_ENOUGH_BLOCKS = 16
# Tests are two thirds of the library, and many distributions leave them out; the others are not the library's own.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order."""

    files: tuple[Path, ...]
    text_key: str = "text"  # of .jsonl lines; the column of .csv and .parquet
    python_source: bool = False  # decode by the encoding that a source file declares (PEP 263), else strict UTF-8

    def identity(self) -> list[list[str | int]]:
        """What decides the text without reading it: path, size and time of change (ns) of each file."""
        return [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in self.files]

    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)

    def block(self) -> int:
        """The most bytes of a document of a .txt file: 64 KiB, or less where the text would be too few documents."""
        return min(_MAX_BLOCK, max(self.size() // _ENOUGH_BLOCKS, _MIN_BLOCK))


def kind(file: Path) -> str:
    """.txt, .jsonl, .csv or .parquet, whether compressed or not; empty for others."""
    suffixes = file.suffixes[-2:]
    if suffixes and suffixes[-1] in COMPRESSED:
        inner = suffixes[0] if len(suffixes) == 2 else ""
        return inner if inner in KINDS and inner != ".parquet" else ""
    return file.suffix if file.suffix in KINDS else ""


def find(path: str | list[str], text_key: str = "text") -> Corpus:
    """The files that `[data] path` means: a file, a folder (all of those below it), a glob, or a list of these.

    Raises:
        DataError: nothing was found, or a file is of a kind that can't be read.
    """
    if path == "":
        return _standard_library()
    files: list[Path] = []
    for entry in [path] if isinstance(path, str) else path:
        found = [Path(p) for p in sorted(glob.glob(str(Path(entry).expanduser()), recursive=True))]
        texts = [t for p in found for t in (_below(p) if p.is_dir() else [p]) if t.is_file()]
        if not texts:
            raise DataError(f"no text at {entry}: it takes {READABLE} (looked in {Path.cwd()})")
        files += texts
    for file in files:
        if not kind(file):
            raise DataError(f"{file}: only {READABLE} can be read; convert it, or rename it if it is plain text")
    return Corpus(tuple(dict.fromkeys(files)), text_key)


def _below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if kind(file))


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if p.is_file() and _SKIPPED.isdisjoint(p.relative_to(root).parts[:-1]))
    files = [file for file in files if file.stat().st_size]  # an empty __init__.py is no text
    if not files:
        raise DataError(f"Python's standard library has no source files at {root}; set data.path to text of your own")
    return Corpus(tuple(files), python_source=True)
