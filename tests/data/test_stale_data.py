"""Stale or damaged prepared data is noticed: changed text, cut or overwritten files, foreign folders."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_data import decoded, make
from tests.data.test_prepare import TEXTS, as_jsonl, contents, succeeds, write
from tests.data.test_recorded_data import letters
from torchtitan_lite.data import packing
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.prepare import folder as folders
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.errors import DataError

QUIET = ["--tokenizer", "bytes", "--on-error", "skip"]


# --- other text of the same name, size and time -----------------------------------------------------------------


def replaced(file: Path, old: bytes, new: bytes) -> None:
    """Other text, which the size and the time of change do not show."""
    info, before = file.stat(), file.read_bytes()
    assert old in before
    file.write_bytes(before.replace(old, new))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)


def test_text_replaced_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("an apple fell from the tree\n" * 400)
    honest = folders.Writer.add

    def change(self: folders.Writer, *args: Any) -> None:
        honest(self, *args)
        replaced(tmp_path / "a.txt", b"apple", b"peach")

    with monkeypatch.context() as patch:
        patch.setattr(folders.Writer, "add", change)
        with pytest.raises(DataError, match="the text was changed while it was being read"):
            make(tmp_path / "a.txt", tmp_path / "cache", 257)
    assert not list((tmp_path / "cache").glob("*.partial"))
    assert "peach" in "".join(decoded(make(tmp_path / "a.txt", tmp_path / "cache", 257), "train"))


def test_a_part_of_other_text_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = interrupted(tmp_path, monkeypatch)
    replaced(source / "b.jsonl", b"document 39", b"DOCUMENT 39")
    replaced(source / "a.jsonl", b"document 0:", b"DOCUMENT 0:")
    succeeds(source, "--out", tmp_path / "out", *QUIET)
    texts = decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val")
    assert sum(text.startswith("DOCUMENT 0:") for text in texts) == 1
    assert not any(text.startswith("document 0:") for text in texts)


# --- what a kill left -------------------------------------------------------------------------------------------


def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The text of a preparation that ends after two batches, in the second of its files."""
    monkeypatch.setattr(folders, "BATCH_BYTES", 4096)
    source, batches = tmp_path / "in", 0
    write(source / "b.jsonl", TEXTS[20:])
    (source / "a.jsonl").write_bytes(as_jsonl(TEXTS[:20]) + b"no json\n{}\n[]\n")
    honest = folders.Writer.add

    def stopped(self: folders.Writer, *args: Any) -> None:
        nonlocal batches
        batches += 1
        if batches == 3:
            raise KeyboardInterrupt
        honest(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(folders, "COMMIT_EVERY_S", 0.0)
        patch.setattr(folders.Writer, "add", stopped)
        assert main([str(source), "--out", str(tmp_path / "out"), *QUIET]) == 130
    progress = json.loads((tmp_path / "out.partial/progress.json").read_bytes())
    assert (progress["file"], progress["number"] > 0) == (1, True)
    return source


KILLED: dict[str, list[str]] = {
    "with unknown tokens": ["--tokenizer", "letters.json"],
    "with a trained tokenizer": ["--train-tokenizer", "300"],
    "pairs": ["--tokenizer", "bytes", "--source-key", "text", "--target-key", "start"],
    "held-out files": ["--tokenizer", "bytes", "--held-out", "val.jsonl"],
}


@pytest.mark.parametrize("name", KILLED)
def test_a_preparation_resumes_where_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after each of its batches, with copies, empty texts and files, and what can't be used in any file."""
    rows = [json.dumps({"text": text, "start": text[:12]}) for text in ["", *TEXTS[:30], " ", *TEXTS[:9], "document"]]
    for number, lines in enumerate((rows[:7], [], ["no json", *rows[7:], "{}"], rows[3:20], ["[]"])):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "val.jsonl").write_text("\n".join(rows[3:6]))
    letters().save(str(tmp_path / "letters.json"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # of eight files, after each batch
    monkeypatch.setattr(folders, "BATCH_BYTES", 3072)
    monkeypatch.setattr(folders, "COMMIT_EVERY_S", 0.0)
    honest, codes = folders.Writer.add, list[int]()
    command = [*(f"{number}.jsonl" for number in range(5)), "--on-error", "skip", *KILLED[name], "--out"]
    succeeds(*command, "straight")

    def once(self: folders.Writer, batch: folders.Batch, *args: Any) -> None:
        added.append(batch)
        if len(added) > 1:
            raise KeyboardInterrupt
        honest(self, batch, *args)

    monkeypatch.setattr(folders.Writer, "add", once)
    while codes[-1:] != [0]:
        added = list[folders.Batch]()
        codes.append(main([*command, "out"]))
        for file in tmp_path.glob("out.partial/*.[bil]*"):  # .bin, .idx and .log
            file.write_bytes(file.read_bytes() + b"torn" * 1000)  # not committed
        assert len(codes) < 20, "it begins anew each time"
    assert codes == [130] * (len(codes) - 1) + [0]
    assert len(codes) > 5
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("train.bin", None), ("val.bin", b""), ("train.idx", b"12345678"), ("val.idx", None)),
        *(("progress.json", damage) for damage in (b"", b'{"made_from": 3}', b"\xff")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_damaged_part_is_made_again(
    name: str, damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = interrupted(tmp_path, monkeypatch)
    if damage is None:
        (tmp_path / "out.partial" / name).unlink()
    else:
        (tmp_path / "out.partial" / name).write_bytes(damage)
    succeeds(source, "--out", tmp_path / "out", *QUIET)
    succeeds(source, "--out", tmp_path / "straight", *QUIET)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


# --- the index of packed documents ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("lines")
    write(base / "a.jsonl", TEXTS)
    succeeds(base / "a.jsonl", "--out", base / "out", *QUIET)
    return base / "out"


@pytest.fixture
def packed(lines: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A prepared folder, and its index for sequences of 128."""
    shutil.copytree(lines, tmp_path / "out", ignore=shutil.ignore_patterns("packed*"))
    PackedSamples(tmp_path / "out", "train", 128)
    (index,) = (path for path in (tmp_path / "out").glob("packed-128-*") if path.is_dir())
    return tmp_path / "out", index


@pytest.mark.parametrize("name", packing.NAMES)
def test_an_overwritten_index_is_found(name: str, packed: tuple[Path, Path]) -> None:
    folder, index = packed
    before = contents(index)
    numbers = np.fromfile(index / name, np.int64).reshape(-1, 2)
    at = len(numbers) // 2
    numbers[[at - 1, at]] = numbers[[at, at - 1]]
    numbers.tofile(index / name)
    for split in ("train", "val"):
        with pytest.raises(DataError, match=rf"packed-128-.*damaged \({name} has changed since it was made\); delete"):
            PackedSamples(folder, split, 128)
    (index / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing"):
        PackedSamples(folder, "train", 128)
    shutil.rmtree(index)
    PackedSamples(folder, "train", 128)
    assert contents(index) == before


# --- folders that are not ours ----------------------------------------------------------------------------------
