"""Plans a run: `make_plan` simulates one step of a config on some ranks, and `expected` estimates its time.

The time follows from the simulation and a few constants:

    matmuls         FLOPs at the device's sustained rate, plus the time to read inputs and write the result; in compiled
                    blocks the longer of the two
    attention       FLOPs of the causal half, at a lower rate
    other operators bytes, as eager or fused kernels move them; at least the host's time to launch them
    communication   what computation cannot hide: the first all-gather, the last reduce-scatter, and what takes longer
                    than the overlapping computation; hidden communication slows the computation down
    optimizer       bytes; with muon also its matmuls and exchanges, which are not hidden

`Device.sustained`, ATTENTION and CONTENTION are fitted to published runs (benchmarks/published.py); the other constants
are assumed. The printed range is the error on other published runs, with which docs/lab/plan.md compares.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

import torch

from torchtitan_lite import models
from torchtitan_lite.config.derive import Layout, derive
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand, is_prepared, unfound
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run.mfu import DEVICES, Device, active_parameters, flops_per_token
from torchtitan_lite.tools.estimate.simulate import GRADIENTS, OPTIMIZER, PARAMETERS, Simulated, simulate
from torchtitan_lite.tools.estimate.work import GATHERED, Attention, Collective, Matmul, Traffic, Work, muon_step

RESERVE = 0.06  # of the device's memory: CUDA context, NCCL buffers, fragmentation
SPREAD = 0.15  # nine of ten published runs not used for fitting are within this of the expected speed
UNLIKE = 1.7  # a T5 on pairs, unlike the published runs, took nearly this many times its expected time
ATTENTION = 0.6  # rate of attention, as a share of the matmul rate
CONTENTION = 0.1  # slowdown of computation, as a share of the time of hidden communication
MEMORY = 0.85  # share of the nominal memory bandwidth
LAUNCH_S = 5e-6  # the host's time for one operator
LINKS = 0.8  # share of the nominal bandwidth of links
LATENCY_S = 20e-6, 2e-6  # per collective, and per rank in it


@dataclass(frozen=True)
class Plan:
    """A config on a number of ranks of a device, with its simulated step. Bytes and FLOPs are per rank."""

    config: Config
    world_size: int
    device: Device | None  # None: a CPU, or a device without known figures
    layout: Layout
    vocab_size: int
    n_parameters: int
    n_active: int  # parameters that compute a token: without idle experts
    flops_per_token: int
    simulated: Simulated
    checkpoint_bytes: int  # parameters, optimizer state and averages of all ranks

    @property
    def device_bytes(self) -> dict[str, int]:
        """Peak bytes by kind, without what `cpu_offload` keeps on the host."""
        on_host = (PARAMETERS, OPTIMIZER, GRADIENTS) if self.config.fsdp.cpu_offload else ()
        return {kind: n for kind, n in self.simulated.peak.items() if kind not in on_host}

    @property
    def free(self) -> float:
        """Bytes of the device's memory that the peak leaves, without the reserve; negative if it does not fit."""
        room = math.inf if self.device is None else (1 - RESERVE) * self.device.memory_gib * 2**30
        return room - sum(self.device_bytes.values())


def make_plan(config: Config, world_size: int, device: Device | None, *, on_gpu: bool | None = None) -> Plan:
    """Simulate a step and collect the figures.

    Args:
        on_gpu: whether to plan for a GPU; default: if `device` is given. Needed for a GPU with unknown figures.
    """
    on_gpu = device is not None if on_gpu is None else on_gpu
    vocab_size = config.model.vocab_size or vocabulary(config)[0]
    layout = derive(config, world_size)
    with torch.device("meta"):
        model = models.build(config.model, vocab_size)
    n_parameters = sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model, config.input_len, config.target_len)
    simulated = simulate(config, world_size, vocab_size, on_gpu=on_gpu)
    matmuls, collectives = muon_step(model, config.optim, layout, on_gpu=on_gpu)
    held, n_bytes = simulated.peak, 4 * n_parameters
    shards = held[PARAMETERS] - sum(buffer.nbytes for buffer in model.buffers())  # of one rank; buffers are not saved
    return Plan(
        config=config,
        world_size=world_size,
        device=device and device.computing(config),
        layout=layout,
        vocab_size=vocab_size,
        n_parameters=n_parameters,
        n_active=active_parameters(model),
        flops_per_token=flops,
        simulated=replace(simulated, optimizer=simulated.optimizer + matmuls, muon_collectives=collectives),
        checkpoint_bytes=n_bytes + round(n_bytes * held[OPTIMIZER] / shards),
    )


def phases_of(config: Config) -> list[tuple[Config, int]]:
    """Return the config of each phase of a run, and its number of samples."""
    begins = [0, *config.train.boundaries()]
    configs = [config.phase(n) for n in range(len(begins))]
    spans = zip(configs, begins, [*begins[1:], config.train.steps], strict=True)
    return [(phase, phase.train.samples(begin, end)) for phase, begin, end in spans]


def vocabulary(config: Config) -> tuple[int, str]:
    """Return the entries of the tokenizer that training would use, and a note if that is uncertain here.

    Raises:
        ConfigError: `tokenizer.path` is not on this machine.
    """
    data, path = config.data, config.tokenizer.path
    prepared = [p for p in data.texts if is_prepared(p)]
    if prepared or path:
        file = expand(prepared[0]) / "tokenizer.json" if prepared else expand(path)
        if not file.exists():
            raise ConfigError(f"{file} is not on this machine; --model.vocab_size=N gives its number of entries")
        return bpe.size(bpe.load(file)), ""
    missing = [p for p in data.texts if unfound(p)]
    note = f"{', '.join(missing[:1])} is not on this machine: if it is a prepared folder, give --model.vocab_size=N"
    return config.tokenizer.vocab_size, note if missing else ""


# --- the time of a step -----------------------------------------------------------------------------------------


@dataclass
class Expected:
    """The expected seconds of a step, by kind of work."""

    matmuls: float = 0.0
    attention: float = 0.0
    others: float = 0.0  # other operators, and waiting for the host
    exposed: float = 0.0  # communication that is not hidden, and the slowdown by hidden communication
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


def shares(device: Device) -> tuple[float, float]:
    """Return the lowest and the highest share of the nominal peak that large matmuls reach.

    For a device without published runs: the lowest share of all other devices, and the highest of the three nearest in
    peak. The share falls as the peak grows, because power grows less.
    """
    if device.sustained:
        return device.sustained, device.sustained
    fitted = [d for d in DEVICES.values() if d.sustained]
    near = sorted(fitted, key=lambda d: abs(math.log(d.half_flops / device.half_flops)))[:3]
    return min(d.sustained or 1.0 for d in fitted), max(d.sustained or 1.0 for d in near)


def rate(device: Device, width: int) -> float:
    """Return the FLOPs per second of large matmuls; `width`: bytes of an element."""
    return math.sqrt(math.prod(shares(device))) * (device.fp32_flops if width == 4 else device.half_flops)


def work_s(work: Counter[Work], phase: str, device: Device, *, fused: bool) -> tuple[float, float, float]:
    """Return the seconds of matmuls, attention and other operators.

    Args:
        fused: whether the blocks are compiled.
    """
    bandwidth = MEMORY * device.memory_bandwidth
    matmuls = attention = 0.0
    for w, n in work.items():
        if isinstance(w, Matmul) and w.phase == phase:
            computing = 2 * w.batch * w.m * w.n * w.k / rate(device, w.width)
            moving = w.batch * w.width * (w.m * w.k + w.k * w.n + w.m * w.n) / bandwidth
            matmuls += n * (max(computing, moving) if fused else computing + moving)
        elif isinstance(w, Attention) and w.phase == phase:
            flops = 2 * w.matmuls * w.heads * w.scores * w.head_dim
            attention += n * flops / (ATTENTION * rate(device, w.width))
    return matmuls, attention, work[Traffic(phase)] / bandwidth


def why_unknown(plan: Plan) -> str:
    """Return why the time of a step is not estimated; empty if it is."""
    if plan.device is None:
        return "the peak of this device is not known"
    if plan.config.fsdp.cpu_offload:
        return "copies to the host are not estimated"
    return "float8 is not estimated" if plan.config.speed.float8 else ""


def expected(plan: Plan, device: Device) -> Expected:
    """Return the expected time of a step."""
    simulated = plan.simulated
    exchanged = expected_s(simulated.muon_collectives, device, plan.world_size)
    update_s = sum(work_s(simulated.optimizer, "optimizer", device, fused=False))
    parts = [Expected(optimizer=update_s + sum(seconds for seconds, _ in exchanged.values()))]
    for i, times in simulated.micro_batches(plan.layout.grad_accum_steps):
        sent = expected_s(simulated.collectives[i], device, plan.world_size)
        parts += [micro_batch(device, simulated.work[i], sent, fused=plan.config.compile.enabled)] * times
    return Expected(*map(sum, zip(*map(astuple, parts), strict=True)))


def likely(plan: Plan, device: Device) -> tuple[float, float]:
    """Return the range of seconds that a step is likely to take; see SPREAD, UNLIKE and `shares`."""
    least, most = (expected(plan, replace(device, sustained=share)).total for share in shares(device)[::-1])
    return least / (1 + SPREAD), most / (1 - SPREAD) * (UNLIKE if unlike_published(plan.config) else 1)


def unlike_published(config: Config) -> str:
    """Return how a run differs from every published run that estimates were compared with; empty if it does not."""
    differences = {
        "of an encoder-decoder": FAMILIES[config.model.family].encoder_decoder,
        "on pairs": config.data.objective == "pairs",
        "with experts": config.model.has_experts,
        "with delta layers": "delta" in config.model.layer_pattern,
    }
    return " or ".join(text for text, differs in differences.items() if differs)


def micro_batch(device: Device, work: Counter[Work], sent: dict[str, tuple[float, int]], *, fused: bool) -> Expected:
    """Return the expected time of one micro-batch.

    Args:
        sent: seconds and number of calls by kind of collective.
        fused: whether the blocks are compiled.
    """
    found = Expected()
    for phase in ("forward", "backward"):
        matmuls, attention, others = work_s(work, phase, device, fused=fused)
        launches = work[Traffic(phase, kernels=True)] + sum(
            n for w, n in work.items() if not isinstance(w, Traffic) and w.phase == phase
        )
        device_s = max(matmuls + attention + others, LAUNCH_S * launches)
        total = sum(seconds for kind, (seconds, _) in sent.items() if ("forward" in kind) == (phase == "forward"))
        seconds, calls = sent.get("all-gather, forward" if phase == "forward" else "reduce-scatter", (0.0, 1))
        exposed = max(seconds / calls, total - device_s)
        found.matmuls += matmuls
        found.attention += attention
        found.others += device_s - matmuls - attention
        found.exposed += exposed + CONTENTION * (total - exposed)
    return found


def link_s(collective: Collective, device: Device, world_size: int) -> float:
    """Return a lower bound of a collective's time, from the bytes that cross the slowest link.

    Ranks of a shard group are neighbours; replicas (all-reduce, Muon's all-gather) are dp_shard ranks apart. All ranks
    of a machine send their share to other machines at the same time.
    """
    per_node, ranks = min(device.per_node, world_size), collective.ranks
    if collective.kind in ("all-reduce", GATHERED):
        machines, network = min(ranks, -(-world_size // per_node)), device.inter_node  # each rank has separate partners
    else:
        machines, network = -(-ranks // per_node), device.inter_node * per_node
    spread = collective.kind in ("all-reduce", GATHERED) and machines > 1  # no two of them on one machine
    inside_s = 0.0 if spread else collective.bytes * (ranks - 1) / ranks / device.intra_node
    between_s = collective.bytes * (machines - 1) / machines / network
    return max(inside_s, between_s) * (2 if collective.kind == "all-reduce" else 1)


def expected_s(collectives: Mapping[Collective, int], device: Device, world_size: int) -> dict[str, tuple[float, int]]:
    """Return expected seconds and number of calls, by kind of collective."""
    expected: dict[str, tuple[float, int]] = {}
    for collective, times in collectives.items():
        seconds, calls = expected.get(collective.kind, (0.0, 0))
        each = link_s(collective, device, world_size) / LINKS + LATENCY_S[0] + LATENCY_S[1] * collective.ranks
        expected[collective.kind] = seconds + times * each, calls + times
    return expected
