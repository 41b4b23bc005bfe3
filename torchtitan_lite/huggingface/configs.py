"""Reads and writes Hugging Face's config.json, by one table per `model_type`.

The table has each key's type, and our key of [model] or a function that reads it. `fixed` has the keys that we support
with one value only. Any other key may change what the model computes, so it is refused unless UNREAD has it. An export
reads what it has written, so that it refuses models that Hugging Face can't express.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, ValidationError, create_model

from torchtitan_lite.config.families import FAMILIES, unread
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError, shortened

# keys that do not change what a model computes: files, generation, initial values, dropout, other heads and software
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
UNKNOWN = "unknown"  # whether attention has rotary positions

Content = dict[str, Any]
Count = Annotated[int, Field(gt=0, lt=2**31)]
STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
SCALED = {  # theirs -> ours; Llama 3's
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_seq_len",
}


class Key(NamedTuple):
    """A key of config.json that a model is made of."""

    ours: str  # our key of [model]; empty: a function below reads it
    type: Any
    default: Any = ...  # their class's default; ...: none


# --- reading: our keys that combine several of theirs; the argument is their content with defaults ------------------


def rotary(rope: Content, theta: float | None) -> Content:
    """Return our keys for rotary positions.

    Args:
        theta: the base, if `rope` has none.
    """
    types = {rope.get("rope_type"), rope.get("type")} - {None, "default"}
    neutral = rope.get("factor") == 1 and "llama3" not in types  # scales nothing
    scaling = {ours: rope[theirs] for theirs, ours in SCALED.items() if not neutral and rope.get(theirs) is not None}
    if (types - {"llama3"} and not neutral) or len(scaling) != 4 * ("llama3" in types):
        raise ValueError(
            f"rotary positions of type {' and '.join(map(str, types)) or 'default'} are supported only with "
            + (", ".join(SCALED) if "llama3" in types else "a factor of 1")
        )
    return {"rope_theta": rope.get("rope_theta", theta), "rope_factor": 1.0} | scaling


def heads(t: Content) -> Content:
    n_heads = t["num_attention_heads"]
    return {
        "n_kv_heads": t["num_key_value_heads"] or n_heads,
        "head_dim": t["head_dim"] or t["hidden_size"] // n_heads,
    }


def one_rope(t: Content) -> Content:
    """Return the keys of heads, and of rotary positions that all layers share."""
    return heads(t) | rotary(t["rope_scaling"] or t["rope_parameters"] or {}, t["rope_theta"])


def shortest(t: Content, key: str, default: list[Any], kinds: Mapping[Any, str]) -> Content:
    """Return layer_pattern: the shortest list of kinds that, repeated, gives the kinds of all layers.

    Args:
        default: each layer's value if the key is missing.
        kinds: our name for each value.
    """
    n = len(default)
    values = default if t[key] is None else t[key]
    if len(values) < n or any(value not in kinds for value in values):
        known = " or ".join(map(str, kinds))
        raise ValueError(f"{key} = {shortened(values)} should be {known} for each of {n} layers")
    every = [kinds[value] for value in values[:n]]
    return {
        "layer_pattern": next(every[:p] for p in range(1, n + 1) if all(every[i] == every[i % p] for i in range(n)))
    }


def windowed(t: Content, default: list[str]) -> Content:
    """Return window and layer_pattern of a model with windows in some layers."""
    keys = shortest(t, "layer_types", default, {WINDOWED: "window", FULL: "full"})
    return {"window": (t["sliding_window"] or 0) if "window" in keys["layer_pattern"] else 0} | keys


def llama(t: Content) -> Content:
    """Read a model whose layers are all alike. A sliding_window has no effect."""
    shortest(t, "layer_types", [FULL] * t["num_hidden_layers"], {FULL: "full"})
    return one_rope(t)


def qwen(t: Content) -> Content:
    """Read a model whose last layers may have windows."""
    if not t["use_sliding_window"]:
        return one_rope(t)
    default = [WINDOWED if i >= t["max_window_layers"] else FULL for i in range(t["num_hidden_layers"])]
    return one_rope(t) | windowed(t, default)


def mistral(t: Content) -> Content:
    return one_rope(t) | {"window": t["sliding_window"] or 0}


def smollm3(t: Content) -> Content:
    rotates = [int((i + 1) % t["no_rope_layer_interval"] != 0) for i in range(t["num_hidden_layers"])]
    return llama(t) | shortest(t, "no_rope_layers", rotates, {0: "nope", 1: "full"})


def olmo_hybrid(t: Content) -> Content:
    """Read a hybrid model. A null rope_theta means no rotary positions, as in the released model."""
    keys, n = one_rope(t), t["num_hidden_layers"]
    if keys["rope_theta"] == UNKNOWN:
        raise ValueError(
            "rope_theta is missing, here and in rope_parameters, and versions of transformers differ in what this "
            "means; rope_theta = null says that attention has no rotary positions"
        )
    kinds = {LINEAR: "delta", FULL: "nope" if keys["rope_theta"] is None else "full"}
    default = [FULL if i % 4 == 3 or i + 1 == n < 4 else LINEAR for i in range(n)]
    layers = shortest(t, "layer_types", default, kinds)
    if len({*layers["layer_pattern"]}) < 2:
        raise ValueError(f"layer_types should have both {LINEAR} and {FULL}")
    return keys | {"rope_theta": keys["rope_theta"] or 1e4} | layers


def gemma3(t: Content) -> Content:
    """Read a model with two kinds of layers, each with its own rotary positions."""
    ropes, every = t["rope_parameters"] or {}, t["sliding_window_pattern"]
    local = rotary(ropes.get(WINDOWED, {}), t["rope_local_base_freq"])  # regardless of rope_theta
    if local["rope_factor"] > 1:
        raise ValueError(f"scaled rotary positions of {WINDOWED} are not supported")
    full = ropes.get(FULL, {})
    if t["rope_scaling"]:
        full = {"rope_theta": full.get("rope_theta", t["rope_theta"])} | t["rope_scaling"]
    layers = windowed(t, [FULL if (i + 1) % every == 0 else WINDOWED for i in range(t["num_hidden_layers"])])
    return heads(t) | rotary(full, t["rope_theta"]) | {"window_rope_theta": local["rope_theta"]} | layers


def olmo3(t: Content) -> Content:
    keys = gemma3(t)
    if (local := keys.pop("window_rope_theta")) != keys["rope_theta"]:
        raise ValueError(f"rope_theta = {local} of {WINDOWED} is not that of {FULL}")
    return keys


def t5(t: Content) -> Content:
    """Read a T5, except whether its head is tied, which only the weights show: see weights.keys_of.

    transformers 5 writes tie_word_embeddings = true for every T5; in older versions it also meant the scale.
    """
    return {
        "n_decoder_layers": t["num_decoder_layers"] or t["num_layers"],
        "gated": t["feed_forward_proj"] == "gated-gelu",
        "scale_output": t["tie_word_embeddings"] if t["scale_decoder_outputs"] is None else t["scale_decoder_outputs"],
    }


# --- keys with one supported value; the argument is their content ---------------------------------------------------

_NEUTRAL: Content = {  # of every model type: these values, and null, switch off what no model here has
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "embedding_multiplier", "residual_multiplier"), 1.0),
    **dict.fromkeys(("logit_scale", "logits_scaling"), 1.0),
    **dict.fromkeys(("add_cross_attention", "alibi", "is_decoder", "qk_layernorm", "tie_encoder_decoder"), False),
    **dict.fromkeys(("use_bidirectional_attention", "use_mrope", "use_parallel_residual"), False),
    **dict.fromkeys(("hidden_dropout", "layerdrop", "mlp_dropout", "residual_dropout"), 0.0),
    **dict.fromkeys(("num_experts", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "quantization_config"), None),
    "is_causal": True,
}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False, "rope_interleaved": False}
_PLAIN = _NO_BIAS | {"hidden_act": "silu"}
_ALIKE = _PLAIN | {"use_sliding_window": False}


def widths_of_delta(t: Content) -> Content:
    key, value = ModelConfig(dim=t["hidden_size"], n_heads=t["num_attention_heads"]).delta_dims
    return _ALIKE | {
        "linear_num_key_heads": t["num_attention_heads"],
        "linear_num_value_heads": t["num_attention_heads"],
        "linear_key_head_dim": key,
        "linear_value_head_dim": value,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    }


def feed_forward_of_t5(t: Content) -> Content:
    gated = t["feed_forward_proj"] == "gated-gelu"
    return {
        "dense_act_fn": "gelu_new" if gated else "relu",
        "is_gated_act": gated,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "is_decoder": False,
    }


# --- the model types ------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """How to read and write one model_type."""

    architecture: str
    ours: Content  # the keys of [model] that it implies
    keys: Mapping[str, Key]
    read: Callable[[Content], Content]
    fixed: Callable[[Content], Content] = lambda _: _ALIKE
    defaults: Mapping[str, Any] = {}  # for keys missing in config.json, where they differ from those in `keys`


_ROPE_TYPE: Any = Literal["default", "llama3", "linear", "dynamic", "yarn"] | None  # the last three: see `rotary`
Rope: Any = create_model(  # older files say `type`, and some have both
    "Rope",
    __config__=STRICT,
    rope_type=(_ROPE_TYPE, None),
    type=(_ROPE_TYPE, None),
    rope_theta=(float | None, None),
    factor=(float | None, None),
    low_freq_factor=(float | None, None),
    high_freq_factor=(float | None, None),
    original_max_position_embeddings=(Count | None, None),
    partial_rotary_factor=(Annotated[float, Field(ge=1, le=1)] | None, None),
    attention_factor=(None, None),
    beta_fast=(float | None, None),  # of YaRN, without effect if its factor is 1
    beta_slow=(float | None, None),
)
Ropes: Any = create_model("Ropes", __config__=STRICT, full_attention=(Rope, None), sliding_attention=(Rope, None))

DECODER = {
    "vocab_size": Key("vocab_size", Count),
    "hidden_size": Key("dim", Count),
    "num_hidden_layers": Key("n_layers", Annotated[Count, Field(le=2048)]),
    "num_attention_heads": Key("n_heads", Count),
    "num_key_value_heads": Key("n_kv_heads", Count | None, None),
    "head_dim": Key("head_dim", Count | None, None),
    "intermediate_size": Key("hidden_dim", Count),
    "max_position_embeddings": Key("max_seq_len", Count, 2048),
    "rms_norm_eps": Key("norm_eps", float, 1e-6),
    "tie_word_embeddings": Key("tie_embeddings", bool, False),
    "rope_theta": Key("", float, 1e4),
    "rope_scaling": Key("", Rope | None, None),
    "rope_parameters": Key("", Rope | None, None),
    "sliding_window": Key("", Count | None, None),
    "layer_types": Key("", list[str] | None, None),
}
QWEN = DECODER | {
    "use_sliding_window": Key("", bool, False),
    "max_window_layers": Key("", Annotated[int, Field(ge=0)], 28),
}
MISTRAL = {name: key for name, key in DECODER.items() if name != "layer_types"}  # each layer has the window
SMOLLM3 = DECODER | {
    "no_rope_layer_interval": Key("", Count, 4),
    "no_rope_layers": Key("", list[int] | None, None),
}
TWO_ROPES = DECODER | {
    "rope_parameters": Key("", Ropes | None, None),
    "rope_local_base_freq": Key("", float),
    "sliding_window_pattern": Key("", Count, 6),
}
HYBRID = DECODER | {"rope_theta": Key("", float | None, UNKNOWN)}
OLMOE = DECODER | {
    "num_experts": Key("n_experts", Count),
    "num_experts_per_tok": Key("experts_per_token", Count),
    "norm_topk_prob": Key("norm_topk_prob", bool, False),
}
QWEN3_MOE = OLMOE | {
    "moe_intermediate_size": Key("hidden_dim", Count),
    "intermediate_size": Key("", Count | None, None),  # of layers without experts
}
GPT2 = {
    "vocab_size": Key("vocab_size", Count),
    "n_embd": Key("dim", Count),
    "n_layer": Key("n_layers", Count),
    "n_head": Key("n_heads", Count),
    "n_positions": Key("max_seq_len", Count),
    "layer_norm_epsilon": Key("norm_eps", float, 1e-5),
    "tie_word_embeddings": Key("tie_embeddings", bool, True),
    "attn_pdrop": Key("", float, 0.1),
    "embd_pdrop": Key("", float, 0.1),
    "resid_pdrop": Key("", float, 0.1),
}
T5 = {
    "vocab_size": Key("vocab_size", Count),
    "d_model": Key("dim", Count),
    "num_layers": Key("n_layers", Count),
    "num_decoder_layers": Key("n_decoder_layers", Count | None, None),
    "num_heads": Key("n_heads", Count),
    "d_kv": Key("head_dim", Count),
    "d_ff": Key("hidden_dim", Count),
    "n_positions": Key("max_seq_len", Count, 512),
    "layer_norm_epsilon": Key("norm_eps", float, 1e-6),
    "scale_decoder_outputs": Key("scale_output", bool | None, None),
    "tie_word_embeddings": Key("", bool, True),
    "feed_forward_proj": Key("", Literal["relu", "gated-gelu"], "relu"),
    "dropout_rate": Key("", float, 0.1),
}

_LLAMA: Content = {"family": "llama", "qk_norm": False, "qkv_bias": False, "layer_pattern": ["full"]}
KINDS = {
    "llama": Kind("LlamaForCausalLM", _LLAMA, DECODER, llama),
    "qwen2": Kind(
        "Qwen2ForCausalLM",
        _LLAMA | {"qkv_bias": True},
        QWEN,
        qwen,
        lambda _: _PLAIN | {"use_mrope": False},
        {"num_key_value_heads": 32, "max_position_embeddings": 2**15, "sliding_window": 4096},
    ),
    "qwen3": Kind(
        "Qwen3ForCausalLM",
        _LLAMA | {"qk_norm": True},
        QWEN,
        qwen,
        lambda _: _PLAIN | {"use_mrope": False},
        {"num_key_value_heads": 32, "max_position_embeddings": 2**15, "sliding_window": 4096, "head_dim": 128},
    ),
    "mistral": Kind(
        "MistralForCausalLM",
        {"family": "mistral"},
        MISTRAL,
        mistral,
        lambda _: _ALIKE | {"layer_types": None},
        {"num_key_value_heads": 8, "max_position_embeddings": 2**17, "sliding_window": 4096},
    ),
    "smollm3": Kind(
        "SmolLM3ForCausalLM",
        {"family": "smollm3"},
        SMOLLM3,
        smollm3,
        defaults={
            **{"num_key_value_heads": 4, "max_position_embeddings": 2**15, "rope_theta": 2e6},
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": Kind("Olmo2ForCausalLM", {"family": "olmo2"}, DECODER, llama, defaults={"rms_norm_eps": 1e-5}),
    "olmo3": Kind(
        "Olmo3ForCausalLM",
        {"family": "olmo3"},
        TWO_ROPES,
        olmo3,
        defaults={
            **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
            **{"sliding_window": 4096, "sliding_window_pattern": 4},
        },
    ),
    "olmo_hybrid": Kind(
        "OlmoHybridForCausalLM",
        {"family": "olmo_hybrid"},
        HYBRID,
        olmo_hybrid,
        widths_of_delta,
        {"max_position_embeddings": 65536},
    ),
    "gemma3_text": Kind(
        "Gemma3ForCausalLM",
        {"family": "gemma3"},
        TWO_ROPES,
        gemma3,
        lambda t: {
            **_NO_BIAS,
            "use_sliding_window": False,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": t["head_dim"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        {
            **{"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
            **{"max_position_embeddings": 2**17, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
            "sliding_window": 4096,
        },
    ),
    "qwen3_moe": Kind(
        "Qwen3MoeForCausalLM",
        {"family": "qwen3_moe"},
        QWEN3_MOE,
        llama,
        lambda _: _ALIKE | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        {
            **{"num_key_value_heads": 4, "max_position_embeddings": 2**15, "moe_intermediate_size": 768},
            **{"num_experts": 128, "num_experts_per_tok": 8},
        },
    ),
    "olmoe": Kind(
        "OlmoeForCausalLM",
        {"family": "olmoe"},
        OLMOE,
        llama,
        lambda _: _ALIKE | {"clip_qkv": None},
        {
            **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "intermediate_size": 2048},
            **{"num_experts": 64, "num_experts_per_tok": 8},
        },
    ),
    "gpt2": Kind(
        "GPT2LMHeadModel",
        {"family": "gpt"},
        GPT2,
        lambda _: {},
        lambda t: {
            "n_inner": 4 * t["n_embd"],
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    "t5": Kind("T5ForConditionalGeneration", {"family": "t5", "tie_embeddings": True}, T5, t5, feed_forward_of_t5),
}


# --- in and out -------------------------------------------------------------------------------------------------


@functools.cache
def _published(model_type: str) -> Any:
    """Return the pydantic model of a config.json."""
    fields: Content = {name: (key.type, key.default) for name, key in KINDS[model_type].keys.items()}
    return create_model("Published", __config__=STRICT, **fields)


def from_hf_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return our [model] keys for a Hugging Face config.json.

    Raises:
        CheckpointError: the model_type, a key or a value is not supported, or a value is missing.
    """
    model_type = content.get("model_type")
    if model_type not in [*KINDS]:
        raise CheckpointError(f"config.json: model_type {shortened(model_type)} is not among {', '.join(KINDS)}")
    kind = KINDS[str(model_type)]
    given = {**kind.defaults, **{RENAMED.get(key, key): value for key, value in content.items()}}
    try:
        read = _published(str(model_type)).model_validate({key: given[key] for key in given if key in kind.keys})
        theirs = {name: key.default for name, key in kind.keys.items()} | read.model_dump(exclude_unset=True)
        _refuse({key: given[key] for key in given if key not in kind.keys}, _NEUTRAL | kind.fixed(theirs))
        ours = {key.ours: theirs[name] for name, key in kind.keys.items() if key.ours}
        return _family_keys(kind.ours | ours | kind.read(theirs))
    except ValidationError as error:
        raise CheckpointError("\n  ".join(f"config.json: {_problem(e)}" for e in error.errors())) from None
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _refuse(others: Content, fixed: Content) -> None:
    """Raise ValueError for an unknown key, and for a value that we do not support.

    Null and empty values switch a key off, or mean a number that follows from other keys.
    """
    for name, value in sorted(others.items()):
        if name in fixed:
            known = fixed[name]
            if value != known and not (value is None and (not known or type(known) in (int, float))):
                raise ValueError(f"{name} = {shortened(value)} is not supported for this model_type; {known} is")
        elif name not in UNREAD and value not in (None, [], {}):
            raise ValueError(
                f"{name} = {shortened(value)} is not known for this model_type; if it does not change what the "
                "model computes, use a copy of the file without it"
            )


def _family_keys(keys: Content) -> Content:
    """Return the keys that our family reads. Raises ValueError if a different key has an unsupported value."""
    read = {key: value for key, value in keys.items() if key not in unread(keys["family"])}
    fixed = ModelConfig.model_validate(read).resolved()
    for key in sorted(keys.keys() - read.keys()):
        if keys[key] != fixed[key]:
            raise ValueError(f"{key} = {keys[key]} is not supported for this model_type; {fixed[key]} is")
    return read


def _problem(error: Any) -> str:
    name = ".".join(map(str, error["loc"]))
    return (
        f"{name} is missing" if error["type"] == "missing" else f"{name} = {shortened(error['input'])}: {error['msg']}"
    )


def to_hf_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the config.json for one of our models.

    Raises:
        CheckpointError: Hugging Face has no such architecture.
    """
    known = sorted({str(kind.ours["family"]) for kind in KINDS.values()})
    if config.family not in known:
        raise CheckpointError(
            f'model.family = "{config.family}" has no Hugging Face names, only {", ".join(known)} do '
            "(huggingface/configs.py); model.safetensors of a full checkpoint has its tensors under our names"
        )
    ours = {key: value for key, value in config.resolved().items() if key not in unread(config.family)}
    config = ModelConfig.model_validate(ours)
    model_type = {"gpt": "gpt2", "gemma3": "gemma3_text"}.get(config.family, config.family)
    if model_type == "llama":
        model_type = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    kind = KINDS[model_type]
    content: Content = {"architectures": [kind.architecture], "model_type": model_type, "dtype": "float32"}
    if model_type == "t5":
        if config.tie_embeddings != config.scale_output:
            raise CheckpointError(
                "no version of transformers reads a T5 in which model.tie_embeddings and model.scale_output differ"
            )
        content |= {"is_encoder_decoder": True, "decoder_start_token_id": 0, "pad_token_id": 0}
    elif model_type not in ("llama", "qwen2", "qwen3", "gpt2"):  # the default may not be in the vocabulary
        content["pad_token_id"] = None
    ours, values = config.resolved() | {"vocab_size": vocab_size}, _values(config)
    content |= {name: values[name] for name in kind.keys if name in values}
    content |= {name: ours[key.ours] for name, key in kind.keys.items() if key.ours}
    content |= {name: value for name, value in kind.fixed(content).items() if value}  # off by default
    try:
        expressed = variant(ModelConfig.model_validate(from_hf_config(content)))
    except CheckpointError as error:
        raise CheckpointError(f"no {kind.architecture} of Hugging Face is like this model; of its {error}") from None
    for key, value in variant(config).items():
        if value != expressed[key]:
            raise CheckpointError(
                f"no {kind.architecture} of Hugging Face is like this model: it can't have "
                f"model.{key} = {getattr(config, key)}"
            )
    return content


def _values(config: ModelConfig) -> Content:
    """Return the values of their keys that combine several of ours. A model_type has some of these keys."""
    kinds, reads, two_ropes = config.layer_kinds, FAMILIES[config.family].keys, config.family in ("olmo3", "gemma3")
    types = {"delta": LINEAR, "window": WINDOWED if config.window or two_ropes else FULL}
    theta = None if config.family == "olmo_hybrid" and "nope" in kinds else config.rope_theta
    rope: Content = {"rope_type": "default", "rope_theta": theta}
    values: Content = {
        "rope_theta": theta,
        "rope_parameters": rope,
        "no_rope_layers": [int(kind != "nope") for kind in kinds],
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout_rate"), config.dropout),
        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
        # For T5: transformers 4 and 5 read false as "do not scale". Only version 4 also unties the head.
        "tie_word_embeddings": config.scale_output,
    }
    if config.rope_factor > 1:
        rope |= {"rope_type": "llama3"} | {theirs: getattr(config, ours) for theirs, ours in SCALED.items()}
        values["rope_scaling"] = rope
    if "layer_pattern" in reads:
        values["layer_types"] = [types.get(kind, FULL) for kind in kinds]
    if "window" in reads:
        values |= {"use_sliding_window": bool(config.window), "sliding_window": config.window or None}
    if two_ropes:
        local = config.window_rope_theta if config.family == "gemma3" else theta
        values |= {
            "rope_parameters": {FULL: rope, WINDOWED: rope | {"rope_theta": local}},
            "rope_local_base_freq": local,
            "sliding_window": config.window or config.max_seq_len,  # required; this covers all tokens
        }
    return values


def variant(config: ModelConfig) -> Content:
    """Return the features of a family that not each of its model types can express, and the kind of each layer."""
    length, reads = config.max_seq_len, FAMILIES[config.family].keys
    values = {
        "qk_norm": config.qk_norm,
        "qkv_bias": config.qkv_bias,
        "router_bias": config.router_bias,
        "window": [min(window or length, length) for window in config.windows],
        # the same layers in all spellings; those of gemma3 also differ in their rotary positions
        "layer_pattern": [
            k if "window_rope_theta" in reads else k.replace("window", "full") for k in config.layer_kinds
        ],
        "rope_theta": config.rope_theta if {"window", "full"} & {*config.layer_kinds} else 0.0,  # read by no other
    }
    return {key: value for key, value in values.items() if key in reads}
