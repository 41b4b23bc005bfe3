"""What a resume logs, and the evaluations that it still has to run."""

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.exchange import on_rank0
from torchtitan_lite.run import attempts
from torchtitan_lite.run.phases import place_lines
from torchtitan_lite.run.session import Periodic, Session


def resume_lines(config: Config, saved: TrainState, current: TrainState) -> list[str]:
    """List changed keys, why the resume is not bit for bit, and changes of validation text and tasks."""
    lines = []
    shown = {key: value for key, value in current.settings.items() if key != "model.init_from"}  # only read at step 0
    if values := changed_values(saved.settings, shown):
        lines.append(f"run     changed since then: {values}")
    if len(current.segments) > max(len(saved.segments), 1):
        lines += place_lines(current)
    if values := changed_values(saved.bitwise_setting, current.bitwise_setting):
        lines.append(f"run     the same data in the same order, but not bit for bit: {values}")
    before, now = saved.validation, current.validation
    if config.eval.every and now != before:
        covers = f"{now['samples']} of {now['of']} sequences, drawn at random, and covered {before['samples']} before"
        lines.append(f"run     validation covers {covers}: do not compare its loss with that of earlier steps")
    for name, digest in current.tasks.items():
        if saved.tasks.get(name, digest) != digest:
            changed = f"eval.tasks {name} has different questions"
            lines.append(f"run     {changed}: do not compare its scores with those of earlier steps")
    return lines


def changed_values(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """List the changed values, as "threads 1 -> 2, ..."; empty if there are none."""
    return ", ".join(
        f"{key} {saved.get(key)} -> {value}" for key, value in current.items() if saved.get(key, value) != value
    )


# --- evaluations -------------------------------------------------------------------------------------------------


def missed_evaluations(s: Session) -> list[Periodic]:
    """Return the evaluations due at the current step without records. (One prompt's counts for all.) Collective."""
    step = s.state.step
    evaluations = [work for work in s.periodic if work.keys and work.due(step, s.config.train.steps)]

    def missing() -> list[int]:
        files = "metrics.jsonl", "samples.jsonl"
        keys = {k for file in files for r in attempts.records(s.config.folder, file) if r["step"] == step for k in r}
        return [i for i, one in enumerate(evaluations) if not keys.issuperset(one.keys)]

    return [evaluations[i] for i in on_rank0(missing, s.process.untimed)] if step else []


def run_missed(s: Session, missed: list[Periodic]) -> None:
    """Run these before the first step; stop after the one during which a rank was asked to stop. Collective."""
    for evaluation in missed:
        s.watchdog.step(s.state.step)
        evaluation.run(s, None)
        s.preemption.agree(s.process)
        if s.preemption.agreed:
            break
    s.meter.lap(s.state.tokens)
