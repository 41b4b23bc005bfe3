"""Stale or damaged prepared data is noticed: changed text, cut or overwritten files, foreign folders."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.data.test_data import decoded, make
from tests.data.test_prepare import TEXTS, as_jsonl, contents, succeeds, write
from tests.data.test_recorded_data import letters
from tests.recorded import assert_recorded
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


def cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(folder, monkeypatch)


def finished(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    """A preparation that ends just before its last step."""
    with monkeypatch.context() as patch:
        write(folder / "in/b.jsonl", TEXTS)
        lines = [json.dumps({"text": text, "start": text[:12]}) for text in TEXTS]
        (folder / "in/b.jsonl").write_text("\n".join(lines))
        patch.setattr(Path, "rename", Mock(side_effect=KeyboardInterrupt))
        assert main([str(folder / "in"), "--out", str(folder / "out"), *map(str, options or QUIET)]) == 130


def finished_pairs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(folder, monkeypatch, "--source-key=text", "--target-key=start", "--tokenizer=bytes", "--on-error=skip")


def part(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "out.partial" / name).write_bytes(content)


SAME = "--tokenizer bytes --on-error skip"
# what a kill left, what happens to it, and the options of the next command
LEFT: dict[str, tuple[Callable[..., object], Callable[[Path], object], str]] = {
    "the same": (cut, lambda _: None, SAME),
    "a shorter text": (cut, lambda folder: write(folder / "in/b.jsonl", TEXTS[20:60]), SAME),
    "without the second file": (cut, lambda folder: (folder / "in/b.jsonl").unlink(), SAME),
    "without the first file": (cut, lambda folder: (folder / "in/a.jsonl").unlink(), SAME),
    "a file more": (cut, lambda folder: write(folder / "in/c.jsonl", TEXTS[:9]), SAME),
    "another share": (cut, lambda _: None, f"{SAME} --val-fraction 0.3"),
    "another key": (cut, lambda _: None, f"{SAME} --text-key id"),
    "another tokenizer": (cut, lambda _: None, "--train-tokenizer 300 --on-error skip"),
    "killed again": (cut, lambda folder: (folder / "out.partial/progress.json.new").write_text("{"), SAME),
    "made meanwhile": (cut, lambda folder: shutil.copytree(folder / "in", folder / "out"), SAME),
    "a file in its place": (
        lambda folder, _: write(folder / "in/a.jsonl", TEXTS),
        lambda folder: (folder / "out.partial").touch(),
        SAME,
    ),
    "a lock that nobody holds": (cut, lambda folder: (folder / ".out.lock").touch(), SAME),
    "at the end": (finished, lambda _: None, SAME),
    "at the end, a shorter text": (finished, lambda folder: write(folder / "in/b.jsonl", TEXTS[20:60]), SAME),
    "at the end of pairs": (finished_pairs, lambda _: None, f"{SAME} --source-key text --target-key start"),
    "no train.bin": (cut, lambda folder: (folder / "out.partial/train.bin").unlink(), SAME),
    "no val.idx": (cut, lambda folder: (folder / "out.partial/val.idx").unlink(), SAME),
    "half of train.idx": (cut, part("train.idx", b"12345678"), SAME),
    "an empty val.bin": (cut, part("val.bin", b""), SAME),
    "an empty progress.json": (cut, part("progress.json", b""), SAME),
    "a foreign progress.json": (cut, part("progress.json", b'{"made_from": 3}'), SAME),
    "no text in progress.json": (cut, part("progress.json", b"\xff"), SAME),
    "at the end, now pairs": (finished, lambda _: None, f"{SAME} --source-key text --target-key start"),
}


def test_what_a_kill_left_is_continued_or_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the folder is as if nothing had been left."""
    found: dict[str, list[str]] = {}
    for name, (kill, change, options) in LEFT.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        kill(folder, monkeypatch)
        change(folder)
        capsys.readouterr()
        code = main([str(folder / "in"), "--out", str(folder / "out"), *options.split()])
        said = "".join(capsys.readouterr()).replace(str(folder), "FOLDER")
        left = [str(one.relative_to(folder)) for one in sorted(folder.rglob("*")) if one.is_file() or one.suffix]
        found[name] = [
            f"exit code {code}",
            *re.sub("document: .*\n|tokenizer [0-9a-f]{12}, ", "", said).splitlines(),
            " ".join(left),
        ]
        again = main([str(folder / "in"), "--out", str(folder / "straight"), *options.split()])
        if code == again == 0:
            made, straight = contents(folder / "out"), contents(folder / "straight")
            assert {key for key in {**made, **straight} if made.get(key) != straight.get(key)} == set(), name
        found[name] += [f"straight: {again}"] * (again != code)
    assert_recorded(found, Path(__file__).with_name("recorded_kills.json"))


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
