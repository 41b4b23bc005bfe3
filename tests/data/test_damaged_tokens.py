"""Damage in prepared data that the quick check at the start does not cover is found when the data is read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from torchtitan_lite.data import token_files
from torchtitan_lite.data.packing import damage, pack
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.errors import DataError


@pytest.fixture
def folder(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a vocabulary of 257, of whose files the first and the last bytes are the spots."""
    monkeypatch.setattr(token_files, "_SPOTS", 2)
    assert main([str(text), "--out", str(tmp_path / "data"), "--tokenizer", "bytes"]) == 0
    return tmp_path / "data"


def overwrite(file: Path, place: int, value: int) -> None:
    tokens = np.fromfile(file, np.uint16)
    tokens[place] = value
    tokens.tofile(file)


def test_a_flipped_token_is_named_where_it_is_read(folder: Path, refuses: Callable[..., str]) -> None:
    file = folder / "train.bin"
    bad = 32 * 200 + 5
    overwrite(file, bad, 60_000)
    read_meta(folder)  # the quick look passes
    samples = Samples(folder, "train", 32)
    expected = rf"train\.bin is damaged: token {bad:,} \(at byte {2 * bad:,}\) is 60000, but the vocabulary has 257"
    with pytest.raises(DataError, match=expected):
        samples.draw(np.array([bad // 32]), None)
    assert len(samples.draw(np.array([bad // 32 + 1]), None).tokens) == 1
    said = refuses("--verify", folder)
    assert "the prepared data is damaged (train.bin has changed since it was made)" in said
    boundary = 32 * 210
    overwrite(file, boundary, 257)
    with pytest.raises(DataError, match=rf"token {boundary:,} .* is 257,"):  # only as a target, the last one
        samples.draw(np.array([boundary // 32 - 1]), None)


def test_an_index_that_can_not_be_written_is_named_and_what_a_kill_left_is_replaced(folder: Path) -> None:
    meta = read_meta(folder)
    (folder / f"packed-32-{meta.tokens_sha256[:12]}.partial").mkdir()
    assert damage(pack(folder, meta, 32)) == []
    (folder / f"packed-33-{meta.tokens_sha256[:12]}.partial").touch()
    with pytest.raises(DataError, match='data.packing = "best_fit" writes an index to .*, which is not possible: '):
        pack(folder, meta, 33)


def test_verify_reads_the_index_of_packed_documents_and_every_hash(folder: Path, refuses: Callable[..., str]) -> None:
    """A start compares the spots of large files only."""
    index = pack(folder, read_meta(folder), 32)
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
