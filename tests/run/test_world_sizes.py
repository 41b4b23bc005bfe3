"""The number of processes changes only the speed of a run."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import checkpoint, forget_after, losses, ranks, succeeded, tensors, tiny
from tests.run.test_resume import T5

TOLERANCE = 1e-4  # relative; sums in another order, in float32


# llama with everything uneven: 3 query heads share a key head, tied embeddings of 517 rows
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        **{"model__family": "llama", "model__dim": 36, "model__n_heads": 6, "model__n_kv_heads": 2},
        **{"model__hidden_dim": 50, "model__tie_embeddings": True},
        **{"model__window": 9, "model__layer_pattern": "window,full"},
    },
    "t5": T5,
    "muon": {"optim__name": "muon"},
}
LAST = 8  # steps
STEPS = {"train__steps": LAST, "checkpoint__every": LAST // 2, "train__micro_batch_size": 2}
Runs = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of a family's run on n processes; each runs once."""
    folder = tmp_path_factory.mktemp("worlds")

    @functools.cache
    def run(family: str, n: int) -> Path:
        succeeded(ranks(n, *tiny(text, folder, run__name=f"{family}{n}", **STEPS, **FAMILIES[family])))
        return folder / f"{family}{n}"

    return run


def assert_close(run: Path, reference: Path, first: int = 1) -> None:
    ours, theirs = losses(run), losses(reference)
    assert ours.keys() == theirs.keys() == set(range(1, LAST + 1))
    for step in range(first, LAST + 1):
        assert ours[step] == pytest.approx(theirs[step], rel=TOLERANCE), f"step {step}"


extended = pytest.mark.extended


@pytest.mark.parametrize(
    ("family", "n"),
    [
        ("llama", 3),
        *(pytest.param(*p, marks=extended) for p in (("llama", 2), ("llama", 4), ("gpt", 2), ("t5", 4))),
    ],
)
def test_loss_curves_agree(family: str, n: int, runs: Runs) -> None:
    """On 2 and 4 processes, 2 of 8 sequences are masked to make up the batch of 6; on 1 and 3 none."""
    assert_close(runs(family, n), runs(family, 1))
    ours, theirs = (tensors(checkpoint(runs(family, m), LAST)) for m in (n, 1))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-4, msg=f"{name} differs")


@pytest.mark.parametrize(
    ("family", "n", "more"),
    [
        ("llama", 3, {}),
        *(
            pytest.param(*p, marks=extended)
            for p in (("llama", 1, {}), ("llama", 4, {"fsdp__dp_replicate": 2}), ("t5", 3, {}), ("muon", 3, {}))
        ),
    ],
)
def test_a_run_of_2_ranks_resumes_on_other_world_sizes(
    family: str, n: int, more: dict[str, Any], runs: Runs, text: Path, tmp_path: Path
) -> None:
    """1, 3, and 2 copies of 2 shards: the same samples from the middle on."""
    run = tmp_path / "resumed"
    shutil.copytree(runs(family, 2), run)
    forget_after(run, LAST // 2)
    command = tiny(text, tmp_path, run__name="resumed", **STEPS, **FAMILIES[family], **more)
    output = succeeded(ranks(n, *command))
    assert f"resumed after step {LAST // 2}" in output
    assert f"not bit for bit: world_size 2 -> {n}" in output
    assert_close(run, runs(family, 2), first=LAST // 2 + 1)
