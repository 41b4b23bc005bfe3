"""Validation: the subset, standard errors, and texts with undefined values."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.data.test_data import make, rows
from tests.helpers import checkpoint, ranks, records, succeeded, tiny
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Batch, Loader, PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.run.resumed import validation_change
from torchtitan_lite.scoring import validation
from torchtitan_lite.scoring.validation import SUBSET_SEED, Score, Validation, eval_line, unigram_bits_per_byte

NAN = math.nan


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(text, tmp_path_factory.mktemp("validation"), val_fraction=0.3)


def validation_of(data_set: DataSet, samples: int, rank: int = 0, world_size: int = 1, **more: object) -> Validation:
    values = {"train": {"seq_len": 16}, "eval": {"samples": samples}, **more}
    return Validation.of(Config.model_validate(values), data_set, 2, rank, world_size)


def sequences(*validations: Validation) -> list[tuple[int, ...]]:
    """What these ranks score together, in no order."""
    return sorted(row for v in validations for micro in v.micro_batches() for row in rows(Batch([micro], 0)))


def in_file_order(folder: Path, packing: str = "concat") -> list[tuple[int, ...]]:
    samples = (PackedSamples if packing == "best_fit" else Samples)(folder, "val", 16)
    return [tuple(row) for row in samples.draw(np.arange(samples.n_samples), None).tokens.tolist()]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.extended
def test_the_subset_is_drawn_from_all_of_the_held_out_text(folder: Path, packing: str) -> None:
    data, every = DataSet.of({"a": (1.0, folder)}), in_file_order(folder, packing)
    n = len(every)
    assert n > 200
    subset = sequences(validation_of(data, 60, data={"packing": packing}))
    assert len(subset) == 60
    places = [every.index(row) for row in subset]
    assert sum(place < n // 2 for place in places) in range(20, 41), "the halves of the text have not the same chance"
    assert max(places) > 0.9 * n
    assert sequences(validation_of(data, 10**6, data={"packing": packing})) == sorted(every), "each once"
    assert set(sequences(validation_of(data, 30, data={"packing": packing}))) < set(subset), "more adds to fewer"


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_subset_is_the_same_at_every_world_size_and_seed(folder: Path, world_size: int) -> None:
    data = DataSet.of({"a": (1.0, folder)})
    parts = [validation_of(data, 25, rank, world_size, run={"seed": 7}) for rank in range(world_size)]
    assert sequences(*parts) == sequences(validation_of(data, 25))
    assert len({len(list(part.micro_batches())) for part in parts}) == 1, "ranks would wait for each other"


def test_validation_loads_as_training_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, and pinned for a GPU."""
    made: list[tuple[bool, torch.device]] = []

    class Noted(PrefetchingLoader):
        def __init__(self, loader: Loader, device: torch.device) -> None:
            made.append((loader.pin, device))
            super().__init__(replace(loader, pin=False), torch.device("cpu"))

    monkeypatch.setattr(validation, "PrefetchingLoader", Noted)
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        assert len(list(validation_of(DataSet.of({"a": (1.0, folder)}), 5).micro_batches(device))) == 3
        assert made.pop() == (device.type == "cuda", device)


def test_the_subset_of_a_mixture_keeps_the_shares(folder: Path) -> None:
    data = DataSet.of({"a": (3.0, folder), "b": (1.0, folder)})
    validation = validation_of(data, 40)
    assert isinstance(validation.loader.samples, Mixture)
    assert validation.loader.samples.consumed(validation.n_samples) == [30, 10]
    first = set(in_file_order(folder)[:40])
    assert len(first & set(sequences(validation))) < 20


def test_a_rank_reads_a_micro_batch_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    honest = Samples.draw

    def draw(self: Samples, run_samples: np.ndarray, seed: int | None) -> object:
        drawn.append(len(run_samples))
        return honest(self, run_samples, seed)

    monkeypatch.setattr(Samples, "draw", draw)
    batches = validation_of(DataSet.of({"a": (1.0, folder)}), 60, rank=1, world_size=3).micro_batches()
    assert sum(drawn) == 0
    next(batches)
    assert sum(drawn) == 2, "it read ahead"
    assert len(list(batches)) == 9
    assert max(drawn) == 2
    assert sum(drawn) == 20, "it read what other ranks score"


def test_the_entropy_of_one_token_is_zero_and_of_no_bytes_is_undefined() -> None:
    assert unigram_bits_per_byte(torch.tensor([0, 48, 0]), torch.tensor([1, 2, 1])) == 0
    assert math.isnan(unigram_bits_per_byte(torch.tensor([3, 1]), torch.tensor([0, 0])))


def test_the_line_leaves_out_what_is_undefined(folder: Path) -> None:
    validation = validation_of(DataSet.of({"a": (1.0, folder)}), 5)
    of = f"5 of {validation.samples.n_samples} sequences, 1.0 s)"

    def line(loss: float, loss_stderr: float, bits: float, bits_stderr: float, unigram: float) -> str:
        return eval_line(7, Score(loss, loss_stderr, bits, bits_stderr, unigram), validation, 1.0)

    assert line(4.0, 0.1, math.nan, math.nan, math.nan).count("\n") == 0
    assert line(4.0, 0.1, 2.0, 0.05, 2.5) == (
        f"eval    step 7  loss 4.0000 +- 0.1000  bits/byte 2.000 +- 0.050  (20 % below unigram 2.500; {of}"
    )
    assert line(4.0, NAN, 2.0, NAN, 0.0) == f"eval    step 7  loss 4.0000  bits/byte 2.000  (unigram 0.000; {of}"
    assert line(4.0, 0.1, NAN, NAN, NAN) == f"eval    step 7  loss 4.0000 +- 0.1000  ({of}"
    assert line(NAN, NAN, NAN, NAN, 2.5) == f"eval    step 7  loss nan  bits/byte nan  (unigram 2.500; {of}"


def test_a_validation_text_of_one_token_does_not_end_the_run(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a" * (3000 + i)}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    arguments = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "data"), "--val-fraction", "0.2"]
    assert main([*arguments, "--tokenizer", "bytes"]) == 0
    command = tiny(tmp_path / "data", tmp_path, run__name="run", train__steps=3, eval__every=3, eval__samples=1)
    assert "(unigram 0.000; 1 of " in succeeded(ranks(1, *command))
    assert checkpoint(tmp_path / "run", 3).is_dir(), "the save comes after the validation"
    (found,) = [r for r in records(tmp_path / "run") if "val_loss" in r]
    assert found["unigram_bits_per_byte"] == 0
    assert found["val_loss_stderr"] is None, "of one sequence"


@pytest.mark.extended
def test_a_run_that_validated_other_sequences_is_told_when_it_is_resumed(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", train__steps=2, eval__every=2, optim__warmup_steps=1)
    succeeded(ranks(1, *command))
    (found,) = [r for r in records(tmp_path / "run") if "val_loss" in r]
    assert found["eval_samples"] == 5
    assert 0 < found["val_loss_stderr"] < found["val_loss"]
    assert 0 < found["val_bits_per_byte_stderr"] < found["val_bits_per_byte"]
    assert "validation covers" not in succeeded(ranks(1, *command, "--train.steps=3"))
    state_file = checkpoint(tmp_path / "run", 3) / "state.json"
    state = json.loads(state_file.read_text())
    state["validation"]["samples"] = 3
    state_file.write_text(json.dumps(state))
    said = succeeded(ranks(1, *command, "--train.steps=4", "--checkpoint.verify=off"))
    assert "sequences, drawn at random, and covered 3 before: do not compare its loss" in said
    assert json.loads((checkpoint(tmp_path / "run", 4) / "state.json").read_text())["validation"]["samples"] == 5


def test_validations_are_comparable_on_equal_subsets_only() -> None:
    subset, everything = {"samples": 128, "of": 501, "seed": 0}, {"samples": 501, "of": 501, "seed": 0}
    assert not validation_change(subset, subset)
    said = "64 of 501 sequences, drawn at random, and covered 128 before"
    assert validation_change(subset, subset | {"samples": 64}) == said
    assert validation_change(subset, subset | {"seed": 1})
    assert not validation_change(everything, everything | {"seed": 1}), "the whole text is the same in any order"


def test_bits_per_byte_have_the_bytes_of_the_targets_that_were_scored(folder: Path, tmp_path: Path) -> None:
    """Five of some hundred sequences, which have other bytes per token than the whole split."""
    more = {"train__steps": 1, "optim__warmup_steps": 0, "eval__every": 1, "eval__samples": 5, "checkpoint__every": 0}
    succeeded(ranks(2, *tiny(folder, tmp_path, run__name="run", **more)))
    (found,) = [record for record in records(tmp_path / "run") if "val_loss" in record]
    samples, tokenizer = Samples(folder, "val", 32), Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = read_meta(folder).end_token

    def bytes_per_target(numbers: np.ndarray, seed: int | None) -> float:
        targets = [target for row in samples.draw(numbers, seed).targets.tolist() for target in row]
        # a character of a byte-level entry stands for a byte
        text = (tokenizer.id_to_token(target) or "" for target in targets if target != end)
        return sum(map(len, text)) / len(targets)

    scored, whole = bytes_per_target(np.arange(5), SUBSET_SEED), bytes_per_target(np.arange(samples.n_samples), None)
    assert abs(scored / whole - 1) > 0.01
    assert found["val_bits_per_byte"] == pytest.approx(found["val_loss"] / scored / math.log(2), rel=1e-6)
