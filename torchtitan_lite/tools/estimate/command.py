"""Memory and time of a run, without a GPU: `python -m torchtitan_lite.plan --config x.toml --world-size 64`.

Memory and communication come from a simulated step (simulate.py). Two times are printed: a lower bound from nominal
peaks, and the expected one (estimate/).

The figures, their text and the command line are one file: each line of the output is next to what it shows.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from torchtitan_lite import models
from torchtitan_lite.config import cli
from torchtitan_lite.config.derive import Layout, derive
from torchtitan_lite.config.find_text import unfound
from torchtitan_lite.config.paths import expand, is_prepared
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.errors import ConfigError, run_cli
from torchtitan_lite.monitoring.console import batch_line, model_line
from torchtitan_lite.monitoring.mfu import DEVICES, Device, flops_per_token, formula
from torchtitan_lite.terminal import counted, duration, size
from torchtitan_lite.tools.estimate import step_time
from torchtitan_lite.tools.estimate.muon import muon_step
from torchtitan_lite.tools.estimate.schedule import schedule_lines
from torchtitan_lite.tools.estimate.simulate import GRADIENTS, OPTIMIZER, PARAMETERS, Collective, Simulated, simulate
from torchtitan_lite.tools.estimate.work import Product, Work
from torchtitan_lite.training import epochs

GIB = 2**30
MOST_RANKS = 1_000_000
RESERVE = 0.06  # of the device's memory: CUDA context, NCCL buffers, fragmentation


@dataclass(frozen=True)
class Plan:
    """The plan for a config, a world size and a device. Bytes, seconds and FLOPs are per rank."""

    config: Config
    world_size: int
    device: Device | None
    layout: Layout
    vocab_size: int
    n_parameters: int
    flops_per_token: int
    simulated: Simulated
    logits_bytes: int  # of one micro-batch, in the dtype of the output matrix plus float32
    muon_work: Counter[Work]
    muon_sent: Counter[Collective]

    @property
    def full_steps(self) -> float:
        """Steps of the last batch size that have as many samples as the run."""
        train = self.config.train
        return train.samples / train.batch_size(train.steps)

    @property
    def computed_tokens(self) -> int:
        """Tokens of a rank in a step, including padding of the last micro-batches."""
        train = self.config.train
        return self.layout.grad_accum_steps * train.micro_batch_size * self.config.target_len

    def compute_s(self, device: Device) -> float:
        """Matrix products at the device's peak, including recomputation."""
        checkpointing = self.config.activation_checkpointing
        again = 1 / (3 * checkpointing.every) if checkpointing.mode == "full" else 0.0
        peak = device.fp32_flops if self.config.fsdp.param_dtype == "float32" else device.bf16_flops
        return self.flops_per_token * (1 + again) * self.computed_tokens / peak

    def optimizer_s(self, device: Device) -> float:
        """Time to read and write parameters and state, to read gradients, and of muon's products and exchanges."""
        start = self.simulated.peaks["start"]
        moved = (3 * start[PARAMETERS] + 2 * start[OPTIMIZER]) / device.memory_bandwidth
        flops = sum(n * 2 * w.m * w.n * w.k for w, n in self.muon_work.items() if isinstance(w, Product))
        wide = any(isinstance(w, Product) and w.width == 4 for w in self.muon_work)
        links = (n * step_time.link_s(c, device, self.layout, self.world_size) for c, n in self.muon_sent.items())
        return moved + flops / (device.fp32_flops if wide else device.bf16_flops) + sum(links)

    def least_s(self, device: Device) -> float:
        """Lower bound of a step: the longer of computation and communication, plus the optimizer."""
        return max(self.compute_s(device), sum(self.sent_s(device).values())) + self.optimizer_s(device)

    def expected(self, device: Device, power: float = 1.0) -> step_time.Expected:
        """The expected time of a step.

        Args:
            power: the device's power limit, as a share of the nominal one.
        """
        machine, fused = step_time.Machine(device, power), self.config.compile.enabled
        exchanged = step_time.sent_s(self.muon_sent, device, self.layout, self.world_size)
        found = step_time.optimizer(machine, self.simulated.optimizer, self.muon_work, exchanged)
        for i, times in self.simulated.micro_batches(self.layout.grad_accum_steps):
            sent = step_time.sent_s(self.simulated.collectives[i], device, self.layout, self.world_size)
            found += step_time.micro_batch(machine, self.simulated.work[i], sent, fused=fused).times(times)
        return found

    def sent_s(self, device: Device, collectives: Counter[Collective] | None = None) -> dict[str, float]:
        """Seconds by kind of collective, on otherwise idle links. None: those of forward and backward."""
        found: Counter[str] = Counter()
        for collective, times in (self.collectives if collectives is None else collectives).items():
            found[collective.kind] += times * step_time.link_s(collective, device, self.layout, self.world_size)  # type: ignore[assignment]
        return dict(found)

    @property
    def collectives(self) -> Counter[Collective]:
        """The collectives of a step."""
        return self.simulated.of_step(self.layout.grad_accum_steps)

    @property
    def device_bytes(self) -> dict[str, int]:
        """Peak bytes by kind, without those that `cpu_offload` keeps on the host."""
        on_host = (PARAMETERS, OPTIMIZER, GRADIENTS) if self.config.fsdp.cpu_offload else ()
        return {kind: n for kind, n in self.simulated.peak.items() if kind not in on_host}

    def fits(self, device: Device) -> bool:
        """Whether the peak fits into the device's memory minus the reserve."""
        return sum(self.device_bytes.values()) <= (1 - RESERVE) * device.memory_gib * GIB


def vocabulary(config: Config) -> tuple[int, str]:
    """Entries of the tokenizer that training would use, and a note if that is uncertain here.

    Raises:
        ConfigError: `tokenizer.path` is not on this machine.
    """
    data, path = config.data, config.tokenizer.path
    texts = [*([data.path] if isinstance(data.path, str) else data.path), *data.sources]
    prepared = [p for p in texts if p and is_prepared(p)]
    if prepared or path:
        file = expand(prepared[0]) / "tokenizer.json" if prepared else expand(path)
        if not file.is_file():
            raise ConfigError(f"{file} is not on this machine; --model.vocab_size=N gives its number of entries")
        return bpe.size(bpe.load(file)), ""
    missing = [p for p in texts if p and unfound(p)]
    note = f"{', '.join(missing[:1])} is not on this machine: if it is a prepared folder, give --model.vocab_size=N"
    return config.tokenizer.vocab_size, note if missing else ""


def make_plan(config: Config, world_size: int, device: Device | None, *, on_gpu: bool | None = None) -> Plan:
    """Simulate a step and collect the figures.

    Args:
        on_gpu: whether to plan for a GPU; None: if `device` is given. Needed for a GPU with unknown figures.
    """
    vocab_size = config.model.vocab_size or vocabulary(config)[0]
    with torch.device("meta"):
        model = models.build(config.model, vocab_size)
    train = config.train
    width = 4 if config.fsdp.param_dtype == "float32" else 2
    layout, on_gpu = derive(config, world_size), device is not None if on_gpu is None else on_gpu
    n_parameters, flops = (
        sum(p.numel() for p in model.parameters()),
        flops_per_token(model, config.input_len, config.target_len),
    )
    muon_work, muon_sent = muon_step(model, config.optim, layout, on_gpu=on_gpu)
    return Plan(
        config=config,
        world_size=world_size,
        device=device,
        layout=layout,
        vocab_size=vocab_size,
        n_parameters=n_parameters,
        flops_per_token=flops,
        simulated=simulate(config, world_size, vocab_size, on_gpu=on_gpu),
        logits_bytes=train.micro_batch_size * config.target_len * vocab_size * (4 if width == 4 else width + 4),
        muon_work=muon_work,
        muon_sent=muon_sent,
    )


# --- what is printed --------------------------------------------------------------------------------------------


def describe(plan: Plan, mfu: float) -> str:
    """The printed plan."""
    return "\n".join([*_model_lines(plan), *_memory_lines(plan), *_sent_lines(plan), *_time_lines(plan, mfu)])


def _model_lines(plan: Plan) -> list[str]:
    config, layout = plan.config, plan.layout
    on = plan.device.name if plan.device else "cpu"
    note = "" if config.model.vocab_size else vocabulary(config)[1]
    return [
        model_line(config, f"{plan.n_parameters:,} parameters, vocabulary {plan.vocab_size:,}"),
        *([f"        {note}"] if note else []),
        f"mesh    {plan.world_size} x {on} = dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard}",
        batch_line(config, layout, plan.world_size),
    ]


def _memory_lines(plan: Plan) -> list[str]:
    lines = ["", "peak memory of a rank"]
    lines += [f"  {kind:<24}{size(n):>12}" for kind, n in plan.device_bytes.items()]
    total = sum(plan.device_bytes.values())
    lines.append(f"  {'total':<24}{size(total):>12}" + _fit(plan))
    lines.append(f"  activations kept from forward to backward: {size(plan.simulated.kept)}; ")
    lines[-1] += f"logits of a micro-batch: {size(plan.logits_bytes)}"
    if plan.config.fsdp.cpu_offload:
        host = sum(plan.simulated.peak.values()) - total
        lines.append(f"  on the host, per rank: {size(host)}")
    if plan.config.compile.enabled:
        lines.append("  (compiled blocks keep less; the plan ignores that)")
    return lines


def _fit(plan: Plan) -> str:
    if plan.device is None:
        return ""
    usable = (1 - RESERVE) * plan.device.memory_gib
    state = "fits" if plan.fits(plan.device) else "DOES NOT FIT"
    return (
        f"   {state}: {plan.device.memory_gib:.1f} GiB on the device, {usable:.1f} without a reserve of {RESERVE:.0%}"
    )


def _sent_lines(plan: Plan) -> list[str]:
    lines = ["", "communication of a step: bytes gathered, scattered or summed"]
    kinds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for collective, times in (plan.collectives + plan.muon_sent).items():
        kinds[collective.kind] += times * collective.bytes
        calls[collective.kind] += times
    seconds = plan.sent_s(plan.device, plan.collectives + plan.muon_sent) if plan.device else {}
    for kind in sorted(kinds):
        at_least = f"   at least {seconds[kind]:.3f} s" if kind in seconds else ""
        lines.append(f"  {kind:<24}{size(kinds[kind]):>12}   in {counted(calls[kind], 'call')}{at_least}")
    return lines if kinds else []


def _time_lines(plan: Plan, mfu: float) -> list[str]:
    train, tokens = plan.config.train, plan.layout.tokens_per_step
    lines = [
        "",
        f"compute {plan.flops_per_token:.4g} FLOPs per token ({formula(plan.config.model)}), "
        f"{plan.flops_per_token * tokens:.4g} per step",
        f"run     {train.steps:,} steps, {train.samples * plan.config.target_len:,} tokens",
    ]
    if not train.steps:
        lines[-1] = f"run     train.epochs = {train.epochs:g}; the number of steps needs prepared data in data.path"
    device = plan.device
    if device is None:
        return [*lines, "time    unknown: the peak of this device is not known; give --peak-tflops and bandwidths"]
    parts = {"computing": plan.compute_s(device), "communication": sum(plan.sent_s(device).values())}
    bound = max(parts, key=lambda name: parts[name])
    step_s = plan.least_s(device)
    lines += [
        f"time    a step takes at least {step_s:.3f} s, bound by {bound}: computing {parts['computing']:.3f} s at the "
        f"device's peak, communication {parts['communication']:.3f} s if it overlaps in full, optimizer "
        f"{plan.optimizer_s(device):.3f} s",
        *([f"        the run at least {_long(step_s * plan.full_steps)}"] if train.steps else []),
    ]
    peak = device.fp32_flops if plan.config.fsdp.param_dtype == "float32" else device.bf16_flops
    real_s = max(plan.flops_per_token * tokens / plan.world_size / peak / mfu, step_s)
    days = f", {real_s * plan.full_steps / 86400:.2f} days" if train.steps else ""
    lines.append(f"        at {mfu:.0%} of the peak (--mfu): {real_s:.3f} s a step{days}")
    return [*lines, *_expected_lines(plan, device, peak)]


def _long(seconds: float) -> str:
    return f"{duration(seconds)} ({seconds / 86400:.2f} days)"


def _expected_lines(plan: Plan, device: Device, peak: float) -> list[str]:
    """What docs/plan.md compares with published runs."""
    if plan.config.fsdp.cpu_offload:
        return ["expected time unknown: copies to the host are not estimated"]
    found, steps = plan.expected(device), plan.config.train.steps
    tokens_s = plan.layout.tokens_per_step / plan.world_size / found.total
    run = f"; the run {_long(found.total * plan.full_steps)}" if steps else ""
    note = "" if device.name in step_time.SUSTAINED else f" (no published run on {device.name} was used)"
    return [
        f"expected a step takes {found.total:.3f} s{note}: products {found.products:.3f}, attention "
        f"{found.attention:.3f}, other operators {found.others:.3f}, communication not hidden {found.exposed:.3f}, "
        f"optimizer {found.optimizer:.3f}",
        f"        {tokens_s:,.0f} tokens per second and device, {plan.flops_per_token * tokens_s / peak:.0%} MFU{run}",
    ]


def advice(plan: Plan) -> list[str]:
    """Changes that make the run fit, simulated one by one, the cheapest first; empty if it fits."""
    device = plan.device
    if device is None or plan.fits(device):
        return []
    lines = ["", "what to change"]
    for options, config, world_size in _changes(plan):
        other = make_plan(config, world_size, device)
        total = size(sum(other.device_bytes.values()))
        lines.append(f"  {total:>12}   {'fits' if other.fits(device) else 'not yet'}   {options}")
        if other.fits(device):
            return lines
    return [*lines, "  none of these is enough: more ranks, a smaller model, or a device with more memory"]


def _changes(plan: Plan) -> Iterator[tuple[str, Config, int]]:
    """Cumulative changes: options, config, world size."""
    config, world_size = plan.config, plan.world_size
    values: dict[str, object] = {}

    def change(key: str, value: object) -> Iterator[tuple[str, Config, int]]:
        nonlocal config
        section, name = key.split(".")
        part = getattr(config, section)
        if getattr(part, name) != value:
            config = config.model_copy(update={section: part.model_copy(update={name: value})})
            values[key] = value
            yield " ".join(f"--{k}={str(v).lower()}" for k, v in values.items()), config, world_size

    if config.fsdp.param_dtype == "float32":
        yield from change("fsdp.param_dtype", "bfloat16")
    if config.fsdp.reshard_after_forward != "default":
        yield from change("fsdp.reshard_after_forward", True)
    if config.activation_checkpointing.mode == "none":
        yield from change("activation_checkpointing.mode", "selective")
    yield from change("activation_checkpointing.every", 1)
    yield from change("activation_checkpointing.mode", "full")
    while config.train.micro_batch_size > 1:
        yield from change("train.micro_batch_size", config.train.micro_batch_size // 2)
    if plan.layout.dp_replicate > 1:
        values["fsdp.dp_shard"] = -1
        config = config.model_copy(update={"fsdp": config.fsdp.model_copy(update={"dp_replicate": -1, "dp_shard": -1})})
        yield from change("fsdp.dp_replicate", 1)
    options = " ".join(f"--{key}={str(value).lower()}" for key, value in values.items())
    for _ in range(3):
        world_size *= 2
        if world_size > MOST_RANKS:
            return
        yield f"{options} --world-size={world_size}".strip(), config, world_size


# --- the command line -------------------------------------------------------------------------------------------


# figures of another device, by option: field, unit, help
OWN = {
    "peak-tflops": ("bf16_flops", 1e12, "dense TFLOPs per second in the dtype that is computed in"),
    "memory-gib": ("memory_gib", 1.0, "memory of a device, GiB"),
    "memory-gbs": ("memory_bandwidth", 1e9, "bandwidth of that memory, GB per second"),
    "intra-node-gbs": ("intra_node", 1e9, "bandwidth between devices of a machine, GB per second and direction"),
    "inter-node-gbs": ("inter_node", 1e9, "a device's share of the network, GB per second and direction"),
    "per-node": ("per_node", 1, "devices of a machine"),
}


def device_of(given: argparse.Namespace) -> Device | None:
    """The named device, with the given figures in place of its own; None for the CPU.

    Raises:
        ConfigError: the name is unknown, and figures are missing.
    """
    values = {
        field: getattr(given, flag.replace("-", "_")) * unit
        for flag, (field, unit, _) in OWN.items()
        if getattr(given, flag.replace("-", "_")) is not None
    }
    bad = [flag for flag, (field, _, _) in OWN.items() if field in values and not 0 < values[field] < float("inf")]
    if bad:
        raise ConfigError("; ".join(f"--{flag} should be above 0 and finite" for flag in bad))
    if "bf16_flops" in values:
        values["fp32_flops"] = values["bf16_flops"]
    if "per_node" in values:
        values["per_node"] = int(values["per_node"])
        if values["per_node"] < 1:
            raise ConfigError(f"--per-node={given.per_node} should be 1 or more")
    name = given.device.lower()
    if name == "cpu" and not values:
        return None
    if name in DEVICES:
        return replace(DEVICES[name], **values)
    missing = [flag for flag, (field, _, _) in OWN.items() if field not in values and field != "per_node"]
    if missing:
        raise ConfigError(
            f"--device={given.device} is not known: {', '.join(DEVICES)} and cpu are. For another give its figures: "
            + " ".join(f"--{flag}=N" for flag in missing)
        )
    return Device(given.device, **({"per_node": 8} | values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.plan",
        description="Memory, communication, and the least and expected time of a run. Nothing is allocated; no GPU "
        "is needed. Every option of train.py works as well: --config FILE, --section.key=value, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    parser.add_argument("--device", default="h100", help=f"cpu, {', '.join(DEVICES)}, or own figures (default: h100)")
    parser.add_argument("--mfu", type=float, default=0.4, help="a share of the peak to expect (default: 0.4)")
    parser.add_argument(
        "--print-schedule", action="store_true", help="print only the learning rate and batch size by step"
    )
    own = parser.add_argument_group("own figures, for another device")
    for flag, (_, _, text) in OWN.items():
        own.add_argument(f"--{flag}", type=float, metavar="N", help=text)
    return parser


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    given, rest = _parser().parse_known_args(argv)
    return run_cli("plan", lambda: _plan(given, rest))


def _plan(given: argparse.Namespace, rest: Sequence[str]) -> int:
    if not 1 <= given.world_size <= MOST_RANKS:
        raise ConfigError(f"--world-size={given.world_size} should be 1 or more, and at most {MOST_RANKS:,}")
    if not 0 < given.mfu <= 1:
        raise ConfigError(f"--mfu={given.mfu} should be above 0 and at most 1, e.g. 0.4")
    device = device_of(given)
    per_node = min(device.per_node if device else given.world_size, given.world_size)
    sizes = {"world_size": given.world_size, "local_world_size": per_node}
    elsewhere = True
    flags = [action.dest.replace("_", "-") for action in _parser()._actions]
    command = cli.parse(rest, elsewhere, flags, n_gpus=0 if device is None else per_node, **sizes)
    config = epochs.planned(command.loaded)
    if given.print_schedule:
        print("\n".join(schedule_lines(config)))
        return 0
    plan = make_plan(config, given.world_size, device)
    print(describe(plan, given.mfu), flush=True)
    print("\n".join(advice(plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
