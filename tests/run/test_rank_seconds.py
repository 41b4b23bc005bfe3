"""rank_seconds and rank_data_s name the rank that computes or reads slowly."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import ranks, records, succeeded, tiny
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.run import rank_seconds


@pytest.mark.parametrize(("site", "slow", "other"), [("block", "seconds", "data_s"), ("batch", "data_s", "seconds")])
def test_a_slow_rank_is_named(site: str, slow: str, other: str, text: Path, tmp_path: Path) -> None:
    """Each of the two blocks of rank 1 sleeps, or its loader. The others wait for it, which does not count."""
    command = tiny(text, tmp_path, run__name="run", train__steps=4, log__every=2, eval__every=0, checkpoint__every=0)
    succeeded(ranks(3, *command, fault=f"slow:1:1:{site}:99", env={"FAULT_SECONDS": "0.5"}))
    found = [record for record in records(tmp_path / "run") if "loss" in record]
    assert len(found) == 2
    for record in found:
        first, named, last = record[f"rank_{slow}"]
        assert max(first, last) < 0.5 <= 1.0 <= named
        assert 0 < max(record[f"rank_{other}"]) < 0.5


def test_a_line_names_a_rank_that_stays_slow_and_many_ranks_are_cut_to_three(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    unused: Any = SimpleNamespace(info=said.append)
    monkeypatch.setattr(rank_seconds, "values_of_ranks", lambda _: ["node1", "node1", "node2"])
    times = rank_seconds.RankSeconds(torch.nn.Linear(1, 1), Process(0, 3, torch.device("cuda"), 1), unused, unused)
    for n, slow in enumerate([1.05, *[1.2] * 4, 1.05, *[1.2] * 7]):
        assert times.metric.values(torch.tensor([[1.0, 1.0, slow], [0.0, 0.0, 0.5]]))["rank_data_s"] == [0.0, 0.0, 0.5]
        assert len(said) == (n >= 10)
    assert said == ["SLOW    rank 2 (node2): computed 10 % longer than the median rank in each of the last 5 records"]
    many = torch.arange(2 * 1025.0, dtype=torch.float64).view(2, 1025)
    assert times.metric.values(many) == {
        f"rank_{key}/{n}": n + more for key, more in (("seconds", 0.0), ("data_s", 1025.0)) for n in (1024, 1023, 1022)
    }
