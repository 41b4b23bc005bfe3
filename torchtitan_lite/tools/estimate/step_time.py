"""How long does a step take? A lower bound from nominal peaks, and the expected time, from the simulated step and a few
constants:

    products        FLOPs at the device's sustained rate; and the time to read the factors and write the result, which
                    is added, and in compiled blocks only counts where it is longer
    attention       FLOPs of the causal half, at a lower rate
    other operators bytes, as eager or fused kernels move them; at least the time in which the host can launch them
    communication   what computation cannot hide: the first all-gather, the last reduce-scatter, and what takes longer
                    than the computation beside it; what is hidden slows the computation down
    optimizer       bytes; with muon also its products and exchanges, which nothing hides

`Device.sustained`, ATTENTION and CONTENTION were fitted to published runs (benchmarks/published.py), the others are
assumed. The error on other published runs is the range that is printed. docs/plan.md compares with them.
"""

import math
from collections import Counter
from dataclasses import dataclass, fields, replace

from torchtitan_lite.monitoring.mfu import DEVICES, Device, formula
from torchtitan_lite.terminal import duration
from torchtitan_lite.tools.estimate import communication
from torchtitan_lite.tools.estimate.planned_run import Plan
from torchtitan_lite.tools.estimate.simulate import OPTIMIZER, PARAMETERS
from torchtitan_lite.tools.estimate.work import Attention, Product, Traffic, Work

SPREAD = 0.15  # nine of ten published runs that were not used for fitting are within this of the expected speed
ATTENTION = 0.6  # rate of attention, as a share of the products' rate
CONTENTION = 0.1  # how much hidden communication slows computation down, as a share of its time
POWER = 1 / 3  # the rate goes with this power of the power limit: power goes with clock times voltage squared
MEMORY = 0.85  # share of the nominal memory bandwidth
LAUNCH_S = 5e-6  # the host's time for one operator


# --- the lower bound --------------------------------------------------------------------------------------------


def compute_s(plan: Plan, device: Device) -> float:
    """Matrix products of forward and backward at the device's peak, including recomputation."""
    checkpointing = plan.config.activation_checkpointing
    recomputed = 1 / (3 * checkpointing.every) if checkpointing.mode == "full" else 0.0
    flops = plan.flops_per_token * (1 + recomputed) * plan.computed_tokens
    return flops / device.peak_flops(plan.config.fsdp.param_dtype)


def optimizer_s(plan: Plan, device: Device) -> float:
    """Time to read and write parameters and state, to read gradients, and of muon's products and exchanges."""
    start, work = plan.simulated.peaks["start"], plan.simulated.optimizer
    moved = (3 * start[PARAMETERS] + 2 * start[OPTIMIZER]) / device.memory_bandwidth
    flops = sum(n * 2 * w.m * w.n * w.k for w, n in work.items() if isinstance(w, Product))
    wide = any(isinstance(w, Product) and w.width == 4 for w in work)
    exchanged = communication.least_s(plan, plan.simulated.exchanges, device)
    return moved + flops / (device.fp32_flops if wide else device.half_flops) + sum(exchanged.values())


def least_s(plan: Plan, device: Device) -> float:
    """Lower bound of a step: the longer of computation and communication, plus the optimizer."""
    sent = communication.least_s(plan, plan.collectives, device)
    return max(compute_s(plan, device), sum(sent.values())) + optimizer_s(plan, device)


# --- the expected time ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Seconds of a step."""

    products: float = 0.0
    attention: float = 0.0
    others: float = 0.0  # operators other than products, and waiting for the host
    exposed: float = 0.0  # communication that is not hidden, and the slowdown by what is
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def __add__(self, other: "Expected") -> "Expected":
        return Expected(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, n: int) -> "Expected":
        return Expected(*(n * getattr(self, f.name) for f in fields(self)))


def shares(device: Device) -> tuple[float, float]:
    """The least and the most of the nominal peak that large products reach.

    Without published runs: the least of all devices that have some, and the most of the three nearest in peak. The
    share falls as the peak grows, because the power does not grow with it.
    """
    if device.sustained:
        return device.sustained, device.sustained
    fitted = [d for d in DEVICES.values() if d.sustained]
    near = sorted(fitted, key=lambda d: abs(math.log(d.half_flops / device.half_flops)))[:3]
    return min(d.sustained or 1.0 for d in fitted), max(d.sustained or 1.0 for d in near)


@dataclass(frozen=True)
class Machine:
    """The rates of a device."""

    device: Device
    power: float = 1.0  # limit, as a share of the nominal one

    def rate(self, width: int) -> float:
        """FLOPs per second of large products; `width`: bytes of an element."""
        nominal = self.device.fp32_flops if width == 4 else self.device.half_flops
        return math.sqrt(math.prod(shares(self.device))) * self.power**POWER * nominal

    @property
    def bandwidth(self) -> float:
        """Bytes per second of memory."""
        return MEMORY * self.device.memory_bandwidth

    def products_s(self, work: Counter[Work], phase: str, *, fused: bool) -> float:
        total = 0.0
        for w, n in work.items():
            if isinstance(w, Product) and w.phase == phase:
                computing = 2 * w.batch * w.m * w.n * w.k / self.rate(w.width)
                moving = w.batch * w.width * (w.m * w.k + w.k * w.n + w.m * w.n) / self.bandwidth
                total += n * (max(computing, moving) if fused else computing + moving)
        return total

    def attention_s(self, work: Counter[Work], phase: str) -> float:
        return sum(
            n * 2 * w.products * w.heads * w.scores * w.head_dim / (ATTENTION * self.rate(w.width))
            for w, n in work.items()
            if isinstance(w, Attention) and w.phase == phase
        )

    def others_s(self, work: Counter[Work], phase: str, *, fused: bool) -> float:
        return work[Traffic(phase, fused)] / self.bandwidth


def expected(plan: Plan, device: Device, power: float = 1.0) -> Expected:
    """The expected time of a step.

    Args:
        power: the device's power limit, as a share of the nominal one.
    """
    machine, simulated = Machine(device, power), plan.simulated
    update_s = machine.others_s(simulated.optimizer, "optimizer", fused=False)
    products_s = machine.products_s(simulated.optimizer, "optimizer", fused=False)
    exchanged = communication.expected_s(plan, simulated.exchanges, device)
    step = Expected(optimizer=update_s + (products_s + sum(seconds for seconds, _ in exchanged.values())))
    for i, times in simulated.micro_batches(plan.layout.grad_accum_steps):
        sent = communication.expected_s(plan, simulated.collectives[i], device)
        step += micro_batch(machine, simulated.work[i], sent, fused=plan.config.compile.enabled).times(times)
    return step


def likely(plan: Plan, device: Device, power: float = 1.0) -> tuple[float, float]:
    """The least and the most seconds that a step is likely to take: see SPREAD and `shares`."""
    least, most = (expected(plan, replace(device, sustained=share), power).total for share in shares(device)[::-1])
    return least / (1 + SPREAD), most / (1 - SPREAD)


def micro_batch(machine: Machine, work: Counter[Work], sent: dict[str, tuple[float, int]], *, fused: bool) -> Expected:
    """The expected time of one micro-batch.

    Args:
        sent: seconds and number of calls by kind of collective.
        fused: whether the blocks are compiled.
    """
    both = Expected()
    for phase in ("forward", "backward"):
        products, attention = machine.products_s(work, phase, fused=fused), machine.attention_s(work, phase)
        others = machine.others_s(work, phase, fused=fused)
        launches = work[Traffic(phase, fused, kernels=True)] + sum(
            n for w, n in work.items() if not isinstance(w, Traffic) and w.phase == phase
        )
        device_s = products + attention + others
        waiting = max(LAUNCH_S * launches - device_s, 0.0)
        total = sum(seconds for kind, (seconds, _) in sent.items() if ("forward" in kind) == (phase == "forward"))
        seconds, calls = sent.get("all-gather, forward" if phase == "forward" else "reduce-scatter", (0.0, 1))
        exposed = max(seconds / calls, total - device_s - waiting)
        both += Expected(products, attention, others + waiting, exposed + CONTENTION * (total - exposed))
    return both


# --- what is printed --------------------------------------------------------------------------------------------


def time_lines(plan: Plan, mfu: float, power: float = 1.0) -> list[str]:
    """FLOPs, the lower bound, the time at a share `mfu` of the peak, and the expected time at a power limit."""
    train, tokens = plan.config.train, plan.layout.tokens_per_step
    lines = [
        "",
        f"compute {plan.flops_per_token:.4g} FLOPs per token ({formula(plan.config.model)}), "
        f"{plan.flops_per_token * tokens:.4g} per step",
    ]
    if train.steps:
        lines.append(f"run     {train.steps:,} steps, {train.samples * plan.config.target_len:,} tokens")
    else:
        lines.append(f"run     train.epochs = {train.epochs:g}; the number of steps needs prepared data in data.path")
    device = plan.device
    if device is None:
        return [*lines, "time    unknown: the peak of this device is not known; give --peak-tflops and bandwidths"]
    computing_s = compute_s(plan, device)
    sent_s = sum(communication.least_s(plan, plan.collectives, device).values())
    step_s = least_s(plan, device)
    lines.append(
        f"time    a step takes at least {step_s:.3f} s, "
        f"bound by {'computing' if computing_s >= sent_s else 'communication'}: computing {computing_s:.3f} s at the "
        f"device's peak, communication {sent_s:.3f} s if it overlaps in full, optimizer "
        f"{optimizer_s(plan, device):.3f} s"
    )
    if train.steps:
        lines.append(f"        the run at least {_long(step_s * plan.full_steps)}")
    peak = device.peak_flops(plan.config.fsdp.param_dtype)
    real_s = max(plan.flops_per_token * tokens / plan.world_size / peak / mfu, step_s)
    days = f", {real_s * plan.full_steps / 86400:.2f} days" if train.steps else ""
    lines.append(f"        at {mfu:.0%} of the peak (--mfu): {real_s:.3f} s a step{days}")
    if plan.config.fsdp.cpu_offload:
        return [*lines, "expected time unknown: copies to the host are not estimated"]
    if plan.config.speed.float8:
        return [*lines, "expected time unknown: float8 is not estimated"]
    step, (least, most) = expected(plan, device, power), likely(plan, device, power)
    tokens_s = tokens / plan.world_size / step.total
    limit = "" if power == 1 else f" at {power:.0%} of the nominal power limit"
    lines += [
        f"expected a step takes {step.total:.3f} s{limit}: products {step.products:.3f}, attention "
        f"{step.attention:.3f}, other operators {step.others:.3f}, communication not hidden {step.exposed:.3f}, "
        f"optimizer {step.optimizer:.3f}",
        f"        {tokens_s:,.0f} tokens per second and device, {plan.flops_per_token * tokens_s / peak:.0%} MFU",
        f"        likely between {least:.3f} and {most:.3f} s, {tokens / plan.world_size / most:,.0f} and "
        f"{tokens / plan.world_size / least:,.0f} tokens per second and device"
        + ("" if device.sustained else f": {device.name} has no published run here, other devices give its range"),
    ]
    if train.steps:
        run_s = [seconds * plan.full_steps for seconds in (step.total, least, most)]
        device_hours = [f"{seconds * plan.world_size / 3600:,.0f}" for seconds in run_s]
        lines.append(
            f"        the run {_long(run_s[0])}, likely {duration(run_s[1])} to {duration(run_s[2])}; "
            f"{device_hours[0]} device hours, likely {device_hours[1]} to {device_hours[2]}"
        )
    return lines


def _long(seconds: float) -> str:
    return f"{duration(seconds)} ({seconds / 86400:.2f} days)"
