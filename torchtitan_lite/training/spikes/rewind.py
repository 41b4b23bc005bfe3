"""Rewinds within the process: loads a checkpoint and skips the samples seen since.

The steps after the checkpoint become as if they had not been: step, tokens, learning rates and optimizer are those of
the checkpoint, and so are the records in the run's folder. Only the position in the data is that after the spike. A run
whose data.skip_samples has the same range does the same, bit for bit.

Nothing is erased. The records of the abandoned steps move to spikes.jsonl, with the number of the rewind, and later
checkpoints are set aside as .old-step-N. The number of rewinds and the jump in the data are in TrainState, so they are
saved with the next checkpoint. If the run is killed before that, it resumes from the checkpoint that it had gone back
to, meets the spike again, and does the same again: then its lines in spikes.jsonl take the place of the first ones.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing.compatibility import require_same_order
from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.checkpointing.select import set_aside
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.storage import find_steps
from torchtitan_lite.errors import CheckpointError, UnreadableError
from torchtitan_lite.monitoring import records, run_folder
from torchtitan_lite.monitoring.metrics import Meter
from torchtitan_lite.monitoring.resumed import recorded_changes
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.training.callbacks import report_save
from torchtitan_lite.training.session import Session

_OF_STEPS = "metrics.jsonl", "samples.jsonl"


def checkpoints_before(s: Session, step: int) -> list[int]:
    """The steps of the checkpoints before this one, ascending. Collective; a save in the background ends first.

    If nothing was saved since the last rewind, its checkpoint is the newest, however near it is.
    """
    report_save(s, wait=True)
    saved = on_rank0(s.world, lambda: find_steps(s.checkpointer.folder))
    last = s.state.spikes.get("rewound_to", 0)
    return [number for number in saved if number < step or number == last == saved[-1]]


def skipped_samples(s: Session) -> str:
    """data.skip_samples with which another run skips the same samples as this one."""
    ranges: list[list[int]] = []
    for first, end in sorted([*s.config.data.skip_samples, *([first, end] for _, first, end in s.state.jumps)]):
        if ranges and first <= ranges[-1][1]:
            ranges[-1][1] = max(end, ranges[-1][1])
        else:
            ranges.append([first, end])
    return f"[{','.join(f'[{first},{end}]' for first, end in ranges)}]"


def go_back(s: Session, spike: dict[str, Any], steps: list[int], of: str) -> None:
    """Load the newest complete checkpoint of these, and continue after the samples of the last step. Collective.

    Args:
        spike: its record, for spikes.jsonl.
        of: for the log, how many rewinds there may be.

    Raises:
        CheckpointError: on every rank: none is complete, it is of an older version (`require_same_order`), or the
            files can't be changed.
    """
    before, c = s.state, s.config
    s.watchdog.step(steps[-1])  # every rank is behind this step now
    with s.watchdog.loading("going back to an earlier checkpoint"), s.log.clock.on("load"):
        loaded = _load(s, steps)
        require_same_order(c.train, loaded)
        number = before.spikes.get("rewinds", 0) + 1
        saved = loaded.continued_by(before)
        jump = [saved.step, saved.samples_consumed, before.samples_consumed]
        spikes = {**saved.spikes, "rewinds": number, "rewound_to": saved.step}
        s.state = replace(saved, samples_consumed=before.samples_consumed, jumps=[*saved.jumps, jump], spikes=spikes)
        record = {"rewind": number, "step": before.step, "back_to": saved.step, "spike": spike, "skipped": jump[1:]}
        for note in on_rank0(s.world, lambda: _change_files(s, loaded, number, record)):
            s.log.info(f"note    {note}")
        s.log.clock.rewind(c.folder, run_folder.read(c.folder), saved.step)
    s.scaler = GradScaler(c.grad_scaler, c.fsdp.uses_float16, s.world.device, saved.grad_scaler)
    s.guard = FiniteGuard(s.optimizer, s.scaler, s.guard.max_skipped, saved.skipped)
    before_meter, s.meter = s.meter, Meter(s.state, s.world.device, s.log.clock)
    s.meter.started, s.meter.first_step = before_meter.started, min(before_meter.first_step, saved.step)
    s.log.reopen_trackers(s.state)
    s.log.start_bar(saved.step, c.train.steps)
    s.log.record({"step": saved.step + 1, "rewind": number, "rewound_from": before.step, "rewound_samples": jump[1:]})
    s.log.info(
        f"REWOUND from step {before.step} to {s.checkpointer.folder / f'step-{saved.step:08d}'} ({number} {of}), and "
        f"on without the samples {jump[1]} to {jump[2] - 1}: as a run with --data.skip_samples={skipped_samples(s)}"
    )


def _load(s: Session, steps: list[int]) -> TrainState:
    """Load the newest of these checkpoints that is complete."""
    checkpointer, config, problems = s.checkpointer, s.checkpointer.config, list[str]()
    try:
        for step in reversed(steps):
            checkpointer.config = config.model_copy(update={"resume": f"step-{step}"})
            try:
                if loaded := checkpointer.load(s.state.identity):
                    return loaded
            except UnreadableError:
                raise
            except CheckpointError as error:
                problems.append(str(error))
                s.log.info(f"note    damaged: {error}")
    finally:
        checkpointer.config = config
    raise CheckpointError("\n  ".join(["no checkpoint is complete that the run could go back to:", *problems]))


def _change_files(s: Session, loaded: TrainState, number: int, record: dict[str, Any]) -> list[str]:
    """Move later records to spikes.jsonl, and set later checkpoints aside, on rank 0. Returns notes."""
    folder, step = s.config.folder, loaded.step
    file = folder / "spikes.jsonl"
    lines, cut = [record | {"time": round(time.time(), 3)}], recorded_changes(folder / "changes.jsonl", loaded, s.state)
    for name in _OF_STEPS:
        whole, kept, later = records.split(folder / name, step)
        lines += [{"rewind": number, "file": name, **values} for values in later]
        if kept != whole:
            cut[name] = kept
    new = "".join(json.dumps(values) + "\n" for values in lines).encode()
    kept = _without_the_same(file, record)
    run_folder.take_over(folder, {file.name: kept + new}, list)  # first: a kill in between loses no record
    return run_folder.take_over(folder, cut, lambda: set_aside(s.checkpointer.folder, s.checkpointer.aside))


def _without_the_same(file: Path, record: dict[str, Any]) -> bytes:
    """The content of spikes.jsonl without an earlier attempt of this rewind, which a kill made the run repeat."""
    kept, same = [], False
    for line in file.read_bytes().splitlines(keepends=True) if file.is_file() else []:
        earlier = records.parse(line)
        if earlier is None:
            continue
        if "back_to" in earlier:  # the first line of a rewind; those of its steps follow
            same = all(earlier.get(key) == record[key] for key in ("rewind", "step", "back_to", "skipped"))
        kept += [] if same else [line]
    return b"".join(kept)
