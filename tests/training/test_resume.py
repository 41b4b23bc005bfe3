"""A resumed run equals an uninterrupted one, bit for bit, with both checkpoint APIs."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, losses, ranks, records, succeeded, tensors, tiny

# Accumulation (6 sequences on 2 ranks, one at a time), sizes that don't divide by 2; dropout, where there is any; a
# scaled loss that overflows and recovers.
RUNS: dict[str, dict[str, Any]] = {
    "dtensor": {
        **{"checkpoint__api": "dtensor", "model__dropout": 0.1, "fsdp__grad_sync": "last"},
        **{"fsdp__param_dtype": "float16", "grad_scaler__init_scale": 2.0**24, "grad_scaler__growth_interval": 2},
    },
    "dcp": {
        **{"checkpoint__api": "dcp", "model__family": "llama", "model__n_heads": 4, "model__n_kv_heads": 1},
        **{"model__hidden_dim": 50, "model__tie_embeddings": True, "fsdp__param_dtype": "bfloat16"},
        **{"fsdp__explicit_prefetching": True, "activation_checkpointing__mode": "selective"},
    },
}


def command_of(api: str, text: Path, folder: Path) -> list[str]:
    steps = {"train__steps": 12, "checkpoint__every": 3, "train__micro_batch_size": 1}
    return tiny(text, folder, run__name=api, **steps, **RUNS[api])


SAMPLES = ["--sample.every=2", '--sample.prompts=["def ", "The"]', "--sample.max_tokens=8"]


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """12 steps without interruption, once for each API; the one that drops out also writes samples."""
    folder = tmp_path_factory.mktemp("straight")

    @functools.cache
    def run(api: str) -> Path:
        more = SAMPLES if api == "dtensor" else []
        assert "x 3 accumulation" in succeeded(ranks(2, *command_of(api, text, folder), *more))
        return folder / api

    return run


APIS = [pytest.param("dtensor", marks=pytest.mark.extended), "dcp"]


def forget_after(run: Path, step: int) -> None:
    """What is left of a run that was killed some steps after its checkpoint of `step`."""
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


def assert_equal_runs(run: Path, reference: Path) -> None:
    assert losses(run) == losses(reference)
    assert len(records(run)) == len(records(reference)), "a step stands twice in metrics.jsonl"
    mine, theirs = tensors(checkpoint(run, 12)), tensors(checkpoint(reference, 12))
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("api", APIS)
def test_12_steps_equal_6_steps_and_a_resume(
    api: str, straight: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    run = tmp_path / api
    shutil.copytree(straight(api), run)
    forget_after(run, 6)
    command = command_of(api, text, tmp_path)
    # the one without samples before has them now, and the other way round: they change nothing, bit for bit
    output = succeeded(ranks(2, *command, *(SAMPLES if api == "dcp" else [])))
    assert "resumed after step 6" in output
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    expected = [8, 10, 12] if api == "dcp" else [2, 4, 6]  # later ones were cut, as they would come again
    assert [(s["step"], s["prompt"]) for s in samples] == [(n, p) for n in expected for p in ("def ", "The")]
    assert len({s["text"] for s in samples}) == len(samples)
    if api == "dcp":
        assert 'sample  step 12  "The" -> "' in output
    assert "not bit for bit" not in output
    assert_equal_runs(run, straight(api))
    if api == "dtensor":  # and a resume of the resume
        forget_after(run, 9)
        assert "resumed after step 9" in succeeded(ranks(2, *command))
        assert_equal_runs(run, straight(api))


LLAMA = {"model__family": "llama", "model__n_heads": 4, "model__n_kv_heads": 1, "model__hidden_dim": 64}
SHARDED = {"checkpoint__state_dict": "sharded"}
# what else could go into a resume: ranks and options
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "float32": (2, LLAMA),
    "sums in bfloat16": (2, {**LLAMA, "fsdp__param_dtype": "bfloat16", "fsdp__reduce_dtype": "bfloat16"}),
    "two copies": (4, {"fsdp__dp_replicate": 2, "fsdp__grad_sync": "all_reduce_last", "model__dropout": 0.1}),
    "saved beside": (2, {**SHARDED, "checkpoint__api": "dcp", "checkpoint__async_save": True, "model__dropout": 0.1}),
    "compiled": (2, {**LLAMA, **SHARDED, "compile__enabled": True}),
    "compiled, recomputed": (2, {"compile__enabled": True, "activation_checkpointing__mode": "full"}),
    "sgd": (3, {**LLAMA, "optim__name": "sgd", "optim__lr": 0.1, "fsdp__reshard_after_forward": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_everything_else_resumes_bit_for_bit_too(name: str, text: Path, tmp_path: Path) -> None:
    n, more = MORE[name]
    command = tiny(text, tmp_path, run__name="straight", train__steps=12, checkpoint__every=6, **more)
    succeeded(ranks(n, *command))
    shutil.copytree(tmp_path / "straight", tmp_path / "run")
    forget_after(tmp_path / "run", 6)
    output = succeeded(ranks(n, *command, "--run.name=run"))
    assert "resumed after step 6" in output
    assert "not bit for bit" not in output
    assert_equal_runs(tmp_path / "run", tmp_path / "straight")


@pytest.mark.extended
def test_the_scale_of_the_loss_is_resumed_too(straight: Callable[[str], Path]) -> None:
    """Steps were skipped before and after the checkpoint of step 6, so that a forgotten scale would show above."""
    skipped = {r["step"]: r["skipped_steps"] for r in records(straight("dtensor")) if "skipped_steps" in r}
    assert 0 < skipped[6] < skipped[12], skipped
    scales = {r["loss_scale"] for r in records(straight("dtensor")) if "loss_scale" in r}
    assert len(scales) > 3, scales


@pytest.mark.parametrize("api", APIS)
def test_training_changes_the_parameters(api: str, straight: Callable[[str], Path]) -> None:
    """Otherwise the comparisons above would hold trivially."""
    first, last = (tensors(checkpoint(straight(api), step)) for step in (3, 12))
    assert all(not first[name].equal(last[name]) for name in last)
    assert losses(straight(api))[12][0] < losses(straight(api))[1][0] - 0.05


def test_the_mean_loss_covers_the_steps_since_the_last_line(text: Path, tmp_path: Path) -> None:
    """Also if the run was preempted in between, if the world size has changed, and without an end in a checkpoint."""
    more = {"train__steps": 8, "eval__every": 0, "checkpoint__every": 3, "optim__schedule": "constant"}

    def command(name: str, every: int = 4) -> list[str]:
        return tiny(text, tmp_path, run__name=name, log__every=every, **more)

    def means(name: str) -> dict[int, float]:
        return {r["step"]: r["mean_loss"] for r in records(tmp_path / name) if "loss" in r}

    succeeded(ranks(1, *command("each", 1)))
    each = {step: loss for step, (loss, _) in losses(tmp_path / "each").items()}
    assert means("each") == pytest.approx(each)
    said = succeeded(ranks(1, *command("rare")))
    straight = means("rare")
    expected = {4: sum(each[s] for s in (1, 2, 3, 4)) / 4, 8: sum(each[s] for s in (5, 6, 7, 8)) / 4}
    assert straight == pytest.approx(expected)
    assert straight[8] != pytest.approx(each[8], abs=1e-4)
    assert f"step    8/8  loss {straight[8]:.4f}" in said

    succeeded(ranks(1, *command("stopped"), fault="term:0:5"))
    left = max(means("stopped"))
    assert 5 <= left < 8, "a line of its own"
    succeeded(ranks(1, *command("stopped")))
    again = means("stopped")
    assert again.pop(left) == pytest.approx(sum(each[s] for s in range(5, left + 1)) / (left - 4))
    assert again == straight

    shutil.copytree(tmp_path / "rare", tmp_path / "resized")
    shutil.copytree(tmp_path / "rare", tmp_path / "older")
    for name in ("resized", "older"):
        forget_after(tmp_path / name, 6)
    succeeded(ranks(2, *command("resized")))
    assert means("resized") == pytest.approx(straight)
    file = checkpoint(tmp_path / "older", 6) / "state.json"
    state = json.loads(file.read_text())
    assert len(state.pop("loss_since")) == 2
    file.write_text(json.dumps(state))
    succeeded(ranks(1, *command("older"), "--checkpoint.verify=off"))
    assert means("older") == pytest.approx({4: straight[4], 8: (each[7] + each[8]) / 2})
