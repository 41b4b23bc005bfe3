"""[model]: the family, its sizes, and the initial weights."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tomli
from pydantic import AfterValidator, Field, PositiveFloat, ValidationInfo, field_validator

from torchtitan_lite.config.families import FAMILIES, Family
from torchtitan_lite.config.paths import not_downloaded, problem
from torchtitan_lite.config.section import (
    FORK,
    REFUSED,
    Machine,
    PathText,
    Resume,
    Rules,
    Section,
    Size,
    SizeOrZero,
    UsedIf,
    Width,
    WidthOrZero,
)

if TYPE_CHECKING:
    from torchtitan_lite.config.schema import Config

_READ_AT_STEP_0 = Resume(
    "refused",
    "only read at step 0, so a different one would have no effect (leaving it out is allowed)",
    changes="start",
)
_STRETCHED = UsedIf("model.family model.rope_factor", "model.rope_factor above 1", lambda c: c.model.rope_factor > 1)
_WINDOWED = UsedIf("model.layer_pattern", "window in model.layer_pattern", lambda c: "window" in c.model.layer_pattern)
_HAS_ROOM_FOR_INDUCTION = UsedIf(
    "model.qk_norm model.tie_embeddings model.n_layers model.dim model.head_dim model.n_heads model.layer_pattern "
    "model.window model.init_from",
    "random initial weights, model.qk_norm = true, model.tie_embeddings = false, two layers with positions, windows "
    "above 1, and heads of 16 to dim / 2",
    lambda c: c.model.has_room_for_induction,
)


class ModelConfig(Section):
    """Keys that only some families read are listed in their entries of `FAMILIES`, and unused with the others."""

    on_resume: ClassVar[Resume] = REFUSED

    family: Annotated[str, AfterValidator(FAMILIES.known)] = "llama"
    """gpt: learned positions, LayerNorm, GELU; llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention; \
resformer: llama with value embeddings; mistral: llama with windows; smollm3: llama with layers that have no \
positions; olmo2, olmo3: norms after the sublayers; olmo_hybrid: olmo2 with gated DeltaNet in three of four layers; \
gemma3: norms before and after the sublayers; qwen3_moe, olmoe: experts; t5: encoder and decoder"""
    size: Annotated[str, Resume("kept", "a name for other keys", changes="nothing")] = "1M"
    """a preset of the sizes below (families.py); sizes set explicitly override the preset"""
    init_from: Annotated[PathText, _READ_AT_STEP_0] = ""
    """start from the weights of a run, a checkpoint or a Hugging Face folder, at step 0 with a new optimizer"""
    vocab_size: SizeOrZero = 0
    """rows of the token embedding; 0: the tokenizer's vocabulary size"""
    dim: Width = 128
    """width of the residual stream"""
    n_layers: int = Field(default=4, gt=0, le=2048)
    """number of Transformer blocks; t5: of the encoder"""
    n_decoder_layers: int = Field(default=0, ge=0, le=2048)
    """t5: number of blocks of the decoder; 0: n_layers"""
    n_heads: Width = 4
    """attention heads"""
    max_seq_len: Annotated[Size, FORK] = 1024
    """maximum sequence length, in tokens"""
    tie_embeddings: bool = False
    """use the token embeddings as the output matrix"""
    dropout: Annotated[float, FORK] = Field(default=0.0, ge=0, lt=1)
    """gpt, t5: dropout probability"""
    n_kv_heads: WidthOrZero = 0
    """llama: key and value heads for grouped-query attention; 0: n_heads"""
    head_dim: WidthOrZero = 0
    """llama, t5: width of a head; 0: dim / n_heads"""
    hidden_dim: int = Field(default=0, ge=0, le=2**24)
    """llama, t5: width of the feed-forward, or of each expert's; 0: 8/3 dim, rounded up to a multiple of 64 (t5: \
4 dim)"""
    n_experts: Size = 8
    """qwen3_moe, olmoe: experts per layer"""
    experts_per_token: Annotated[Size, FORK] = 2
    """qwen3_moe, olmoe: experts per token"""
    norm_topk_prob: Annotated[bool, FORK] = False
    """qwen3_moe, olmoe: divide the weights of a token's experts by their sum"""
    router_bias: bool = False
    """qwen3_moe, olmoe: balance the experts' loads by a bias on the scores that select them (DeepSeek-V3); see \
train.router_bias_rate"""
    gated: bool = True
    """t5: gated GELU in the feed-forward (v1.1); false: ReLU (v1.0)"""
    scale_output: Annotated[bool, FORK] = False
    """t5: multiply the decoder's output by dim^-0.5 (v1.0)"""
    mup_base_dim: Annotated[WidthOrZero, FORK] = 0
    """gpt, llama, resformer: muP: the dim at which learning rate and initial values were tuned; 0: off"""
    norm_eps: Annotated[PositiveFloat, FORK] = 1e-5
    """epsilon of the norms"""
    qk_norm: bool = False
    """llama, resformer: normalize queries and keys (Qwen3)"""
    induction_head: Annotated[
        bool,
        Resume("kept", "only read at step 0", changes="start"),
        _HAS_ROOM_FOR_INDUCTION,
    ] = False
    """llama, resformer: initialize an induction head, which predicts what followed the current token before \
(docs/models.md)"""
    qkv_bias: bool = False
    """llama: add biases to queries, keys and values (Qwen2)"""
    rope_theta: Annotated[PositiveFloat, FORK] = 1e4
    """llama: base of the rotary wavelengths"""
    rope_factor: Annotated[float, FORK] = Field(default=1.0, ge=1)
    """llama: stretch long rotary wavelengths by this factor (Llama 3.1's longer context); 1: off"""
    rope_low_freq_factor: Annotated[PositiveFloat, FORK, _STRETCHED] = 1.0
    """llama: wavelengths above rope_original_max_seq_len / this are stretched by the full factor"""
    rope_high_freq_factor: Annotated[PositiveFloat, FORK, _STRETCHED] = 4.0
    """llama: wavelengths below rope_original_max_seq_len / this are not stretched"""
    rope_original_max_seq_len: Annotated[Size, FORK, _STRETCHED] = 8192
    """llama: the context length before stretching"""
    window: Annotated[SizeOrZero, FORK, _WINDOWED] = 0
    """llama, mistral, olmo3, gemma3: tokens that a windowed layer attends to, including the current one; 0: all"""
    layer_pattern: Annotated[list[Literal["full", "window", "nope", "delta"]], FORK] = Field(
        default=["window"], min_length=1, max_length=2048, examples=[["window", "window", "window", "full"]]
    )
    """llama, smollm3, olmo3, olmo_hybrid, gemma3: kinds of layers, repeated over the depth. window: attention within \
model.window; full: to all tokens; nope: to all tokens, without positions; delta: gated DeltaNet (olmo_hybrid)"""
    window_rope_theta: Annotated[PositiveFloat, FORK] = 1e4
    """gemma3: base of the rotary wavelengths of windowed layers"""

    @field_validator("size")
    @classmethod
    def _known(cls, size: str, info: ValidationInfo) -> str:
        family = info.data.get("family", "")
        sizes = FAMILIES[family].sizes if family in FAMILIES else {}
        if sizes and size not in sizes:
            raise ValueError(f"no such size of {family}; known: {', '.join(sizes)}")
        return size

    def resolved(self) -> dict[str, Any]:
        """Return every key, with derived sizes instead of 0. (vocab_size 0 stays: it needs the tokenizer.)"""
        derived = {"n_kv_heads": self.kv_heads, "head_dim": self.dim_of_heads, "hidden_dim": self.dim_of_ffn}
        return self.model_dump() | derived | {"n_decoder_layers": sum(self.stacks[1:])}

    @property
    def stacks(self) -> tuple[int, ...]:
        """The number of blocks of the decoder, or of the encoder and the decoder."""
        one = self.n_layers
        return (one, self.n_decoder_layers or one) if FAMILIES[self.family].encoder_decoder else (one,)

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of each decoder block: layer_pattern, repeated."""
        return [self.layer_pattern[i % len(self.layer_pattern)] for i in range(self.n_layers)]

    @property
    def windows(self) -> list[int]:
        """The attention window of each decoder block, in tokens; 0: all."""
        window = self.window if "window" in FAMILIES[self.family].keys else 0
        return [window if kind == "window" else 0 for kind in self.layer_kinds]

    @property
    def has_room_for_induction(self) -> bool:
        """Whether `induction_head` has an effect."""
        return (
            not self.init_from
            and "induction_head" in FAMILIES[self.family].keys
            and self.qk_norm
            and not self.tie_embeddings
            and self.n_layers > 1
            and "nope" not in self.layer_kinds[:2]
            and 1 not in self.windows[:2]
            and 16 <= self.dim_of_heads <= self.dim // 2
        )

    @property
    def delta_dims(self) -> tuple[int, int]:
        """The key and value width of each head of a delta layer."""
        key = 3 * self.dim // (4 * self.n_heads)
        return key, 2 * key

    @property
    def has_experts(self) -> bool:
        """Whether the family's feed-forward is a mixture of experts."""
        return "n_experts" in FAMILIES[self.family].keys

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


_WIDTHS = "n_heads", "n_kv_heads", "head_dim", "hidden_dim"


def default_shape(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the family's architecture and, unless a size is given, its default size, by "section.key".

    If dim is given without a size, heads (of width 64, or the next larger even divisor of dim) and hidden_dim follow.

    Args:
        given: values by "section.key".
    """
    keys = dict(family.defaults)
    if "model.size" not in given:
        keys |= family.sizes.get(ModelConfig.model_fields["size"].default, {})
        if isinstance(dim := given.get("model.dim"), int):
            keys = {key: value for key, value in keys.items() if key not in _WIDTHS}
            fitting = (n for n in range(dim // 64, 1, -1) if dim % n == dim // n % 2 == 0)
            keys["n_heads"] = next(fitting, 1)
    return {
        f"model.{key}": value
        for key, value in keys.items()
        if key != "induction_head" or not given.get("model.init_from")  # weights replace initial values
    }


def shape_rules(model: ModelConfig) -> Rules:
    """Yield the broken rules between the sizes of a model."""
    if model.dim % model.n_heads and not model.head_dim:
        works = max(d for d in range(1, model.n_heads + 1) if model.dim % d == 0)
        yield (
            "model.n_heads model.dim",
            f"model.dim = {model.dim} is not a multiple of model.n_heads = {model.n_heads}; n_heads = {works} works",
        )
    reads = FAMILIES[model.family].keys
    if "n_kv_heads" in reads and model.n_heads % model.kv_heads:
        works = max(k for k in range(1, model.kv_heads + 1) if model.n_heads % k == 0)
        yield (
            "model.n_kv_heads model.n_heads",
            f"model.n_heads = {model.n_heads} is not a multiple of model.n_kv_heads = {model.kv_heads}; "
            f"n_kv_heads = {works} works",
        )
    if "rope_theta" in reads and model.dim_of_heads % 2:
        yield (
            "model.head_dim model.dim",
            f"rotary positions need an even head_dim, not {model.dim_of_heads}; "
            f"head_dim = {model.dim_of_heads + 1} works",
        )
    if model.has_experts and model.experts_per_token > model.n_experts:
        yield (
            "model.experts_per_token model.n_experts",
            f"model.experts_per_token = {model.experts_per_token} is more than model.n_experts = {model.n_experts}; "
            f"experts_per_token = {model.n_experts} works",
        )
    if "delta" in model.layer_pattern and not FAMILIES[model.family].delta:
        known = " or ".join(f'"{name}"' for name, family in FAMILIES.items() if family.delta)
        yield (
            "model.layer_pattern model.family",
            f'model.layer_pattern has "delta", which model.family = "{model.family}" does not have; '
            f"family = {known} works",
        )


def rules(config: "Config", machine: Machine) -> Rules:
    """Yield the broken rules of [model], and between it and other sections."""
    model = config.model
    yield from shape_rules(model)
    if model.mup_base_dim and "mup_base_dim" not in FAMILIES[model.family].reads:
        known = " or ".join(f'"{name}"' for name, family in FAMILIES.items() if "mup_base_dim" in family.reads)
        yield (
            "model.mup_base_dim model.family",
            f"model.mup_base_dim = {model.mup_base_dim} would scale nothing, as model.family = "
            f'"{model.family}" has no muP; mup_base_dim = 0 works, or family = {known}, '
            "or a family of your own with muP (docs/own_model.md)",
        )
    elif model.mup_base_dim and model.tie_embeddings:
        yield (
            "model.mup_base_dim model.tie_embeddings",
            f"model.mup_base_dim = {model.mup_base_dim} gives embeddings and output matrix different initial values "
            "and learning rates, but model.tie_embeddings = true ties them; model.tie_embeddings = false works",
        )
    if model.mup_base_dim and config.optim.name == "sgd":
        yield (
            "model.mup_base_dim optim.name",
            f"model.mup_base_dim = {model.mup_base_dim} scales learning rates for updates of a fixed size, like Adam's "
            'and Muon\'s; those of optim.name = "sgd" vary with the gradient; optim.name = "muon" or "adamw" works',
        )
    if not FAMILIES[model.family].encoder_decoder:
        return
    if config.fsdp.uses_float16:
        yield (
            "fsdp.param_dtype model.family",
            f'model.family = "{model.family}" can\'t compute in float16: the outputs of its feed-forward exceed 65504, '
            'the largest float16 number, in published models; "bfloat16" works in its place as param_dtype, '
            "reduce_dtype and output_dtype",
        )
    if model.tie_embeddings and not model.scale_output and not model.init_from:
        yield (
            "model.tie_embeddings model.scale_output",
            "model.tie_embeddings = true needs model.scale_output = true, or the initial logits are too large by "
            f"a factor of {model.dim**0.5:.0f}; scale_output = true works, and so does tie_embeddings = false",
        )
    if config.data.target_len > model.max_seq_len:
        yield (
            "data.target_len model.max_seq_len",
            f"data.target_len = {config.data.target_len} is longer than model.max_seq_len = {model.max_seq_len}; "
            f"model.max_seq_len = {config.data.target_len} works",
        )


def local_rules(config: "Config", machine: Machine) -> Rules:
    """Yield a broken rule if `model.init_from` can't be read. It may be gone once the run has started from it."""
    if config.model.init_from and not started_from(config) and (wrong := problem(config.model.init_from)):
        yield "model.init_from", f"model.init_from: {wrong}{not_downloaded(config.model.init_from)}"


def started_from(config: "Config") -> bool:
    """Return whether the run has a checkpoint and started from `model.init_from`."""
    try:
        before = tomli.loads((config.folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return config.has_checkpoint and bool(before.get("model", {}).get("init_from") == config.model.init_from)


def lr_note(config: "Config") -> str:
    """Return a note on the default learning rate, for a run about to start from `model.init_from`."""
    lr = "1e-4" if FAMILIES[config.model.family].encoder_decoder else "2e-5"
    return (
        f"optim.lr = {config.optim.lr} is the default, for training from random weights; a pretrained "
        f"model forgets a lot at it: try --optim.name=adamw --optim.lr={lr} first (docs/models.md)"
    )
