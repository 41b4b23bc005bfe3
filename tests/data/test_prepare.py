"""The command that prepares a data set: formats, errors, and kills."""

import csv
import gzip
import io
import json
import os
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from tests.data.test_data import decoded, make
from tests.helpers import python, succeeded
from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.prepare import documents
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.summary import verify
from torchtitan_lite.data.prepare.texts import Corpus
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.errors import DataError

TEXTS = [f'document {i}: "quoted", two\nlines, h\u00e4\u00df \u4e2d \U0001f600\n' for i in range(400)]


def as_jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def as_csv(texts: list[str]) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows([("id", "text"), *enumerate(texts)])
    return stream.getvalue().encode()


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, "zstd", asbytes=True))


def write(path: Path, texts: list[str]) -> Path:
    """The texts in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=100)
        return path
    content = "".join(texts).encode() if path.suffix == ".txt" else as_jsonl(texts)
    if ".csv" in path.suffixes:
        content = as_csv(texts)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":  # of two frames
        content = zstd(content[:1000]) + zstd(content[1000:])
    path.write_bytes(content)
    return path


def succeeds(*arguments: object) -> None:
    assert main(list(map(str, arguments))) == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# --- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.csv", "a.csv.gz"])
def test_every_format_gives_the_same_documents(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in" / name, TEXTS)
    succeeds(source, "--out", tmp_path / "out", "--train-tokenizer", 350)
    train, val = decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(TEXTS)
    assert [text for text in TEXTS if text in set(train)] == train, "not in the order of the file"
    meta = read_meta(tmp_path / "out")
    assert (meta.documents, meta.val_documents) == (400, len(val))
    assert (meta.text_bytes, meta.val_text_bytes) == tuple(len("".join(texts).encode()) for texts in (TEXTS, val))
    assert meta.vocab_size == 350
    progress = list[int]()
    list(documents.documents(Corpus((source,)), count=progress.append))
    assert sum(progress) == source.stat().st_size or name == "a.parquet"  # whose end is read more than once
    assert not verify(tmp_path / "out")


def test_what_was_made_is_printed_with_three_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(as_jsonl([text * 4 for text in TEXTS]).replace(b'"text"', b'"body"'))
    succeeds(source, "--out", out, "--tokenizer", "bytes", "--text-key", "body")
    succeeds("--verify", out)
    train, n = decoded(out, "train"), 4 * len("".join(TEXTS).encode())
    made = (
        f"{n:,} bytes -> {n + 402:,} tokens of {n / (n + 402):.2f} bytes; "
        f"400 documents, {400 - len(train)} of them for validation"
    )
    assert capsys.readouterr().out.splitlines() == [
        made,
        f"vocabulary 257, tokenizer {read_meta(out).tokenizer_sha256[:12]}, in {out}",
        *(f"document: {text.encode()[:60].decode()!r}" for text in train[:: -(-len(train) // 3)]),
        f"{out}: complete and undamaged. {made}",
    ]
    assert " ".join(sorted(contents(out))) == (
        "meta.json origins.json tokenizer.json train.bin train.idx train.origins val.bin val.idx val.origins"
    )


def test_texts_of_a_mixture_share_the_tokenizer_that_all_of_them_give(tmp_path: Path) -> None:
    """As if they were one text."""
    sources = {str(write(tmp_path / f"{i}.jsonl", TEXTS[i::2])): float(i + 1) for i in range(2)}
    data = prepare_all(
        DataConfig(sources=sources, cache_dir=str(tmp_path / "cache")), TokenizerConfig(vocab_size=330), print
    )
    assert data.hashes() == {
        f"data.sources {s.name}": f"{s.meta.tokens_sha256[:16]} x {s.weight}" for s in data.sources
    }
    assert [(s.name, s.weight, s.meta.documents) for s in data.sources] == [(*item, 200) for item in sources.items()]
    one, both = (
        read_meta(make(path, tmp_path / "cache", 330)).tokenizer_sha256 for path in ([*sources][:1], [*sources])
    )
    assert one != data.tokenizer_sha256 == both


def test_held_out_files_are_the_validation_text(tmp_path: Path, refuses: Callable[..., str]) -> None:
    train, val = (
        write(tmp_path / "a.jsonl", TEXTS[:300]),
        write(tmp_path / "b.jsonl", ["zqzq \u4e2d" * 500, *TEXTS[300:]]),
    )
    out = tmp_path / "out"
    succeeds(train, "--held-out", val, "--out", out, "--tokenizer", "bytes")
    assert decoded(out, "train") == TEXTS[:300]
    assert decoded(out, "val") == ["zqzq \u4e2d" * 500, *TEXTS[300:]], "a token per byte spells characters it never saw"
    assert "made from different text or options" in refuses(train, val, "--out", out, "--tokenizer", "bytes")
    assert "a.jsonl: line 1: is also held out" in refuses(
        train, "--held-out", train, "--out", tmp_path / "x", "--tokenizer", "bytes"
    )
    succeeds(train, "--held-out", val, "--out", tmp_path / "bpe", "--train-tokenizer", 280)
    vocabulary = Tokenizer.from_file(str(tmp_path / "bpe/tokenizer.json")).get_vocab()
    assert not [entry for entry in vocabulary if "zq" in entry], "the tokenizer was trained on held-out text"


@pytest.mark.extended
def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([f"word{i}" for i in range(70_000)])
    tokenizer.save(str(tmp_path / "large.json"))
    source = write(tmp_path / "a.jsonl", [f"{text} word69999" for text in TEXTS])
    succeeds(source, "--out", tmp_path / "out", "--tokenizer", tmp_path / "large.json")
    tokens = np.fromfile(tmp_path / "out/train.bin", np.uint32)
    assert tokens.max() > 2**16
    assert len(tokens) == read_meta(tmp_path / "out").train_tokens


def test_documents_stay_in_their_split_when_data_is_added(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.jsonl", TEXTS[:200]), write(tmp_path / "two.jsonl", TEXTS[200:])
    succeeds(one, "--out", tmp_path / "first", "--tokenizer", "bytes", "--val-fraction", 0.2)
    succeeds(two, one, "--out", tmp_path / "second", "--tokenizer", "bytes", "--val-fraction", 0.2)
    first, second = (set(decoded(tmp_path / name, "val")) for name in ("first", "second"))
    assert first == second & set(TEXTS[:200])
    assert 20 < len(first) < 60


def test_a_tokenizer_learns_nothing_from_validation(tmp_path: Path) -> None:
    texts = [f"{i} zebrafish{i} quagga{i}" for i in range(200)]
    held_out = "--held-out", write(tmp_path / "other.jsonl", ["another text"])

    def learned(name: str, texts: list[str], *options: object) -> dict[str, int]:
        source, out = write(tmp_path / f"{name}.jsonl", texts), tmp_path / name
        succeeds(source, "--out", out, "--train-tokenizer", 330, *options)
        return Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab()

    half = learned("half", texts, "--val-fraction", 0.5)
    assert half == learned("training", decoded(tmp_path / "half", "train"), *held_out)
    assert half != learned("all", texts, *held_out)


def test_a_tokenizer_that_drops_characters_is_refused_and_one_that_marks_them_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import models, pre_tokenizers

    source = write(tmp_path / "a.jsonl", ["known words", "known \u4e2d words"] * 50)
    vocabulary = {letter: i for i, letter in enumerate(" knowrds")} | {"</s>": 20, "<unk>": 21}
    for unknown, code in ((None, 2), ("<unk>", 0)):
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
        tokenizer.save(str(tmp_path / "given.json"))
        command = [str(source), "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "given.json")]
        assert main(command) == code
    said = capsys.readouterr()
    assert "silently drops unknown characters" in said.err
    assert read_meta(tmp_path / "out").unknown_tokens == 50
    assert read_meta(tmp_path / "out").vocab_size == 22
    assert "unknown             50  tokens" in said.out


def test_a_copy_of_a_held_out_document_is_named_or_left_out(tmp_path: Path, refuses: Callable[..., str]) -> None:
    train, val = write(tmp_path / "a.jsonl", TEXTS[:50]), write(tmp_path / "b.jsonl", [*TEXTS[60:70], TEXTS[7]])
    command = train, "--held-out", val, "--out", tmp_path / "out", "--tokenizer", "bytes"
    assert f"a.jsonl: line 8: is also held out: {val}: line 11; correct or remove it" in refuses(*command)
    succeeds(*command, "--on-error", "skip")
    assert decoded(tmp_path / "out", "train") == [*TEXTS[:7], *TEXTS[8:50]]
    assert TEXTS[7] in decoded(tmp_path / "out", "val")
    write(train, [TEXTS[7], TEXTS[60]])
    assert refuses(*command[:4], tmp_path / "x", *command[5:], "--on-error", "skip") == (
        "prepare: the text has 0 usable documents to train and 11 to validate, and needs some of both; 2 were left "
        f"out: {tmp_path}/x.partial/skipped.log; use more text, or another --val-fraction (data.val_fraction)\n"
    )


# --- text that can't be used ------------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'
ROW, UNREADABLE = "a row of the wrong length", "a file that can't be read to its end"
# by name: a file and its content, what is said of it, and how it is counted
BAD: dict[str, tuple[str, bytes, str, str]] = {
    "not UTF-8": ("a.txt", b"good\n" * 3 + b"gr\xfc\n", r"a\.txt: line 4: byte 0xfc is not utf-8", "not UTF-8"),
    "broken JSON": ("a.jsonl", GOOD + b'{"text": "cut\n' + GOOD, r"a\.jsonl: line 2: not JSON", "not JSON"),
    "JSON not UTF-8": (
        "a.jsonl",
        GOOD + b'{"text": "\xff"}\n',
        r"a\.jsonl: line 2: not JSON in UTF-8: invalid unicode",
        "not JSON",
    ),
    "nested JSON": ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", r"a\.jsonl: line 2: not JSON", "not JSON"),
    "missing key": (
        "a.jsonl",
        GOOD + b'{"body": "x", "id": 1}\n',
        'line 2: no "text": its keys are body, id; --text-key',
        'no "text"',
    ),
    "not an object": (
        "a.jsonl",
        GOOD + b'["text"]\n',
        r'a\.jsonl: line 2: no "text": it is not an object',
        'no "text"',
    ),
    "surrogate": (
        "a.jsonl",
        GOOD + b'{"text": "\\ud83d"}\n',
        "line 2: is not valid text: surrogates not allowed",
        "no text",
    ),
    "a list": ("a.jsonl", GOOD + b'{"text": [1, 2]}\n', r'line 2: "text" should be text, but is \[1, 2\]', "no text"),
    "null": ("a.jsonl", GOOD * 4 + b'{"text": null}\n', r'l: line 5: "text" should be text, but is null', "no text"),
    "empty text": ("a.jsonl", b'{"text": ""}\n', r'a\.jsonl: line 1: "text" should be text, but is ""', "no text"),
    "empty file": ("a.txt", b"", r"a\.txt: can't be read: is empty", UNREADABLE),
    "long JSON": (
        "a.jsonl",
        GOOD + b'{"text": "' + b"x" * 17_000_000 + b'"}\n',
        "line 2: is longer than 16,777,216 b",
        "a text that is too long",
    ),
    "truncated gzip": ("a.jsonl.gz", gzip.compress(GOOD * 500)[:-12], r"a\.jsonl\.gz: can't be read.*end", UNREADABLE),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(GOOD)[:12] + b"garbage!" * 9, r"l\.gz: can't be read", UNREADABLE),
    "truncated zstd": ("a.jsonl.zst", zstd(GOOD * 500)[:-6], r"\.zst: can't be read: Truncated compressed", UNREADABLE),
    "no zstd": ("a.jsonl.zst", b"plain text", r"a\.jsonl\.zst: can't be read", UNREADABLE),
    "truncated parquet": ("a.parquet", b"PAR1" + b"\0" * 100, r"a\.parquet: can't be read: ", UNREADABLE),
    "csv without the column": (
        "a.csv",
        b"id,body\n1,x\n",
        "a.csv: can't be read: no column .text.: its columns are id, body",
        UNREADABLE,
    ),
    "short row": ("a.csv", b"id,text\n1,good\n2\n", r"a\.csv: line 3: has 1 columns, its header has 2", ROW),
    "long row": ("a.csv", b"id,text\n1,good\n2,Hello, world\n", r"csv: line 3: has 3 columns, its header has 2", ROW),
    "long row, first column": ("a.csv", b"text,id\ngood,1\nHello, world,2\n", "line 3: has 3 columns, its header", ROW),
    "two columns": (
        "a.csv",
        b"text,text\ngood,good\n",
        'has 2 columns "text"; which one holds the text is ambiguous',
        UNREADABLE,
    ),
    "empty cell": ("a.csv", b"id,text\n1,good\n2,\n", 'a.csv: line 3: "text" should be text, but is ""', "no text"),
    "open quote": (
        "a.csv",
        b'id,text\n1,good\n2,"never\nclosed',
        r"a\.csv: can't be read after line 2: unexpected end",
        UNREADABLE,
    ),
    "csv not UTF-8": (
        "a.csv",
        b"id,text\n1,good\n2,gr\xfc\n",
        r"a\.csv: can't be read after line 2: 'utf-8' codec",
        UNREADABLE,
    ),
}


@pytest.mark.parametrize(("name", "content", "expected", "reason"), BAD.values(), ids=BAD)
def test_bad_input_is_named_or_skipped_and_listed(
    name: str, content: bytes, expected: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in/good.jsonl", TEXTS)
    (tmp_path / "in" / name).write_bytes(content)
    out = tmp_path / "out"
    command = [str(tmp_path / "in"), f"--out={out}", "--tokenizer=bytes"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error), error
    assert error.endswith(
        "; correct or remove it, or leave it out with python -m torchtitan_lite.data.prepare ... --on-error skip\n"
    )
    assert not out.exists()
    succeeds(*command, "--on-error", "skip")
    (listed,) = (out / "skipped.log").read_text().splitlines()
    assert re.search(expected, listed)
    assert read_meta(out).skipped == {reason: 1}
    assert f"\nskipped              1  {reason} (listed in {out / 'skipped.log'})\n" in capsys.readouterr().out
    documents = decoded(out, "train") + decoded(out, "val")
    assert set(TEXTS) <= set(documents)
    assert set(documents) - set(TEXTS) <= {"good"}
    assert not verify(out)


def test_a_cut_off_gzip_still_counts_what_came_before(tmp_path: Path) -> None:
    texts = TEXTS * 20
    whole = gzip.compress(as_jsonl(texts))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    *found, problem = documents.documents(Corpus((tmp_path / "a.jsonl.gz",)))
    assert isinstance(problem, documents.Problem)
    assert 100 < len(found) < len(texts)
    assert [item.texts[0] for item in found if isinstance(item, documents.Document)] == texts[: len(found)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_line_without_end_takes_no_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a hole: it has the size, and no bytes on the disk."""
    monkeypatch.setattr(documents, "LONGEST", 1 << 20)
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(1 << 26)
    corpus = Corpus((tmp_path / name,))
    tracemalloc.start()
    (problem,) = documents.documents(corpus)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(problem, documents.Problem)
    assert re.search(f"{name}: .*line 1:? is longer than ", problem.message(corpus))
    assert peak < 8 << 20


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_missing_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / name, TEXTS)
    for module in [module for module in sys.modules if module.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"need the package pyarrow, .*pip install 'torchtitan_lite\[data\]'"):
        prepare_all(DataConfig(path=str(tmp_path)), TokenizerConfig(vocab_size=257), print)


# --- made once, and whole ---------------------------------------------------------------------------------------


def test_an_existing_data_set_is_kept(tmp_path: Path, refuses: Callable[..., str]) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    command = [str(source), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main(command) == 0
    before, time = contents(tmp_path / "out"), source.stat().st_mtime_ns
    assert main(command) == 0
    write(source, [*TEXTS[:7], TEXTS[7].replace("7", "8"), *TEXTS[8:]])
    os.utime(source, ns=(time, time))
    assert "exists, made from different text or options; choose a different --out" in refuses(*command)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _: b"cut", "has 3 bytes instead of .*prepare the text again into"),
        (lambda tokens: tokens[::-1], "has changed since it was"),
        (lambda tokens: tokens[:-1] + b"\1", "has changed since it was"),  # the last byte
    ],
)
def test_cut_or_other_tokens_are_noticed_at_once(
    change: Callable[[bytes], bytes], expected: str, tmp_path: Path
) -> None:
    succeeds(write(tmp_path / "a.jsonl", TEXTS), "--out", tmp_path / "out", "--tokenizer", "bytes")
    file = tmp_path / "out/train.bin"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=rf"train\.bin {expected}"):
        read_meta(tmp_path / "out")


def test_the_number_of_threads_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", [text * 50 for text in TEXTS])
    for threads in ("1", "3"):
        monkeypatch.setenv("RAYON_NUM_THREADS", threads)
        options = "--train-tokenizer=500", f"--out={tmp_path / threads}"
        succeeded(python(str(source), *options, script="-m torchtitan_lite.data.prepare"))
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
