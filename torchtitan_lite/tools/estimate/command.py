"""`python -m torchtitan_lite.plan`: estimates a run's memory and time without a GPU, and suggests changes.

    python -m torchtitan_lite.plan --config configs/llama_8b.toml --world-size 64 --device h100

The estimates come from a simulated step (simulate.py).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tomli_w

from torchtitan_lite import commands
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import cli
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run import epochs, phases
from torchtitan_lite.run.console import batch_line, data_lines, model_line
from torchtitan_lite.run.mfu import DEVICES, Device
from torchtitan_lite.terminal import counted, duration, size
from torchtitan_lite.tools.estimate.planned_run import (
    RESERVE,
    SPREAD,
    UNLIKE,
    Plan,
    expected,
    likely,
    make_plan,
    n_checkpoints,
    unlike_published,
    vocabulary,
    why_unknown,
)

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
    plan = make_plan(epochs.planned(command.loaded, data), world_size, device)
    lines = _data_lines(plan.config, data) if data else []
    print("\n".join([*_model_lines(plan), *lines, "", *_memory_lines(plan), *_time_lines(plan)]), flush=True)
    for n in range(1, len(plan.config.train.phases) + 1):
        phase = make_plan(plan.config.phase(n), world_size, device)
        print(
            f"phase   {n + 1}", *(line.strip() for line in (_memory_lines(phase)[0], _time_lines(phase)[0])), sep="  "
        )
    for line in _suggestions(plan) if suggest else _advice(plan):
        print(line, flush=True)
    return 0


def _data_lines(config: Config, data: DataSet) -> list[str]:
    return data_lines(config, data, open_samples(data, "train", config), phases.planned(config, data, TrainState()))


def _model_lines(plan: Plan) -> list[str]:
    config, layout, train = plan.config, plan.layout, plan.config.train
    run = f"train.epochs = {train.epochs:g}; the number of steps needs prepared data in data.path"
    if train.steps:
        ends = [0, *train.boundaries(), train.steps]
        of_phases = [(config.phase(n), first, last) for n, (first, last) in enumerate(itertools.pairwise(ends))]
        tokens = sum(phase.target_len * phase.train.samples(first, last) for phase, first, last in of_phases)
        run = f"{train.steps:,} steps, {tokens:,} tokens"
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
    total, device, fits = sum(plan.device_bytes.values()), plan.device, "fits" if plan.fits else "DOES NOT FIT"
    room = f": {fits} in {device.memory_gib:.1f} GiB with a reserve of {RESERVE:.0%}" if device else ""
    saved, n_bytes = n_checkpoints(plan.config), plan.checkpoint_bytes
    each = (
        f"{counted(saved, 'checkpoint')} of {size(n_bytes)}, one of them being saved" if saved > 1 else "a checkpoint"
    )
    return [
        f"memory  {size(total)} peak per rank{room}",
        f"        {', '.join(f'{kind} {size(n)}' for kind, n in plan.device_bytes.items())}",
        *[f"        on the host, per rank: {size(sum(plan.simulated.peak.values()) - total)}"]
        * plan.config.fsdp.cpu_offload,
        *["        (compiled blocks need less memory; this estimate ignores that)"] * plan.config.compile.enabled,
        *["        (these estimates are for bfloat16; float8 is not estimated)"] * plan.config.speed.float8,
        f"disk    {size(max(saved, 1) * n_bytes)} for {each}",
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
        f"none of them was {unlike}; a T5 on pairs took {UNLIKE} times its estimate, and 1.4 times the memory"
        if unlike
        else f"nine of ten runs that were not used for fitting are within {SPREAD:.0%} of their estimates"
    )
    lines = [
        f"time    a step takes {step.total:.3f} s, likely {least:.3f} to {most:.3f}: {rate:,.0f} tokens per second "
        f"per device, {share:.0%} MFU",
        f"        matmuls {step.matmuls:.3f} s, attention {step.attention:.3f}, other operators {step.others:.3f}, "
        f"exposed communication {step.exposed:.3f}, optimizer {step.optimizer:.3f}",
        f"        based on {basis}{f'; {error}' if device.sustained or unlike else ''} (docs/plan.md)",
    ]
    if plan.config.train.steps:
        run_s = [seconds * plan.full_steps for seconds in (step.total, least, most)]
        lines.append(
            f"        {'at the speed of phase 1, ' * bool(plan.config.train.phases)}the run takes "
            f"{duration(run_s[0])}, likely {duration(run_s[1])} to "
            f"{duration(run_s[2])}: {run_s[0] * plan.world_size / 3600:,.0f} device hours"
        )
    return lines


# --- what to try ------------------------------------------------------------------------------------------------


def _advice(plan: Plan) -> Iterator[str]:
    """Yield a line per change, each simulated on top of the previous ones, until the run fits."""
    if plan.fits:
        return
    for options, config, world_size in _changes(plan):
        changed = make_plan(config, world_size, plan.device)
        total = size(sum(changed.device_bytes.values()))
        known = changed.device is not None and not why_unknown(changed)
        time = f", {expected(changed, changed.device).total:.3f} s a step" if known and changed.device else ""
        yield f"try     {total}, {'fits' if changed.fits else 'not yet'}{time}: {options}"
        if changed.fits:
            return
    yield "        none of these is enough; use more ranks, a smaller model, or a device with more memory"


def _changes(plan: Plan) -> Iterator[tuple[str, Config, int]]:
    """Yield cumulative changes: all options so far, the config, the world size."""
    config, size = plan.config, plan.config.train.micro_batch_size
    changes: list[dict[str, Any]] = [
        *[{"fsdp.param_dtype": "bfloat16"}] * (config.fsdp.param_dtype == "float32"),
        *[{"activation_checkpointing.mode": "selective"}] * (config.activation_checkpointing.mode == "none"),
        {"activation_checkpointing.mode": "full"},
        *({"train.micro_batch_size": size >> n} for n in range(1, size.bit_length())),
        # one replica, sharded over all ranks
        *[{"fsdp.dp_shard": -1, "fsdp.dp_replicate": 1}] * (plan.layout.dp_replicate > 1 or config.fsdp.dp_shard > 0),
    ]
    values, given, text = flatten(config), dict[str, Any](), ""
    for change in changes:
        if change.items() <= values.items():
            continue
        values, given = values | change, given | change
        config = config.changed(change)
        text = " ".join(f"--{key}={value}" for key, value in given.items())
        yield text, config, plan.world_size
    for world_size in (2 * plan.world_size, 4 * plan.world_size, 8 * plan.world_size):
        yield f"{text} --world-size={world_size}".lstrip(), config, world_size


def _suggestions(plan: Plan) -> Iterator[str]:
    """Yield the three fastest settings that fit, of micro-batch, checkpointing, and what is freed and summed when."""
    if plan.device is None or why_unknown(plan):
        raise ConfigError(f"--suggest compares times, but {why_unknown(plan)}")
    batch, found = plan.config.train.global_batch_size, list[tuple[float, dict[str, Any], Plan]]()
    for mode, kept in itertools.product(("none", "selective", "full"), (False, True)):
        if mode == "full" and found:  # recomputing everything is only for what fits no other way
            break
        change: dict[str, Any] = {"train.micro_batch_size": 1, "activation_checkpointing.mode": mode}
        # a group is gathered and reduced once per step, or in each micro-batch
        change |= {"fsdp.reshard_after_forward": False if kept else "default"}
        change |= {"fsdp.reshard_after_backward": not kept, "fsdp.grad_sync": "last" if kept else "every"}
        while batch % (change["train.micro_batch_size"] * plan.world_size) == 0:
            config = plan.config.changed(change)
            candidate = plan if config == plan.config else make_plan(config, plan.world_size, plan.device)
            if not candidate.fits:  # a larger micro-batch would not, either
                break
            found.append((expected(candidate, plan.device).total, dict(change), candidate))
            change["train.micro_batch_size"] *= 2
    for seconds, change, candidate in sorted(found, key=lambda one: one[0])[:3]:
        rate = plan.layout.tokens_per_step / plan.world_size / seconds
        yield f"\n# {rate:,.0f} tokens per second per device, {size(sum(candidate.device_bytes.values()))}"
        sections = dict.fromkeys(key.partition(".")[0] for key in change)
        yield tomli_w.dumps(
            {s: {k.partition(".")[2]: v for k, v in change.items() if k.startswith(s)} for s in sections}
        )
    if not found:
        yield "none of the settings that --suggest tries fits; without it, plan names further changes"
