"""How much of the time do failures cost, and how often should a run save?

A simulation draws the times of failures, and follows a run through them: steps, saves, failures, restarts, machines
that are lost and replaced. Its parts are seconds that somebody has measured, published or assumed; `INPUTS` says which.
Young's and Daly's intervals are printed next to the best simulated one. Nothing is fitted to a published goodput.

Simplifications: failures are independent, at a constant rate. One during a restart starts it again; one while the run
waits for a machine is ignored. The run waits for the machine; it does not continue with fewer. Storage serves all
machines at the same speed. What was computed before the last committed save is kept, and nothing else.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.terminal import duration

Array = NDArray[np.float64]
HOUR_S, DAY_S = 3600.0, 86400.0
DAYS = 54  # the length of the period that Llama 3's report covers
SIZES = 16, 1_024, 16_384, 100_000
LLAMA3_HOURS = 16_384 * DAYS * 24 / 419  # GPU-hours an interruption: 50,677
_FACTORS = np.geomspace(1 / 4, 4, 33)  # of Daly's interval: those that are simulated
_FAILURES = 4_000  # that are simulated for each size, to average over
_MOST_RUNS = 2_000
_ALIKE = 0.001  # of goodput

# option: default, what it is, where the default comes from
INPUTS = {
    "launch-s": (10.0, "launcher and imports, on each machine", "measured on 2 CPU cores, docs/plan.md"),
    "rendezvous-s": (1.0, "process group, for each doubling of the ranks", "measured on 2 CPU cores, docs/plan.md"),
    "first-step-s": (
        5.0,
        "the first step, beyond what a step takes",
        "assumed; 0.3 measured, without compilation and NCCL",
    ),
    "save-s": (0.01, "each save blocks training for this and the copy", "measured on 2 CPU cores, docs/plan.md"),
    "detect-s": (20.0, "until a failure is noticed", "tools.elastic; a hang takes 0.9 run.timeout_minutes"),
    "copy-gbs": (10.0, "copying shards to the host, GB per second and GPU", "assumed"),
    "storage-gbs": (1.0, "writing and reading checkpoints, GB per second and machine", "assumed"),
    "machine-share": (0.78, "share of failures that lose the machine", "Llama 3: interruptions due to hardware"),
    "replace-s": (1800.0, "until another machine is there, without a spare", "assumed"),
    "spare-share": (0.02, "spare machines, as a share of the machines", "assumed"),
    "repair-s": (DAY_S, "until a lost machine is back, as a spare", "assumed"),
}


class Saves(NamedTuple):
    """How a run saves, as its config says."""

    n_bytes: float  # of a checkpoint
    sharded: bool  # every machine writes its rows; otherwise rank 0 writes everything
    background: bool


@dataclass(frozen=True)
class Parts:
    """What a run has to do and to fear, in seconds.

    Args:
        mtbf_s: mean time between failures of the whole run.
        stall_s: how long a save blocks training.
        background_s: how long it takes after that, until it is committed.
        restart_s: from the start of the launcher to the end of the first step, beyond what a step takes.
    """

    mtbf_s: float
    stall_s: float
    background_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0
    machine_share: float = 0.0
    replace_s: float = 0.0
    spares: int = 0
    repair_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Shares of the time of the simulated runs, for each interval between saves. They add up to 1."""

    steps: Array  # that counted: goodput
    repeated: Array
    saves: Array
    restarts: Array  # with the time until a failure is noticed
    waiting: Array  # for a machine


def parts_of(gpus: int, mtbf_hours: float, saves: Saves, values: dict[str, float], *, per_machine: int) -> Parts:
    """The parts at a size, by these rules.

    Each machine writes, and reads, its share of a sharded checkpoint; a full one is written and read by one machine. A
    save in the background blocks training while each GPU copies its shard to the host. Launcher and imports take
    equally long everywhere; the rendezvous grows with the logarithm of the ranks.

    Args:
        mtbf_hours: GPU-hours for each failure.
        values: by the names of `INPUTS`.
    """
    machines = math.ceil(gpus / per_machine)
    disk_s = saves.n_bytes / (machines if saves.sharded else 1) / (1e9 * values["storage-gbs"])
    copy_s = saves.n_bytes / gpus / (1e9 * values["copy-gbs"])
    restart = values["launch-s"] + values["rendezvous-s"] * math.log2(max(gpus, 2)) + disk_s + values["first-step-s"]
    return Parts(
        mtbf_s=mtbf_hours * HOUR_S / gpus,
        stall_s=values["save-s"] + (copy_s if saves.background else disk_s),
        background_s=disk_s if saves.background else 0.0,
        detect_s=values["detect-s"],
        restart_s=restart,
        machine_share=values["machine-share"],
        replace_s=values["replace-s"],
        spares=math.ceil(values["spare-share"] * machines),
        repair_s=values["repair-s"],
    )


def young_s(parts: Parts) -> float:
    """Young's interval between saves (1974), in seconds of steps."""
    return math.sqrt(2 * parts.stall_s * parts.mtbf_s)


def daly_s(parts: Parts) -> float:
    """Daly's interval (2006), which also holds where a save is not short against the time between failures."""
    ratio = parts.stall_s / (2 * parts.mtbf_s)
    if ratio >= 1:
        return parts.mtbf_s
    return young_s(parts) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - parts.stall_s


def daly_goodput(parts: Parts, interval_s: float) -> float:
    """Daly's expected goodput: synchronous saves, no loss of machines, failures at any time."""
    m = parts.mtbf_s
    return interval_s / (m * math.exp(parts.restart_s / m) * math.expm1((interval_s + parts.stall_s) / m))


def simulate(parts: Parts, intervals_s: Array, *, days: float = DAYS, runs: int, seed: int = 0) -> Outcome:
    """Simulate runs of so many days. Each interval meets the same failures, so differences are due to the interval.

    Args:
        intervals_s: (K,), seconds of steps between saves.
    """
    rng, horizon, p = np.random.default_rng(seed), days * DAY_S, parts
    # a save waits until the one before is committed
    cycle = np.maximum(intervals_s, p.background_s) + p.stall_s
    shape = runs, len(intervals_s)
    now, dead_s, ready_at = np.zeros(shape), np.zeros(shape), np.zeros((*shape, p.spares))
    counted, repeated, saves, restarts, waiting = (np.zeros(shape) for _ in range(5))
    restart_s = 0.0  # the first start is no failure
    while now.min() < horizon:
        alive_s, lost = rng.exponential(p.mtbf_s, (runs, 1)), rng.random((runs, 1)) < p.machine_share
        left = horizon - now
        waits = np.minimum(dead_s, left)
        waiting += waits
        left -= waits
        notices = np.minimum(p.detect_s if restart_s else 0.0, left)
        left -= notices
        starts = np.minimum(np.minimum(restart_s, alive_s), left)
        restarts += notices + starts
        left -= starts
        up = np.clip(alive_s - restart_s, 0.0, left)
        failed = (alive_s - restart_s) < left
        # within `up`: cycles of steps and a save; the last one may be incomplete
        full = np.floor(up / cycle)
        trained = full * intervals_s + np.minimum(up - full * cycle, intervals_s)
        committed = np.minimum(np.maximum(np.floor((up - p.background_s) / cycle), 0.0), full)
        kept = np.where(failed, committed * intervals_s, trained)
        counted += kept
        repeated += trained - kept
        saves += up - trained
        now = horizon - left + up
        dead_s = np.where(failed & lost, _wait_for_machine(p, now, ready_at, failed & lost), 0.0)
        restart_s = p.restart_s
    shares = ((total / horizon).mean(0) for total in (counted, repeated, saves, restarts, waiting))
    return Outcome(*shares)


def _wait_for_machine(parts: Parts, now: Array, ready_at: Array, lost: NDArray[np.bool_]) -> Array:
    """How long a run waits for another machine, without a spare `replace_s` at most. Takes the first spare.

    Args:
        ready_at: (..., spares), when each spare can be used. The lost machine takes the place of the spare.
    """
    if not parts.spares:
        return np.full_like(now, parts.replace_s)
    first = ready_at.argmin(-1)[..., None]
    wait = np.clip(np.take_along_axis(ready_at, first, -1)[..., 0] - now, 0.0, parts.replace_s)
    after = np.where(lost, now + parts.repair_s, np.take_along_axis(ready_at, first, -1)[..., 0])
    np.put_along_axis(ready_at, first, after[..., None], -1)
    return wait


class Best(NamedTuple):
    """The best simulated interval, the shortest and longest that are almost as good, and shares of the time."""

    interval_s: float
    range_s: tuple[float, float]
    shares: dict[str, float]


def best(parts: Parts, seed: int = 0, days: float = DAYS) -> Best:
    """Simulate intervals around Daly's, and take the best."""
    intervals = daly_s(parts) * _FACTORS
    runs = min(max(math.ceil(_FAILURES * parts.mtbf_s / (days * DAY_S)), 2), _MOST_RUNS)
    outcome = simulate(parts, intervals, days=days, runs=runs, seed=seed)
    i = int(outcome.steps.argmax())
    alike = intervals[outcome.steps >= outcome.steps[i] - _ALIKE]
    shares = {name: float(share[i]) for name, share in vars(outcome).items()}
    return Best(float(intervals[i]), (float(alike.min()), float(alike.max())), shares)


def failure_lines(
    sizes: list[int],
    mtbf_hours: float,
    saves: Saves,
    values: dict[str, float],
    *,
    per_machine: int,
    step_s: tuple[int, float] | None = None,
) -> list[str]:
    """The inputs with their sources, and a table by size.

    Args:
        values: by the names of `INPUTS`.
        step_s: the world size of the plan, and its expected time of a step.
    """
    how = "in the background (checkpoint.async_save)" if saves.background else "synchronously"
    lines = [
        "",
        f"failures: {DAYS} days, one interruption in {mtbf_hours:,.0f} GPU-hours "
        f"(Llama 3's report: 419 in {DAYS} days on 16,384 GPUs, {LLAMA3_HOURS:,.0f})",
        f"  a checkpoint of {saves.n_bytes / 1e9:,.4g} GB, {'sharded' if saves.sharded else 'full'}, saved {how}; "
        f"{per_machine} GPU{'s' * (per_machine > 1)} a machine",
    ]
    for name, (default, text, source) in INPUTS.items():
        given = values[name] != default
        lines.append(f"  {f'--{name}={values[name]:g}':<20} {text} ({'given' if given else source})")
    lines += [
        "",
        "     GPUs  failures   stall  commit  restart    Young     Daly     best (almost as good)    goodput"
        "  repeated  saves  restarts  waiting  no spares",
    ]
    for gpus in sizes:
        parts = parts_of(gpus, mtbf_hours, saves, values, per_machine=per_machine)
        found, bare = best(parts), best(replace(parts, spares=0))
        s = found.shares
        alike = f"({_short(found.range_s[0])} to {_short(found.range_s[1])})"
        lines.append(
            f"{gpus:>9,} {DAYS * DAY_S / parts.mtbf_s:>9,.1f} {_short(parts.stall_s):>7} "
            f"{_short(parts.background_s):>7} {_short(parts.restart_s):>8} {_short(young_s(parts)):>8} "
            f"{_short(daly_s(parts)):>8} {_short(found.interval_s):>8} {alike:<22} {s['steps']:>7.1%} "
            f"{s['repeated']:>9.1%} {s['saves']:>6.1%} {s['restarts']:>9.1%} {s['waiting']:>8.1%} "
            f"{bare.shares['steps']:>10.1%}"
        )
        if step_s is not None and gpus == step_s[0]:
            every = max(round(found.interval_s / step_s[1]), 1)
            lines.append(f"           with steps of {step_s[1]:.3g} s as expected: --checkpoint.every={every}")
    return lines


def _short(seconds: float) -> str:
    return f"{seconds:.2g}s" if seconds < 9.95 else duration(seconds)
