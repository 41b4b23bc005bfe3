"""The configuration: what can be set. (What follows from it: derive.py. Which combinations make no sense: rules.py.)

Every section of the TOML file is a frozen class, and the string under a field is its help text. Builders are given
their own section, never the whole. It is one file because it is the reference of all keys: docs/config.md is made from
it. How files, `base` and the command line become a Config is in load.py.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand

_LARGEST = 2**63 - 1  # TOML's integers have 64 bits


class Frozen(BaseModel):
    """What all parts of a config have in common. The string under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Section(Frozen):
    """A table of the TOML file."""

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        _require_toml(value)
        return value


def _require_toml(value: Any) -> None:
    """
    Raises:
        ValueError: a number or a text in it can't be written to a TOML file.
    """
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError("should be a number of at most 64 bits")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError("should be UTF-8")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    for item in value if isinstance(value, list | tuple) else ():
        _require_toml(item)


class SpeedConfig(Section):
    chunked_loss: bool = True
    """compute output matrix and loss together, some tokens at a time: the logits never exist as a whole"""
    block_attention: bool = True
    """CPU: attention of up to 1,024 tokens by plain matrix products, a block of queries at a time"""
    fused_functions: bool = True
    """CPU: RMSNorm and rotary positions in fewer passes over memory, with a backward of their own"""
    shared_memory: bool = True
    """CPU, all ranks on one machine: parameters and gradients go through shared memory, not through gloo's TCP"""
    gc_every: NonNegativeInt = 100
    """collect Python's garbage every so many steps, on all ranks at once; 0: leave it to Python"""


class ProfileConfig(Section):
    steps: list[PositiveInt] = []
    """profile from the first of these steps to the last, e.g. [10, 12]: traces and a table in profile/"""
    memory_snapshot: bool = False
    """CUDA: the allocator's history in these steps as well, for pytorch.org/memory_viz"""


Dtype = Literal["float32", "bfloat16", "float16"]
if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]


def _reshard(value: Any) -> Any:
    if value == "default" or (isinstance(value, int) and (isinstance(value, bool) or value > 1)):
        return value
    raise ValueError('should be "default", true, false, or a number of ranks above 1')


def _without_nul(value: Any) -> Any:
    if any("\0" in path for path in ([value] if isinstance(value, str) else value)):
        raise ValueError("should have no NUL character: it names files")
    return value


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"should be 0 (always the likeliest token), or at least {MIN_TEMPERATURE}")
    return value


MIN_TEMPERATURE = 1e-6  # the likeliest token is drawn long before; far below, float32 overflows
# Bounds far above any use, so that no product of them leaves 64 bits and no typing error fills the memory.
Size = Annotated[int, Field(gt=0, lt=2**31)]
SizeOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Width = Annotated[int, Field(gt=0, le=2**20)]
WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
PathText = Annotated[str, AfterValidator(_without_nul)]


class RunConfig(Section):
    name: PathText = "default"
    """name of the run; a config file's own name if it sets none"""
    out_dir: PathText = "runs"
    """folder of all runs; this one lives in <out_dir>/<name>"""
    seed: NonNegativeInt = 0
    """decides the initial parameters, the order of the data and dropout"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: cuda if there is a GPU, else cpu"""
    threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads of each rank; 0: the cores divided by the ranks of this machine"""
    max_minutes: NonNegativeFloat = 0.0
    """save and leave after so many minutes; 0: no limit"""
    timeout_minutes: float = Field(default=20.0, gt=0, le=525_600)
    """a step that a rank delays for longer, or a save or load without progress for so long, ends the run (stacks/)"""
    deterministic: bool = False
    """CUDA: only deterministic kernels, slower, for a bitwise resume (the CPU always is)"""


class ModelConfig(Section):
    family: FamilyName = "llama"
    """gpt: learned positions, LayerNorm, GELU; llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention"""
    size: str = "1M"
    """a name for the numbers below, which can also be set one by one; see families.py"""
    init_from: PathText = ""
    """start from the weights of a run, a checkpoint or a Hugging Face folder: step 0, a new optimizer"""
    vocab_size: SizeOrZero = 0
    """entries of the embedding; 0: as many as the tokenizer has"""
    dim: Width = 128
    """width of the residual stream"""
    n_layers: int = Field(default=4, gt=0, le=2048)
    """number of Transformer blocks"""
    n_heads: Width = 4
    """attention heads"""
    max_seq_len: Size = 1024
    """longest sequence, in tokens"""
    tie_embeddings: bool = False
    """the output matrix is the token embeddings"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """gpt: probability of dropping an activation while training"""
    n_kv_heads: WidthOrZero = 0
    """llama: heads of keys and values, shared by n_heads; 0: as many as n_heads"""
    head_dim: WidthOrZero = 0
    """llama: width of a head; 0: dim / n_heads"""
    hidden_dim: int = Field(default=0, ge=0, le=2**24)
    """llama: width of the feed-forward; 0: 8/3 dim, rounded up to a multiple of 64"""
    norm_eps: PositiveFloat = 1e-5
    """epsilon of the norms"""
    qk_norm: bool = False
    """llama: normalise queries and keys (Qwen3)"""
    qkv_bias: bool = False
    """llama: biases of queries, keys and values (Qwen2)"""
    rope_theta: PositiveFloat = 1e4
    """llama: base of the rotary wavelengths"""
    rope_factor: float = Field(default=1.0, ge=1)
    """llama: stretch long rotary wavelengths by this factor (Llama 3.1's longer context); 1: not"""
    rope_low_freq_factor: PositiveFloat = 1.0
    """llama: wavelengths above rope_original_max_seq_len / this are stretched in full"""
    rope_high_freq_factor: PositiveFloat = 4.0
    """llama: wavelengths below rope_original_max_seq_len / this are kept"""
    rope_original_max_seq_len: Size = 8192
    """llama: the context before stretching"""

    def resolved(self) -> dict[str, Any]:
        """Every key, with the numbers that 0 stands for (but for vocab_size, which is the tokenizer's then)."""
        derived = {"n_kv_heads": self.kv_heads, "head_dim": self.dim_of_heads, "hidden_dim": self.dim_of_ffn}
        return self.model_dump() | derived

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_heads or self.n_heads

    @property
    def dim_of_heads(self) -> int:
        """Width of one head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def dim_of_ffn(self) -> int:
        """Width of the feed-forward."""
        numerator, denominator, multiple = FAMILIES[self.family].hidden_dim
        return self.hidden_dim or -(-numerator * self.dim // (denominator * multiple)) * multiple


class TokenizerConfig(Section):
    path: PathText = ""
    """a tokenizer.json to use; empty: one is trained on the text"""
    end_token: str = ""
    """with path: the entry that ends a document; empty: <|endoftext|>, <|end_of_text|>, </s> or <eos>. Prepared data \
brings its own"""
    vocab_size: int = Field(default=4096, ge=257, le=2**31 - 1)
    """without path: size of the byte-level BPE vocabulary that is trained (256 bytes, 1 end mark, merges)"""


class DataConfig(Section):
    path: Annotated[str | list[str], AfterValidator(_without_nul)] = ""
    """a prepared folder (docs/data.md), or your text: files, folders or globs; empty: Python's standard library"""
    sources: Annotated[dict[str, PositiveFloat], AfterValidator(_without_nul)] = {}
    """instead of path: prepared folders or texts that are mixed, with weights: [data.sources] "data/web" = 0.7"""
    text_key: str = "text"
    """the key of a .jsonl line, or the column of a .csv or .parquet file, that holds the text"""
    val_fraction: float = Field(default=0.05, gt=0, lt=1)
    """share of the documents that is held out for validation, chosen by their hash"""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: sequences are cut from the documents one after the other; best_fit: whole documents are put together, \
and the rest of a sequence is padding"""
    document_mask: bool = False
    """attention stays within a document, and positions begin again with each"""
    cache_dir: PathText = ""
    """where tokenised text is kept; empty: $XDG_CACHE_HOME/torchtitan_lite or ~/.cache/torchtitan_lite"""


class TrainConfig(Section):
    steps: int = Field(default=250, gt=0, le=10**12)
    """optimizer steps of the whole run"""
    seq_len: Size = 256
    """tokens in a sequence"""
    micro_batch_size: Size = 8
    """sequences per rank in one forward and backward"""
    global_batch_size: Size = 16
    """sequences per optimizer step, over all ranks; gradient accumulation follows from it"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """a loss or gradient norm that is not finite stops the run, or its step is skipped and recorded"""
    max_skipped: PositiveInt = 10
    """with skip: more skipped steps in a row than this stop the run"""


class ParameterGroup(Section):
    match: str
    """names of parameters, e.g. "*norm*" or "layers.0.*"; the first group that matches counts"""
    lr_factor: NonNegativeFloat = 1.0
    """multiplies the learning rate"""
    weight_decay: NonNegativeFloat | None = None
    """instead of [optim] weight_decay; absent: as without the group"""


class OptimConfig(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """the optimizer, one of torch's (torch's Adafactor can't take sharded parameters)"""
    lr: PositiveFloat = 4e-3
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw: decay rates of the two moments"""
    eps: PositiveFloat = 1e-8
    """adamw: added to the root of the second moment"""
    momentum: float = Field(default=0.9, gt=0, lt=1)
    """sgd: momentum"""
    weight_decay: NonNegativeFloat = 0.1
    """decay of matrices; biases and norms have none"""
    freeze: list[str] = []
    """names of parameters that keep their values, e.g. ["tok_embeddings.*", "layers.0.*"]"""
    groups: list[ParameterGroup] = []
    """parameters with a learning rate or decay of their own: [[optim.groups]] match = "*", lr_factor, weight_decay"""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """shape of the learning rate after warm-up; wsd: constant, then linear over the last decay_ratio of the steps"""
    warmup_steps: NonNegativeInt = 20
    """steps of linear warm-up"""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """wsd: share of the steps in which the learning rate falls"""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """the schedule ends at this share of lr (constant: does not fall)"""
    max_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """gradients are clipped to this global norm; inf: not clipped"""


class PrecisionOverride(Section):
    match: str
    """names of parameters, e.g. "layers.0.*"; the first override that matches counts"""
    param_dtype: Dtype | None = None
    """instead of [fsdp] param_dtype; absent: the same"""
    reduce_dtype: Dtype | None = None
    """instead of [fsdp] reduce_dtype; absent: the same"""
    output_dtype: Dtype | None = None
    """instead of [fsdp] output_dtype; absent: the same"""


class FsdpConfig(Section):
    sharding_strategy: Literal["", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"] = (
        ""
    )
    """FSDP1's name for a choice of dp_replicate, dp_shard and reshard_after_forward; empty: those decide"""
    dp_replicate: int = -1
    """copies of the sharded model (HSDP); -1: as many as dp_shard leaves, and 1 if that is -1 too"""
    dp_shard: int = -1
    """ranks that share one copy; -1: all that dp_replicate leaves; 1: nothing is sharded"""
    reshard_after_forward: Annotated[bool | int | Literal["default"], PlainValidator(_reshard)] = "default"
    """free gathered parameters after forward (true), keep them for backward (false), or keep them in shards over this \
many ranks; default: all but the head, which backward needs at once"""
    reshard_after_backward: bool = True
    """free gathered parameters after backward; false: keep them for the next micro-batch of the step"""
    grad_sync: Literal["every", "last", "all_reduce_last"] = "every"
    """when gradients are summed over the ranks: with every micro-batch, or with the last of a step (more memory); \
all_reduce_last: within a copy with every one, between copies with the last"""
    param_dtype: Dtype = "float32"
    """dtype of the parameters in forward and backward (they are kept and updated in float32)"""
    reduce_dtype: Dtype = "float32"
    """dtype in which gradients are summed over the ranks"""
    output_dtype: Literal["", Dtype] = ""
    """dtype of what each group hands to the next; empty: its param_dtype"""
    cast_forward_inputs: bool = False
    """let FSDP cast every floating input of a group, also llama's rotary tables, which lose precision"""
    precision_overrides: list[PrecisionOverride] = []
    """groups with dtypes of their own: [[fsdp.precision_overrides]] match = "layers.0.*", with any of the dtypes"""
    cpu_offload: bool = False
    """keep parameters, gradients and optimizer state on the host (with a GPU only)"""
    explicit_prefetching: bool = False
    """issue the first all-gather before the batch is fetched, and each group's next ones by explicit lists"""
    forward_prefetch: PositiveInt = 2
    """with explicit_prefetching: how many groups ahead to gather in forward"""
    backward_prefetch: PositiveInt = 2
    """with explicit_prefetching: how many groups ahead to gather in backward"""

    @property
    def uses_float16(self) -> bool:
        """Whether anything is computed or summed in float16, whose range needs a scaled loss."""
        keys = "param_dtype", "reduce_dtype", "output_dtype"
        dtypes = [getattr(section, key) for section in (self, *self.precision_overrides) for key in keys]
        return "float16" in dtypes


class ActivationCheckpointingConfig(Section):
    mode: Literal["none", "full", "selective"] = "none"
    """what backward recomputes instead of keeping it: whole blocks (full), or all but matrix products and attention"""
    every: PositiveInt = 1
    """every how many blocks; 1: all of them"""


class CompileConfig(Section):
    enabled: bool = False
    """compile each block by torch.compile, in place"""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """inductor: fused kernels, needs a compiler; the others only trace (to look for the cause of a difference)"""


class GradScalerConfig(Section):
    init_scale: float = Field(default=65536.0, gt=0, le=2.0**100)
    """float16: the loss is multiplied by this, so that small gradients do not vanish; halved when one overflows"""
    growth_interval: PositiveInt = 2000
    """float16: the scale doubles after this many steps without an overflow"""
    min_scale: float = Field(default=1.0, gt=0, le=2.0**100)
    """float16: below this scale the run stops"""


class EvalConfig(Section):
    every: NonNegativeInt = 100
    """validate every so many steps and at the end; 0: never"""
    samples: PositiveInt = 128
    """validation sequences, drawn at random from all held-out text; the same ones at every step, in every run"""


class SampleConfig(Section):
    every: NonNegativeInt = 100
    """continue the prompts every so many steps and at the end; 0: never"""
    prompts: list[str] = ["def ", "The "]
    """beginnings of text"""
    max_tokens: PositiveInt = 48
    """how many tokens to add at most; each gathers all parameters once"""
    temperature: Annotated[NonNegativeFloat, AfterValidator(_temperature)] = 0.8
    """0: always the likeliest token"""


class CheckpointConfig(Section):
    every: NonNegativeInt = 100
    """save every so many steps and at the end; 0: only at the end"""
    state_dict: Literal["full", "sharded"] = "full"
    """full: rank 0 writes whole tensors; sharded: each rank writes its own part, on a file system that all share"""
    api: Literal["dtensor", "dcp"] = "dtensor"
    """how state dicts are gathered and spread: by DTensors, or by torch.distributed.checkpoint; same files"""
    async_save: bool = False
    """train on while a copy is written: each rank keeps a copy of its part until then (full by dcp: rank 0 of all)"""
    resume: PathText = "auto"
    """auto: go on from the newest checkpoint that is whole; never: begin again; step-N: go on from that one; or the \
path of another run or checkpoint, as long as this run has none"""
    verify: Literal["full", "size", "off"] = "full"
    """what is compared with the manifest before a checkpoint is loaded: SHA-256 and size, size, nothing"""
    keep_latest: NonNegativeInt = 3
    """keep this many of the newest checkpoints; 0: all"""
    keep_every: NonNegativeInt = 0
    """keep those of every so many steps as well; 0: none"""
    keep_best: bool = False
    """keep the one with the lowest validation loss as well (validate at the steps that are saved)"""


class LogConfig(Section):
    every: PositiveInt = 10
    """write a line and a record every so many steps"""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """hand the records on to these as well; each is an extra: pip install -e ".[tensorboard]\""""
    wandb_project: str = "torchtitan_lite"
    """wandb: the project"""


class Config(Frozen):
    """One experiment. Frozen: what a run was started with is what it runs with."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    compile: CompileConfig = CompileConfig()
    speed: SpeedConfig = SpeedConfig()
    grad_scaler: GradScalerConfig = GradScalerConfig()
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return expand(self.run.out_dir) / self.run.name


@functools.cache
def known_keys() -> dict[str, Any]:
    """Each "section.key" with pydantic's description of the field, in the order of the file."""
    return {
        f"{section}.{key}": field
        for section, table in Config.model_fields.items()
        for key, field in type(table.default).model_fields.items()
    }


def type_name(key: str) -> str:
    """What `--help` calls the values of "section.key"."""
    annotation = known_keys()[key].annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return getattr(annotation, "__name__", "VALUE").upper() if isinstance(annotation, type) else "VALUE"


def default_of(key: str) -> Any:
    """The default of "section.key"."""
    return known_keys()[key].default
