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
from torchtitan_lite.data import packing
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.prepare import folder as folders
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.token_files import read_meta
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


def test_a_preparation_resumes_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, added = interrupted(tmp_path, monkeypatch), list[int]()
    honest = folders.Writer.add
    for name in ("train.bin", "val.idx", "skipped.log"):
        with (tmp_path / "out.partial" / name).open("ab") as stream:
            stream.write(b"torn" * 100_000)  # not committed

    def noted(self: folders.Writer, batch: folders.Batch, *args: Any) -> None:
        added.append(len(batch.items))
        honest(self, batch, *args)

    monkeypatch.setattr(folders.Writer, "add", noted)
    succeeds(source, "--out", tmp_path / "out", *QUIET)
    resumed = sum(added)
    succeeds(source, "--out", tmp_path / "straight", *QUIET)
    assert 0 < resumed < sum(added) - resumed == len(TEXTS) + 3
    assert read_meta(tmp_path / "out").skipped == {"not JSON": 1, 'no "text"': 2}
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
