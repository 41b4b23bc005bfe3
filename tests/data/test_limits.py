"""Limits on how much is handled at a time change no result: small ones are compared with brute force or the default."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_prepare import as_jsonl, succeeds
from torchtitan_lite.data import packing
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.token_files import document_ends, read_meta
from torchtitan_lite.models.loss import IGNORE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 2 to 60 tokens."""
    base, chance = tmp_path_factory.mktemp("limits"), random.Random(0)
    texts = [f"{chance.randbytes(30).hex()}"[: chance.randint(1, 59)] for _ in range(150)]
    (base / "a.jsonl").write_bytes(as_jsonl(texts))
    succeeds(base / "a.jsonl", "--out", base / "out", "--tokenizer", "bytes", "--val-fraction", 0.2)
    return base / "out"


# --- packing ----------------------------------------------------------------------------------------------------


def best_fit_fills(lengths: list[int], seq_len: int) -> list[int]:
    """The tokens in each sequence of a best-fit decreasing packing, by brute force."""
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, fill in enumerate(fills) if fill + length <= seq_len]
        if fitting:
            fills[max(fitting, key=lambda i: fills[i])] += length
        else:
            fills.append(length)
    return fills


@pytest.mark.parametrize("window", [1, 4, 7, 1 << 15])
@pytest.mark.parametrize("seq_len", [1, 16, 64])
def test_every_window_is_packed_by_best_fit_and_every_token_once(
    window: int, seq_len: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_WINDOW", window)
    shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns("packed*"))
    meta = read_meta(folder)
    for split in ("train", "val"):
        ends = document_ends(folder, meta, split).tolist()
        documents = list(zip([1, *ends], ends, strict=False))
        samples = PackedSamples(tmp_path / "out", split, seq_len)
        rows = samples.draw(np.arange(samples.n_samples), None)
        expected: list[int] = []
        for first in range(0, len(documents), window):
            lengths = []
            for begin, end in documents[first : first + window]:
                lengths += [min(seq_len, end - at) for at in range(begin, end, seq_len)]
            fills = best_fit_fills(lengths, seq_len)
            found = (rows.targets[len(expected) : len(expected) + len(fills)] != IGNORE).sum(axis=1)
            assert sorted(found.tolist()) == sorted(fills), f"the window that begins with document {first}"
            expected += fills
        assert samples.n_samples == len(expected)
        index = next((tmp_path / "out").glob(f"packed-{seq_len}-*[0-9a-f]"))
        pieces = np.fromfile(index / f"{split}.pieces", np.int64).reshape(-1, 2).tolist()
        covered = sorted(token for begin, length in pieces for token in range(begin, begin + length))
        assert covered == list(range(1, meta.tokens(split))), "each token once"
        assert samples.n_targets(np.arange(samples.n_samples), None) == meta.tokens(split) - 1
