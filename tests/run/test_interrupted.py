"""A run that was cut off anywhere ends as if it had not been: recorded_interrupted.json.

Nothing else holds: what each start makes again, in which order; read the diffs. That a run ends as an uninterrupted one
is computed, not recorded: a line "differs: ..." is an exception, so no other one may appear.
"""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from torch import distributed

import train
from tests.helpers import checkpoint, forget_after, ranks, succeeded
from tests.recorded import assert_recorded
from tests.run.test_recorded_runs import masked
from tests.tools.test_recorded_commands import PREPARED, Place, write_texts
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.run import attempts, start_and_end

RUN = """--run.out_dir=FOLDER --run.name=run --run.device=cpu --run.threads=1 --model.family=gpt --model.dim=8
--model.n_layers=1 --model.n_heads=1 --model.max_seq_len=16 --train.seq_len=16 --train.micro_batch_size=2
--train.global_batch_size=4 --train.steps=7 --optim.name=adamw --optim.lr=0.02 --optim.warmup_steps=1
--optim.ema_decay=0.8 --eval.every=2 --eval.samples=5 --eval.tasks=FOLDER/quiz.jsonl,FOLDER/last.jsonl
--eval.tasks_every=3 --eval.task_questions=2 --sample.every=3 --sample.max_tokens=1 '--sample.prompts=["the", "of"]'
--log.every=4 --checkpoint.every=2 --checkpoint.keep_latest=0
'--data.sources={"FOLDER/data/news" = 3.0, "FOLDER/data/essays" = 1.0}' """
# some steps overflow, later ones double the scale again, and the last one is a spike
GUARDED = (
    RUN
    + """--fsdp.param_dtype=float16 --grad_scaler.init_scale=8e4 --grad_scaler.growth_interval=3
--spike.action=skip --spike.window=4 --spike.loss_deviations=0.01 --spike.norm_deviations=0.01 --train.max_skipped=9
--optim.lr=1"""
)
MOVED = " --run.name=fork --checkpoint.resume=FOLDER/run/checkpoints/step-00000004 --optim.lr=0.01"
# by name: the run, its newest checkpoint that is left, and which records are lost
LEFT: dict[str, tuple[str, int, str]] = {
    "killed in the save of step 6": ("run", 4, "7 .*|6 (save_s|prompt.*)"),
    "killed after this save": ("run", 6, "7 .*|6 (save_s|prompt.*)"),
    "killed in its samples": ("run", 6, "7 .*|6 prompt of"),
    "stopped after step 6": ("run", 6, "7 .*|6 (val_|ema|task|prompt).*"),
    "killed in the validation then": ("run", 6, "7 .*|6 (ema|task|prompt).*"),
    "killed in the tasks then": ("run", 6, "7 .*|6 (task/last|task_s|prompt.*)"),
    "validation is due": ("run", 6, "7 .*|6 (val_|ema).*"),
    "one of the tasks is due": ("run", 6, "7 .*|6 task/quiz"),
    "stopped after the last step": ("run", 7, "7 (val_|ema|task|prompt).*"),
    "killed in the last validation": ("run", 7, "7 ema.*"),
    "killed in the last samples": ("run", 7, "7 prompt.*"),
    "the newest checkpoints are deleted": ("run", 2, ""),
    "a fork that was killed before its first save": ("fork", 0, "[67] .*|5 prompt.*"),
    "a fork that was killed": ("fork", 6, "7 .*"),
}
FILES = "metrics.jsonl", "samples.jsonl"


def label(record: Mapping[str, Any]) -> str:
    """The step and what is recorded, without the words of a sample."""
    return " ".join(
        [str(record["step"]), next(key for key in record if key != "step"), record.get("prompt", "")]
    ).strip()


def whole(run: Path) -> dict[str, Any]:
    """What counts of a run: its records, without times and saves, and its checkpoints."""
    made = [record for file in FILES for record in attempts.records(run, file)]
    for record in made:  # measured in the step before a logged one, which a first step does not have
        record.pop("rank_seconds", None)
        record.pop("rank_data_s", None)
    found = {label(record): masked(record | {"attempt": 0}, {}) for record in made if "save_s" not in record}
    for step in storage.find_steps(run / "checkpoints"):
        state, manifest = storage.read_state(checkpoint(run, step)), storage.read_manifest(checkpoint(run, step))
        found[f"checkpoint {step}"] = asdict(state), {name: file.sha256 for name, file in manifest.files.items()}
    return found


def leave(run: Path, step: int, lost: str) -> None:
    """Make of a whole run one that ended earlier."""
    forget_after(run, step)
    for name in FILES:
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if not re.fullmatch(lost, label(json.loads(line)))))


def main(argv: list[str]) -> int:
    """All of it in this one process: `FOLDER`, which gets said.json."""
    folder = Path(argv[0]) / "place"
    made, place, found = Path(argv[0]) / "made", Place(folder), dict[str, Any]()
    folder.mkdir()
    write_texts(folder)
    for line in PREPARED[:2]:
        with contextlib.redirect_stdout(io.StringIO()):
            assert prepare([*place.words(line), "--tokenizer=bytes", "--val-fraction=0.2"]) == 0

    module: Any = start_and_end
    taken = module.take_over = Mock(wraps=module.take_over)

    def start(line: str) -> str:
        place.call("train", train.main, line)
        if distributed.is_initialized():  # after an error, which would end the process
            distributed.destroy_process_group()
        return str(place.said.popitem()[1])

    os.fsync = lambda fd: None
    for more in ("", MOVED):
        start(GUARDED + more)
    straight = {name: whole(folder / name) for name in ("run", "fork")}
    folder.rename(made)
    for name, (run, step, lost) in LEFT.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
        leave(folder / run, step, lost)
        said = start(GUARDED + MOVED * (run == "fork"))
        found[name] = [line for line in said.splitlines() if line.startswith(("run  ", "finished", "stopped"))]
        lines = [line for file in FILES for line in (folder / run / file).read_text().splitlines()]
        again = [label(record) for record in map(json.loads, lines) if record["attempt"] == 2 and "spike" not in record]
        now, then = whole(folder / run), straight[run]
        found[name] += [
            ", ".join(again),
            *(f"differs: {key}" for key in {**now, **then} if now.get(key) != then.get(key)),
        ]
    s = taken.call_args.args[-1]
    for service in (s.watchdog, s.preemption):
        service.on_abort(f"said by {type(service).__name__}")
        last = attempts.read(folder / run)[-1]
        found[last.reason] = last.attempt, last.ended, last.last_step
    (Path(argv[0]) / "said.json").write_text(json.dumps(found))
    return 0


def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    succeeded(ranks(1, str(tmp_path), entry="tests.run.test_interrupted"))
    found = json.loads((tmp_path / "said.json").read_text())
    assert_recorded(found, Path(__file__).with_name("recorded_interrupted.json"))
