"""What saving, loading and importing take on each rank, as docs/checkpoints.md says it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpointing import fill_worker
from tests.checkpointing.memory_worker import VOCABULARY, model_config
from tests.helpers import ranks, succeeded
from torchtitan_lite.huggingface import names
from torchtitan_lite.models import build

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """MiB by what was done, for each of two ranks."""
    folder = tmp_path_factory.mktemp("memory")
    config = model_config()
    with torch.device("meta"):
        model = build(config, VOCABULARY)
    weights = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    parts = names.hf_names(weights, config.family)
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(json.dumps(names.to_hf_config(config, VOCABULARY)))
    content = {name: names.to_hf(ours, weights.__getitem__, config.family) for name, ours in parts.items()}
    save_file(content, folder / "hf/model.safetensors")
    succeeded(ranks(2, str(folder), str(folder / "hf"), entry="tests.checkpointing.memory_worker"))
    return json.loads((folder / "found.json").read_text())


SLACK = 12  # MiB: messages, JSON, the interpreter


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("api", ["dtensor", "dcp"])
def test_sharded_states_are_written_and_read_in_place(api: str, rank: int, measured: list[dict[str, float]]) -> None:
    found = measured[rank]
    assert found[f"save sharded {api}"] < SLACK, found
    # making the optimizer's state takes gradients, as training does
    assert found[f"load sharded {api}"] < found["gradients"] + SLACK, found


def test_full_states_pass_through_a_few_tensors(measured: list[dict[str, float]]) -> None:
    """One at a time is gathered, or sent; a collective and the allocator have some of their own."""
    whole = 3 * 2 * measured[0]["gradients"]
    for found in measured:
        assert found["save full dtensor"] < 0.4 * whole, found
        assert found["load full dtensor"] < 0.4 * whole, found
    assert measured[0]["save full dcp"] > 0.8 * whole, "DCP gathers all of it, as the docs say"


def test_an_import_reads_the_rows_of_each_rank(measured: list[dict[str, float]]) -> None:
    for found in measured:
        assert found["import"] < SLACK, found


def test_a_slow_disk_keeps_the_others_waiting_without_collectives(tmp_path: Path) -> None:
    """Three seconds, where a collective may take one. Loading takes a piece, whatever the size of a tensor."""
    succeeded(ranks(2, str(tmp_path), entry="tests.checkpointing.fill_worker"))
    on_rank = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert on_rank[0]["save ahead"] == on_rank[0]["load ahead"] == 0
    assert all(found["equal"] for found in on_rank)
    # a buffer for each of two files: gloo's thread may free the first one late
    assert on_rank[1]["load peak"] < 2 * fill_worker.PIECE + 20_000 < on_rank[1]["largest"] / 2
