"""The likelihood engine, its statistics and validation: the same on any number of ranks, sharded or not."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.distributed.device_mesh import DeviceMesh

from tests.data.test_data import make, rows
from tests.helpers import meta_model, ranks, records, run_distributed, succeeded, tiny
from torchtitan_lite.config.schema import Config, FsdpConfig, ModelConfig
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Batch
from torchtitan_lite.data.packing import PackedSamples
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import read_meta
from torchtitan_lite.distributed.fsdp import apply_fsdp
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer
from torchtitan_lite.scoring.likelihood import Window, pad_batch, sums_by_item
from torchtitan_lite.scoring.statistics import Array, ratio, ratio_difference
from torchtitan_lite.scoring.validation import SUBSET_SEED, Score, Validation, evaluate, evaluate_average

CPU = torch.device("cpu")
VOCABULARY = 517
FAMILIES = {
    "gpt": ModelConfig(family="gpt", dim=32, n_layers=2, n_heads=2, max_seq_len=16),
    "llama, tied": ModelConfig(family="llama", dim=32, n_layers=2, n_heads=2, max_seq_len=16, tie_embeddings=True),
}


FSDP = FsdpConfig()


def model_of(family: str, process: Process | None = None, fsdp: FsdpConfig = FSDP, seed: int = 7) -> Transformer:
    """Sharded over the ranks of a world, if one is given."""
    model = meta_model(FAMILIES[family], VOCABULARY)
    if process:
        apply_fsdp(model, DeviceMesh("cpu", torch.arange(process.world_size), mesh_dim_names=("dp_shard",)), fsdp)
    materialize(model, CPU, seed)
    return model.eval()


def batches(n: int) -> list[list[Window]]:
    """Windows of 1 to 9 tokens. Item 0 has one in each batch, and some first targets are not predicted."""
    generator = np.random.default_rng(0)
    result = []
    for batch in range(n):
        windows = []
        for item in (0, 2 * batch + 1, 2 * batch + 2):
            ids = generator.integers(0, VOCABULARY, generator.integers(2, 10), np.int32)
            windows.append(Window(item, ids, known=1 + item % 2 * (len(ids) > 2)))
        result.append(windows)
    return result


CASES = [(family, n_batches) for family in FAMILIES for n_batches in (0, 1, 5)]


def engine(process: Process, fsdp: FsdpConfig) -> dict[tuple[str, int], tuple[Array, int]]:
    """The sums of a sharded model by item, and how often this rank computed a forward pass, by case."""
    found = {}
    for family, n_batches in CASES:
        model, forwards = model_of(family, process, fsdp), list[int]()
        model.register_forward_pre_hook(lambda *_, forwards=forwards: forwards.append(1))
        with torch.no_grad():
            sums = sums_by_item(model, batches(n_batches), pad_batch, range(2 * n_batches + 1), process)
        found[family, n_batches] = sums[0].numpy(), len(forwards)
    return found


@torch.no_grad()
def expected(family: str, n_batches: int) -> Array:
    model = model_of(family)
    nats = np.zeros(2 * n_batches + 1)
    for window in (window for batch in batches(n_batches) for window in batch):
        ids = window.ids.tolist()
        logits = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        nats[window.item] -= sum(float(logits[i - 1, ids[i]]) for i in range(window.known, len(ids)))
    return nats


def test_sums_are_the_same_bits_on_any_number_of_ranks() -> None:
    """Against log-probabilities of an unsharded model. Some ranks have no batch in the last round, or none at all."""
    (alone,), three = (run_distributed(engine, n, FSDP) for n in (1, 3))
    in_float16, _ = run_distributed(engine, 2, FsdpConfig(param_dtype="float16"))
    for case in CASES:
        reference = expected(*case)
        assert in_float16[case][0] == pytest.approx(reference, rel=1e-2)
        for n, found in ((1, alone), *((3, of_rank) for of_rank in three)):
            sums, forwards = found[case]
            assert sums == pytest.approx(reference, rel=1e-5)
            assert (sums == alone[case][0]).all(), n
            assert forwards == -(-case[1] // n), "each forward of a sharded model is one of all ranks"


# --- validation -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(text, tmp_path_factory.mktemp("validation"), val_fraction=0.3)


def validate_average(process: Process, folder: Path) -> tuple[dict[str, Any], list[Score], str]:
    """Validate a model whose averages are the weights of another: its record and line, and the scores of both."""
    model, other = (model_of("llama, tied", process, seed=seed) for seed in (7, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter, average in zip(model.parameters(), other.parameters(), strict=True):
        optimizer.state[parameter] = {"ema": average.detach().clone()}
    data = DataSet.open({"a": (1, folder), "b": (2, folder)})
    validation = validation_of(data, 5, process.rank, process.world_size)
    before = evaluate(model, validation, CPU)
    record, line = evaluate_average(3, model, optimizer, validation, CPU)
    return record, [before, evaluate(model, validation, CPU), evaluate(other, validation, CPU)], line


def test_the_average_of_a_tied_model_has_its_own_score(folder: Path) -> None:
    for record, (before, after, average), line in run_distributed(validate_average, 2, folder):
        assert repr(before) == repr(after), "the weights are the same again"
        assert record.pop("eval_s") > 0
        expected = {f"ema_{key}": value for key, value in average.record().items() if key.startswith("val_")}
        assert record == {"step": 3, **expected}
        assert average.loss != before.loss
        assert line.startswith(f"eval    step 3  ema loss {average.loss:.4f} +- ")


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


# --- statistics -------------------------------------------------------------------------------------------------


def test_a_ratio_has_the_error_of_many_draws() -> None:
    """Against the spread of the ratio over 2,000 texts of 200 documents each."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(5, 100, (2000, 200)).astype(float)
    nats = sizes * generator.uniform(2.0, 4.0, sizes.shape)
    ratios, errors = zip(*map(ratio, nats, sizes), strict=True)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.05)


def test_a_difference_of_ratios_is_paired() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(5, 100, 60).astype(float)
    hard = sizes * generator.uniform(1.0, 9.0, 60)
    better = hard - 0.1 * sizes * generator.uniform(0.9, 1.1, 60)
    difference, error = ratio_difference((better, sizes), (hard, sizes))
    assert difference == pytest.approx(ratio(better, sizes)[0] - ratio(hard, sizes)[0])
    assert 0 < error < 0.01 * ratio(hard, sizes)[1]
    assert ratio_difference((hard, sizes), (hard, sizes)) == (0.0, 0.0)
