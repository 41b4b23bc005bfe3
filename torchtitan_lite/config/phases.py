"""Phases: what changes within a run, and after which step (docs/phases.md).

A phase is a TOML table: `from_step` or `from_fraction`, and tables with values of sections, which hold until a later
phase changes them. So the config of a phase is that of a fork which begins where the phase begins.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# The keys that a phase may change. What is built from the others (parameters, optimizer, mesh) is built once.
KEYS = (
    "data.sources",
    *(f"train.{key}" for key in ("seq_len", "micro_batch_size", "global_batch_size")),
    *(f"optim.{key}" for key in ("lr", "schedule", "decay_ratio", "min_lr_ratio", "step_gamma", "step_every")),
    *(f"model.{key}" for key in ("window", "window_rope_theta", "rope_theta", "rope_factor")),
    *(f"model.rope_{key}" for key in ("low_freq_factor", "high_freq_factor", "original_max_seq_len")),
)


def checked(value: Any) -> list[dict[str, Any]]:
    """Return phases with a place each, and with keys that a phase may change."""
    if not isinstance(value, list) or not all(isinstance(phase, dict) for phase in value):
        raise ValueError("should be tables, each beginning with [[phases]]")
    for n, phase in enumerate(value, 2):  # phase 1 is before the first of them
        tables = {name: table for name, table in phase.items() if name not in ("from_step", "from_fraction")}
        step, fraction = phase.get("from_step", 0), phase.get("from_fraction", 0.0)
        if not isinstance(step, int) or not isinstance(fraction, float) or (step > 0) + (0 < fraction < 1) != 1:
            raise ValueError(f"phase {n} should have either from_step = 8000 or from_fraction = 0.8")
        if not all(isinstance(table, dict) for table in tables.values()):
            raise ValueError(f"phase {n} should have keys of sections, such as train.seq_len = 4096")
        for key, item in changes([phase], 1).items():
            if key not in (*KEYS, "data.path"):
                raise ValueError(
                    f"phase {n} can't change {key}, only {', '.join(KEYS)}; others change in a fork from the step "
                    "where the phase would begin: --run.name=NEW --checkpoint.resume=RUN/checkpoints/STEP "
                    f"--{key}={item}"
                )
    return value


def changes(phases: Sequence[Mapping[str, Any]], n: int) -> dict[str, Any]:
    """Return what the first n phases change, by "section.key"."""
    sections = [item for phase in phases[:n] for item in phase.items() if isinstance(item[1], dict)]
    merged = {f"{section}.{key}": value for section, table in sections for key, value in table.items()}
    return {"data.path": "", **merged} if "data.sources" in merged else merged
