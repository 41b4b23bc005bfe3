"""`python -m torchtitan_lite.plan`: memory, communication and time of a run, without a GPU.

    python -m torchtitan_lite.plan --config configs/llama_8b.toml --world-size 64 --device h100

The figures come from a simulated step (simulate.py). Two times are printed: a lower bound from nominal peaks, and the
expected one (step_time.py).
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

from torchtitan_lite.config import cli
from torchtitan_lite.errors import ConfigError, run_cli
from torchtitan_lite.monitoring.console import batch_line, model_line
from torchtitan_lite.monitoring.mfu import DEVICES, Device
from torchtitan_lite.tools.estimate.communication import communication_lines
from torchtitan_lite.tools.estimate.failures import INPUTS, LLAMA3_HOURS, failure_lines
from torchtitan_lite.tools.estimate.memory import advice_lines, memory_lines
from torchtitan_lite.tools.estimate.planned_run import MOST_RANKS, Plan, make_plan
from torchtitan_lite.tools.estimate.step_time import expected, time_lines
from torchtitan_lite.training import epochs

# figures of another device, by option: field of Device, unit, help
FIGURES = {
    "peak-tflops": ("half_flops", 1e12, "dense TFLOPs per second in the dtype that is computed in"),
    "memory-gib": ("memory_gib", 1.0, "memory of a device, GiB"),
    "memory-gbs": ("memory_bandwidth", 1e9, "bandwidth of that memory, GB per second"),
    "intra-node-gbs": ("intra_node", 1e9, "bandwidth between devices of a machine, GB per second and direction"),
    "inter-node-gbs": ("inter_node", 1e9, "a device's share of the network, GB per second and direction"),
    "per-node": ("per_node", 1, "devices of a machine"),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.plan",
        description="Memory, communication, and the least and expected time of a run. Nothing is allocated; no GPU "
        "is needed. Every option of train.py works as well: --config FILE, --section.key=value, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    parser.add_argument("--device", default="h100", help=f"cpu, {', '.join(DEVICES)}, or own figures (default: h100)")
    parser.add_argument("--mfu", type=float, default=0.4, help="a share of the peak to expect (default: 0.4)")
    parser.add_argument("--power", type=float, default=1.0, help="the power limit, as a share of the nominal one")
    parser.add_argument(
        "--mtbf", type=float, metavar="HOURS", help="GPU-hours for each failure: when to save, and goodput"
    )
    costs = parser.add_argument_group("what a save and a failure cost, with --mtbf")
    for flag, (default, text, source) in INPUTS.items():
        costs.add_argument(f"--{flag}", dest=flag, type=float, metavar="N", help=f"{default:g}: {text} ({source})")
    own = parser.add_argument_group("own figures, for another device")
    for flag, (field, _, text) in FIGURES.items():
        own.add_argument(f"--{flag}", dest=field, type=float, metavar="N", help=text)
    options, config_options = parser.parse_known_args(argv)
    flags = ["help", "world-size", "device", "mfu", "power", "mtbf", *INPUTS, *FIGURES]
    return run_cli("plan", lambda: _plan(options, config_options, flags))


def _plan(options: argparse.Namespace, config_options: Sequence[str], flags: Sequence[str]) -> int:
    world_size: int = options.world_size
    if not 1 <= world_size <= MOST_RANKS:
        raise ConfigError(f"--world-size={world_size} should be 1 or more, and at most {MOST_RANKS:,}")
    if not 0 < options.mfu <= 1:
        raise ConfigError(f"--mfu={options.mfu} should be above 0 and at most 1, e.g. 0.4")
    if not 0 < options.power <= 1:
        raise ConfigError(f"--power={options.power} should be above 0 and at most 1, e.g. 0.7 for 490 of 700 W")
    given = {flag: value for flag in INPUTS if (value := getattr(options, flag)) is not None}
    values = {flag: given.get(flag, default) for flag, (default, *_) in INPUTS.items()}
    if given and options.mtbf is None:
        raise ConfigError(f"--{next(iter(given))} needs --mtbf=HOURS, e.g. {LLAMA3_HOURS:.0f}, as for Llama 3")
    if options.mtbf is not None and not 1 <= options.mtbf <= 1e12:
        raise ConfigError(
            f"--mtbf={options.mtbf:g} should be from 1 to 1e12 hours, e.g. {LLAMA3_HOURS:.0f}, as for Llama 3"
        )
    if bad := [flag for flag, value in values.items() if not 0 <= value < math.inf or (not value and "gbs" in flag)]:
        raise ConfigError("; ".join(f"--{flag} should be finite, and not negative or a speed of 0" for flag in bad))
    device = _device(options)
    per_node = min(device.per_node, world_size) if device else world_size
    command = cli.parse(
        config_options,
        True,  # the run is for another machine
        flags,
        n_gpus=per_node if device else 0,
        world_size=world_size,
        local_world_size=per_node,
    )
    config = epochs.planned(command.loaded)
    plan = make_plan(config, world_size, device)
    lines = [*_model_lines(plan), *memory_lines(plan), *communication_lines(plan)]
    lines += time_lines(plan, options.mfu, options.power)
    print("\n".join(lines), flush=True)
    print("\n".join(advice_lines(plan)))
    if options.mtbf is not None:
        lines = failure_lines(
            options.mtbf,
            world_size,
            math.ceil(world_size / per_node),
            plan.checkpoint_bytes,
            values,
            sharded=config.checkpoint.state_dict == "sharded",
            background=config.checkpoint.async_save,
            step_s=expected(plan, plan.device, options.power).total if plan.device else None,
        )
        print("\n".join(lines))
    return 0


def _device(options: argparse.Namespace) -> Device | None:
    """The device of --device, with the figures of the other options in place of its own; None for the CPU.

    Raises:
        ConfigError: the name is unknown, and figures are missing.
    """
    figures = {
        field: getattr(options, field) * unit
        for field, unit, _ in FIGURES.values()
        if getattr(options, field) is not None
    }
    bad = [flag for flag, (field, _, _) in FIGURES.items() if not 0 < figures.get(field, 1) < math.inf]
    if bad:
        raise ConfigError("; ".join(f"--{flag} should be above 0 and finite" for flag in bad))
    if "half_flops" in figures:
        figures |= {"fp32_flops": figures["half_flops"], "bf16": True, "tf32": False}  # whatever the dtype is
    if "per_node" in figures:
        figures["per_node"] = int(figures["per_node"])
        if figures["per_node"] < 1:
            raise ConfigError(f"--per-node={options.per_node} should be 1 or more")
    name = options.device.lower()
    if name == "cpu" and not figures:
        return None
    if name in DEVICES:
        return replace(DEVICES[name], **figures)
    missing = [flag for flag, (field, _, _) in FIGURES.items() if field not in figures and field != "per_node"]
    if missing:
        raise ConfigError(
            f"--device={options.device} is not known: {', '.join(DEVICES)} and cpu are. For another give its figures: "
            + " ".join(f"--{flag}=N" for flag in missing)
        )
    return Device(options.device, driver_name="", **figures)


def _model_lines(plan: "Plan") -> list[str]:
    from torchtitan_lite.tools.estimate.planned_run import vocabulary

    config, layout = plan.config, plan.layout
    active = f", {plan.n_active:,} of them active" if config.model.has_experts else ""
    note = "" if config.model.vocab_size else vocabulary(config)[1]
    return [
        model_line(config, f"{plan.n_parameters:,} parameters{active}, vocabulary {plan.vocab_size:,}"),
        *([f"        {note}"] if note else []),
        f"mesh    {plan.world_size} x {plan.device.name if plan.device else 'cpu'} "
        f"= dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard}",
        batch_line(config, layout, plan.world_size),
    ]
