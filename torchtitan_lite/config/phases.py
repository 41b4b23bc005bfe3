"""Phases: what changes within a run, and after which step (docs/phases.md).

A phase has `from_step` or `from_fraction`, and values by "section.key", which hold until a later phase changes them. So
the config of a phase is that of a fork which begins where the phase begins.
"""

from collections.abc import Mapping
from typing import Any

# The keys that a phase may change. What is built from the others (parameters, optimizer, mesh) is built once.
KEYS = (
    "data.sources",
    *(f"train.{key}" for key in ("seq_len", "micro_batch_size", "global_batch_size")),
    *(f"optim.{key}" for key in ("lr", "schedule", "decay_ratio", "min_lr_ratio", "step_gamma", "step_every")),
    *(f"model.{key}" for key in ("window", "window_rope_theta", "rope_theta", "rope_factor")),
    *(f"model.rope_{key}" for key in ("low_freq_factor", "high_freq_factor", "original_max_seq_len")),
)


def flat(value: Any) -> list[dict[str, Any]]:
    """Return phases as TOML tables with their values by "section.key"."""
    if not isinstance(value, list) or not all(isinstance(phase, dict) for phase in value):
        raise ValueError("should be tables, each beginning with [[phases]]")
    phases: list[dict[str, Any]] = []
    for n, tables in enumerate(value, 2):  # phase 1 is before the first of them
        inside = {section: table for section, table in tables.items() if isinstance(table, dict) and "." not in section}
        phase = {key: item for key, item in tables.items() if key not in inside}
        phase |= {f"{section}.{key}": item for section, table in inside.items() for key, item in table.items()}
        step, fraction = phase.get("from_step", 0), phase.get("from_fraction", 0.0)
        if not isinstance(step, int) or not isinstance(fraction, float) or (step > 0) + (0 < fraction < 1) != 1:
            raise ValueError(f"phase {n} should have either from_step = 8000 or from_fraction = 0.8")
        if wrong := [key for key in phase if key not in (*KEYS, "from_step", "from_fraction")]:
            raise ValueError(
                f"phase {n} can't change {wrong[0]}, only {', '.join(KEYS)}; others change in a fork from the step "
                "where the phase would begin: --run.name=NEW --checkpoint.resume=RUN/checkpoints/STEP "
                f"--{wrong[0]}={phase[wrong[0]]}"
            )
        phases.append(phase)
    return phases


def changes(values: Mapping[str, Any], n: int) -> dict[str, Any]:
    """Return what the first n phases of a config change. All are values by "section.key"."""
    merged = {key: value for phase in values.get("train.phases", [])[:n] for key, value in phase.items() if "." in key}
    return {"data.path": "", **merged} if "data.sources" in merged else merged
