"""How often should a run save, and what goodput can it expect? `plan --mtbf`, by Daly's closed form (2006).

Failures are independent, at a constant rate, and a run that fails starts again on as many machines: the wait for a
machine is not included. The published figure for HOURS is Llama 3's: 419 interruptions in 54 days on 16,384 GPUs.
"""

import math

from torchtitan_lite.terminal import duration

LLAMA3_HOURS = 16_384 * 54 * 24 / 419  # GPU-hours an interruption: 50,677
# option: default, what it is, where the default comes from
INPUTS = {
    "restart-s": (60.0, "from a failure to the next step, without loading", "assumed; 2 CPU cores: 8 to 12 measured"),
    "copy-gbs": (10.0, "copying shards to the host, GB per second and GPU", "assumed"),
    "storage-gbs": (1.0, "writing and reading checkpoints, GB per second and machine", "assumed"),
}


def best_interval(save_s: float, mtbf_s: float) -> float:
    """Daly's interval between saves that block training for save_s, in seconds of steps."""
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def expected_goodput(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Daly's expected share of the time in steps that count, with failures also in saves and restarts."""
    cycle = (interval_s + save_s) / mtbf_s
    return interval_s / mtbf_s * math.exp(-cycle - restart_s / mtbf_s) / -math.expm1(-cycle)


def failure_lines(
    mtbf_hours: float,
    gpus: int,
    machines: int,
    checkpoint_bytes: float,
    values: dict[str, float],
    *,
    sharded: bool,
    background: bool,
    step_s: float | None,
) -> list[str]:
    """The best interval between saves, the expected goodput, and what they follow from.

    Each machine writes, and reads, its share of a sharded checkpoint; a full one is written and read by one machine. A
    save in the background blocks training only while each GPU copies its shard. A failure before it is committed also
    repeats the steps since it began, so that time counts as a part of the restart.

    Args:
        mtbf_hours: GPU-hours for each failure.
        values: by the names of `INPUTS`.
        step_s: the expected time of a step, if it is known.
    """
    mtbf_s = mtbf_hours * 3600 / gpus
    disk_s = checkpoint_bytes / (machines if sharded else 1) / (1e9 * values["storage-gbs"])
    save_s = checkpoint_bytes / gpus / (1e9 * values["copy-gbs"]) if background else disk_s
    commit_s = disk_s if background else 0.0
    restart_s = values["restart-s"] + disk_s
    interval_s = max(best_interval(save_s, mtbf_s), commit_s)  # a save waits for the one before it
    goodput = expected_goodput(interval_s, save_s, restart_s + commit_s, mtbf_s)
    every = f", --checkpoint.every={max(round(interval_s / step_s), 1)} at the expected step time" if step_s else ""
    how = "in the background (checkpoint.async_save)" if background else "while training waits"
    return [
        "",
        f"failure one in {mtbf_hours:,.0f} GPU-hours (given; Llama 3's report: {LLAMA3_HOURS:,.0f}): one in "
        f"{duration(mtbf_s)} on {gpus:,} GPU{'s' * (gpus > 1)}",
        *(
            f"        --{name}={values[name]:g}: {text} ({'given' if values[name] != default else source})"
            for name, (default, text, source) in INPUTS.items()
        ),
        f"        a save blocks training for {save_s:.2g} s, written {how}; a restart takes {duration(restart_s)}",
        f"save    every {duration(interval_s)} of training (Daly's interval){every}: expected goodput {goodput:.1%}",
    ]
