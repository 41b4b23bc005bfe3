"""Does a rank's step fit into the memory of its device, and if not, which options make it fit?"""

from collections.abc import Iterator

from torchtitan_lite.config.derive import options_against_copies
from torchtitan_lite.config.schema import Config
from torchtitan_lite.monitoring.mfu import Device
from torchtitan_lite.terminal import size
from torchtitan_lite.tools.estimate.planned_run import MOST_RANKS, Plan, make_plan

GIB = 2**30
RESERVE = 0.06  # of the device's memory: CUDA context, NCCL buffers, fragmentation


def fits(plan: Plan, device: Device) -> bool:
    """Whether the peak fits into the device's memory minus the reserve."""
    return sum(plan.device_bytes.values()) <= (1 - RESERVE) * device.memory_gib * GIB


def memory_lines(plan: Plan) -> list[str]:
    """A table of the peak by kind."""
    total, device = sum(plan.device_bytes.values()), plan.device
    verdict = ""
    if device is not None:
        verdict = (
            f"   {'fits' if fits(plan, device) else 'DOES NOT FIT'}: {device.memory_gib:.1f} GiB on the device, "
            f"{(1 - RESERVE) * device.memory_gib:.1f} without a reserve of {RESERVE:.0%}"
        )
    lines = [
        "",
        "peak memory of a rank",
        *(f"  {kind:<24}{size(n):>12}" for kind, n in plan.device_bytes.items()),
        f"  {'total':<24}{size(total):>12}{verdict}",
        f"  activations kept from forward to backward: {size(plan.simulated.kept)}; "
        f"logits of a micro-batch: {size(plan.logits_bytes)}",
    ]
    if plan.config.fsdp.cpu_offload:
        lines.append(f"  on the host, per rank: {size(sum(plan.simulated.peak.values()) - total)}")
    on_disk = plan.checkpoint_bytes
    lines.append(f"  a checkpoint on disk: {f'{on_disk / 1e12:.3g} TB' if on_disk >= 1e11 else size(on_disk)}")
    if plan.config.compile.enabled:
        lines.append("  (compiled blocks keep less; the plan ignores that)")
    if plan.config.speed.float8:
        lines.append("  (float8 is not estimated: this is bfloat16)")
    return lines


def advice_lines(plan: Plan) -> list[str]:
    """Changes that make the run fit, each simulated, the cheapest first. If it fits: what saves copies, or nothing."""
    device = plan.device
    if device is None:
        return []
    if fits(plan, device):
        return _copies_lines(plan, device)
    lines = ["", "what to change"]
    for options, config, world_size in _changes(plan):
        changed = make_plan(config, world_size, device)
        enough = fits(changed, device)
        total = size(sum(changed.device_bytes.values()))
        lines.append(f"  {total:>12}   {'fits' if enough else 'not yet'}   {options}")
        if enough:
            return lines
    return [*lines, "  none of these is enough: more ranks, a smaller model, or a device with more memory"]


def _copies_lines(plan: Plan, device: Device) -> list[str]:
    """Where nothing is sharded: options that gather and reduce less often, as far as they fit."""
    notes = "bit for bit the same", "gradients are added in another order"
    lines = []
    for options, note in zip(options_against_copies(plan.config, plan.layout), notes, strict=False):
        fsdp = plan.config.fsdp.model_copy(update=options)
        config = plan.config.model_copy(update={"fsdp": fsdp})
        changed = make_plan(config, plan.world_size, device)
        if fits(changed, device):
            text = " ".join(f"--fsdp.{key}={str(value).lower()}" for key, value in options.items())
            lines.append(f"  {size(sum(changed.device_bytes.values())):>12}   fits   {text}   ({note})")
    return ["", "nothing is sharded, so these save FSDP's copies", *lines] if lines else []


def _changes(plan: Plan) -> Iterator[tuple[str, Config, int]]:
    """Each change on top of those before it: all options so far, the config, the world size."""
    config, world_size = plan.config, plan.world_size
    options: dict[str, object] = {}

    def text() -> str:
        return " ".join(f"--{key}={str(value).lower()}" for key, value in options.items())

    changes: list[tuple[str, str, object]] = []
    if config.fsdp.param_dtype == "float32":
        changes.append(("fsdp", "param_dtype", "bfloat16"))
    if config.fsdp.reshard_after_forward != "default":
        changes.append(("fsdp", "reshard_after_forward", True))
    if config.activation_checkpointing.mode == "none":
        changes.append(("activation_checkpointing", "mode", "selective"))
    changes.append(("activation_checkpointing", "every", 1))
    changes.append(("activation_checkpointing", "mode", "full"))
    micro_batch_size = config.train.micro_batch_size
    while micro_batch_size > 1:
        micro_batch_size //= 2
        changes.append(("train", "micro_batch_size", micro_batch_size))
    for section, key, value in changes:
        values = getattr(config, section)
        if getattr(values, key) != value:
            config = config.model_copy(update={section: values.model_copy(update={key: value})})
            options[f"{section}.{key}"] = value
            yield text(), config, world_size
    if plan.layout.dp_replicate > 1:  # one copy of the model, sharded over all ranks
        one_copy = config.fsdp.model_copy(update={"dp_shard": -1, "dp_replicate": 1})
        config = config.model_copy(update={"fsdp": one_copy})
        options |= {"fsdp.dp_shard": -1, "fsdp.dp_replicate": 1}
        yield text(), config, world_size
    for _ in range(3):
        world_size *= 2
        if world_size > MOST_RANKS:
            return
        yield f"{text()} --world-size={world_size}".strip(), config, world_size
