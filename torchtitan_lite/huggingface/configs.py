"""Hugging Face's config.json, read and written by one strict pydantic model for each `model_type`.

A field that is a key of [model] has our name, and theirs as its alias; the others have their names. A key that no
field has is refused, unless it is one of UNREAD: it may change what the model computes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from torchtitan_lite.config.families import FAMILIES
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
RENAMED = {"num_local_experts": "num_experts", "_sliding_window_pattern": "sliding_window_pattern"}  # since version 5
FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"
GELU: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"


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

    vocab_size: Count

    def keys(self) -> dict[str, Any]:
        """Our keys of [model]. Raises ValueError for a variant that we don't have."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in ModelConfig.model_fields}

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


# --- decoders ---------------------------------------------------------------------------------------------------


class Rope(Strict):
    """Rotary positions, which Llama 3 scales. Older files say `type`, and some have both."""

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: Count | None = None

    def keys(self, theta: float | None) -> dict[str, Any]:
        """Our keys.

        Args:
            theta: the base, unless one is given here.
        """
        scaling = {
            "rope_factor": self.factor,
            "rope_low_freq_factor": self.low_freq_factor,
            "rope_high_freq_factor": self.high_freq_factor,
            "rope_original_max_seq_len": self.original_max_position_embeddings,
        }
        given = sum(value is not None for value in scaling.values())
        if given != (4 if "llama3" in (self.rope_type, self.type) else 0):
            raise ValueError("llama3 needs factor, low_freq_factor, high_freq_factor, original_max_position_embeddings")
        base = self.rope_theta if "rope_theta" in self.model_fields_set else theta
        return {"rope_theta": base} | (scaling if given else {"rope_factor": 1.0})


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
    rope_theta: float | None = 1e4
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    rope_interleaved: Off = False
    use_sliding_window: Off = False
    sliding_window: Count | None = None
    layer_types: list[str] | None = None

    def keys(self) -> dict[str, Any]:
        heads = {"n_kv_heads": self.n_kv_heads or self.n_heads, "head_dim": self.head_dim or self.dim // self.n_heads}
        return super().keys() | heads | self.rope() | self.layers()

    def rope(self) -> dict[str, Any]:
        """Our keys for the rotary positions."""
        rope = self.rope_scaling or self.rope_parameters or Rope()  # transformers prefers the first
        return rope.keys(self.rope_theta)

    def layers(self) -> dict[str, Any]:
        """Our keys for the kinds of layers. Here all are alike, and a sliding_window has no effect."""
        shortest("layer_types", self.layer_types, [FULL] * self.n_layers, {FULL: "full"})
        return {"window": 0, "layer_pattern": ["window"]}

    def windowed(self, default: list[str]) -> dict[str, Any]:
        """Our keys for layers of which some have a window.

        Args:
            default: layer_types, if there are none.
        """
        keys = shortest("layer_types", self.layer_types, default, {WINDOWED: "window", FULL: "full"})
        return {"window": (self.sliding_window or 0) if "window" in keys["layer_pattern"] else 0} | keys

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        if config.rope_factor > 1:
            rope |= {
                "rope_type": "llama3",
                "factor": config.rope_factor,
                "low_freq_factor": config.rope_low_freq_factor,
                "high_freq_factor": config.rope_high_freq_factor,
                "original_max_position_embeddings": config.rope_original_max_seq_len,
            }
        scaling = {"rope_scaling": rope} if config.rope_factor > 1 else {}
        return {"hidden_act": "silu", "rope_theta": config.rope_theta, "rope_parameters": rope} | scaling


class Qwen(Decoder):
    """Qwen2 and Qwen3, whose last layers may have windows."""

    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    use_mrope: Off = False

    def layers(self) -> dict[str, Any]:
        if not self.use_sliding_window:
            return {"window": 0, "layer_pattern": ["window"]}
        return self.windowed([WINDOWED if i >= self.max_window_layers else FULL for i in range(self.n_layers)])

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        types = [WINDOWED if kind == "window" and config.window else FULL for kind in config.layer_kinds]
        windows = {"sliding_window": config.window or None, "use_sliding_window": bool(config.window)}
        return super().more(config) | windows | {"layer_types": types}


class Mistral(Decoder):
    layer_types: None = None  # each layer has the window

    def layers(self) -> dict[str, Any]:
        return {"window": self.sliding_window or 0}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        return super().more(config) | {"sliding_window": config.window or None}


class SmolLM3(Decoder):
    no_rope_layer_interval: Count = 4
    no_rope_layers: list[int] | None = None

    def layers(self) -> dict[str, Any]:
        default = [int((i + 1) % self.no_rope_layer_interval != 0) for i in range(self.n_layers)]
        return super().layers() | shortest("no_rope_layers", self.no_rope_layers, default, {0: "nope", 1: "full"})

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        rotates = [int(kind != "nope") for kind in config.layer_kinds]
        layers = {"no_rope_layers": rotates, "layer_types": [FULL] * config.n_layers, "sliding_window": None}
        return super().more(config) | layers


class Olmoe(Decoder):
    """A decoder with experts in each layer."""

    n_experts: Count = Field(alias="num_experts")
    experts_per_token: Count = Field(alias="num_experts_per_tok")
    norm_topk_prob: bool = False
    clip_qkv: None = None


class Qwen3Moe(Olmoe):
    hidden_dim: Count = Field(alias="moe_intermediate_size")
    intermediate_size: Count | None = None  # of layers without experts
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: list[int] | None = Field(None, max_length=0)


class OlmoHybrid(Decoder):
    """Attention has no rotary positions if rope_theta is null, as in the released model."""

    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count = 4
    linear_allow_neg_eigval: bool = True

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
        return heads | dims | {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        theta = None if "nope" in config.layer_kinds else config.rope_theta
        rope = {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        types = [LINEAR if kind == "delta" else FULL for kind in config.layer_kinds]
        return super().more(config) | rope | {"layer_types": types}


class Ropes(Strict):
    """Rotary positions of each kind of layer."""

    full_attention: Rope = Rope()
    sliding_attention: Rope = Rope()


class Olmo3(Decoder):
    """Layers of two kinds, each with rotary positions of its own."""

    rope_parameters: Ropes | None = None  # type: ignore[assignment]
    rope_local_base_freq: float  # of windowed layers, whatever rope_theta is
    sliding_window_pattern: Count = 6

    def bases(self) -> dict[str, Any]:
        """Our keys for the rotary positions of both kinds."""
        ropes = self.rope_parameters or Ropes()
        keys = ropes.full_attention.keys(self.rope_theta)
        local = ropes.sliding_attention.keys(self.rope_local_base_freq)
        if local["rope_factor"] > 1:
            raise ValueError(f"scaled rotary positions of {WINDOWED} are not supported")
        keys = self.rope_scaling.keys(keys["rope_theta"]) if self.rope_scaling else keys
        return keys | {"window_rope_theta": local["rope_theta"]}

    def rope(self) -> dict[str, Any]:
        keys = self.bases()
        if (local := keys.pop("window_rope_theta")) != keys["rope_theta"]:
            raise ValueError(f"rope_theta = {local} of {WINDOWED} is not that of {FULL}")
        return keys

    def layers(self) -> dict[str, Any]:
        every = self.sliding_window_pattern
        return self.windowed([FULL if (i + 1) % every == 0 else WINDOWED for i in range(self.n_layers)])

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        thetas = {FULL: config.rope_theta, WINDOWED: config.rope_theta}
        if config.family == "gemma3":
            thetas[WINDOWED] = config.window_rope_theta
        return super().more(config) | {
            "sliding_window": config.window or config.max_seq_len,  # transformers needs one, and no token is beyond
            "layer_types": [WINDOWED if kind == "window" else FULL for kind in config.layer_kinds],
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
            "rope_local_base_freq": thetas[WINDOWED],
        }


class Gemma3(Olmo3):
    hidden_act: Literal["silu"] = Field("silu", exclude=True)
    hidden_activation: Literal["gelu_pytorch_tanh"] = GELU
    query_pre_attn_scalar: Count | None = None
    attn_logit_softcapping: None = None
    final_logit_softcapping: None = None
    use_bidirectional_attention: Off | None = None

    def rope(self) -> dict[str, Any]:
        return self.bases()

    def implied(self) -> dict[str, Any]:
        return {"query_pre_attn_scalar": self.head_dim}

    @classmethod
    def more(cls, config: ModelConfig) -> dict[str, Any]:
        return super().more(config) | {"hidden_activation": GELU, "query_pre_attn_scalar": config.dim_of_heads}


# --- GPT-2 and T5 -----------------------------------------------------------------------------------------------


class GPT2(Published):
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


def shortest(key: str, types: list[Any] | None, default: list[Any], kinds: Mapping[Any, str]) -> dict[str, Any]:
    """layer_pattern: the shortest list of kinds that gives those of all layers if it is repeated."""
    n = len(default)
    values = default if types is None else types
    if len(values) < n or any(value not in kinds for value in values):
        known = " or ".join(map(str, kinds))
        raise ValueError(f"{key} = {shortened(values)} should be {known} for each of {n} layers")
    every = [kinds[value] for value in values[:n]]
    return {
        "layer_pattern": next(every[:p] for p in range(1, n + 1) if all(every[i] == every[i % p] for i in range(n)))
    }


# --- in and out -------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A model_type."""

    architecture: str
    content: type[Published]
    ours: dict[str, Any]  # the keys of [model] that it stands for
    defaults: dict[str, Any]  # of keys that config.json may leave out, where they differ from the class's


_LLAMA = {"family": "llama", "qk_norm": False, "qkv_bias": False}
KINDS: dict[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", Decoder, _LLAMA, {}),
    "qwen2": Kind("Qwen2ForCausalLM", Qwen, _LLAMA | {"qkv_bias": True}, {"sliding_window": 4096}),
    "qwen3": Kind("Qwen3ForCausalLM", Qwen, _LLAMA | {"qk_norm": True}, {"sliding_window": 4096, "head_dim": 128}),
    "mistral": Kind(
        "MistralForCausalLM",
        Mistral,
        {"family": "mistral"},
        {"num_key_value_heads": 8, "max_position_embeddings": 2**17, "sliding_window": 4096},
    ),
    "smollm3": Kind(
        "SmolLM3ForCausalLM",
        SmolLM3,
        {"family": "smollm3"},
        {"num_key_value_heads": 4, "max_position_embeddings": 2**15, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "olmo2": Kind("Olmo2ForCausalLM", Decoder, {"family": "olmo2"}, {"rms_norm_eps": 1e-5}),
    "olmo3": Kind(
        "Olmo3ForCausalLM",
        Olmo3,
        {"family": "olmo3"},
        {
            **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
            **{"sliding_window": 4096, "sliding_window_pattern": 4},
        },
    ),
    "olmo_hybrid": Kind(
        "OlmoHybridForCausalLM", OlmoHybrid, {"family": "olmo_hybrid"}, {"max_position_embeddings": 65536}
    ),
    "gemma3_text": Kind(
        "Gemma3ForCausalLM",
        Gemma3,
        {"family": "gemma3"},
        {
            **{"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
            **{"max_position_embeddings": 2**17, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
            **{"sliding_window": 4096},
        },
    ),
    "qwen3_moe": Kind(
        "Qwen3MoeForCausalLM",
        Qwen3Moe,
        {"family": "qwen3_moe"},
        {
            **{"num_key_value_heads": 4, "max_position_embeddings": 2**15, "moe_intermediate_size": 768},
            **{"num_experts": 128, "num_experts_per_tok": 8},
        },
    ),
    "olmoe": Kind(
        "OlmoeForCausalLM",
        Olmoe,
        {"family": "olmoe"},
        {
            **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "intermediate_size": 2048},
            **{"num_experts": 64, "num_experts_per_tok": 8},
        },
    ),
    "gpt2": Kind("GPT2LMHeadModel", GPT2, {"family": "gpt"}, {}),
    "t5": Kind("T5ForConditionalGeneration", T5, {"family": "t5", "tie_embeddings": True}, {}),
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
    unread = UNREAD - kind.content.model_fields.keys()
    try:
        given = {RENAMED.get(key, key): value for key, value in content.items() if key not in unread}
        keys = kind.ours | kind.content.model_validate(kind.defaults | given).keys()
        return _read(keys)
    except ValidationError as error:
        raise CheckpointError("\n  ".join(f"config.json: {_problem(e)}" for e in error.errors())) from None
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _read(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that our family reads. Raises ValueError if another has a value that the family does not stand for."""
    family = FAMILIES[keys["family"]].keys
    others = {key for entry in FAMILIES.values() for key in entry.keys if key not in family}
    read = {key: value for key, value in keys.items() if key not in others}
    fixed = ModelConfig.model_validate(read).resolved()
    for key in keys.keys() & others:
        if keys[key] != fixed[key]:
            raise ValueError(f"{key} = {keys[key]} is not supported for this model_type; {fixed[key]} is")
    return read


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
    known = sorted({str(kind.ours["family"]) for kind in KINDS.values()})
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
    ours = config.resolved() | {"vocab_size": vocab_size}
    fields = kind.content.model_fields.items()
    values = {field.serialization_alias or name: ours[name] for name, field in fields if name in ours}
    made = kind.content.model_validate(values | kind.content.more(config))
    return common | made.model_copy(update=made.implied()).model_dump(by_alias=True, exclude_unset=True)
