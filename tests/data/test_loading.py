"""Mixtures, packing and prefetching of prepared data."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.data.test_data import decoded, make, same_in_every_layout, stream_of
from tests.helpers import losses, ranks, records, succeeded, tiny
from torchtitan_lite.config.load import load
from torchtitan_lite.config.schema import Config, DataConfig, TokenizerConfig, TrainConfig
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.mixture import Mixture, exact_shares
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.order import sample_indices
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.validation import Validation
from torchtitan_lite.tools.report.page import page
from torchtitan_lite.tools.report.runs import read_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three prepared folders with one tokenizer: `lines` has short documents."""
    base = tmp_path_factory.mktemp("sources")
    lines = [line + "\n" for line in (text / "argparse.txt").read_text().splitlines() if line.strip()]
    lines_file = base / "lines.jsonl"
    lines_file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = make(text, base / "cache") / "tokenizer.json"
    for name, source in (("typing", text / "typing.txt"), ("tar", text / "tarfile.txt"), ("lines", lines_file)):
        assert main([str(source), "--out", str(base / name), "--tokenizer", str(tokenizer)]) == 0
    return {name: base / name for name in ("typing", "tar", "lines")}


# --- order ------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(1, 2000), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_each_epoch_has_every_sample_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(sample_indices(np.arange(epoch * n, (epoch + 1) * n), n, seed).tolist()) == list(range(n))


# --- mixtures ---------------------------------------------------------------------------------------------------


def mixed(weights: list[float]) -> Mixture:
    """A mixture without its sources."""
    return Mixture([], weights, [])


WEIGHTS = st.lists(st.floats(0.001, 100, allow_nan=False).map(lambda x: round(x, 4)), min_size=1, max_size=8)


@settings(deadline=None, derandomize=True, max_examples=4)
@given(WEIGHTS)
def test_a_source_is_within_one_sample_of_its_share_at_every_prefix(weights: list[float]) -> None:
    shares = np.array([float(share) for share in exact_shares(weights)])
    if shares.min() < 2**-16:
        return
    table = mixed(weights).table
    assert len(table) <= 65_536
    had = np.cumsum(table[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.arange(1, len(table) + 1)[:, None] * shares
    assert np.abs(had - ideal).max() < 1 + 1e-6


def test_a_sample_of_a_mixture_is_the_next_one_of_its_source(folders: dict[str, Path]) -> None:
    """Of packed sources, whose samples have other numbers of targets and other beginnings."""
    config = DataConfig(sources={str(folders["lines"]): 3, str(folders["typing"]): 2}, packing="best_fit")
    data = prepare_all(config, TokenizerConfig(), print)
    mixture = open_samples(data, "train", Config(data=config, train=TrainConfig(seq_len=256)))
    n = 3 * min(source.n_samples for source in mixture.sources)
    drawn, had = mixture.draw(np.arange(n), 1), [0, 0]
    for i, source in enumerate(mixture.table[np.arange(n) % 5]):
        one, number = mixture.sources[source], np.array([had[source]])
        own = one.trimmed(one.draw(number, 1))
        for name in ("tokens", "targets", "begins"):
            assert (getattr(drawn, name)[i] == getattr(own, name)[0]).all(), (i, name)
        assert one.n_targets(number, 1) == (own.targets != IGNORE).sum()
        had[source] += 1
    assert mixture.consumed(n) == had
    assert max(h / s.n_samples for h, s in zip(had, mixture.sources, strict=True)) > 1, "into a second epoch"
    assert mixture.n_targets(np.arange(n), 1) == (drawn.targets != IGNORE).sum()
    same_in_every_layout(mixture)


def test_a_prepared_folder_in_a_list_is_an_error(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"is a prepared folder, which can't be in a list"):
        load(None, {"data.path": [str(folders["tar"]), "tests"]})


def test_validation_is_mixed_as_well_and_repeats_nothing(folders: dict[str, Path]) -> None:
    sources = {str(folders["typing"]): 0.9, str(folders["lines"]): 0.1}
    config = Config.model_validate({"data": {"sources": sources}, "train": {"seq_len": 16}, "eval": {"samples": 10**6}})
    validation = Validation.from_config(config, prepare_all(config.data, config.tokenizer, print), 1, 0, 1)
    assert isinstance(validation.loader.samples, Mixture)
    mixture = validation.loader.samples
    most = [source.n_samples for source in mixture.sources]
    once = [n for n in range(2 * sum(most)) if all(map(int.__le__, mixture.consumed(n), most))]
    assert validation.n_samples == mixture.longest_prefix(10**6) == once[-1] == len(once) - 1
    assert [mixture.longest_prefix(n) for n in (1, 7, once[-1], once[-1] + 1)] == [1, 7, once[-1], once[-1]]
    assert validation.description() == {"samples": once[-1], "of": sum(most), "seed": 0}
    targets = torch.cat([micro.targets for micro in validation.micro_batches()])
    assert int((targets != IGNORE).sum()) == 16 * validation.n_samples
    for rank in range(3):  # each knows the numbers of its own sequences
        part = Validation.from_config(config, prepare_all(config.data, config.tokenizer, print), 2, rank, 3)
        counts = torch.cat([micro.targets for micro in part.micro_batches()]).ne(IGNORE).any(1)
        assert part.numbers()[counts].tolist() == [i for i in range(part.n_samples) if i // 2 % 3 == rank]


def test_a_run_on_a_mixture_reports_each_source_and_resumes_only_with_the_same(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """In the log, in the records and in the report: the mean over all is that of the sources."""
    paths = [str(folders[name]) for name in ("typing", "tar")]
    sources = f'--data.sources={{ "{paths[0]}" = 0.7, "{paths[1]}" = 0.3 }}'
    found = []
    for n in (1, 2):
        more = {"run__name": f"run{n}", "train__steps": 3, "eval__every": 3, "eval__samples": 21}
        options = [o for o in tiny(Path("-"), tmp_path, **more) if not o.startswith("--data.path")]
        said = succeeded(ranks(n, *options, sources))
        found.append(next(r for r in records(tmp_path / f"run{n}") if "val_loss" in r))
        for path in paths:
            assert f"        {path}: loss {found[-1][f'val_loss/{path}']:.4f}" in said
    one, two = found
    counts = mixed([0.7, 0.3]).consumed(21)
    assert min(counts) > 3
    mean = sum(n * one[f"val_loss/{path}"] for n, path in zip(counts, paths, strict=True)) / 21
    assert mean == pytest.approx(one["val_loss"], rel=1e-6)
    for key in [key for key in one if "/" in key]:
        assert one[key] == pytest.approx(two[key], rel=1e-5)
    assert one[f"val_loss/{paths[0]}"] != pytest.approx(one[f"val_loss/{paths[1]}"], rel=1e-4)
    assert "Validation loss by source" in page([read_run(tmp_path / "run1")])
    assert "70.0 %" in said
    tokens = [32 * n for n in mixed([0.7, 0.3]).consumed(3 * 6)]
    trained = [r for r in records(tmp_path / "run1") if "loss" in r]
    assert [seen["tokens"] for seen in trained[-1]["sources"].values()] == tokens
    assert f"{paths[1]}: {tokens[1]:,} tokens seen" in said
    other = ranks(1, *options, "--run.name=run1", "--train.steps=5", f'--data.sources={{ "{paths[0]}" = 1.0 }}')
    assert other.returncode == 2
    assert paths[1] in other.stderr


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


# --- ahead ------------------------------------------------------------------------------------------------------


def test_a_run_on_packed_documents_counts_tokens_without_padding(folders: dict[str, Path], tmp_path: Path) -> None:
    more = {"data__packing": "best_fit", "data__document_mask": True, "model__family": "llama", "train__steps": 5}
    succeeded(ranks(1, *tiny(folders["lines"], tmp_path, run__name="packed", **more)))
    samples = PackedSamples(folders["lines"], "train", 32)
    logged = [r for r in records(tmp_path / "packed") if "loss" in r]
    assert logged[-1]["tokens"] == samples.n_targets(np.arange(30), 0) < 30 * 32
    assert len(losses(tmp_path / "packed")) == 5
