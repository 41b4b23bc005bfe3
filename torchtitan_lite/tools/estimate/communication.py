"""What a rank sends in a step, and how long that takes."""

from collections import Counter
from collections.abc import Mapping

from torchtitan_lite.config.derive import Layout
from torchtitan_lite.monitoring.mfu import Device
from torchtitan_lite.terminal import counted, size
from torchtitan_lite.tools.estimate.muon import GATHERED
from torchtitan_lite.tools.estimate.planned_run import Plan
from torchtitan_lite.tools.estimate.work import Collective

LINKS = 0.8  # share of the nominal bandwidth of links
LATENCY_S = 20e-6, 2e-6  # of a collective, and of each rank


def link_s(collective: Collective, device: Device, layout: Layout, world_size: int) -> float:
    """Lower bound of a collective's time, from the bytes that cross the slowest link.

    Ranks of a shard group are neighbours; copies (all-reduce, Muon's all-gather) are dp_shard ranks apart. All ranks of
    a machine send their share to other machines at the same time.
    """
    per_node = min(device.per_node, world_size)
    rounds = 2 if collective.kind == "all-reduce" else 1
    between_copies = collective.kind in ("all-reduce", GATHERED)
    if between_copies:
        ranks, machines = layout.dp_replicate, min(layout.dp_replicate, -(-world_size // per_node))
        network = device.inter_node  # each rank has its own partners
    else:
        ranks, machines = collective.ranks, -(-collective.ranks // per_node)
        network = device.inter_node * per_node
    inside = collective.bytes * (ranks - 1) / max(ranks, 1) / device.intra_node
    between = collective.bytes * (machines - 1) / machines / network if machines > 1 else 0.0
    return rounds * max(0.0 if between_copies and machines > 1 else inside, between)


def least_s(plan: Plan, collectives: Mapping[Collective, int], device: Device) -> dict[str, float]:
    """Lower bound in seconds by kind of collective, on otherwise idle links."""
    seconds: dict[str, float] = {}
    for collective, times in collectives.items():
        each = link_s(collective, device, plan.layout, plan.world_size)
        seconds[collective.kind] = seconds.get(collective.kind, 0) + times * each
    return seconds


def expected_s(plan: Plan, collectives: Mapping[Collective, int], device: Device) -> dict[str, tuple[float, int]]:
    """Expected seconds, and number of calls, by kind of collective."""
    expected: dict[str, tuple[float, int]] = {}
    for collective, times in collectives.items():
        seconds, calls = expected.get(collective.kind, (0.0, 0))
        latency = LATENCY_S[0] + LATENCY_S[1] * (collective.ranks or plan.layout.dp_replicate)
        each = link_s(collective, device, plan.layout, plan.world_size) / LINKS + latency
        expected[collective.kind] = seconds + times * each, calls + times
    return expected


def communication_lines(plan: Plan) -> list[str]:
    """A table of bytes, calls and seconds by kind of collective; empty on one rank."""
    collectives = plan.collectives + plan.simulated.exchanges
    n_bytes, calls = Counter[str](), Counter[str]()
    for collective, times in collectives.items():
        n_bytes[collective.kind] += times * collective.bytes
        calls[collective.kind] += times
    seconds = least_s(plan, collectives, plan.device) if plan.device else {}
    lines = ["", "communication of a step: bytes gathered, scattered or summed"]
    for kind in sorted(n_bytes):
        at_least = f"   at least {seconds[kind]:.3f} s" if kind in seconds else ""
        lines.append(f"  {kind:<24}{size(n_bytes[kind]):>12}   in {counted(calls[kind], 'call')}{at_least}")
    return lines if n_bytes else []
