"""The order, mixtures and packing of prepared data; data/test_recorded_data.py has the samples."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.data.test_data import decoded, make, stream_of
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.mixture import Mixture, exact_shares
from torchtitan_lite.data.order import sample_indices
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.validation import Validation


@pytest.fixture(scope="module")
def folders(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two prepared folders with one tokenizer: `lines` has short documents."""
    base = tmp_path_factory.mktemp("sources")
    lines = [line + "\n" for line in (text / "argparse.txt").read_text().splitlines() if line.strip()]
    lines_file = base / "lines.jsonl"
    lines_file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = make(text, base / "cache") / "tokenizer.json"
    for name, source in (("typing", text / "typing.txt"), ("lines", lines_file)):
        assert main([str(source), "--out", str(base / name), "--tokenizer", str(tokenizer)]) == 0
    return {name: base / name for name in ("typing", "lines")}


# --- order ------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(1, 2000), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_each_epoch_has_every_sample_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(sample_indices(np.arange(epoch * n, (epoch + 1) * n), n, seed).tolist()) == list(range(n))


# --- mixtures ---------------------------------------------------------------------------------------------------


WEIGHTS = st.lists(st.floats(0.001, 100, allow_nan=False).map(lambda x: round(x, 4)), min_size=1, max_size=8)


@settings(deadline=None, derandomize=True, max_examples=4)
@given(WEIGHTS)
def test_a_source_is_within_one_sample_of_its_share_at_every_prefix(weights: list[float]) -> None:
    shares = np.array([float(share) for share in exact_shares(weights)])
    if shares.min() < 2**-16:
        return
    table = Mixture([], weights, []).table
    assert len(table) <= 65_536
    had = np.cumsum(table[:, None] == np.arange(len(weights)), axis=0)
    assert np.abs(had - np.arange(1, len(table) + 1)[:, None] * shares).max() < 1 + 1e-6


def test_validation_is_mixed_as_well_and_repeats_nothing(folders: dict[str, Path]) -> None:
    sources = {str(folders["typing"]): 0.9, str(folders["lines"]): 0.1}
    config = Config.model_validate({"data": {"sources": sources}, "train": {"seq_len": 16}, "eval": {"samples": 10**6}})
    validation = Validation.from_config(config, prepare_all(config.data, config.tokenizer, print), 1, 0, 1)
    mixture = validation.loader.samples
    most = [source.n_samples for source in mixture.sources]
    once = [n for n in range(2 * sum(most)) if all(map(int.__le__, mixture.positions(n).values(), most))]
    assert validation.n_samples == mixture.longest_prefix(10**6) == once[-1] == len(once) - 1
    assert [mixture.longest_prefix(n) for n in (1, 7, once[-1], once[-1] + 1)] == [1, 7, once[-1], once[-1]]
    assert validation.description() == {"samples": once[-1], "of": sum(most), "seed": 0}
    targets = torch.cat([micro.targets for micro in validation.micro_batches()])
    assert int((targets != IGNORE).sum()) == 16 * validation.n_samples
    for rank in range(3):  # each knows the numbers of its own sequences
        part = Validation.from_config(config, prepare_all(config.data, config.tokenizer, print), 2, rank, 3)
        counts = torch.cat([micro.targets for micro in part.micro_batches()]).ne(IGNORE).any(1)
        assert part.numbers()[counts].tolist() == [i for i in range(part.n_samples) if i // 2 % 3 == rank]


# --- packing ----------------------------------------------------------------------------------------------------


def test_packed_sequences_hold_whole_documents(folders: dict[str, Path]) -> None:
    folder, samples = folders["lines"], PackedSamples(folders["lines"], "train", 64)
    drawn = samples.draw(np.arange(samples.n_samples), None)
    known = drawn.targets != IGNORE
    assert samples.n_targets(np.arange(samples.n_samples), None) == known.sum() == len(stream_of(folder, "train")) - 1
    assert known.mean() > 0.98, "more padding than it takes"
    tokenizer, end = Tokenizer.from_file(str(folder / "tokenizer.json")), read_meta(folder).end_token
    found = Counter[str]()
    for tokens, targets in zip(drawn.tokens, drawn.targets, strict=True):
        text = tokenizer.decode(targets[targets != IGNORE].tolist(), skip_special_tokens=False)
        found.update(text.split("<|endoftext|>")[int(tokens[0] != end) : -1])  # without pieces of a longer one
    assert not Counter(d for d in decoded(folder, "train") if len(tokenizer.encode(d).ids) < 64) - found
