"""Pairs: their order and their split; the default pairs. data/test_recorded_data.py has their rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_data import decoded
from torchtitan_lite.config.schema import Config, DataConfig, ModelConfig, TokenizerConfig, TrainConfig
from torchtitan_lite.data import pairs as pairs_module
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.pairs import PairSamples
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.token_files import read_meta

ROWS = [(f'the {i}-th text, "quoted",\nof {"many words " * (i % 9)}', f"text {i}") for i in range(300)]
KEYS = ["--source-key", "text", "--target-key", "headline", "--tokenizer", "bytes"]


def config_of(path: Path, family: str = "t5", *, seq_len: int = 64, target_len: int = 10, **values: Any) -> Config:
    data = DataConfig(path=str(path), objective="pairs", target_len=target_len, **values)
    return Config(data=data, model=ModelConfig(family=family), train=TrainConfig(seq_len=seq_len))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": s, "headline": t}) + "\n" for s, t in ROWS))
    assert main([str(folder / "a.jsonl"), *KEYS, "--val-fraction", "0.2", "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_an_epoch_has_every_pair_once_in_blocks_of_similar_length_in_random_order(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs_module, "WINDOW", 100)
    monkeypatch.setattr(pairs_module, "BLOCK", 10)
    samples = PairSamples(prepared, "train", config_of(prepared, seq_len=256))
    n = samples.n_samples
    assert n > 200
    epochs = [samples.indices(np.arange(first, first + n), 3) for first in (0, n, 2 * n)]
    assert all(sorted(epoch.tolist()) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    # one sample at a time is the same
    assert [int(samples.indices(np.array([i]), 3)[0]) for i in range(n + 5)] == [*epochs[0].tolist(), *epochs[1][:5]]
    spreads = [np.ptp(samples.lengths(epochs[0][i : i + 10])[:, 0]) for i in range(0, 100, 10)]
    assert np.mean(spreads) < 15, "of lengths from 25 to 125"
    windows = [epoch[i : i + 100] for epoch in epochs for i in (0, 100)]
    shortest = [samples.lengths(window)[:, 0].reshape(10, 10).min(axis=1) for window in windows]
    assert len({tuple(np.argsort(of_blocks).tolist()) for of_blocks in (*shortest, np.arange(10))}) == 7, "random"
    val = PairSamples(prepared, "val", config_of(prepared))
    assert np.ptp(val.lengths(val.indices(np.arange(10), 0), cut=False)[:, 0]) > 30, "validation is not sorted"


def test_a_source_is_on_one_side_only_whatever_its_targets_are(tmp_path: Path) -> None:
    """Three pairs of each source, with the same three targets."""
    pairs = [(f"source {i}", target) for i in range(60) for target in ("one", "two", "three")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": s, "headline": t}) + "\n" for s, t in pairs))
    out = tmp_path / "out"
    assert main([str(tmp_path / "a.jsonl"), *KEYS, "--val-fraction", "0.4", "--out", str(out)]) == 0
    train, val = (set(decoded(out, split)[::2]) for split in ("train", "val"))
    assert (len(train) + len(val), train & val) == (60, set())
    assert 10 < len(val) < 40


def test_a_begin_token_is_only_before_a_decoders_source(prepared: Path, tmp_path: Path) -> None:
    """Else the rows are those without one. A prepared folder that has none keeps its documents, with a note."""
    text, out = str(prepared.with_name("a.jsonl")), tmp_path / "out"
    assert main([text, *KEYS, "--val-fraction=0.2", "--begin-token=<extra_id_7>", "--out", str(out)]) == 0
    for family, n in (("llama", 1), ("t5", 0)):
        without, rows = (
            PairSamples(folder, "train", config_of(folder, family)).draw(np.arange(50), None)
            for folder in (prepared, out)
        )
        without.tokens[:, :n] = read_meta(out).marks[-1]
        assert (rows.tokens.tolist(), rows.targets.tolist()) == (without.tokens.tolist(), without.targets.tolist())
    (note,) = [
        note
        for folder in (prepared, out)
        for note in prepare_all(DataConfig(path=str(folder)), TokenizerConfig(begin_token="<extra_id_7>"), print).notes
    ]
    assert "have '</s>' (id 1) before them, not tokenizer.begin_token = '<extra_id_7>'" in note
