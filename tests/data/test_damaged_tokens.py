"""Damage in prepared data that the quick check at the start does not cover is found when the data is read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from torchtitan_lite.data.packing import damage, pack
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import _SPOT_BYTES, _SPOTS, read_meta
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
