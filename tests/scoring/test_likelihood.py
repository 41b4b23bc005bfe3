"""The likelihood engine and its statistics: the same on any number of ranks, sharded or not, and by definition."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.data.test_data import make
from tests.helpers import run_distributed
from torchtitan_lite.config.schema import Config, FsdpConfig, ModelConfig
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.parallelize import apply_fsdp
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.scoring.likelihood import Window, pad_batch, sums_by_item
from torchtitan_lite.scoring.statistics import Array, ratio, ratio_difference
from torchtitan_lite.scoring.validation import Score, Validation, evaluate, evaluate_average

CPU = torch.device("cpu")
VOCABULARY = 517
FAMILIES = {
    "gpt": ModelConfig(family="gpt", dim=32, n_layers=2, n_heads=2, max_seq_len=16),
    "llama, tied": ModelConfig(family="llama", dim=32, n_layers=2, n_heads=2, max_seq_len=16, tie_embeddings=True),
}


FSDP = FsdpConfig()


def model_of(family: str, process: Process | None = None, fsdp: FsdpConfig = FSDP, seed: int = 7) -> Transformer:
    """Sharded over the ranks of a world, if one is given."""
    with torch.device("meta"):
        model = build(FAMILIES[family], VOCABULARY)
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


N_BATCHES = 0, 1, 5


def engine(process: Process, family: str, fsdp: FsdpConfig) -> dict[int, tuple[Array, int]]:
    """The sums of a sharded model by item, and how often this rank computed a forward pass, by number of batches."""
    model, forwards, found = model_of(family, process, fsdp), list[int](), {}
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for n_batches in N_BATCHES:
        forwards.clear()
        with torch.no_grad():
            sums = sums_by_item(model, batches(n_batches), pad_batch, range(2 * n_batches + 1), process)
        found[n_batches] = sums[0].numpy(), len(forwards)
    return found


@torch.no_grad()
def expected(model: nn.Module, n_batches: int) -> Array:
    nats = np.zeros(2 * n_batches + 1)
    for window in (window for batch in batches(n_batches) for window in batch):
        ids = window.ids.tolist()
        logits = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        nats[window.item] -= sum(float(logits[i - 1, ids[i]]) for i in range(window.known, len(ids)))
    return nats


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_are_the_same_bits_on_any_number_of_ranks(family: str) -> None:
    """Against log-probabilities of an unsharded model. Some ranks have no batch in the last round, or none at all."""
    reference = {n_batches: expected(model_of(family), n_batches) for n_batches in N_BATCHES}
    found = {n: run_distributed(engine, n, family, FSDP) for n in (1, 2, 3)}
    for n, ranks in found.items():
        for n_batches, (sums, forwards) in (item for each in ranks for item in each.items()):
            assert sums == pytest.approx(reference[n_batches], rel=1e-5)
            assert (sums == found[1][0][n_batches][0]).all(), n
            assert forwards == -(-n_batches // n), "each forward of a sharded model is one of all ranks"
    in_float16, _ = run_distributed(engine, 2, family, FsdpConfig(param_dtype="float16"))
    assert in_float16[5][0] == pytest.approx(reference[5], rel=1e-2)
    assert np.isfinite(in_float16[5][0]).all()


@pytest.fixture(scope="module")
def mixture(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cache = tmp_path_factory.mktemp("scoring")
    folder = make(text / "argparse.txt", cache, val_fraction=0.3)
    return {"one": folder, "two": folder}


def validate(process: Process, folders: dict[str, Path], samples: int, family: str) -> Score:
    data = DataSet.open({name: (share, folder) for share, (name, folder) in enumerate(folders.items(), 1)})
    config = Config.model_validate({"train": {"seq_len": 16}, "eval": {"samples": samples}})
    validation = Validation.from_config(config, data, 2, process.rank, process.world_size)
    return evaluate(model_of(family, process), validation, CPU)


@pytest.mark.parametrize(("samples", "family"), [(1, "gpt"), (5, "llama, tied")])
def test_a_validation_with_fewer_sequences_than_ranks(samples: int, family: str, mixture: dict[str, Path]) -> None:
    """Also of a mixture, one of whose sources may have none: 4 ranks have room for 8 sequences."""
    (one,) = run_distributed(validate, 1, mixture, samples, family)
    four = run_distributed(validate, 4, mixture, samples, family)
    for score in four:
        assert repr(score) == repr(four[0])
        for key, value in one.record().items():  # undefined ones are None
            assert score.record()[key] == pytest.approx(value, rel=1e-3 if "stderr" in key else 1e-6), key
    assert math.isnan(one.loss_stderr) == (samples == 1)
    assert any(math.isnan(loss) for loss, _ in one.sources.values()) == (samples == 1)


def validate_average(process: Process, folder: Path) -> tuple[dict[str, Any], list[Score], str]:
    """Validate a model whose averages are the weights of another: its record and line, and the scores of both."""
    data = DataSet.open({"a": (1.0, folder)})
    config = Config.model_validate({"train": {"seq_len": 16}, "eval": {"samples": 5}})
    model, other = (model_of("llama, tied", process, seed=seed) for seed in (7, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter, average in zip(model.parameters(), other.parameters(), strict=True):
        optimizer.state[parameter] = {"ema": average.detach().clone()}
    validation = Validation.from_config(config, data, 2, process.rank, process.world_size)
    before = evaluate(model, validation, CPU)
    record, line = evaluate_average(3, model, optimizer, validation, CPU)
    return record, [before, evaluate(model, validation, CPU), evaluate(other, validation, CPU)], line


def test_the_average_of_a_tied_model_has_its_own_score(mixture: dict[str, Path]) -> None:
    for record, (before, after, average), line in run_distributed(validate_average, 2, mixture["one"]):
        assert repr(before) == repr(after), "the weights are the same again"
        assert record.pop("eval_s") > 0
        expected = {f"ema_{key}": value for key, value in average.record().items() if key.startswith("val_")}
        assert record == {"step": 3, **expected}
        assert average.loss != before.loss
        assert line.startswith(f"eval    step 3  ema loss {average.loss:.4f} +- ")


def test_a_ratio_has_the_error_of_many_draws() -> None:
    """Against the spread of the ratio over 2,000 texts of 200 documents each."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(5, 100, (2000, 200)).astype(float)
    nats = sizes * generator.uniform(2.0, 4.0, sizes.shape)
    ratios, errors = zip(*map(ratio, nats, sizes), strict=True)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.05)
    same = ratio(np.array([1.0, 2.0, 6.0]), np.full(3, 2.0))
    assert same == pytest.approx((1.5, np.array([0.5, 1.0, 3.0]).std(ddof=1) / math.sqrt(3))), "that of a mean"


def test_a_difference_of_ratios_is_paired() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(5, 100, 60).astype(float)
    hard = sizes * generator.uniform(1.0, 9.0, 60)
    better = hard - 0.1 * sizes * generator.uniform(0.9, 1.1, 60)
    difference, error = ratio_difference((better, sizes), (hard, sizes))
    assert difference == pytest.approx(ratio(better, sizes)[0] - ratio(hard, sizes)[0])
    assert 0 < error < 0.01 * ratio(hard, sizes)[1]
    assert ratio_difference((hard, sizes), (hard, sizes)) == (0.0, 0.0)
    assert all(map(math.isnan, ratio_difference((hard, sizes), (hard, np.zeros(60)))))
    assert math.isnan(ratio(hard[:1], sizes[:1])[1])
