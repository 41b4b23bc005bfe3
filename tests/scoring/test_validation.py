"""Validation: the subset, standard errors, and texts with undefined values."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.data.test_data import make, rows
from tests.helpers import checkpoint, ranks, records, succeeded, tiny
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Batch
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.scoring.validation import SUBSET_SEED, Validation


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(text, tmp_path_factory.mktemp("validation"), val_fraction=0.3)


def validation_of(data_set: DataSet, samples: int, rank: int = 0, world_size: int = 1, **more: object) -> Validation:
    values = {"train": {"seq_len": 16}, "eval": {"samples": samples}, **more}
    return Validation.from_config(Config.model_validate(values), data_set, 2, rank, world_size)


def sequences(*validations: Validation) -> list[tuple[int, ...]]:
    """What these ranks score together, in no order."""
    return sorted(row for v in validations for micro in v.micro_batches() for row in rows(Batch([micro], 0)))


def in_file_order(folder: Path, packing: str = "concat") -> list[tuple[int, ...]]:
    samples = (PackedSamples if packing == "best_fit" else Samples)(folder, "val", 16)
    return [tuple(row) for row in samples.draw(np.arange(samples.n_samples), None).tokens.tolist()]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_subset_is_drawn_from_all_of_the_held_out_text(folder: Path, packing: str) -> None:
    data, every = DataSet.open({"a": (1.0, folder)}), in_file_order(folder, packing)
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
    data = DataSet.open({"a": (1.0, folder)})
    parts = [validation_of(data, 25, rank, world_size, run={"seed": 7}) for rank in range(world_size)]
    assert sequences(*parts) == sequences(validation_of(data, 25))
    assert len({len(list(part.micro_batches())) for part in parts}) == 1, "ranks would wait for each other"


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
