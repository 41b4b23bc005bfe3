"""The expected time of a step, from the simulated step and a few constants.

    products        FLOPs at the device's sustained rate, plus the time to read the factors and write the result, which
                    is what makes small and narrow products slow
    attention       FLOPs of the causal half, at a lower rate
    other operators bytes, as eager or fused kernels move them; at least the time in which the host can launch them
    communication   what computation cannot hide: the first all-gather, the last reduce-scatter, and what takes longer
                    than the computation beside it; what is hidden slows the computation down
    optimizer       bytes; with muon also its products and exchanges, which nothing hides

SUSTAINED, ATTENTION and CONTENTION were fitted to published runs of 8 GPUs (benchmarks/published.py), the others are
assumed. docs/plan.md compares with published runs.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from torchtitan_lite.config.derive import Layout
from torchtitan_lite.monitoring.mfu import Device
from torchtitan_lite.tools.estimate.simulate import Collective
from torchtitan_lite.tools.estimate.work import Attention, Product, Traffic, Work

# share of the nominal peak that very large products reach
SUSTAINED = {"a100": 0.76, **dict.fromkeys(("h100", "h200", "gh200"), 0.59)}
OTHERS = 0.59  # devices without published runs
ATTENTION = 0.6  # rate of attention, as a share of the products' rate
CONTENTION = 0.1  # how much hidden communication slows computation down, as a share of its time
POWER = 1 / 3  # the rate goes with this power of the power limit: power goes with clock times voltage squared

MEMORY = 0.85  # share of the nominal memory bandwidth
LINKS = 0.8  # share of the nominal bandwidth of links
LATENCY_S = 20e-6, 2e-6  # of a collective, and of each rank
LAUNCH_S = 5e-6  # the host's time for one operator


@dataclass(frozen=True)
class Expected:
    """Seconds of a step."""

    products: float
    attention: float
    others: float  # operators other than products, and waiting for the host
    exposed: float  # communication that is not hidden, and the slowdown by what is
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def __add__(self, other: "Expected") -> "Expected":
        return Expected(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, n: int) -> "Expected":
        """The same `n` times."""
        return Expected(*(n * getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Machine:
    """The rates of a device."""

    device: Device
    power: float = 1.0  # limit, as a share of the nominal one

    def rate(self, width: int) -> float:
        """FLOPs per second of large products; `width`: bytes of an element."""
        nominal = self.device.fp32_flops if width == 4 else self.device.bf16_flops
        return SUSTAINED.get(self.device.name, OTHERS) * self.power**POWER * nominal

    @property
    def bandwidth(self) -> float:
        """Bytes per second of memory."""
        return MEMORY * self.device.memory_bandwidth

    def products_s(self, work: Counter[Work], phase: str) -> float:
        """Seconds of all products of a phase."""
        total = 0.0
        for w, n in work.items():
            if isinstance(w, Product) and w.phase == phase:
                size = w.batch * w.width * (w.m * w.k + w.k * w.n + w.m * w.n)
                total += n * (2 * w.batch * w.m * w.n * w.k / self.rate(w.width) + size / self.bandwidth)
        return total

    def attention_s(self, work: Counter[Work], phase: str) -> float:
        """Seconds of attention in a phase."""
        return sum(
            n * 2 * w.products * w.heads * w.scores * w.head_dim / (ATTENTION * self.rate(w.width))
            for w, n in work.items()
            if isinstance(w, Attention) and w.phase == phase
        )

    def others_s(self, work: Counter[Work], phase: str, *, fused: bool) -> float:
        """Seconds of the other operators in a phase."""
        return work[Traffic(phase, fused)] / self.bandwidth


def micro_batch(machine: Machine, work: Counter[Work], sent: dict[str, tuple[float, int]], *, fused: bool) -> Expected:
    """The expected time of one micro-batch.

    Args:
        sent: seconds and number of calls by kind of collective.
        fused: whether the blocks are compiled.
    """
    found = Expected(0, 0, 0, 0, 0)
    for phase in ("forward", "backward"):
        products, attention = machine.products_s(work, phase), machine.attention_s(work, phase)
        others = machine.others_s(work, phase, fused=fused)
        launches = work[Traffic(phase, fused, kernels=True)] + sum(
            n for w, n in work.items() if not isinstance(w, Traffic) and w.phase == phase
        )
        device_s = products + attention + others
        waiting = max(LAUNCH_S * launches - device_s, 0.0)
        kinds = [kind for kind in sent if ("forward" in kind) == (phase == "forward")]
        total = sum(sent[kind][0] for kind in kinds)
        ends = "all-gather, forward" if phase == "forward" else "reduce-scatter"
        seconds, calls = sent.get(ends, (0.0, 1))
        exposed = max(seconds / calls, total - device_s - waiting)
        found += Expected(products, attention, others + waiting, exposed + CONTENTION * (total - exposed), 0)
    return found


def optimizer(
    machine: Machine, work: Counter[Work], muon: Counter[Work], exchanged: Mapping[str, tuple[float, int]]
) -> Expected:
    """The expected time of clipping and of the optimizer.

    Args:
        muon, exchanged: its products, and the seconds and number of its all-to-alls.
    """
    more = machine.products_s(muon, "optimizer") + sum(seconds for seconds, _ in exchanged.values())
    return Expected(0, 0, 0, 0, machine.others_s(work, "optimizer", fused=False) + more)


def link_s(collective: Collective, device: Device, layout: Layout, world_size: int) -> float:
    """Lower bound of a collective's time, from the bytes that cross the slowest link.

    Ranks of a shard group are neighbours; copies (all-reduce) are dp_shard ranks apart. All ranks of a machine send
    their share to other machines at the same time.
    """
    per_node = min(device.per_node, world_size)
    if collective.kind == "all-reduce":
        ranks, machines, rounds = layout.dp_replicate, min(layout.dp_replicate, -(-world_size // per_node)), 2
        network = device.inter_node  # each rank has its own partners
    else:
        ranks, machines, rounds = collective.ranks, -(-collective.ranks // per_node), 1
        network = device.inter_node * per_node
    inside = collective.bytes * (ranks - 1) / max(ranks, 1) / device.intra_node
    between = collective.bytes * (machines - 1) / machines / network if machines > 1 else 0.0
    return rounds * max(inside if machines == 1 or rounds == 1 else 0.0, between)


def sent_s(
    collectives: Mapping[Collective, int], device: Device, layout: Layout, world_size: int
) -> dict[str, tuple[float, int]]:
    """Expected seconds, and number of calls, by kind of collective."""
    found: dict[str, tuple[float, int]] = {}
    for collective, times in collectives.items():
        seconds, calls = found.get(collective.kind, (0.0, 0))
        ranks = collective.ranks or layout.dp_replicate
        each = link_s(collective, device, layout, world_size) / LINKS + LATENCY_S[0] + LATENCY_S[1] * ranks
        found[collective.kind] = seconds + times * each, calls + times
    return found
