"""`python -m torchtitan_lite.plan`: estimates a run's memory and time without a GPU, and suggests changes.

    python -m torchtitan_lite.plan --config configs/llama_8b.toml --world-size 64 --device h100

The estimates come from a simulated step (simulate.py).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tomli_w

from torchtitan_lite import commands
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import cli
from torchtitan_lite.config.schema import nested
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run import epochs, phases
from torchtitan_lite.run.console import batch_line, data_lines, model_line
from torchtitan_lite.run.mfu import DEVICES, Device
from torchtitan_lite.terminal import duration, size
from torchtitan_lite.tools.estimate.planned_run import (
    RESERVE,
    SPREAD,
    UNLIKE,
    Plan,
    expected,
    likely,
    make_plan,
    phases_of,
    unlike_published,
    vocabulary,
    why_unknown,
)
from torchtitan_lite.tools.estimate.simulate import ACTIVATIONS

OPTIONS: commands.Options = {
    "--world-size": {"type": int, "default": 1, "help": "ranks of the run (default: 1)"},
    "--device": {
        "type": str.lower,
        "default": "h100",
        "choices": ["cpu", *DEVICES],
        "help": "the device (default: h100)",
    },
    "--suggest": {
        "action": "store_true",
        "help": "print the three fastest settings that fit, as TOML lines",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    return commands.run(
        "plan",
        argv,
        OPTIONS,
        lambda given: _plan(given.world_size, DEVICES.get(given.device), given.rest, suggest=given.suggest),
        others=True,
        description="Estimate a run's memory and time, and suggest changes if it does not fit. Needs no GPU. Every "
        "option of train.py works as well: --config FILE, --section.key=value, ...",
        epilog="To add a device, add an entry to torchtitan_lite/run/devices.toml.",
    )


def _plan(world_size: int, device: Device | None, config_options: Sequence[str], *, suggest: bool) -> int:
    if world_size < 1:
        raise ConfigError(f"--world-size={world_size} should be 1 or more")
    per_node = min(device.per_node, world_size) if device else world_size
    command = cli.parse(
        config_options,
        elsewhere=True,  # the run is for a different machine
        flags=["help", "world-size", "device", "suggest"],
        n_gpus=per_node if device else 0,
        world_size=world_size,
        local_world_size=per_node,
    )
    given, data = command.loaded.config, None
    if given.data.is_prepared:
        data = prepare_all(given.data, given.tokenizer, print, later=given.train.later_sources)
    config = epochs.planned(command.loaded, data)
    plan, *later = plans = [make_plan(config.phase(n), world_size, device) for n in range(len(config.train.phases) + 1)]
    lines = []
    if data:
        samples, parts = open_samples(data, "train", config), phases.planned(config, data, TrainState())
        lines = data_lines(config, data, samples, parts)
    print("\n".join([*_model_lines(plan), *lines, "", *_memory_lines(plan), *_time_lines(plan)]), flush=True)
    for n, phase in enumerate(later, 2):
        print(f"phase   {n}", *(line.strip() for line in (_memory_lines(phase)[0], _time_lines(phase)[0])), sep="  ")
    for line in [*_total_lines(plans), *(_suggestions(plan) if suggest else [])]:
        print(line, flush=True)
    if not (suggest or all(each.free >= 0 for each in plans)):
        print("try     --suggest, which looks for settings that fit; or more ranks, bfloat16 or a smaller model")
    return 0


def _model_lines(plan: Plan) -> list[str]:
    config, layout, train = plan.config, plan.layout, plan.config.train
    run = f"train.epochs = {train.epochs:g}; the number of steps needs prepared data in data.path"
    if train.steps:
        run = f"{train.steps:,} steps, {sum(n * phase.target_len for phase, n in phases_of(config)):,} tokens"
    active = f", {plan.n_active:,} of them active" if config.model.has_experts else ""
    note = "" if config.model.vocab_size else vocabulary(config)[1]
    return [
        model_line(config, f"{plan.n_parameters:,} parameters{active}, vocabulary {plan.vocab_size:,}"),
        *([f"        {note}"] if note else []),
        f"mesh    {plan.world_size} x {plan.device.name if plan.device else 'cpu'} "
        f"= dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard}",
        batch_line(config, layout, plan.world_size),
        f"run     {run}",
    ]


def _memory_lines(plan: Plan) -> list[str]:
    total, device, fits = sum(plan.device_bytes.values()), plan.device, "fits" if plan.free >= 0 else "DOES NOT FIT"
    room = f": {fits} in {device.memory_gib:.1f} GiB with a reserve of {RESERVE:.0%}" if device else ""
    c, n_bytes = plan.config.checkpoint, plan.checkpoint_bytes
    saved = c.keep_latest + c.keep_best + 1 if c.keep_latest and not c.keep_every else 1  # 1: it depends on the steps
    each = f"{saved} checkpoints of {size(n_bytes)}, one of them being saved" if saved > 1 else "a checkpoint"
    return [
        f"memory  {size(total)} peak per rank{room}",
        f"        {', '.join(f'{kind} {size(n)}' for kind, n in plan.device_bytes.items())}",
        *[f"        on the host, per rank: {size(sum(plan.simulated.peak.values()) - total)}"]
        * plan.config.fsdp.cpu_offload,
        *["        (compiled blocks need less memory; this estimate ignores that)"] * plan.config.compile.enabled,
        *["        (these estimates are for bfloat16; float8 is not estimated)"] * plan.config.speed.float8,
        f"disk    {size(saved * n_bytes)} for {each}",
    ]


def _time_lines(plan: Plan) -> list[str]:
    """Return the expected time with its range, its parts, and its basis."""
    device = plan.device
    if device is None or why_unknown(plan):
        return [f"time    unknown: {why_unknown(plan)}"]
    step, (least, most) = expected(plan, device), likely(plan, device)
    rate = plan.layout.tokens_per_step / plan.world_size / step.total
    share = plan.flops_per_token * rate / device.peak_flops(plan.config.fsdp.param_dtype)
    unlike, name = unlike_published(plan.config), device.name
    basis = f"published runs of {name}" if device.sustained else f"other devices: {name} has no published run"
    error = (
        f"none of them was {unlike}; the range ends {UNLIKE} times higher, as for a T5 on pairs"
        if unlike
        else f"nine of ten runs that were not used for fitting are within {SPREAD:.0%} of their estimates"
    )
    return [
        f"time    a step takes {step.total:.3f} s, likely {least:.3f} to {most:.3f}: {rate:,.0f} tokens per second "
        f"per device, {share:.0%} MFU",
        f"        matmuls {step.matmuls:.3f} s, attention {step.attention:.3f}, other operators {step.others:.3f}, "
        f"exposed communication {step.exposed:.3f}, optimizer {step.optimizer:.3f}",
        f"        based on {basis}{f'; {error}' if device.sustained or unlike else ''} (docs/plan.md)",
    ]


def _total_lines(plans: Sequence[Plan]) -> list[str]:
    """Return the time of the steps of all phases."""
    plan, totals = plans[0], np.zeros(3)
    if plan.device is None or why_unknown(plan) or not plan.config.train.steps:
        return []
    for each, (phase, n_samples) in zip(plans, phases_of(plan.config), strict=True):
        n_steps = n_samples / phase.train.batch_size(plan.config.train.steps)  # of the last batch size
        totals += n_steps * np.array([expected(each, plan.device).total, *likely(each, plan.device)])
    hours = totals[0] * plan.world_size / 3600
    mean, least, most = map(duration, totals)
    return [f"        the run takes {mean}, likely {least} to {most}: {hours:,.0f} device hours"]


def _suggestions(plan: Plan) -> Iterator[str]:
    """Yield the three fastest settings that fit, of micro-batch, checkpointing, and what is freed and summed when."""
    if plan.device is None or why_unknown(plan):
        raise ConfigError(f"--suggest compares times, but {why_unknown(plan)}")
    batch, found = plan.config.train.global_batch_size, list[tuple[float, dict[str, Any], Plan]]()
    untried = {False: 1, True: 1}  # a micro-batch that fits is slower with more recomputation
    for mode, kept in itertools.product(("none", "selective", "full"), (False, True)):
        if mode == "full" and found:  # recomputing everything is only for what fits no other way
            break
        change: dict[str, Any] = {"train.micro_batch_size": 1, "activation_checkpointing.mode": mode}
        # a group is gathered and reduced once per step, or in each micro-batch
        change |= {"fsdp.reshard_after_forward": False if kept else "default"}
        change |= {"fsdp.reshard_after_backward": not kept, "fsdp.grad_sync": "last" if kept else "every"}
        while batch % (untried[kept] * plan.world_size) == 0:
            change["train.micro_batch_size"] = untried[kept]
            config = plan.config.changed(change)
            candidate = plan if config == plan.config else make_plan(config, plan.world_size, plan.device)
            if candidate.free < 0:
                break
            found.append((expected(candidate, plan.device).total, dict(change), candidate))
            untried[kept] *= 2
            if candidate.free < candidate.simulated.peak[ACTIVATIONS]:  # twice the activations would not fit
                break
    for seconds, change, candidate in sorted(found, key=lambda one: one[0])[:3]:
        rate = plan.layout.tokens_per_step / plan.world_size / seconds
        yield f"\n# {rate:,.0f} tokens per second per device, {size(sum(candidate.device_bytes.values()))}"
        yield tomli_w.dumps(nested(change))
    if not found:
        yield "none of the settings that --suggest tries fits: use more ranks, bfloat16 or a smaller model"
