"""The number of processes changes how fast a run is, and nothing else."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers import checkpoint, losses, python, succeeded, tensors, tiny, torchrun

TOLERANCE = 1e-4  # relative; sums in another order, in float32


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same 20 steps on 1, 2, 3 and 4 processes."""
    folder = tmp_path_factory.mktemp("worlds")
    for n in (1, 2, 3, 4):
        command = tiny(text, folder, run__name=f"on{n}", train__micro_batch_size=2)
        succeeded(python(*command) if n == 1 else torchrun(n, *command))
    return {n: folder / f"on{n}" for n in (1, 2, 3, 4)}


def assert_close(run: Path, reference: Path, first: int = 1) -> None:
    ours, theirs = losses(run), losses(reference)
    assert ours.keys() == theirs.keys() == set(range(1, 21))
    for step in range(first, 21):
        assert ours[step] == pytest.approx(theirs[step], rel=TOLERANCE), f"step {step}"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_loss_curves_agree(n: int, runs: dict[int, Path]) -> None:
    """On 2 and 4 processes, 2 of 8 sequences are masked to make up the batch of 6; on 1 and 3 none."""
    assert_close(runs[n], runs[1])
    ours, theirs = tensors(checkpoint(runs[n], 20)), tensors(checkpoint(runs[1], 20))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-4, msg=f"{name} differs")


@pytest.mark.parametrize(("n", "more"), [(1, {}), (3, {}), (4, {"fsdp__dp_replicate": 2})])
def test_run_of_2_resumes_on_others(
    n: int, more: dict[str, int], runs: dict[int, Path], text: Path, tmp_path: Path
) -> None:
    """1, 3, and 2 copies of 2 shards: the same samples from step 11 on."""
    run = tmp_path / "resumed"
    shutil.copytree(runs[2], run)
    shutil.rmtree(checkpoint(run, 20))
    command = tiny(text, tmp_path, run__name="resumed", train__micro_batch_size=2, **more)
    output = succeeded(python(*command) if n == 1 else torchrun(n, *command))
    assert "resumed after step 10" in output
    assert f"not bit for bit: world_size 2 -> {n}" in output
    assert_close(run, runs[2], first=11)
