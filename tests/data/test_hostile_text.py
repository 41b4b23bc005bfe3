"""Malformed files and invalid values give a message with the place, and exit code 2."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.config.test_hostile_input import damaged
from tests.data.test_data import decoded
from tests.data.test_prepare import TEXTS, as_jsonl, succeeds, write
from torchtitan_lite.data.prepare.documents import Document, documents, usable
from torchtitan_lite.data.prepare.texts import Corpus
from torchtitan_lite.errors import UserError

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
        ("a.csv", csv_of(b"\n").replace(b"id,text", b"id,text,more")),  # which no row has
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


PARQUET: list[tuple[list[object], str]] = [
    ([TEXTS, TEXTS], 'has 2 columns "text"; which one holds the text is ambiguous'),
    ([[*TEXTS, None]], 'row 401: "text" should be text, but is null'),
    ([[1] * 400], 'row 1: "text" should be text, but is 1'),
    ([[b"a"]], 'row 1: "text" should be text, but is "b\'a\'"'),
]


@pytest.mark.parametrize(("columns", "expected"), PARQUET, ids=["two columns", "null", "numbers", "bytes"])
def test_bad_columns_of_parquet_are_errors(
    columns: list[list[object]], expected: str, tmp_path: Path, refuses: Callable[..., str]
) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names=["text"] * len(columns))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert expected in refuses(tmp_path / "a.parquet", "--out", tmp_path / "out", "--tokenizer", "bytes")


VALUES: list[tuple[list[str], str]] = [
    (["--train-tokenizer", "3000000000"], "--train-tokenizer 3000000000 should be at least 257"),
    (["--train-tokenizer", "256"], "--train-tokenizer 256 should be at least 257"),
    (
        ["--sentinels", "--tokenizer", "a"],
        "--sentinels is for a tokenizer that is trained here; leave it out with --tok",
    ),
    (["--val-fraction", "0"], "--val-fraction 0.0 should be between 0 and 1, e.g. 0.05"),
    (["--val-fraction", "1"], "--val-fraction 1.0 should be between 0 and 1"),
    (["--val-fraction", "nan"], "should be between 0 and 1"),
    (["--out", "."], "--out . should name a new folder, e.g. --out prepared"),
    (["--out", "/"], "--out / should name a new folder, e.g. --out /prepared"),
    (["--out", "a/.."], "should name a new folder"),
    (["--tokenizer", "no.json"], "can't be read as a tokenizer.json"),
    (["--tokenizer", "."], "can't be read as a tokenizer.json: [Errno 21] Is a directory"),
]


@pytest.mark.parametrize(("options", "expected"), VALUES, ids=lambda value: str(value)[:30])
def test_invalid_options_are_errors(
    options: list[str], expected: str, tmp_path: Path, refuses: Callable[..., str]
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    assert expected in refuses(source, "--out", tmp_path / "out", *options)
    assert not list(tmp_path.glob("out*"))


def test_verify_of_another_folder_is_an_error(tmp_path: Path, refuses: Callable[..., str]) -> None:
    path = tmp_path / "x"
    contents: list[tuple[Callable[[], object], str]] = [
        (path.touch, " is not a folder of prepared data\n"),
        (path.unlink, " is not a folder of prepared data\n"),
        (path.mkdir, ": the prepared data is damaged ([Errno 2] No such"),
    ]
    for change, expected in contents:
        change()
        assert refuses("--verify", path).startswith(f"prepare: {path}{expected}")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.txt"])
def test_spoiled_files_are_problems_and_no_tracebacks(name: str, tmp_path: Path) -> None:
    for content in damaged(write(tmp_path / name, TEXTS[:50]).read_bytes()):
        (tmp_path / name).write_bytes(content)
        with contextlib.suppress(UserError):  # documents and problems, and no other exception than ours
            list(documents(Corpus((tmp_path / name,))))


def test_half_a_surrogate_pair_costs_only_its_own_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one", "x": "\\ud83d"}\n{"text": "\\ud83d"}\n{"text": " "}\n')
    found = list(documents(Corpus((tmp_path / "a.jsonl",))))
    assert [item.texts[0] if isinstance(item, Document) else item.detail for item in found] == [
        "one",
        "is not valid text: surrogates not allowed",
        " ",
    ]


def test_a_text_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BOM + b"one\ntwo\n")
    assert "".join(document.texts[0] for document in usable(Corpus((tmp_path / "a.txt",)))) == "one\ntwo\n"
