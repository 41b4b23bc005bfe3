"""Hugging Face's config.json, read and written by one strict pydantic model for each `model_type`.

A field that is a key of [model] has our name, and theirs as its alias; the others have their names. A key that no
field has is refused, unless it is one of UNREAD: it may change what the model computes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError, shortened

# keys about files, generation, initial values, dropout, other heads and other software: a model computes the same
UNREAD = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_factor initializer_range is_encoder_decoder is_llama_config keys_to_ignore_at_inference
    label2id length_penalty linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
    max_length max_window_layers min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_past output_router_logits output_scores
    pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values reorder_and_upcast_attn
    repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef sep_token_id summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)
FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"
GELU: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
PATTERN = "_sliding_window_pattern"  # as transformers 5 writes it


def _off(value: Any) -> Any:
    if value:
        raise ValueError("is not supported for this model_type")
    return value


Count = Annotated[int, Field(gt=0, lt=2**31)]
Off = Annotated[bool, AfterValidator(_off)]


class Strict(BaseModel):
    """The base of all tables of config.json."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Published(Strict):
    """What the config.json of every model has."""

    architecture: ClassVar[str]
    stands_for: ClassVar[dict[str, Any]]  # keys of [model]
    vocab_size: Count

    def keys(self) -> dict[str, Any]:
        """Our keys of [model]. Raises ValueError for a variant that we don't have."""
        ours = (name for name in type(self).model_fields if name in ModelConfig.model_fields)
        return self.stands_for | {name: getattr(self, name) for name in ours}

    def implied(self) -> dict[str, Any]:
        """By field, the only value that we compute, given the others. An export writes it."""
        return {}

    @model_validator(mode="after")
    def _as_implied(self) -> Self:
        for key, known in self.implied().items():
            if (found := getattr(self, key)) not in (known, None):
                raise ValueError(f"{key} = {found} is not supported; {known} is")
        return self

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        """The fields of an export that are not keys of [model]."""
        return {}

    @classmethod
    def of(cls, config: ModelConfig, vocab_size: int) -> Self:
        """What an export of this model writes."""
        ours = config.resolved() | {"vocab_size": vocab_size}
        fields = cls.model_fields.items()
        values = {field.serialization_alias or name: ours[name] for name, field in fields if name in ours}
        made = cls.model_validate(values | cls.more(config))
        return made.model_copy(update=made.implied())


# --- rotary positions -------------------------------------------------------------------------------------------


class Rope(Strict):
    """Rotary positions without scaling. Older files say `type`, and some have both."""

    rope_type: Literal["default"] | None = None
    type: Literal["default"] | None = None
    rope_theta: float | None = None

    def keys(self) -> dict[str, Any]:
        """Our keys for the scaling."""
        return {}


class LlamaRope(Rope):
    """Rotary positions that Llama 3 may scale."""

    rope_type: Literal["default", "llama3"] | None = None  # type: ignore[assignment]
    type: Literal["default", "llama3"] | None = None  # type: ignore[assignment]
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: Count | None = None

    def keys(self) -> dict[str, Any]:
        values = {
            "rope_factor": self.factor,
            "rope_low_freq_factor": self.low_freq_factor,
            "rope_high_freq_factor": self.high_freq_factor,
            "rope_original_max_seq_len": self.original_max_position_embeddings,
        }
        given = sum(value is not None for value in values.values())
        if given != (4 if "llama3" in (self.rope_type, self.type) else 0):
            raise ValueError("llama3 needs factor, low_freq_factor, high_freq_factor, original_max_position_embeddings")
        return values if given else {"rope_factor": 1.0}


class Ropes(Strict):
    """Rotary positions of each kind of layer."""

    full_attention: Rope = Rope()
    sliding_attention: Rope = Rope()


# --- decoders ---------------------------------------------------------------------------------------------------


class Decoder(Published):
    """A decoder with RMSNorm, gated feed-forward and rotary positions, as most are."""

    dim: Count = Field(alias="hidden_size")
    n_layers: Annotated[Count, Field(le=2048)] = Field(alias="num_hidden_layers")
    n_heads: Count = Field(alias="num_attention_heads")
    n_kv_heads: Count | None = Field(None, alias="num_key_value_heads")
    head_dim: Count | None = None
    hidden_dim: Count = Field(alias="intermediate_size")
    max_seq_len: Count = Field(2048, alias="max_position_embeddings")
    norm_eps: float = Field(1e-6, alias="rms_norm_eps")
    tie_embeddings: bool = Field(False, alias="tie_word_embeddings")
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Off = False
    mlp_bias: Off = False
    rope_interleaved: Off = False
    rope_theta: float | None = 1e4
    rope_scaling: Rope | None = None
    rope_parameters: Any = None
    use_sliding_window: Off = False
    sliding_window: Count | None = None  # without effect, unless a class reads it
    layer_types: Any = None

    def keys(self) -> dict[str, Any]:
        heads = {"n_kv_heads": self.n_kv_heads or self.n_heads, "head_dim": self.head_dim or self.dim // self.n_heads}
        return super().keys() | heads | self.rope() | self.layers()

    def rope(self) -> dict[str, Any]:
        """Our keys for the rotary positions."""
        rope = self.rope_scaling or self.rope_parameters or Rope()  # transformers prefers the first
        theta = rope.rope_theta if "rope_theta" in rope.model_fields_set else self.rope_theta
        return {"rope_theta": theta} | rope.keys()

    def layers(self) -> dict[str, Any]:
        """Our keys for the kinds of layers."""
        return {}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        return {"hidden_act": "silu", "rope_theta": config.rope_theta, "rope_parameters": rope}


class Plain(Decoder):
    """A decoder whose layers are all alike, without scaled positions."""

    rope_parameters: Rope | None = None
    layer_types: list[Literal["full_attention"]] | None = None


class Llama(Decoder):
    architecture = "LlamaForCausalLM"
    stands_for: ClassVar = {"family": "llama", "qk_norm": False, "qkv_bias": False}
    rope_scaling: LlamaRope | None = None
    rope_parameters: LlamaRope | None = None
    layer_types: list[Literal["full_attention"]] | None = None

    def rope(self) -> dict[str, Any]:
        return {"rope_factor": 1.0} | super().rope()

    def layers(self) -> dict[str, Any]:
        return {"window": 0, "layer_pattern": ["window"]}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        more = super().more(config)
        if config.rope_factor > 1:
            more["rope_scaling"] = more["rope_parameters"] = {
                "rope_type": "llama3",
                "rope_theta": config.rope_theta,
                "factor": config.rope_factor,
                "low_freq_factor": config.rope_low_freq_factor,
                "high_freq_factor": config.rope_high_freq_factor,
                "original_max_position_embeddings": config.rope_original_max_seq_len,
            }
        return more


class Qwen(Llama):
    """Qwen2 and Qwen3, whose last layers may have windows."""

    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    use_mrope: Off = False
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None  # type: ignore[assignment]

    def layers(self) -> dict[str, Any]:
        if not self.use_sliding_window:
            return super().layers()
        default = [WINDOWED if i >= self.max_window_layers else FULL for i in range(self.n_layers)]
        return windowed(self, default)

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        types = [WINDOWED if kind == "window" and config.window else FULL for kind in config.layer_kinds]
        windows = {"sliding_window": config.window or None, "use_sliding_window": bool(config.window)}
        return super().more(config) | windows | {"layer_types": types}


class Qwen2(Qwen):
    architecture = "Qwen2ForCausalLM"
    stands_for: ClassVar = {"family": "llama", "qk_norm": False, "qkv_bias": True}
    attention_bias: bool = True  # Qwen2 always has these


class Qwen3(Qwen):
    architecture = "Qwen3ForCausalLM"
    stands_for: ClassVar = {"family": "llama", "qk_norm": True, "qkv_bias": False}
    head_dim: Count = 128


class Mistral(Plain):
    architecture = "MistralForCausalLM"
    stands_for: ClassVar = {"family": "mistral"}
    n_kv_heads: Count | None = Field(8, alias="num_key_value_heads")
    max_seq_len: Count = Field(2**17, alias="max_position_embeddings")
    sliding_window: Count | None = 4096  # of every layer
    layer_types: None = None

    def layers(self) -> dict[str, Any]:
        return {"window": self.sliding_window or 0}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        return super().more(config) | {"sliding_window": config.window or None}


class SmolLM3(Plain):
    architecture = "SmolLM3ForCausalLM"
    stands_for: ClassVar = {"family": "smollm3"}
    n_kv_heads: Count | None = Field(4, alias="num_key_value_heads")
    max_seq_len: Count = Field(2**15, alias="max_position_embeddings")
    tie_embeddings: bool = Field(True, alias="tie_word_embeddings")
    rope_theta: float = 2e6
    no_rope_layer_interval: Count = 4
    no_rope_layers: list[Literal[0, 1]] | None = None

    def layers(self) -> dict[str, Any]:
        default = [int((i + 1) % self.no_rope_layer_interval != 0) for i in range(self.n_layers)]
        return shortest("no_rope_layers", self.no_rope_layers, default, {0: "nope", 1: "full"})

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        rotates = [int(kind != "nope") for kind in config.layer_kinds]
        layers = {"no_rope_layers": rotates, "layer_types": [FULL] * config.n_layers, "sliding_window": None}
        return super().more(config) | layers


class Olmo2(Plain):
    architecture = "Olmo2ForCausalLM"
    stands_for: ClassVar = {"family": "olmo2"}
    norm_eps: float = Field(1e-5, alias="rms_norm_eps")


def experts(default: int) -> Any:
    """The field of the number of experts, which transformers 5 renames."""
    names = AliasChoices("num_experts", "num_local_experts")
    return Field(default, validation_alias=names, serialization_alias="num_experts")


class Qwen3Moe(Plain):
    architecture = "Qwen3MoeForCausalLM"
    stands_for: ClassVar = {"family": "qwen3_moe"}
    n_kv_heads: Count | None = Field(4, alias="num_key_value_heads")
    hidden_dim: Count = Field(768, alias="moe_intermediate_size")
    max_seq_len: Count = Field(2**15, alias="max_position_embeddings")
    n_experts: Count = experts(128)
    experts_per_token: Count = Field(8, alias="num_experts_per_tok")
    norm_topk_prob: bool = False
    intermediate_size: Count | None = None  # of layers without experts
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: list[int] | None = Field(None, max_length=0)


class Olmoe(Plain):
    architecture = "OlmoeForCausalLM"
    stands_for: ClassVar = {"family": "olmoe"}
    hidden_dim: Count = Field(2048, alias="intermediate_size")
    max_seq_len: Count = Field(4096, alias="max_position_embeddings")
    norm_eps: float = Field(1e-5, alias="rms_norm_eps")
    n_experts: Count = experts(64)
    experts_per_token: Count = Field(8, alias="num_experts_per_tok")
    norm_topk_prob: bool = False
    clip_qkv: None = None

    def keys(self) -> dict[str, Any]:
        return {key: value for key, value in super().keys().items() if key != "head_dim"}

    def implied(self) -> dict[str, Any]:
        return {"head_dim": self.dim // self.n_heads}


class OlmoHybrid(Plain):
    """Attention has no rotary positions if rope_theta is null, as in the released model."""

    architecture = "OlmoHybridForCausalLM"
    stands_for: ClassVar = {"family": "olmo_hybrid"}
    max_seq_len: Count = Field(65536, alias="max_position_embeddings")
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None  # type: ignore[assignment]
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count = 4
    linear_allow_neg_eigval: bool = True

    def keys(self) -> dict[str, Any]:
        return {key: value for key, value in super().keys().items() if key != "head_dim"}

    def rope(self) -> dict[str, Any]:
        return {key: 1e4 if value is None else value for key, value in super().rope().items()}

    def layers(self) -> dict[str, Any]:
        given = self.model_fields_set
        if "rope_parameters" in given and self.rope_parameters is None and "rope_theta" not in given:
            raise ValueError(
                "rope_parameters = null does not say whether attention has rotary positions, as versions of "
                "transformers differ; rope_theta = null says that it has none"
            )
        n, kinds = self.n_layers, {LINEAR: "delta", FULL: "nope" if super().rope()["rope_theta"] is None else "full"}
        default = [FULL if i % 4 == 3 or i + 1 == n < 4 else LINEAR for i in range(n)]
        return shortest("layer_types", self.layer_types, default, kinds)

    def implied(self) -> dict[str, Any]:
        heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), self.n_heads)
        widths = ModelConfig(dim=self.dim, n_heads=self.n_heads).delta_dims
        dims = dict(zip(("linear_key_head_dim", "linear_value_head_dim"), widths, strict=True))
        more = {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True}
        return heads | dims | more | {"head_dim": self.dim // self.n_heads}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        theta = None if "nope" in config.layer_kinds else config.rope_theta
        rope = {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        types = [LINEAR if kind == "delta" else FULL for kind in config.layer_kinds]
        return super().more(config) | rope | {"layer_types": types}


class TwoRopes(Decoder):
    """A decoder with windowed layers, whose rotary positions are given by themselves."""

    rope_parameters: Ropes | None = None
    sliding_window: Count | None = 4096
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    def thetas(self, local: float) -> tuple[float | None, float]:
        """The rotary bases of full layers and of windowed ones, which have `local` unless theirs is given."""
        ropes = self.rope_parameters or Ropes()
        full = next((r for r in (self.rope_scaling, ropes.full_attention) if r and r.rope_theta is not None), self)
        given = ropes.sliding_attention.rope_theta
        return full.rope_theta, local if given is None else given

    def layers_with(self, every: int) -> dict[str, Any]:
        """Our keys for the kinds of layers, of which every so many is full unless layer_types are given."""
        return windowed(self, [FULL if (i + 1) % every == 0 else WINDOWED for i in range(self.n_layers)])

    @classmethod
    def with_bases(cls, config: ModelConfig, local: float) -> dict[str, Any]:
        thetas = {FULL: config.rope_theta, WINDOWED: local}
        return super().more(config) | {
            "sliding_window": config.window or config.max_seq_len,  # transformers needs one, and no token is beyond
            "layer_types": [WINDOWED if kind == "window" else FULL for kind in config.layer_kinds],
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        }


class Olmo3(TwoRopes):
    architecture = "Olmo3ForCausalLM"
    stands_for: ClassVar = {"family": "olmo3"}
    norm_eps: float = Field(1e-5, alias="rms_norm_eps")
    rope_theta: float = 5e5

    def rope(self) -> dict[str, Any]:
        theta, local = self.thetas(5e5)  # whatever rope_theta is
        if local != theta:
            raise ValueError(f"rope_theta = {local} of {WINDOWED} is not that of {FULL}, {theta}")
        return {"rope_theta": theta}

    def layers(self) -> dict[str, Any]:
        return self.layers_with(4)

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        return cls.with_bases(config, config.rope_theta)


class Gemma3(TwoRopes):
    architecture = "Gemma3ForCausalLM"
    stands_for: ClassVar = {"family": "gemma3"}
    n_kv_heads: Count = Field(4, alias="num_key_value_heads")
    head_dim: Count = 256
    max_seq_len: Count = Field(2**17, alias="max_position_embeddings")
    tie_embeddings: bool = Field(True, alias="tie_word_embeddings")
    rope_theta: float = 1e6
    rope_local_base_freq: float = 1e4
    sliding_window_pattern: Count = Field(6, validation_alias=AliasChoices("sliding_window_pattern", PATTERN))
    hidden_activation: Literal["gelu_pytorch_tanh"] = GELU
    query_pre_attn_scalar: Count = 256
    attn_logit_softcapping: None = None
    final_logit_softcapping: None = None
    use_bidirectional_attention: Off | None = None

    def rope(self) -> dict[str, Any]:
        return dict(zip(("rope_theta", "window_rope_theta"), self.thetas(self.rope_local_base_freq), strict=True))

    def layers(self) -> dict[str, Any]:
        return self.layers_with(self.sliding_window_pattern)

    def implied(self) -> dict[str, Any]:
        return {"query_pre_attn_scalar": self.head_dim}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        more = cls.with_bases(config, config.window_rope_theta)
        del more["hidden_act"]
        own = {"hidden_activation": GELU, "rope_local_base_freq": config.window_rope_theta}
        return more | own | {"query_pre_attn_scalar": config.dim_of_heads}


def shortest(key: str, types: list[Any] | None, default: list[Any], kinds: Mapping[Any, str]) -> dict[str, Any]:
    """layer_pattern: the shortest list of kinds that gives those of all layers if it is repeated."""
    n = len(default)
    values = default if types is None else types
    if len(values) < n:
        raise ValueError(f"{key} = {shortened(values)} should have a value for each of {n} layers")
    every = [kinds[value] for value in values[:n]]
    return {
        "layer_pattern": next(every[:p] for p in range(1, n + 1) if all(every[i] == every[i % p] for i in range(n)))
    }


def windowed(model: Decoder, default: list[str]) -> dict[str, Any]:
    """Our keys for layers of which some have windows."""
    keys = shortest("layer_types", model.layer_types, default, {WINDOWED: "window", FULL: "full"})
    return {"window": (model.sliding_window or 0) if "window" in keys["layer_pattern"] else 0} | keys


# --- GPT-2 and T5 -----------------------------------------------------------------------------------------------


class GPT2(Published):
    architecture = "GPT2LMHeadModel"
    stands_for: ClassVar = {"family": "gpt"}
    dim: Count = Field(alias="n_embd")
    n_layers: Count = Field(alias="n_layer")
    n_heads: Count = Field(alias="n_head")
    max_seq_len: Count = Field(alias="n_positions")
    norm_eps: float = Field(1e-5, alias="layer_norm_epsilon")
    tie_embeddings: bool = Field(True, alias="tie_word_embeddings")
    n_inner: Count | None = None
    activation_function: Literal["gelu_new"] = "gelu_new"
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Off = False
    add_cross_attention: Off = False
    attn_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    resid_pdrop: float = 0.1

    def implied(self) -> dict[str, Any]:
        return {"n_inner": 4 * self.dim}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)
        return {"activation_function": "gelu_new"} | dropout


class T5(Published):
    """transformers 5 writes tie_word_embeddings = true for every T5, and before, it also meant the scale. Whether the
    head is tied is only known from the weights: see weights.keys_of."""

    architecture = "T5ForConditionalGeneration"
    stands_for: ClassVar = {"family": "t5", "tie_embeddings": True}
    dim: Count = Field(alias="d_model")
    n_layers: Count = Field(alias="num_layers")
    n_decoder_layers: Count | None = Field(None, alias="num_decoder_layers")
    n_heads: Count = Field(alias="num_heads")
    head_dim: Count = Field(alias="d_kv")
    hidden_dim: Count = Field(alias="d_ff")
    max_seq_len: Count = Field(512, alias="n_positions")
    norm_eps: float = Field(1e-6, alias="layer_norm_epsilon")
    scale_output: bool | None = Field(None, alias="scale_decoder_outputs")
    tie_word_embeddings: bool = True
    feed_forward_proj: Literal["relu", "gated-gelu"] = "relu"
    dense_act_fn: str = "relu"
    is_gated_act: bool = False
    relative_attention_num_buckets: Literal[32] = 32
    relative_attention_max_distance: Literal[128] = 128
    decoder_start_token_id: Literal[0] = 0
    pad_token_id: Literal[0] = 0
    is_decoder: Off = False
    dropout_rate: float = 0.1

    def keys(self) -> dict[str, Any]:
        scaled = self.tie_word_embeddings if self.scale_output is None else self.scale_output
        blocks = {"n_decoder_layers": self.n_decoder_layers or self.n_layers}
        return super().keys() | blocks | {"gated": self.feed_forward_proj == "gated-gelu", "scale_output": scaled}

    def implied(self) -> dict[str, Any]:
        gated = self.feed_forward_proj == "gated-gelu"
        known = {"dense_act_fn": "gelu_new" if gated else "relu", "is_gated_act": gated}
        return {key: value for key, value in known.items() if key in self.model_fields_set}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        # transformers 4 and 5 read tie_word_embeddings = false as: do not scale. Only version 4 also unties the head,
        # so an unscaled model is written with a head of its own. Version 4 can't read a scaled model with one.
        return {
            "tie_word_embeddings": config.scale_output,
            "dropout_rate": config.dropout,
            "feed_forward_proj": "gated-gelu" if config.gated else "relu",
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        }


# --- in and out -------------------------------------------------------------------------------------------------

KINDS: dict[str, type[Published]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "mistral": Mistral,
    "smollm3": SmolLM3,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "olmo_hybrid": OlmoHybrid,
    "gemma3_text": Gemma3,
    "qwen3_moe": Qwen3Moe,
    "olmoe": Olmoe,
    "gpt2": GPT2,
    "t5": T5,
}


def from_hf_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Our [model] keys for a Hugging Face config.json.

    Raises:
        CheckpointError: the model_type, a key or a value is not supported, or a value is missing.
    """
    model_type = content.get("model_type")
    if model_type not in [*KINDS]:
        raise CheckpointError(f"config.json: model_type {shortened(model_type)} is not among {', '.join(KINDS)}")
    kind = KINDS[str(model_type)]
    unread = UNREAD - kind.model_fields.keys()
    try:
        keys = kind.model_validate({key: value for key, value in content.items() if key not in unread}).keys()
        ModelConfig.model_validate(keys)
    except ValidationError as error:
        raise CheckpointError("\n  ".join(f"config.json: {_problem(e)}" for e in error.errors())) from None
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None
    return keys


def _problem(error: Any) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "extra_forbidden":
        return (
            f"{name} = {shortened(error['input'])} is not known for this model_type; if it changes nothing in what the "
            "model computes, a copy of the file without it is read"
        )
    message = error["msg"].removeprefix("Value error, ")
    return f"{name} = {shortened(error['input'])}: {message}" if name else message


def to_hf_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json for one of our models.

    Raises:
        CheckpointError: Hugging Face has no such architecture.
    """
    known = sorted({str(kind.stands_for["family"]) for kind in KINDS.values()})
    if config.family not in known:
        raise CheckpointError(
            f'model.family = "{config.family}" has no Hugging Face names, only {", ".join(known)} do '
            "(huggingface/configs.py); model.safetensors of a full checkpoint has its tensors under our names"
        )
    if config.qk_norm and config.qkv_bias:
        raise CheckpointError("no architecture of Hugging Face has both model.qk_norm and model.qkv_bias")
    if config.router_bias:
        raise CheckpointError(f"no {config.family} of Hugging Face has a bias of its routers (model.router_bias)")
    model_type = {"gpt": "gpt2", "gemma3": "gemma3_text"}.get(config.family, config.family)
    if model_type == "olmo_hybrid" and {*config.layer_kinds} not in ({"delta", "full"}, {"delta", "nope"}):
        raise CheckpointError(
            f"model.layer_pattern = {config.layer_pattern} can't be exported: an olmo_hybrid of Hugging Face has "
            'layers of the kind "delta", and either "full" or "nope"'
        )
    if "nope" in config.layer_pattern and model_type not in ("smollm3", "olmo_hybrid"):
        raise CheckpointError('model.layer_pattern has "nope", which only model.family = "smollm3" can export')
    if model_type == "llama":
        model_type = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
        if config.window and model_type == "llama":
            raise CheckpointError('no Llama of Hugging Face has a window (model.window); model.family = "mistral" has')
    kind = KINDS[model_type]
    common: dict[str, Any] = {"architectures": [kind.architecture], "model_type": model_type, "dtype": "float32"}
    if model_type == "t5":
        common |= {"is_encoder_decoder": True}
    elif model_type not in ("llama", "qwen2", "qwen3", "gpt2"):  # their default may not be in the vocabulary
        common |= {"pad_token_id": None}
    return common | kind.of(config, vocab_size).model_dump(by_alias=True, exclude_unset=True)
