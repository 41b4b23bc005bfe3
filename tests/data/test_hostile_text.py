"""Malformed files and invalid values give a message with the place, and exit code 2."""

import contextlib
import os
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.test_data import decoded
from tests.data.test_prepare import TEXTS, as_jsonl, succeeds, write
from torchtitan_lite.config.schema import DataConfig
from torchtitan_lite.data.prepare import readers
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.cache import cache_folder
from torchtitan_lite.data.prepare.corpus import Corpus
from torchtitan_lite.errors import DataError, UserError

BOM = b"\xef\xbb\xbf"
ROWS = [f'row {i}, "quoted"\nand on' for i in range(60)]


def csv_of(end: bytes, between: bytes = b"", before: bytes = b"") -> bytes:
    cells = [b'"' + row.replace('"', '""').encode() + b'"' for row in ROWS]
    return before + b"id,text" + end + b"".join(between + b"%d,%s" % (i, c) + end for i, c in enumerate(cells))


def jsonl_of(between: bytes) -> bytes:
    return BOM + between.join(line + b"\n" for line in as_jsonl(ROWS).splitlines()) + between * 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", csv_of(b"\n", between=b"\n")),
        ("a.csv", csv_of(b"\r\n", between=b"\r\n")),
        ("a.csv", csv_of(b"\n", before=b"\n\n")),
        ("a.csv", csv_of(b"\n") + b"\n\n\n"),
        ("a.csv", csv_of(b"\n")[:-1]),
        ("a.csv", csv_of(b"\r\n")[:-2]),
        ("a.csv", csv_of(b"\n", before=BOM)),
        ("a.csv", csv_of(b"\r\n", before=BOM, between=b"\r\n")),
        *(("a.jsonl", jsonl_of(between)) for between in (b"\n", b"\r\n", b"  \t\n")),
    ],
)
def test_empty_lines_are_no_documents(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    succeeds(tmp_path / name, "--out", tmp_path / "out", "--tokenizer", "bytes")
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
    with pytest.raises(DataError, match=r"data\.cache_dir: the home folder in ~nobody-of-this-name is unknown"):
        cache_folder(DataConfig(cache_dir="~nobody-of-this-name"))


def test_verify_of_another_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    for change in (lambda: None, path.touch, path.unlink, path.mkdir, lambda: os.mkfifo(path / "meta.json")):
        change()
        assert main(["--verify", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


# --- bytes that were changed at random --------------------------------------------------------------------------


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


@pytest.mark.parametrize(("rounds", "seed"), [(60, 0), pytest.param(4000, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.txt"])
def test_spoiled_files_are_problems_and_no_tracebacks(name: str, rounds: int, seed: int, tmp_path: Path) -> None:
    content, chance = write(tmp_path / name, TEXTS[:50]).read_bytes(), random.Random(seed)
    for _ in range(rounds):
        (tmp_path / name).write_bytes(spoiled(content, chance))
        with contextlib.suppress(UserError):  # documents and problems, and no other exception than ours
            for chunk in readers.chunks(Corpus((tmp_path / name,)), 1 << 20):
                list(readers.decode(chunk, ["text"], ""))
