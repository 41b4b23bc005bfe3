"""The command that prepares a data set: formats, errors, and kills."""

import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tokenizers import Tokenizer

from tests.data.test_data import decoded
from tests.helpers import python, succeeded
from torchtitan_lite.config.schema import DataConfig, TokenizerConfig
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.prepare import documents
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.prepare.texts import Corpus
from torchtitan_lite.errors import DataError

TEXTS = [f'document {i}: "quoted", two\nlines, h\u00e4\u00df \u4e2d \U0001f600\n' for i in range(400)]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def succeeds(*arguments: object) -> None:
    assert main(list(map(str, arguments))) == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# --- formats ----------------------------------------------------------------------------------------------------


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


def test_a_folder_that_another_process_prepares_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    with FileLock(tmp_path / ".out.lock"):
        assert main([str(source), "--out", str(out), "--tokenizer", "bytes"]) == 2
    assert capsys.readouterr().err == f"prepare: {out} is being prepared by another process\n"
    assert not out.exists()


# --- text that can't be used ------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [[{"text": "one"}, {"text": "two"}], {"text": "one\ntwo"}])
def test_the_command_that_makes_jsonl_of_a_json_file_works(content: Any, tmp_path: Path) -> None:
    file, wanted = tmp_path / "a.json", content if isinstance(content, list) else [content]
    file.write_text(json.dumps(content, indent=1))
    (problem,) = documents.documents(Corpus((file,)))
    assert isinstance(problem, documents.Problem)
    command = problem.detail.partition(" of it: ")[2].replace("FILE", str(file)).replace("python", sys.executable)
    subprocess.run(command, shell=True, check=True)
    found = documents.usable(Corpus((tmp_path / "a.json.jsonl",)))
    assert [document.texts for document in found] == [(row["text"],) for row in wanted]


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


def test_the_number_of_threads_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", [text * 50 for text in TEXTS])
    for threads in ("1", "3"):
        monkeypatch.setenv("RAYON_NUM_THREADS", threads)
        options = "--train-tokenizer=500", f"--out={tmp_path / threads}"
        succeeded(python(str(source), *options, script="-m torchtitan_lite.data.prepare"))
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
