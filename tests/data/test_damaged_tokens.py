"""Damage in prepared data that the quick check at the start does not cover is found when the data is read."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from torchtitan_lite.data.packing import damage, pack
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import _SPOT_BYTES, _SPOTS, TokenFiles, document_ends, documents, read_meta
from torchtitan_lite.errors import DataError


@pytest.fixture
def folder(text: Path, tmp_path: Path) -> Path:
    """A folder with a vocabulary of 257 whose training tokens are more than the spots."""
    assert main([str(text), "--out", str(tmp_path / "data"), "--tokenizer", "bytes"]) == 0
    return tmp_path / "data"


def unseen(file: Path) -> np.ndarray:
    """Which tokens (uint16) of a file no spot covers."""
    size = file.stat().st_size
    free = np.ones(size // 2, np.bool_)
    for i in range(_SPOTS):
        begin = (size - _SPOT_BYTES) * i // (_SPOTS - 1)
        free[begin // 2 : -(-(begin + _SPOT_BYTES) // 2)] = False
    return free


def overwrite(file: Path, where: np.ndarray, value: int) -> None:
    tokens = np.fromfile(file, np.uint16)
    tokens[where] = value
    tokens.tofile(file)


def test_a_flipped_token_is_named_where_it_is_read(folder: Path, refuses: Callable[..., str]) -> None:
    file = folder / "train.bin"
    bad = int(np.flatnonzero(unseen(file))[40])
    overwrite(file, np.array([bad]), 60_000)
    read_meta(folder)  # the quick look passes
    samples = Samples(folder, "train", 32)
    expected = rf"train\.bin is damaged: token {bad:,} \(at byte {2 * bad:,}\) is 60000, but the vocabulary has 257"
    with pytest.raises(DataError, match=expected):
        samples.draw(np.array([bad // 32]), None)
    assert len(samples.draw(np.array([bad // 32 + 1]), None).tokens) == 1
    said = refuses("--verify", folder)
    assert "the prepared data is damaged (train.bin has changed since it was made)" in said
    boundary = next(i for i in np.flatnonzero(unseen(file)).tolist() if i % 32 == 0 and i // 32 > bad // 32 + 2)
    overwrite(file, np.array([boundary]), 257)
    with pytest.raises(DataError, match=rf"token {boundary:,} .* is 257,"):  # only as a target, the last one
        samples.draw(np.array([boundary // 32 - 1]), None)


def test_ends_of_documents_that_can_not_be_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_lite.data.token_files._ENDS", 2)  # the third one is the first of a block
    meta, file = read_meta(folder), folder / "train.idx"
    ends = np.fromfile(file, np.int64)
    changed = ends.copy()
    changed[2] = changed[1]
    changed.tofile(file)
    with pytest.raises(DataError, match=r"train\.idx is damaged: document 2 does not end after the one before; "):
        document_ends(folder, meta, "train")
    ends[:-1].tofile(file)
    expected = f"the last document ends at token {ends[-2]:,} instead of {ends[-1]:,}; "
    with pytest.raises(DataError, match=expected):
        document_ends(folder, meta, "train")
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"train\.idx can't be read"):
        document_ends(folder, meta, "train")
    ends.tofile(file)
    every = [*documents(folder, meta, "train")]
    assert sum(map(len, every)) == ends[-1] - 1 - len(ends)
    assert [*documents(folder, meta, "train", 3, most=5)] == [tokens[:5] for tokens in every[::3]]


def test_tokens_that_are_cut_off_later_are_named(folder: Path) -> None:
    meta = read_meta(folder)
    stream, n = TokenFiles(folder, meta, "val"), meta.tokens("val")
    stream.read(n - 2, n)
    os.truncate(folder / "val.bin", 2 * n - 2)
    stream.read(0, n - 1)
    with pytest.raises(DataError, match=rf"val\.bin ends before token {n:,}: it was truncated after the run started"):
        stream.read(n - 2, n)


def test_an_index_that_can_not_be_written_or_has_no_hashes_is_named(folder: Path) -> None:
    meta = read_meta(folder)
    (folder / f"packed-32-{meta.tokens_sha256[:12]}.partial").mkdir()  # of a start that was killed
    index = pack(folder, meta, 32, lambda _: None)
    assert damage(index) == []
    (index / "hashes.json").write_text("[]")
    expected = (
        "the index of packed documents is damaged (hashes.json has changed since it was made); delete this folder"
    )
    with pytest.raises(DataError, match=re.escape(expected)):
        pack(folder, meta, 32, lambda _: None)
    (folder / f"packed-33-{meta.tokens_sha256[:12]}.partial").touch()
    with pytest.raises(DataError, match='data.packing = "best_fit" writes an index to .*, which is not possible: '):
        pack(folder, meta, 33, lambda _: None)


def test_verify_reads_the_index_of_packed_documents_and_every_hash(folder: Path, refuses: Callable[..., str]) -> None:
    """A start compares the spots of large files only."""
    index = pack(folder, read_meta(folder), 32, lambda _: None)
    assert main(["--verify", str(folder)]) == 0
    hashes = json.loads((index / "hashes.json").read_bytes())
    hashes["val.rows"]["spots"] = hashes["val.pieces"]["spots"]
    (index / "hashes.json").write_text(json.dumps(hashes))
    pieces = bytearray((index / "val.pieces").read_bytes())
    pieces[-1] ^= 1
    (index / "val.pieces").write_bytes(pieces)
    said = refuses("--verify", folder)
    for name in ("val.rows", "val.pieces"):
        assert f"{index}: the index of packed documents is damaged ({name} has changed since it was made)" in said
    assert "prepare the text again" not in said, "the tokens are good"
