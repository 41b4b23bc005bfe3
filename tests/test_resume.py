"""A resumed run is the run that was never interrupted, bit for bit, in both ways of saving and loading."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import checkpoint, losses, records, succeeded, tensors, tiny, torchrun

# dropout and accumulation (6 sequences on 2 ranks, one at a time), and sizes that don't divide by 2
UNEVEN = {"model__dropout": 0.1, "checkpoint__every": 5}


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """20 steps without interruption, once for each API."""
    folder = tmp_path_factory.mktemp("straight")
    for api in ("dtensor", "dcp"):
        output = succeeded(torchrun(2, *tiny(text, folder, run__name=api, checkpoint__api=api, **UNEVEN)))
        assert "x 3 accumulation" in output
    return {api: folder / api for api in ("dtensor", "dcp")}


def forget_after(run: Path, step: int) -> None:
    """What is left of a run that was killed some steps after its checkpoint of `step`."""
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


def assert_equal_runs(run: Path, reference: Path) -> None:
    assert losses(run) == losses(reference)
    assert len(records(run)) == len(records(reference)), "a step stands twice in metrics.jsonl"
    mine, theirs = tensors(checkpoint(run, 20)), tensors(checkpoint(reference, 20))
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("api", ["dtensor", "dcp"])
def test_20_steps_are_10_and_10(api: str, straight: dict[str, Path], text: Path, tmp_path: Path) -> None:
    run = tmp_path / api
    shutil.copytree(straight[api], run)
    forget_after(run, 10)
    command = tiny(text, tmp_path, run__name=api, checkpoint__api=api, **UNEVEN)
    output = succeeded(torchrun(2, *command))
    assert "resumed after step 10" in output
    assert "not bit for bit" not in output
    assert_equal_runs(run, straight[api])
    if api == "dtensor":  # and a resume of the resume
        forget_after(run, 15)
        assert "resumed after step 15" in succeeded(torchrun(2, *command))
        assert_equal_runs(run, straight[api])


def test_both_apis_write_the_same_files(straight: dict[str, Path]) -> None:
    """So that each loads what the other wrote."""
    assert losses(straight["dtensor"]) == losses(straight["dcp"])
    for step in (5, 10, 15, 20):
        for file in ("model.safetensors", "optimizer.safetensors", "state.json"):
            one, other = (checkpoint(straight[api], step) / file for api in ("dtensor", "dcp"))
            assert one.read_bytes() == other.read_bytes(), f"{file} of step {step}"


def test_parameters_move_and_dropout_is_on(straight: dict[str, Path]) -> None:
    """The comparisons above would also hold for a run that does nothing."""
    first, last = (tensors(checkpoint(straight["dtensor"], step)) for step in (5, 20))
    assert all(not first[name].equal(last[name]) for name in last)
    assert losses(straight["dtensor"])[20][0] < losses(straight["dtensor"])[1][0] - 0.2
