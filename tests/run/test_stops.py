"""What a run does, and leaves for the next start, when it is asked to stop."""

import json
from pathlib import Path
from typing import Any

import torchtitan_lite as ttl
from tests.helpers import checkpoint, losses, ranks, records, succeeded, tiny
from tests.run.test_trackers import scalars_of
from torchtitan_lite.run import attempts
from torchtitan_lite.run.session import forward_seed

WORK = {
    **{"eval__every": 2, "checkpoint__every": 2, "sample__every": 2, "sample__max_tokens": 9},
    **{"sample__prompts": '["def ", "The"]', "sample__temperature": 0.6},
}


def test_the_next_start_makes_up_for_what_a_stop_left_out_and_no_number_changes(text: Path, tmp_path: Path) -> None:
    """A run that is stopped after each of its first two steps, and at the last one."""
    run = tmp_path / "run"
    plain = tiny(text, tmp_path, run__name="run", train__steps=4, log__trackers='["tensorboard"]', **WORK)
    slow_load: dict[str, Any] = {"fault": "slow:0:0:hash", "env": {"FAULT_SECONDS": "0.7"}}  # more than 0.01 minutes
    for step, limit, due, load in (
        (1, 1e-9, "", {}),
        (2, 0.01, ", with the validation and samples still due", slow_load),
    ):
        said = succeeded(ranks(1, *plain, f"--run.max_minutes={limit}", **load))
        told = (
            f"stopped after step {step} of 4 (run.max_minutes = {limit:g}); the same command resumes from there{due}\n"
        )
        assert told in said
        assert not [line for line in said.splitlines() if line.startswith(("eval", "sample"))]
        assert checkpoint(run, step).is_dir()
    assert "stopped after step 4 of 4 (" in succeeded(ranks(1, *plain, fault="term:0:4"))
    assert attempts.newest_status(run)["status"] == "preempted", "its validation is due"
    assert "finished: step 4 of train.steps = 4" in succeeded(ranks(1, *plain))
    assert attempts.newest_status(run)["status"] == "complete"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [2, 2, 4, 4]
    for number, (sample, prompt) in enumerate(zip(samples, ("def ", "The") * 2, strict=True)):
        model, seed = ttl.load_model(checkpoint(run, sample["step"])), forward_seed(0, sample["step"], 0, 0)
        assert sample["prompt"] == prompt
        assert sample["text"] == ttl.generate(*model, prompt, max_tokens=9, temperature=0.6, seed=seed + number % 2)
    succeeded(ranks(1, *plain, "--run.name=straight"))
    assert losses(run) == losses(tmp_path / "straight")
    mine, theirs = (
        [(record["step"], record["val_loss"]) for record in records(folder) if "val_loss" in record]
        for folder in (run, tmp_path / "straight")
    )
    assert mine == theirs
    assert [step for step, _ in mine] == [step for step, _ in scalars_of(run / "tensorboard", "val_loss")] == [2, 4]
    assert [step for step, _ in scalars_of(run / "tensorboard", "seconds")] == [1, 2, 3, 4], "or those of samples"
