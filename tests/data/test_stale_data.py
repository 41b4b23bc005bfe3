"""Text that changes while it is prepared, and preparations that are killed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_data import decoded, make
from tests.data.test_prepare import TEXTS, contents, succeeds
from tests.data.test_recorded_data import letters
from torchtitan_lite.data.prepare import folder as folders
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.errors import DataError


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


KILLED: dict[str, list[str]] = {
    "with unknown tokens": ["--tokenizer", "letters.json"],
    "with a trained tokenizer": ["--train-tokenizer", "300"],
    "pairs": ["--tokenizer", "bytes", "--source-key", "text", "--target-key", "start"],
    "held-out files": ["--tokenizer", "bytes", "--held-out", "val.jsonl"],
    "a text that changes": ["--train-tokenizer", "301"],
}


@pytest.mark.parametrize("name", KILLED)
def test_a_preparation_resumes_where_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after each of its batches, with copies, empty texts and files, and what can't be used in any file.

    If the text has changed since, it begins anew.
    """
    rows = [json.dumps({"text": text, "start": text[:12]}) for text in ["", *TEXTS[:30], " ", *TEXTS[:9], "document"]]
    for number, lines in enumerate((rows[:7], [], ["no json", *rows[7:], "{}"], rows[3:20], ["[]"])):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "val.jsonl").write_text("\n".join([*rows[3:6], "no json"]))
    letters().save(str(tmp_path / "letters.json"))
    monkeypatch.chdir(tmp_path)
    synced = list[str]()  # not really: eight files, after each batch
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    monkeypatch.setattr(folders, "BATCH_BYTES", 3072)
    monkeypatch.setattr(folders, "COMMIT_EVERY_S", 0.0)
    honest, codes = folders.Writer.add, list[int]()
    command = [*(f"{number}.jsonl" for number in range(5)), "--on-error", "skip", *KILLED[name], "--out"]

    def once(self: folders.Writer, batch: folders.Batch, *args: Any) -> None:
        added.append(batch)
        if len(added) > 1:
            raise KeyboardInterrupt
        honest(self, batch, *args)

    while codes[-1:] != [0]:
        added = list[folders.Batch]()
        with monkeypatch.context() as patch:
            patch.setattr(folders.Writer, "add", once)
            codes.append(main([*command, "out"]))
        if len(codes) == 3 and name == "a text that changes":
            replaced(tmp_path / "0.jsonl", b"document 0", b"DOCUMENT 0")
        for file in tmp_path.glob("out.partial/*.[bil]*"):  # .bin, .idx and .log
            # not committed; or lost
            file.write_bytes(b"" if len(codes) == 3 and name == "pairs" else file.read_bytes() + b"torn" * 1000)
        assert len(codes) < 20, "it begins anew each time"
    assert codes == [130] * (len(codes) - 1) + [0]
    assert len(codes) > 5
    succeeds(*command, "straight")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")
    assert {str(tmp_path), *(f"{tmp_path}/straight.partial{of}" for of in ("", "/train.idx", "/val.idx"))} <= {*synced}
