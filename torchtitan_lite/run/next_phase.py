"""Begins a phase of a run (docs/phases.md). Imported only if a run has phases."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchtitan_lite.config.toml import format_value
from torchtitan_lite.run import phases, start_and_end
from torchtitan_lite.run.session import Session, check_previous_step


def enter(s: Session, step: int, build_loader: Callable[..., Any], build_guards: Callable[..., Any]) -> None:
    """Build what depends on the phase that begins with this step. The builders are those of train.py."""
    check_previous_step(s)  # by the guards that saw this step
    s.loader.close()
    s.phase, s.samples, s.state = phases.open_phase(s.config, s.data, s.state, step)
    s.loader = build_loader(s.phase, s.samples, s.process)
    s.source_losses.begin(s.samples.names)
    saved = {key: value for guard in s.guards for key, value in guard.state().items()}
    begun = replace(s.state, **saved | {"spikes": {}})  # a window of losses is of one phase
    s.guards = build_guards(s.phase, s.process, begun, s.scaler, s.checkpointer, s.log)
    s.model.use_context(s.phase.model)
    s.meter.peak_tokens_per_second = start_and_end.peak_tokens_per_second(s.phase, s.model, s.process)

    n = len(s.state.phases) + 1
    s.log.record({"step": s.state.step, "phase": n})
    compiles = "; blocks are compiled for its lengths" * s.config.compile.enabled
    begins = f"phase   {n} begins after step {s.state.step}: {format_value(s.config.train.phases[n - 2])}{compiles}"
    s.log.info("\n".join([begins, *phases.place_lines(s.state)]))
