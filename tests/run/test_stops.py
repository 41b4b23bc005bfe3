"""What a run does, and leaves for the next start, when it is asked to stop."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import torchtitan_lite as ttl
from tests.helpers import checkpoint, losses, python, ranks, records, succeeded, tiny
from torchtitan_lite.run import attempts
from torchtitan_lite.run.session import forward_seed
from torchtitan_lite.tools import checkpoints, status

AT_ONCE = {"run__max_minutes": 1e-9, "train__steps": 4}
WORK = {"eval__every": 2, "sample__every": 2, "sample__max_tokens": 9, "checkpoint__every": 2}
WORK |= {"sample__prompts": '["def ", "The"]', "sample__temperature": 0.6}


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after each of its first two steps, and then completed."""
    folder = tmp_path_factory.mktemp("stopped")
    command = tiny(text, folder, run__name="run", **AT_ONCE | WORK)
    first = succeeded(ranks(1, *command))
    assert "stopped after step 1 of 4" in first
    assert checkpoint(folder / "run", 1).is_dir()
    assert not [line for line in first.splitlines() if line.startswith(("eval", "sample"))], "they are not due"
    second = succeeded(ranks(1, *command))
    assert "stopped after step 2 of 4" in second
    assert "the same command resumes from there, with the validation and samples still due" in second
    assert not [line for line in second.splitlines() if line.startswith(("eval", "sample"))]
    succeeded(ranks(1, *tiny(text, folder, run__name="run", train__steps=4, **WORK)))
    return folder / "run"


def test_the_next_start_makes_up_for_what_a_stop_left_out(stopped: Path) -> None:
    assert [record["step"] for record in records(stopped) if "eval_s" in record] == [2, 4]
    samples = [json.loads(line) for line in (stopped / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [2, 2, 4, 4]
    for number, (sample, prompt) in enumerate(zip(samples, ("def ", "The") * 2, strict=True)):
        model, seed = ttl.load_model(checkpoint(stopped, sample["step"])), forward_seed(0, sample["step"], 0, 0)
        text = ttl.generate(*model, prompt, max_tokens=9, temperature=0.6, seed=seed + number % 2)
        assert (sample["prompt"], sample["text"]) == (prompt, text)


def test_stops_change_no_number(stopped: Path, text: Path, tmp_path: Path) -> None:
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="run", train__steps=4, **WORK)))
    assert losses(stopped) == losses(tmp_path / "run")
    mine, theirs = (
        [(record["step"], record["val_loss"]) for record in records(run) if "val_loss" in record]
        for run in (stopped, tmp_path / "run")
    )
    assert mine == theirs


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
    from tests.run.test_trackers import scalars_of

    ends = [line for line in (tmp_path / "run/attempts.jsonl").read_text().splitlines() if '"ended"' in line]
    assert len(ends) == 2, "one for each attempt, not for each rank"
    assert [step for step, *_ in scalars_of(tmp_path / "run/tensorboard", "val_loss")] == [2, 4], (
        "made up for, and sent"
    )


def test_the_best_checkpoint_is_kept_named_and_opened(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate rises so far that the loss does, too. The best is that of step 2."""
    more: dict[str, Any] = {"train__steps": 8, "eval__every": 2, "checkpoint__every": 2, "checkpoint__keep_best": True}
    more |= {"checkpoint__keep_latest": 1, "optim__warmup_steps": 0, "optim__lr": 2.0, "optim__schedule": "constant"}
    command = tiny(text, tmp_path, run__name="run", sample__every=0, **more)
    said = succeeded(ranks(1, *command))
    run = tmp_path / "run"
    scores = {r["step"]: r["val_loss"] for r in records(run) if "val_loss" in r}
    best = min(scores, key=lambda step: scores[step])
    assert best < 8, "else the test shows nothing"
    assert sorted(folder.name for folder in (run / "checkpoints").glob("step-*")) == [
        f"step-{n:08d}" for n in (best, 8)
    ]
    so_far = [step for step in scores if scores[step] == min(scores[s] for s in scores if s <= step)]
    assert [int(n) for n in re.findall(r"^eval +step (\d+) .* \(best so far\)", said, re.M)] == so_far
    assert checkpoints.main(["inspect", str(run)]) == 0
    assert f"the run's best checkpoint, by validation loss: step {best}\n" in capsys.readouterr().out
    assert status.main([str(run)]) == 0
    assert f"best    the checkpoint of step {best}, by validation loss" in capsys.readouterr().out

    newest, of_best = ("step-00000008", f"step-{best:08d}")
    for options, folder in ([], newest), (["--best"], of_best):
        result = python(str(run), "--prompt=a", "--max-tokens=1", *options, script="-m torchtitan_lite.generate")
        assert succeeded(result)
        assert folder in result.stderr
    losses_of = [
        json.loads((tmp_path / name).read_text())
        for name, options in (("newest.json", []), ("best.json", ["--best"]))
        if succeeded(python(str(run), f"--json={tmp_path / name}", *options, script="-m torchtitan_lite.evaluate"))
    ]
    assert losses_of[0] != losses_of[1]
    exported = tmp_path / "exported"
    succeeded(python("export", "--best", str(run), str(exported), script="checkpoint.py"))
    mine = python("export", str(run / "checkpoints" / of_best), str(tmp_path / "mine"), script="checkpoint.py")
    succeeded(mine)
    files = [folder / "model.safetensors" for folder in (exported, tmp_path / "mine")]
    assert files[0].read_bytes() == files[1].read_bytes()
    other = python("export", "--best", str(exported), str(tmp_path / "no"), script="checkpoint.py")
    assert other.returncode == 2
    assert "--best: " in other.stderr
    assert "is not a run with a checkpoint of a validated step" in other.stderr
