"""[model]: the family, its sizes, and the initial weights."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveFloat, ValidationInfo, field_validator

from torchtitan_lite.config.families import DEFAULT_SIZE, FAMILIES
from torchtitan_lite.config.section import (
    FORK,
    REFUSED,
    PathText,
    Resume,
    Section,
    Size,
    SizeOrZero,
    UsedIf,
    Width,
    WidthOrZero,
)

_READ_AT_STEP_0 = Resume(
    "refused",
    "only read at step 0, so a different one would have no effect (leaving it out is allowed)",
    changes="start",
)
_STRETCHED = UsedIf("model.rope_factor", "model.rope_factor above 1", lambda factor: factor > 1)
_WINDOWED = UsedIf("model.layer_pattern", "window in model.layer_pattern", lambda pattern: "window" in pattern)
_HAS_ROOM_FOR_INDUCTION = UsedIf(
    "model.has_room_for_induction",
    "random initial weights, model.qk_norm = true, model.tie_embeddings = false, two layers with positions, windows "
    "above 1, and heads of 16 to dim / 2",
)


class ModelConfig(Section):
    """Keys that only some families read are listed in their entries of `FAMILIES`, and unused with the others."""

    on_resume: ClassVar[Resume] = REFUSED

    family: Annotated[str, AfterValidator(FAMILIES.known)] = "llama"
    """gpt: learned positions, LayerNorm, GELU; llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention; \
resformer: llama with value embeddings; mistral: llama with windows; smollm3: llama with some layers without \
positions; olmo2, olmo3: norms after the sublayers; olmo_hybrid: olmo2 with gated DeltaNet in three of four layers; \
gemma3: norms before and after the sublayers; qwen3_moe, olmoe: experts; t5: encoder and decoder"""
    size: Annotated[str, Resume("kept", "a name for other keys", changes="nothing")] = DEFAULT_SIZE
    """a preset of the sizes below (families.py), which override it"""
    init_from: Annotated[PathText, _READ_AT_STEP_0] = ""
    """start from the weights of a run, a checkpoint or a Hugging Face folder, with a new optimizer"""
    vocab_size: SizeOrZero = 0
    """rows of the token embedding; 0: the tokenizer's size"""
    dim: Width = 128
    """width of the residual stream"""
    n_layers: int = Field(default=4, gt=0, le=2048)
    """number of blocks; t5: of the encoder"""
    n_decoder_layers: int = Field(default=0, ge=0, le=2048)
    """t5: number of blocks of the decoder; 0: n_layers"""
    n_heads: Width = 4
    """attention heads"""
    max_seq_len: Annotated[Size, FORK] = 1024
    """maximum tokens of a sequence"""
    tie_embeddings: bool = False
    """use the token embeddings as the output matrix"""
    dropout: Annotated[float, FORK] = Field(default=0.0, ge=0, lt=1)
    """gpt, t5: dropout probability"""
    n_kv_heads: WidthOrZero = 0
    """llama: key and value heads for grouped-query attention; 0: n_heads"""
    head_dim: WidthOrZero = 0
    """llama, t5: width of a head; 0: dim / n_heads"""
    hidden_dim: int = Field(default=0, ge=0, le=2**24)
    """llama, t5: width of the feed-forward, or of each expert's; 0: 8/3 dim, rounded up to a multiple of 64 (t5: 4 \
dim)"""
    n_experts: Size = 8
    """qwen3_moe, olmoe: experts per layer"""
    experts_per_token: Annotated[Size, FORK] = 2
    """qwen3_moe, olmoe: experts per token"""
    norm_topk_prob: Annotated[bool, FORK] = False
    """qwen3_moe, olmoe: divide the weights of a token's experts by their sum"""
    router_bias: bool = False
    """qwen3_moe, olmoe: balance the experts' loads by a bias on the scores that select them (DeepSeek-V3)"""
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
    induction_head: Annotated[bool, Resume("kept", "only read at step 0", changes="start"), _HAS_ROOM_FOR_INDUCTION] = (
        False
    )
    """llama, resformer: begin with an induction head (docs/models.md)"""
    qkv_bias: bool = False
    """llama: add biases to queries, keys and values (Qwen2)"""
    rope_theta: Annotated[PositiveFloat, FORK] = 1e4
    """llama: base of the rotary wavelengths"""
    rope_factor: Annotated[float, FORK] = Field(default=1.0, ge=1)
    """llama: stretch long rotary wavelengths by this factor (Llama 3.1); 1: off"""
    rope_low_freq_factor: Annotated[PositiveFloat, FORK, _STRETCHED] = 1.0
    """llama: wavelengths above rope_original_max_seq_len / this are stretched in full"""
    rope_high_freq_factor: Annotated[PositiveFloat, FORK, _STRETCHED] = 4.0
    """llama: wavelengths below rope_original_max_seq_len / this are not stretched"""
    rope_original_max_seq_len: Annotated[Size, FORK, _STRETCHED] = 8192
    """llama: the context length before stretching"""
    window: Annotated[SizeOrZero, FORK, _WINDOWED] = 0
    """llama, mistral, olmo3, gemma3: tokens that a windowed layer attends to, with the current one; 0: all"""
    layer_pattern: Annotated[list[Literal["full", "window", "nope", "delta"]], FORK] = Field(
        default=["window"], min_length=1, max_length=2048, examples=[["window", "window", "window", "full"]]
    )
    """llama, smollm3, olmo3, olmo_hybrid, gemma3: kinds of layers, repeated over the depth. window: attention \
within model.window; full: to all tokens; nope: to all, without positions; delta: gated DeltaNet (olmo_hybrid)"""
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
        decoder = [self.n_decoder_layers or self.n_layers] if FAMILIES[self.family].encoder_decoder else []
        return self.n_layers, *decoder

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
