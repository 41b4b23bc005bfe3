"""Malformed files and invalid values give a message with the place, and exit code 2."""

import contextlib
import gzip
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.data.test_data import decoded
from tests.data.test_prepare import TEXTS, as_csv, as_jsonl, succeeds, write
from tests.helpers import ROOT
from torchtitan_lite.config.schema import DataConfig
from torchtitan_lite.data.prepare import readers
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.cache import cache_folder
from torchtitan_lite.data.prepare.corpus import Corpus
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.data.tokenizer import load
from torchtitan_lite.errors import DataError, UserError

BOM = b"\xef\xbb\xbf"
ROWS = [f'row {i}, "quoted"\nand on' for i in range(60)]


def csv_of(end: bytes, between: bytes = b"", before: bytes = b"") -> bytes:
    cells = [b'"' + row.replace('"', '""').encode() + b'"' for row in ROWS]
    return before + b"id,text" + end + b"".join(between + b"%d,%s" % (i, c) + end for i, c in enumerate(cells))


@pytest.mark.parametrize(
    "content",
    [
        csv_of(b"\n", between=b"\n"),
        csv_of(b"\r\n", between=b"\r\n"),
        csv_of(b"\n", before=b"\n\n"),
        csv_of(b"\n") + b"\n\n\n",
        csv_of(b"\n")[:-1],
        csv_of(b"\r\n")[:-2],
        csv_of(b"\n", before=BOM),
        csv_of(b"\r\n", before=BOM, between=b"\r\n"),
    ],
)
def test_empty_lines_of_csv_are_no_rows(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    succeeds(tmp_path / "a.csv", "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert sorted(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val")) == sorted(ROWS)


@pytest.mark.parametrize("between", [b"\n", b"\r\n", b"  \t\n"])
def test_empty_lines_of_json_lines_are_none(between: bytes, tmp_path: Path) -> None:
    content = between.join(line + b"\n" for line in as_jsonl(ROWS).splitlines())
    (tmp_path / "a.jsonl").write_bytes(BOM + content + between * 3)
    succeeds(tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert sorted(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val")) == sorted(ROWS)


def test_a_place_after_empty_lines_is_the_line_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_bytes(b"\nid,text\n\n1,good\n\n2\n")
    assert main([str(tmp_path / "a.csv"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    assert "a.csv: line 6: has 1 columns, so no text" in capsys.readouterr().err


def test_a_csv_with_only_a_header_has_no_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,text\n")
    command = ["--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main([str(tmp_path / "a.csv"), *command]) == 2
    assert "the text has 0 documents" in capsys.readouterr().err
    write(tmp_path / "b.csv", TEXTS)
    assert main([str(tmp_path), *command]) == 0


PARQUET: list[tuple[list[object], str]] = [
    ([TEXTS, TEXTS], 'a.parquet: has 2 columns "text"; which one holds the text is ambiguous'),
    ([[*TEXTS, None]], 'row 401: "text" is null'),
    ([[1] * 400], 'column "text" has type int64; it should be string'),
]


@pytest.mark.parametrize(("columns", "expected"), PARQUET, ids=["two columns", "null", "numbers"])
def test_bad_columns_of_parquet_are_errors(
    columns: list[list[object]], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names=["text"] * len(columns))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert main([str(tmp_path / "a.parquet"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    assert expected in capsys.readouterr().err


def test_parquet_text_that_is_not_utf8_is_named_by_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = pyarrow.array([b"good\n\n\n", b"line\nline\n\xff"] * 20, pyarrow.binary())
    strings = pyarrow.Array.from_buffers(pyarrow.string(), len(binary), binary.buffers())
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), file)
    assert main([str(file), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    assert "a.parquet: row 2: byte 0xff is not utf-8; correct or remove it" in capsys.readouterr().err


VALUES: list[tuple[list[str], str]] = [
    (["--workers=-3"], "--workers -3 should be at least 0 and at most 1,024"),
    (["--workers", "1000000"], "--workers 1000000 should be at least 0 and at most 1,024"),
    (["--train-tokenizer", "3000000000"], "--train-tokenizer 3000000000 should be at least 257"),
    (["--train-tokenizer", "0"], "--train-tokenizer 0 should be at least 257"),
    (["--max-document-bytes=-5"], "--max-document-bytes -5 should be at least 1"),
    (["--max-document-bytes", "9" * 30], "should be at least 1 and at most"),
    (["--val-fraction", "nan"], "should be between 0 and 1"),
    (["--out", "."], "--out . should name a new folder, e.g. --out prepared"),
    (["--out", "/"], "--out / should name a new folder, e.g. --out /prepared"),
    (["--out", "a/.."], "should name a new folder"),
    (["--tokenizer", "bytes", "--train-tokenizer", "300"], "leave one of the two out"),
    (["--tokenizer", "no.json"], "can't be read as a tokenizer.json"),
    (["--tokenizer", "."], "can't be read as a tokenizer.json: it is a folder"),
    (["--tokenizer", "/dev/zero"], "can't be read as a tokenizer.json: it is a device"),
]


@pytest.mark.parametrize(("options", "expected"), VALUES, ids=lambda value: str(value)[:30])
def test_invalid_options_are_errors(
    options: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    assert main([str(source), "--out", str(tmp_path / "out"), *options]) == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_the_home_of_an_unknown_user_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["a.jsonl", "--out", "~nobody-of-this-name/x"])
    assert left.value.code == 2
    assert "there is no user nobody-of-this-name" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["file", "nothing", "empty folder", "fifo"])
def test_verify_of_another_folder_is_an_error(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    if what == "file":
        path.write_text("text")
    elif what != "nothing":
        path.mkdir()
    if what == "fifo":
        os.mkfifo(path / "meta.json")
    assert main(["--verify", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


WHERE = """
import os
os.environ.pop("XDG_CACHE_HOME", None)
os.environ.pop("HOME", None)
from torchtitan_lite.config.schema import DataConfig
from torchtitan_lite.data.prepare.cache import cache_folder
from torchtitan_lite.errors import DataError
os.setresuid(54321, 54321, 54321)
try:
    print(cache_folder(DataConfig()))
except DataError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without a name")
@pytest.mark.extended
def test_a_user_without_a_home_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WHERE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert "there is no default folder, because HOME is not set" in done.stdout, done.stderr
    assert 'data.cache_dir = "/tmp/cache"' in done.stdout
    with pytest.raises(DataError, match=r"data\.cache_dir: the home folder in ~nobody-of-this-name is unknown"):
        cache_folder(DataConfig(cache_dir="~nobody-of-this-name"))


# --- bytes that were changed at random --------------------------------------------------------------------------


def _parquet_bytes(tmp_path: Path) -> bytes:
    return write(tmp_path / "seed.parquet", TEXTS[:50]).read_bytes()


SEEDS: dict[str, Callable[[Path], bytes]] = {
    "a.parquet": _parquet_bytes,
    "a.jsonl.gz": lambda _: gzip.compress(as_jsonl(TEXTS[:50])),
    "a.jsonl.zst": lambda _: zstandard.compress(as_jsonl(TEXTS[:50])),
    "a.csv": lambda _: as_csv(TEXTS[:50]),
    "a.txt": lambda _: "".join(TEXTS[:50]).encode(),
}


def spoiled(content: bytes, chance: random.Random) -> bytes:
    """Cut, overwritten, doubled or mixed."""
    data = bytearray(content)
    for _ in range(chance.randrange(1, 8)):
        data = data or bytearray(b"\0")
        at = chance.randrange(len(data))
        what = chance.randrange(5)
        if what == 0:
            data[at] = chance.randrange(256)
        elif what == 1:
            data[at : at + chance.randrange(40)] = chance.randbytes(chance.randrange(40))
        elif what == 2:
            data = data[: max(at, 1)]
        elif what == 3:
            data[at:at] = data[chance.randrange(len(data)) :][:100]
        else:
            data[at : at + 8] = b"\xff" * 8
    return bytes(data)


ROUNDS = [(60, 0), pytest.param(4000, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("rounds", "seed"), ROUNDS)
@pytest.mark.parametrize("name", SEEDS)
def test_spoiled_files_are_problems_and_no_tracebacks(name: str, rounds: int, seed: int, tmp_path: Path) -> None:
    content, chance = SEEDS[name](tmp_path), random.Random(seed)
    for _ in range(rounds):
        (tmp_path / name).write_bytes(spoiled(content, chance))
        with contextlib.suppress(UserError):  # documents and problems, and no other exception than ours
            for chunk in readers.chunks(Corpus((tmp_path / name,)), 1 << 20):
                list(readers.decode(chunk, ["text"], ""))


@pytest.mark.parametrize(("rounds", "seed"), ROUNDS)
@pytest.mark.parametrize(
    ("name", "use"), [("meta.json", read_meta), ("tokenizer.json", lambda folder: load(folder / "tokenizer.json"))]
)
def test_a_spoiled_meta_or_tokenizer_is_a_message(
    name: str, use: Callable[[Path], object], rounds: int, seed: int, tmp_path: Path
) -> None:
    succeeds(write(tmp_path / "a.jsonl", TEXTS[:50]), "--out", tmp_path / "out", "--tokenizer", "bytes")
    file, chance = tmp_path / "out" / name, random.Random(seed)
    content = file.read_bytes()
    for _ in range(rounds):
        file.write_bytes(spoiled(content, chance))
        with contextlib.suppress(UserError):
            use(tmp_path / "out")
