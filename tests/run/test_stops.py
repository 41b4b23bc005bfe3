"""What a run does, and leaves for the next start, when it is asked to stop."""

import json
import re
from pathlib import Path

import pytest

import torchtitan_lite as ttl
from tests.helpers import checkpoint, losses, python, ranks, records, succeeded, tiny
from tests.run.test_trackers import scalars_of
from torchtitan_lite.checkpointing.storage import find_steps
from torchtitan_lite.run import attempts
from torchtitan_lite.run.session import forward_seed
from torchtitan_lite.tools import checkpoints, status

WORK = {
    **{"eval__every": 2, "checkpoint__every": 2, "sample__every": 2, "sample__max_tokens": 9},
    **{"sample__prompts": '["def ", "The"]', "sample__temperature": 0.6},
}


def test_the_next_start_makes_up_for_what_a_stop_left_out_and_no_number_changes(text: Path, tmp_path: Path) -> None:
    """A run that is stopped after each of its first two steps, and then completed."""
    run, plain = tmp_path / "run", tiny(text, tmp_path, run__name="run", train__steps=4, **WORK)
    for step, due in ((1, ""), (2, ", with the validation and samples still due")):
        said = succeeded(ranks(1, *plain, "--run.max_minutes=1e-9"))
        assert (
            f"stopped after step {step} of 4 (run.max_minutes = 1e-09); the same command resumes from there{due}\n"
            in said
        )
        assert not [line for line in said.splitlines() if line.startswith(("eval", "sample"))]
        assert checkpoint(run, step).is_dir()
    succeeded(ranks(1, *plain))
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
    assert [step for step, _ in mine] == [2, 4]


def ended(run: Path) -> tuple[str, int]:
    about = attempts.newest_status(run)
    return about["status"], about["step"]


def test_a_stop_at_the_last_step_is_not_complete_before_its_validation(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", train__steps=4, log__trackers='["tensorboard"]', **WORK)
    said = succeeded(ranks(2, *command, fault="term:0:4"))
    assert "stopped after step 4 of 4 (" in said
    assert ended(tmp_path / "run") == ("preempted", 4)
    said = succeeded(ranks(2, *command))
    assert "eval    step 4  loss" in said
    assert "finished: step 4 of train.steps = 4" in said
    assert ended(tmp_path / "run") == ("complete", 4)
    ends = [line for line in (tmp_path / "run/attempts.jsonl").read_text().splitlines() if '"ended"' in line]
    assert len(ends) == 2, "one for each attempt, not for each rank"
    assert [step for step, *_ in scalars_of(tmp_path / "run/tensorboard", "val_loss")] == [2, 4], (
        "made up for, and sent"
    )


def test_the_best_checkpoint_is_kept_named_and_opened(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate rises so far that the loss does, too. The best is that of step 2."""
    more = {
        **{"train__steps": 8, "eval__every": 2, "checkpoint__every": 2, "checkpoint__keep_best": True},
        **{"checkpoint__keep_latest": 1, "optim__warmup_steps": 0, "optim__lr": 2.0, "optim__schedule": "constant"},
    }
    run = tmp_path / "run"
    said = succeeded(ranks(1, *tiny(text, tmp_path, run__name="run", **more)))
    validated = {r["step"]: r["val_loss"] for r in records(run) if "val_loss" in r}
    best = min(validated, key=lambda step: validated[step])
    assert best < 8, "else the test shows nothing"
    assert find_steps(run / "checkpoints") == [best, 8]
    so_far = [step for step in validated if validated[step] == min(validated[s] for s in validated if s <= step)]
    assert [int(n) for n in re.findall(r"^eval +step (\d+) .* \(best so far\)", said, re.M)] == so_far
    assert checkpoints.main(["inspect", str(run)]) == 0
    assert f"the run's best checkpoint, by validation loss: step {best}\n" in capsys.readouterr().out
    assert status.main([str(run)]) == 0
    assert f"best    the checkpoint of step {best}, by validation loss" in capsys.readouterr().out

    newest, of_best = (checkpoint(run, step).name for step in (8, best))
    scores = []
    for options, folder in ([], newest), (["--best"], of_best):
        result = python(str(run), "--prompt=a", "--max-tokens=1", *options, script="-m torchtitan_lite.generate")
        assert succeeded(result)
        assert folder in result.stderr
        file = tmp_path / f"{folder}.json"
        succeeded(python(str(run), f"--json={file}", *options, script="-m torchtitan_lite.evaluate"))
        scores.append(json.loads(file.read_text()))
    assert scores[0] != scores[1]
    exported = tmp_path / "exported"
    assert checkpoints.main(["export", "--best", str(run), str(exported)]) == 0
    assert checkpoints.main(["export", str(run / "checkpoints" / of_best), str(tmp_path / "mine")]) == 0
    files = [folder / "model.safetensors" for folder in (exported, tmp_path / "mine")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert checkpoints.main(["export", "--best", str(exported), str(tmp_path / "no")]) == 2
    assert re.search("--best: .* is not a run with a checkpoint of a validated step", capsys.readouterr().err)
