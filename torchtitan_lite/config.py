"""The configuration: what can be set, what follows from it, and which combinations make no sense.

Every section of the TOML file is a frozen class, and the string under a field is its help text. Builders are given
their own section, never the whole. How files, `base` and the command line become a Config is in settings.py.
"""

import glob
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A table of the TOML file. The string under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunConfig(Section):
    name: str = "default"
    """name of the run; a config file's own name if it sets none"""
    out_dir: str = "runs"
    """folder of all runs; this one lives in <out_dir>/<name>"""
    seed: NonNegativeInt = 0
    """decides the initial parameters, the order of the data and dropout"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: cuda if there is a GPU, else cpu"""
    threads: NonNegativeInt = 0
    """CPU threads of each rank; 0: the cores divided by the ranks of this machine"""
    deterministic: bool = False
    """CUDA: only deterministic kernels, slower, for a bitwise resume (the CPU always is)"""


class ModelConfig(Section):
    family: Literal["gpt"] = "gpt"
    """kind of model; gpt: learned positions, LayerNorm, GELU, causal attention"""
    size: str = "1M"
    """a name for dim, n_layers and n_heads, which can also be set one by one"""
    dim: PositiveInt = 128
    """width of the residual stream"""
    n_layers: PositiveInt = 4
    """number of Transformer blocks"""
    n_heads: PositiveInt = 4
    """attention heads; dim must be a multiple"""
    max_seq_len: PositiveInt = 1024
    """longest sequence that the learned positions allow"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """probability of dropping an activation while training"""


class TokenizerConfig(Section):
    vocab_size: int = Field(default=4096, ge=257, le=2**31 - 1)
    """size of the byte-level BPE vocabulary that is trained on the text (256 bytes, 1 end mark, merges)"""


class DataConfig(Section):
    path: str | list[str] = ""
    """your .txt files, folders or globs; empty: the text of Python's standard library"""
    val_fraction: float = Field(default=0.05, gt=0, lt=1)
    """share of the documents that is held out for validation, chosen by their hash"""
    cache_dir: str = ""
    """where tokenised text is kept; empty: $XDG_CACHE_HOME/torchtitan_lite or ~/.cache/torchtitan_lite"""


class TrainConfig(Section):
    steps: PositiveInt = 250
    """optimizer steps of the whole run"""
    seq_len: PositiveInt = 256
    """tokens in a sequence"""
    micro_batch_size: PositiveInt = 8
    """sequences per rank in one forward and backward"""
    global_batch_size: PositiveInt = 16
    """sequences per optimizer step, over all ranks; gradient accumulation follows from it"""


class OptimConfig(Section):
    lr: PositiveFloat = 4e-3
    """peak learning rate of AdamW"""
    betas: tuple[float, float] = (0.9, 0.95)
    """decay rates of AdamW's two moments"""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon"""
    weight_decay: NonNegativeFloat = 0.1
    """decay of matrices; biases and norms have none"""
    warmup_steps: NonNegativeInt = 20
    """steps of linear warm-up"""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """the cosine ends at this share of lr"""
    max_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """gradients are clipped to this global norm; inf: not clipped"""


class FsdpConfig(Section):
    dp_replicate: PositiveInt = 1
    """copies of the sharded model (HSDP); 1: plain FSDP"""
    dp_shard: int = -1
    """ranks that share one copy; -1: all that dp_replicate leaves"""
    param_dtype: Dtype = "float32"
    """dtype of the parameters in forward and backward (they are kept and updated in float32)"""
    reduce_dtype: Dtype = "float32"
    """dtype in which gradients are summed over the ranks"""
    explicit_prefetching: bool = False
    """issue the first all-gather before the batch is fetched, and each group's next ones by explicit lists"""
    forward_prefetch: PositiveInt = 2
    """with explicit_prefetching: how many groups ahead to gather in forward"""
    backward_prefetch: PositiveInt = 2
    """with explicit_prefetching: how many groups ahead to gather in backward"""


class EvalConfig(Section):
    every: NonNegativeInt = 100
    """validate every so many steps and at the end; 0: never"""
    samples: PositiveInt = 128
    """validation sequences, always the same ones"""


class CheckpointConfig(Section):
    every: NonNegativeInt = 100
    """save every so many steps and at the end; 0: only at the end"""
    api: Literal["dtensor", "dcp"] = "dtensor"
    """how a full state dict is gathered and spread: by DTensors, or by torch.distributed.checkpoint; same files"""


class LogConfig(Section):
    every: PositiveInt = 10
    """write a line and a record every so many steps"""


class Config(Section):
    """One experiment. Frozen: what a run was started with is what it runs with."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.out_dir) / self.run.name


@dataclass(frozen=True)
class Layout:
    """What follows from a config and a world size. Batches count sequences."""

    dp_replicate: int
    dp_shard: int
    grad_accum_steps: int
    masked_sequences: int  # fully masked sequences that fill the last micro-batches of a step
    tokens_per_step: int


def derive(config: Config, world_size: int) -> Layout:
    """Every number that follows from the config and the world size, in one place."""
    replicate = config.fsdp.dp_replicate
    shard = config.fsdp.dp_shard if config.fsdp.dp_shard != -1 else max(world_size // replicate, 1)
    train = config.train
    per_round = world_size * train.micro_batch_size
    accum = math.ceil(train.global_batch_size / per_round)
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        grad_accum_steps=accum,
        masked_sequences=accum * per_round - train.global_batch_size,
        tokens_per_step=train.global_batch_size * train.seq_len,
    )


def conflicts(world_size: int, n_gpus: int, local_world_size: int) -> Callable[[Config], dict[str, str]]:
    """The rules between keys, for this world size and machine.

    Args:
        n_gpus: of this machine.
        local_world_size: the ranks of this machine.

    Returns:
        a function of a config; it returns the broken rules as {"the keys involved": "what is wrong and what works"}.
    """

    def check(config: Config) -> dict[str, str]:
        found: dict[str, str] = {}
        run, model, train, fsdp = config.run, config.model, config.train, config.fsdp
        if Path(run.name).name != run.name or run.name in ("", ".", ".."):
            found["run.name"] = f'run.name = "{run.name}" should be the plain name of a folder, e.g. run.name = "first"'
        if model.dim % model.n_heads:
            works = max(d for d in range(1, model.n_heads + 1) if model.dim % d == 0)
            found["model.n_heads model.dim"] = (
                f"model.dim = {model.dim} is no multiple of model.n_heads = {model.n_heads}; n_heads = {works} works"
            )
        if train.seq_len > model.max_seq_len:
            found["train.seq_len model.max_seq_len"] = (
                f"train.seq_len = {train.seq_len} is longer than model.max_seq_len = {model.max_seq_len}; "
                f"model.max_seq_len = {train.seq_len} works"
            )
        if config.optim.warmup_steps >= train.steps:
            found["optim.warmup_steps train.steps"] = (
                f"optim.warmup_steps = {config.optim.warmup_steps} leaves none of train.steps = {train.steps}; "
                f"warmup_steps = {train.steps // 10} works"
            )
        if any(not 0 <= beta < 1 for beta in config.optim.betas):
            found["optim.betas"] = f"optim.betas = {list(config.optim.betas)} should be in [0, 1), e.g. [0.9, 0.95]"
        if fsdp.dp_shard != -1 and fsdp.dp_shard < 1:
            found["fsdp.dp_shard"] = f"fsdp.dp_shard = {fsdp.dp_shard} should be -1 (all that is left) or at least 1"
        elif (layout := derive(config, world_size)).dp_replicate * layout.dp_shard != world_size:
            found["fsdp.dp_shard fsdp.dp_replicate"] = _mesh_message(fsdp, world_size)
        if run.device == "cuda" and n_gpus == 0:
            found["run.device"] = 'run.device = "cuda", but torch sees no GPU here; run.device = "cpu" works'
        if run.device != "cpu" and 0 < n_gpus < local_world_size:
            found["run.device"] = (
                f"{local_world_size} processes on this machine, and torch sees {n_gpus} GPUs; "
                f'--nproc-per-node {n_gpus} works, and so does run.device = "cpu"'
            )
        paths = [config.data.path] if isinstance(config.data.path, str) else config.data.path
        missing = [p for p in paths if p and not glob.glob(str(Path(p).expanduser()), recursive=True)]
        if missing:
            found["data.path"] = f"data.path: nothing found at {', '.join(missing)} (looked in {Path.cwd()})"
        if isinstance(config.data.path, list) and not config.data.path:
            found["data.path"] = 'data.path = [] names no text; data.path = "" is Python\'s standard library'
        return found

    return check


def _mesh_message(fsdp: FsdpConfig, world_size: int) -> str:
    replicate = fsdp.dp_replicate if world_size % fsdp.dp_replicate == 0 else 1
    return (
        f"fsdp.dp_replicate = {fsdp.dp_replicate} x fsdp.dp_shard = {fsdp.dp_shard} does not give the world size "
        f"{world_size}; fsdp.dp_replicate = {replicate} with fsdp.dp_shard = {world_size // replicate} works"
    )
