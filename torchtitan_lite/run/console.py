"""Formats the terminal output: the start of a run, each step, and the next commands. metrics.Log prints it."""

import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchtitan_lite import __version__
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.derive import Layout, derive
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.registry import is_module_name
from torchtitan_lite.config.schema import Config, ModelConfig, flatten
from torchtitan_lite.config.toml import format_value
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.environment import cpu_threads, python_command
from torchtitan_lite.errors import shortened
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.run import phases
from torchtitan_lite.run.phases import Part
from torchtitan_lite.run.resumed import resume_lines
from torchtitan_lite.run.session import Session
from torchtitan_lite.terminal import counted, duration

MANY_EPOCHS = 10  # a source read more often gets a note


def start_lines(s: Session) -> str:
    """Return the lines printed at startup, with all derived sizes."""
    config, process, state = s.config, s.process, s.state
    layout = derive(config, process.world_size)
    n_parameters = sum(p.numel() for p in s.model.parameters())
    n_on_rank0 = sum(own_part(p)[0].numel() for p in s.model.parameters())
    lines = [
        f"torchtitan_lite {__version__}  torch {torch.__version__}  {process.device.type}  "
        f"world {process.world_size} = dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard}"
        f"{f', connected in {s.connected_s:.2f} s' if process.world_size > 1 else ''}  "
        f"{counted(process.threads, 'thread')} per rank "
        f"({cpu_threads(config.run.threads)[1]})",
        model_line(
            config,
            f"{n_parameters:,} parameters, {n_on_rank0:,} on rank 0",
            widened=state.bitwise_setting["widen_matmuls"],
        ),
        batch_line(config, layout, process.world_size),
        *data_lines(config, s.data, s.samples, phases.planned(config, s.data, state)),
        f"fsdp    {fsdp_line(config)}",
        f"run     {config.folder}{config.url and f' and {config.url}'}  {_origin(s.resumed, s.checkpointer)}",
    ]
    if process.device.type == "cuda":
        from torchtitan_lite.run import mfu

        lines += mfu.start_lines(config, process)
    if not state.bitwise_setting["deterministic"]:
        lines.append("run     a resume on a GPU is bitwise identical only with run.deterministic = true")
    if s.resumed:
        lines += resume_lines(config, s.resumed, state)
    elif config.model.init_from:
        lines.append(f"run     starts from the weights of {config.model.init_from}")
    return "\n".join(lines)


def _origin(loaded: TrainState | None, checkpointer: Checkpointer) -> str:
    """Describe where the run starts."""
    if loaded is None:
        return "new; the same command resumes it"
    if checkpointer.forked_from:
        return f"new, a fork of {checkpointer.forked_from}, after its step {loaded.step}; the same command resumes it"
    damaged = ", ".join(map(str, sorted(checkpointer.damaged)))
    note = f"; newer checkpoints are damaged, and their steps are repeated: {damaged}" if damaged else ""
    return f"resumed after step {loaded.step}{note}"


def model_line(config: Config, parameters: str, widened: bool = False) -> str:
    model = config.model
    matmuls = ", its matmuls in float32: this CPU has no 16-bit matmul instructions" if widened else ""
    if config.run.tf32 and config.run.device != "cpu" and config.fsdp.param_dtype == "float32":
        matmuls = ", its matmuls in TF32 on a GPU that has it"
    return (
        f"model   {model.family} dim {model.dim}, {', '.join(_shape(model))}: {parameters}; "
        f"computes in {config.fsdp.param_dtype}{matmuls}"
    )


def _shape(model: ModelConfig) -> Iterator[str]:
    """Yield a model's sizes besides its dim, and the switches that are on."""
    reads = FAMILIES[model.family].keys
    yield f"{' + '.join(map(str, model.stacks))} layer{'' if model.stacks == (1,) else 's'}"
    yield f"{counted(model.n_heads, 'head')} of {model.dim_of_heads}"
    if model.kv_heads != model.n_heads and "n_kv_heads" in reads:
        yield f"{model.kv_heads} for keys and values"
    yield f"feed-forward {model.dim_of_ffn}"
    if model.has_experts:
        yield f"{model.experts_per_token} of {model.n_experts} experts"
    if model.window or ("layer_pattern" in reads and len(set(model.layer_pattern)) > 1):
        yield f"layers {'/'.join(model.layer_pattern)}{f' with window {model.window}' if model.window else ''}"
    yield from (
        key
        for key in ("tie_embeddings", *reads)
        if getattr(model, key) is True and (key != "induction_head" or model.has_room_for_induction)
    )


def batch_line(config: Config, layout: Layout, world_size: int) -> str:
    n = layout.masked_sequences
    masked = f", including {counted(n, 'padding sequence')}" if n else ""
    lengths = f"{config.train.seq_len} tokens = {layout.tokens_per_step:,} tokens per step"
    if config.data.objective != "causal":
        lengths = f"at most {config.input_len} tokens and {config.target_len} targets"
    rows, ranks = counted(config.train.micro_batch_size, "sequence"), counted(world_size, "rank")
    last = "; in the last steps (see train.batch_schedule for the others)" if config.train.batch_schedule else ""
    accumulated = counted(layout.grad_accum_steps, "accumulation step")
    return f"batch   {rows} x {ranks} x {accumulated}{masked}, of {lengths}{last}"


def data_lines(config: Config, data: DataSet, samples: Mixture, planned: Sequence[Part]) -> list[str]:
    """Return the text, its size and the number of epochs; for a mixture, for each source. Then the phases, if any."""
    seen = seen_of_sources(planned[-1][-1])
    notes = [*data.notes, *(note for source in samples.sources for note in source.notes)]
    if often := [f"{shortened(name)} {n['epochs']:.0f} times" for name, n in seen.items() if n["epochs"] > MANY_EPOCHS]:
        notes.append(
            f"the run reads {', '.join(often)}: after about four times, the same text teaches little "
            "(arXiv:2305.16264); more text or fewer steps is better"
        )
    notes = [f"data    {note}" for note in notes]
    held_out = f"{data.tokens('val'):,} held out; vocabulary {data.vocab_size}"
    if config.data.packing == "best_fit":
        held_out += "; documents packed whole"
    if config.data.document_mask:
        held_out += "; attention within documents"
    if len(data.sources) == 1:
        name = data.sources[0].name
        amount = f"{shortened(name)}: {data.tokens('train'):,} tokens to train on, {seen[name]['epochs']:.2f} epochs"
        lines = [f"data    {amount} in {counted(config.train.steps, 'step')}; {held_out}"]
        return [*lines, *phase_lines(config, planned), *notes]
    lines = [f"data    {data.tokens('train'):,} tokens to train on, in {len(data.sources)} sources; {held_out}"]
    for source in data.sources:
        share = source.weight / sum(s.weight for s in data.sources)
        lines.append(
            f"data    {100 * share:5.1f} % {source.name}: {source.meta.train_tokens:,} tokens, "
            f"{seen[source.name]['epochs']:.2f} epochs in {counted(config.train.steps, 'step')}"
        )
    return [*lines, *phase_lines(config, planned), *notes]


def phase_lines(config: Config, parts: Sequence[Part]) -> list[str]:
    """Return a line for each phase: its steps, the tokens and epochs of each source, the batch and the rate."""
    lines = []
    for steps, phase, tokens, end in parts if config.train.phases else ():
        places = ((n, end.segments[-1]["sources"][key]) for key, n in tokens.items())
        read = ", ".join(f"{each['name']} {n:,} tokens ({n / each['tokens']:.2f} epochs)" for n, each in places)
        rates = " to ".join(f"{learning_rate(phase.optim, n, config.train.steps):.2e}" for n in (steps[0], steps[-1]))
        batch = f"{phase.train.batch_size(steps[-1])} x {phase.train.seq_len} tokens a step"
        lines.append(f"phase   {len(end.phases) + 1}, steps {steps[0]:,} to {steps[-1]:,}: {read}; {batch}; lr {rates}")
    return lines


def seen_of_sources(state: TrainState) -> dict[str, dict[str, float]]:
    """Return the tokens and epochs of each source so far, also in the runs that this one was forked from."""
    found: dict[str, dict[str, float]] = {}
    for key, each in reversed(state.segments[-1]["sources"].items()):  # a name means the newest text of this name
        name, tokens = each["name"], state.source_tokens.get(key, 0)
        seen = {"tokens": tokens, "epochs": round(tokens / each["tokens"], 4)}
        found[f"{name} ({key})" if name in found else name] = seen
    return dict(reversed(found.items()))


def fsdp_line(config: Config) -> str:
    """List the keys that decide how blocks are sharded and computed, if they differ from their defaults."""
    sections, others = ("fsdp.", "activation_checkpointing.", "compile."), ("speed.float8", "optim.freeze")
    defaults = flatten(Config())
    changed = [
        f"{key} = {format_value(value)}"
        for key, value in flatten(config).items()
        if value != defaults[key] and (key.startswith(sections) or key in others)
    ]
    return ", ".join(changed) or "all keys have their defaults"


def step_line(record: dict[str, Any], metrics: Sequence[str], steps: int, data_share: float, left_s: float) -> str:
    """Format a step's record on one line; its loss is the mean since the last multiple of log.every.

    The end time is local.

    Args:
        metrics: fields of more metrics, such as "loads 0.80-1.30".
    """
    now, then = time.localtime(), time.localtime(time.time() + left_s)
    end = time.strftime("%H:%M" if now[:3] == then[:3] else "%a %d %b %H:%M", then)
    loss = "not finite" if record["loss"] is None else f"{record['mean_loss']:.4f}"
    norm = "not finite, skipped" if record["grad_norm"] is None else f"{record['grad_norm']:.2f}"
    scale = f"  scale {record['loss_scale']:g}, {record['skipped_steps']} skipped" if "loss_scale" in record else ""
    more = "".join(f"  {metric}" for metric in metrics)
    mfu = f"  mfu {100 * record['mfu']:.1f} %" if "mfu" in record else ""
    return (
        f"step    {record['step']:>{len(str(steps))}}/{steps}  loss {loss}  "
        f"grad_norm {norm}{scale}{more}  lr {record['lr']:.2e}  tok/s {record['tokens_per_second']:,.0f}{mfu}  "
        f"mem {record['peak_memory_gib']:.2f} GiB  data {100 * data_share:.0f} %  eta {duration(left_s)} ({end})"
    )


def what_next(config: Config) -> str:
    """Return the commands to use after a finished run: one for its model, one for its curves."""
    folder = shlex.quote(str(config.folder))
    python = shlex.quote(python_command())
    defaults = [] if config.data.path or config.data.sources else ["def "]
    prompt = next(filter(None, config.sample.prompts or defaults), "")
    family = config.model.family
    kind = "source" if FAMILIES[family].encoder_decoder else "prompt"
    option = f"--model.family={family} " if is_module_name(family) else ""
    return (
        f"the run is in {config.folder}\n"
        f"next    prompt it:       {python} -m torchtitan_lite.generate {folder} {option}"
        + (f"--{kind} {shlex.quote(prompt)}\n" if prompt else "--interactive\n")
        + f"        plot its curves: {python} -m torchtitan_lite.report {folder}"
    )
