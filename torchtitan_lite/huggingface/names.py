"""Maps Hugging Face's names, layout and config keys to ours.

Llama, Qwen2 and Qwen3 are the family llama, GPT-2 is gpt, and the others have their own name. The layouts are equal,
except that GPT-2 transposes its matrices and merges queries, keys and values.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError, shortened

# ours -> theirs; {} is a number: the layer
_LLAMA = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OLMO = {name: theirs for name, theirs in _LLAMA.items() if "_norm.weight" not in name} | {
    "layers.{}.attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
_GEMMA3 = _LLAMA | {
    "layers.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    "layers.{}.post_ffn_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
# the matrices of experts have two numbers, layer and expert: see stacks.py
_MOE = {name: theirs for name, theirs in _LLAMA.items() if "feed_forward" not in name} | {
    "layers.{}.feed_forward.router": "model.layers.{}.mlp.gate",
    "layers.{}.feed_forward.w1.{}": "model.layers.{}.mlp.experts.{}.gate_proj",
    "layers.{}.feed_forward.w2.{}": "model.layers.{}.mlp.experts.{}.down_proj",
    "layers.{}.feed_forward.w3.{}": "model.layers.{}.mlp.experts.{}.up_proj",
}
_HYBRID = _OLMO | {
    "layers.{}.delta_norm": "model.layers.{}.attention_layer_norm",
    "layers.{}.delta.wq": "model.layers.{}.linear_attn.q_proj",
    "layers.{}.delta.wk": "model.layers.{}.linear_attn.k_proj",
    "layers.{}.delta.wv": "model.layers.{}.linear_attn.v_proj",
    "layers.{}.delta.wa": "model.layers.{}.linear_attn.a_proj",
    "layers.{}.delta.wb": "model.layers.{}.linear_attn.b_proj",
    "layers.{}.delta.wg": "model.layers.{}.linear_attn.g_proj",
    "layers.{}.delta.wo": "model.layers.{}.linear_attn.o_proj",
    "layers.{}.delta.conv_q": "model.layers.{}.linear_attn.q_conv1d",  # (channels, taps), theirs (channels, 1, taps)
    "layers.{}.delta.conv_k": "model.layers.{}.linear_attn.k_conv1d",
    "layers.{}.delta.conv_v": "model.layers.{}.linear_attn.v_conv1d",
    "layers.{}.delta.A_log": "model.layers.{}.linear_attn.A_log",
    "layers.{}.delta.dt_bias": "model.layers.{}.linear_attn.dt_bias",
    "layers.{}.delta.o_norm": "model.layers.{}.linear_attn.o_norm",
    "layers.{}.feed_forward_norm": "model.layers.{}.feedforward_layer_norm",
}
# families that have one tensor for each of theirs
_TABLES = {"llama": _LLAMA, "mistral": _LLAMA, "smollm3": _LLAMA, "olmo2": _OLMO, "olmo3": _OLMO, "gemma3": _GEMMA3}
_TABLES |= {"qwen3_moe": _MOE, "olmoe": _MOE, "olmo_hybrid": _HYBRID}
_GPT2 = {
    "tok_embeddings.weight": "transformer.wte.weight",
    "pos_embeddings.weight": "transformer.wpe.weight",
    "layers.{}.attention_norm": "transformer.h.{}.ln_1",
    "layers.{}.attention.wqkv": "transformer.h.{}.attn.c_attn",  # wq, wk and wv merged; see hf_names
    "layers.{}.attention.wo": "transformer.h.{}.attn.c_proj",
    "layers.{}.ffn_norm": "transformer.h.{}.ln_2",
    "layers.{}.feed_forward.w1": "transformer.h.{}.mlp.c_fc",
    "layers.{}.feed_forward.w2": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "output.weight": "lm_head.weight",
}
_TRANSPOSED = (".wqkv.weight", ".wo.weight", ".w1.weight", ".w2.weight")  # GPT-2's Conv1D
_T5 = {
    "tok_embeddings.weight": "shared.weight",
    "encoder_bias.weight": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder_bias.weight": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder_norm.weight": "encoder.final_layer_norm.weight",
    "norm.weight": "decoder.final_layer_norm.weight",
    "output.weight": "lm_head.weight",
}
# not read: copies of shared.weight, and a table that no block uses, of the first checkpoints
_T5_SKIPPED = r"(encoder|decoder)\.embed_tokens\.weight|.*\.EncDecAttention\.relative_attention_bias\.weight"


def _t5_table(n_encoder: int, n_decoder: int, *, gated: bool) -> dict[str, str]:
    """ours -> theirs, for every tensor of a T5."""
    table = dict(_T5)
    feed_forward = {"w1": "wi_0", "w3": "wi_1", "w2": "wo"} if gated else {"w1": "wi", "w2": "wo"}
    for i in range(n_encoder + n_decoder):
        decodes = i >= n_encoder
        block = f"decoder.block.{i - n_encoder}.layer" if decodes else f"encoder.block.{i}.layer"
        sublayers = [("attention", "SelfAttention"), *([("cross_attention", "EncDecAttention")] if decodes else [])]
        for at, (ours, theirs) in enumerate(sublayers):
            table[f"layers.{i}.{ours}_norm.weight"] = f"{block}.{at}.layer_norm.weight"
            for letter in "qkvo":
                table[f"layers.{i}.{ours}.w{letter}.weight"] = f"{block}.{at}.{theirs}.{letter}.weight"
        last = f"{block}.{len(sublayers)}"
        table[f"layers.{i}.ffn_norm.weight"] = f"{last}.layer_norm.weight"
        for ours, theirs in feed_forward.items():
            table[f"layers.{i}.feed_forward.{ours}.weight"] = f"{last}.DenseReluDense.{theirs}.weight"
    return table


def _number(names: Iterable[str], pattern: str) -> int:
    return sum(bool(re.fullmatch(pattern, name)) for name in names)


def rename(name: str, table: Mapping[str, str]) -> str:
    """Translate a tensor's name by a table, whose entries may omit the last part (weight or bias)."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    general = ".".join("{}" if part.isdigit() else part for part in name.split("."))
    for known in (general, general.rpartition(".")[0]):
        if known in table:
            return table[known].format(*numbers) + general[len(known) :]
    raise CheckpointError(f"the model has no tensor that corresponds to {shortened(name)}")


# --- weights ----------------------------------------------------------------------------------------------------


def hf_names(ours: Iterable[str], family: str) -> dict[str, list[str]]:
    """For each Hugging Face tensor, the names of ours that it consists of."""
    if family in _TABLES:
        return {rename(name, _TABLES[family]): [name] for name in ours}
    if family == "t5":
        ours = list(ours)
        n_decoder = _number(ours, r"layers\.\d+\.cross_attention_norm\.weight")
        n_encoder = _number(ours, r"layers\.\d+\.attention_norm\.weight") - n_decoder
        whole = _t5_table(n_encoder, n_decoder, gated=any(".w3." in name for name in ours))
        return {whole[name]: [name] for name in ours}
    parts: dict[str, list[str]] = {}
    for name in ours:
        merged = name.replace(".wk.", ".wq.").replace(".wv.", ".wq.")
        parts.setdefault(rename(merged.replace(".wq.", ".wqkv."), _GPT2), []).append(name)
    in_order = (".wq.", ".wk.", ".wv.")
    return {t: sorted(names, key=lambda n: [w in n for w in in_order], reverse=True) for t, names in parts.items()}


def to_hf(names: Sequence[str], weight: Callable[[str], Tensor], family: str) -> Tensor:
    """Build one Hugging Face tensor from ours."""
    whole = torch.cat([weight(name) for name in names]) if len(names) > 1 else weight(names[0])
    if ".delta.conv_" in names[0]:
        whole = whole.unsqueeze(1)
    transposed = family == "gpt" and names[0].endswith((".wq.weight", *_TRANSPOSED))
    return (whole.T if transposed else whole).contiguous()


def from_hf(weights: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names and in our layout. They are views, so nothing is read yet."""
    if family in _TABLES:
        table = {theirs: ours for ours, theirs in _TABLES[family].items()}
        skipped = ("rotary_emb.inv_freq",)  # in old checkpoints
        if family == "olmo_hybrid":
            weights = _as_released(weights)
        return {rename(name, table): tensor for name, tensor in weights.items() if not name.endswith(skipped)}
    if family == "t5":
        stacks = (rf"{stack}\.block\.\d+\.layer\.0\.layer_norm\.weight" for stack in ("encoder", "decoder"))
        n_encoder, n_decoder = (_number(weights, pattern) for pattern in stacks)
        gated = any(".wi_0." in name for name in weights)
        table = {theirs: ours for ours, theirs in _t5_table(n_encoder, n_decoder, gated=gated).items()}
        wanted = {name: t for name, t in weights.items() if not re.fullmatch(_T5_SKIPPED, name)}
        if unknown := sorted(wanted.keys() - table.keys()):
            raise CheckpointError(f"the model has no tensor that corresponds to {shortened(unknown[0])}")
        return {table[name]: tensor for name, tensor in wanted.items()}
    table = {theirs: ours for ours, theirs in _GPT2.items()}
    ours: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask
        prefix = "" if name.startswith(("transformer.", "lm_head.")) else "transformer."  # GPT2Model has no prefix
        renamed = rename(prefix + name, table)
        whole = tensor.T if tensor.ndim == 2 and renamed.endswith(_TRANSPOSED) else tensor
        if ".wqkv." in renamed:
            if not whole.ndim or len(whole) % 3:
                raise CheckpointError(f"{name} of shape {list(tensor.shape)} does not hold queries, keys and values")
            for w, part in zip(("wq", "wk", "wv"), whole.chunk(3), strict=True):
                ours[renamed.replace("wqkv", w)] = part
        else:
            ours[renamed] = whole
    return ours


def _as_released(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an OLMo Hybrid as in the released files, with convolutions of the shape (channels, taps).

    transformers 5.23 reads those and others: it saves attention layers with a name of the recurrent layers' norms, and
    cuts the convolutions of a layer into equal thirds, though those of the values are as long as the others together.
    """
    weights = dict(weights)
    for name in [name for name in weights if name.endswith(".feedforward_layer_norm.weight")]:
        if name.replace("feedforward_layer_norm", "self_attn.q_proj") in weights:
            weights[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = weights.pop(name)
    for name in [name for name in weights if name.endswith(".linear_attn.q_conv1d.weight")]:
        names = [name.replace("q_conv1d", conv) for conv in ("q_conv1d", "k_conv1d", "v_conv1d")]
        parts = [weights[one].flatten(1) for one in names if one in weights]
        if len(parts) < 3 or len({(part.dtype, part.shape[1]) for part in parts}) > 1:
            raise CheckpointError(f"{name} should have the width of the other two convolutions of its layer")
        whole = torch.cat(parts)
        quarter = len(whole) // 4
        weights |= dict(zip(names, whole.split([quarter, quarter, len(whole) - 2 * quarter]), strict=True))
    return weights


def drop_tied(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Drop the output matrix if it is tied to the embeddings."""
    return {name: t for name, t in weights.items() if not (config.tie_embeddings and name == "output.weight")}


# --- configs ----------------------------------------------------------------------------------------------------


# ours -> theirs; vocab_size has the same name everywhere
_LLAMA_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_MOE_KEYS = {"n_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_GPT2_KEYS = {
    "dim": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "max_seq_len": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_T5_KEYS = {
    "dim": "d_model",
    "n_layers": "num_layers",
    "n_decoder_layers": "num_decoder_layers",
    "n_heads": "num_heads",
    "head_dim": "d_kv",
    "hidden_dim": "d_ff",
    "max_seq_len": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_T5_FIXED = {
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
# what a key stands for that config.json leaves out, where it is not the same for all
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 2**17, "sliding_window": 4096},
    "smollm3": {
        **{"num_key_value_heads": 4, "max_position_embeddings": 2**15, "rope_theta": 2e6, "tie_word_embeddings": True},
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen3_moe": {
        **{"num_key_value_heads": 4, "max_position_embeddings": 2**15, "moe_intermediate_size": 768},
        **{"num_experts": 128, "num_experts_per_tok": 8},
    },
    "olmoe": {
        **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "intermediate_size": 2048},
        **{"num_experts": 64, "num_experts_per_tok": 8},
    },
    "olmo_hybrid": {"max_position_embeddings": 65536},
    "gemma3_text": {
        **{"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 2**17, "tie_word_embeddings": True},
        **{"rope_theta": 1e6, "sliding_window": 4096, "sliding_window_pattern": 6},
    },
}
_LINEAR = "linear_attention"
_WINDOWED = "sliding_attention"
_FULL = "full_attention"
_LAYER_TYPES = {_WINDOWED: "window", _FULL: "full"}
_TWO_ROPES = ("olmo3", "gemma3_text")  # whose rope_parameters have a table for each kind of layer
_WITH_EXPERTS = ("qwen3_moe", "olmoe")
_GELU = "gelu_pytorch_tanh"
# model_type: architecture, the names of its keys, and the values that it implies for ours
_KINDS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA_KEYS, {"family": "llama", "qk_norm": False, "qkv_bias": False}),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA_KEYS, {"family": "llama", "qk_norm": False, "qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA_KEYS, {"family": "llama", "qk_norm": True, "qkv_bias": False}),
    "mistral": ("MistralForCausalLM", _LLAMA_KEYS, {"family": "mistral"}),
    "smollm3": ("SmolLM3ForCausalLM", _LLAMA_KEYS, {"family": "smollm3"}),
    "olmo2": ("Olmo2ForCausalLM", _LLAMA_KEYS, {"family": "olmo2"}),
    "olmo3": ("Olmo3ForCausalLM", _LLAMA_KEYS, {"family": "olmo3"}),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        {ours: theirs for ours, theirs in _LLAMA_KEYS.items() if ours != "head_dim"},
        {"family": "olmo_hybrid"},
    ),
    "gemma3_text": ("Gemma3ForCausalLM", _LLAMA_KEYS, {"family": "gemma3"}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        _LLAMA_KEYS | _MOE_KEYS | {"hidden_dim": "moe_intermediate_size"},
        {"family": "qwen3_moe"},
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {ours: theirs for ours, theirs in _LLAMA_KEYS.items() if ours != "head_dim"} | _MOE_KEYS,
        {"family": "olmoe"},
    ),
    "gpt2": ("GPT2LMHeadModel", _GPT2_KEYS, {"family": "gpt"}),
    "t5": ("T5ForConditionalGeneration", _T5_KEYS, {"family": "t5"}),
}


def from_hf_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Our [model] keys for a Hugging Face config.json.

    Raises:
        CheckpointError: the architecture or a variant is not supported, or a value is missing or wrong.
    """
    keys = _model_keys(content)
    try:
        ModelConfig.model_validate(keys)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc']))} = {shortened(e['input'])}: {e['msg']}" for e in error.errors()
        )
        raise CheckpointError(f"config.json describes a model that can't be built: {wrong}") from None
    return keys


def _value(content: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """A value of config.json. Null counts as absent."""
    value = content.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json lacks '{key}'" + (", which is null" if key in content else ""))
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        value = float(value)
    if type(value) is not kind:
        word = {int: "a whole number", float: "a number", bool: "true or false", dict: "a table", str: "a text"}[kind]
        raise CheckpointError(f"config.json: {key} = {shortened(repr(value))} should be {word}")
    return value


def _count(content: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value: int = _value(content, key, int, default)
    if not 0 < value < 2**31:
        raise CheckpointError(f"config.json: {key} = {shortened(value)} should be above 0, and below 2**31")
    return value


def _model_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    model_type = _value(content, "model_type", str)
    if model_type not in _KINDS:
        raise CheckpointError(f'model_type "{shortened(model_type)}" is not among {", ".join(_KINDS)}')
    _, names, fixed = _KINDS[model_type]
    if content.get("num_local_experts") is not None:  # as transformers 5 writes it
        content = dict(content) | {"num_experts": content["num_local_experts"]}
    content = _DEFAULTS.get(model_type, {}) | dict(content)

    def named(**defaults: Any) -> dict[str, Any]:
        keys = fixed | {"vocab_size": _count(content, "vocab_size")}
        keys |= {ours: _count(content, names[ours], defaults.get(ours)) for ours in names if ours != "norm_eps"}
        return keys | {"norm_eps": _value(content, names["norm_eps"], float, defaults["norm_eps"])}

    if model_type == "t5":
        _require_known_t5(content)
        # transformers 5 writes tie_word_embeddings = true for every T5; before, it also meant the scale.
        # weights.keys_of decides from the weights whether the head is tied
        tied = _value(content, "tie_word_embeddings", bool, True)
        return named(n_decoder_layers=_count(content, "num_layers"), max_seq_len=512, norm_eps=1e-6) | {
            "gated": content.get("feed_forward_proj") == "gated-gelu",
            "scale_output": _value(content, "scale_decoder_outputs", bool, tied),
            "tie_embeddings": tied,
        }
    if model_type == "gpt2":
        if content.get("activation_function", "gelu_new") != "gelu_new":
            raise CheckpointError(f"activation_function {shortened(content['activation_function'])} is not gelu_new")
        if content.get("scale_attn_by_inverse_layer_idx") or not content.get("scale_attn_weights", True):
            raise CheckpointError("scale_attn_by_inverse_layer_idx and unscaled attention are not supported")
        dim, hidden = _count(content, "n_embd"), content.get("n_inner")
        if hidden not in (None, 4 * dim):
            raise CheckpointError(f"n_inner = {shortened(hidden)} is not 4 times n_embd = {dim}")
        return named(norm_eps=1e-5) | {"tie_embeddings": _value(content, "tie_word_embeddings", bool, True)}
    if content.get("mlp_bias") or (content.get("attention_bias") and model_type != "qwen2"):
        raise CheckpointError("biases of attention or feed-forward are not supported for this architecture")
    key, known = ("hidden_activation", _GELU) if model_type == "gemma3_text" else ("hidden_act", "silu")
    if (activation := content.get(key, known)) != known:
        raise CheckpointError(f"{key} {shortened(activation)} is not supported; {known} is")
    heads, dim = _count(content, "num_attention_heads"), _count(content, "hidden_size")
    head_dim = 128 if model_type == "qwen3" else dim // heads
    if "max_position_embeddings" not in content:  # then it is Llama's 2048; null says nothing about the model
        content = dict(content) | {"max_position_embeddings": 2048}
    keys = named(n_kv_heads=heads, head_dim=head_dim, norm_eps=1e-6)
    if model_type == "gemma3_text":
        _require_known_gemma3(content, keys["head_dim"])
    if model_type == "olmo_hybrid":
        _require_known_hybrid(content, head_dim)
    keys |= {"tie_embeddings": _value(content, "tie_word_embeddings", bool, False)}
    if model_type in _WITH_EXPERTS:
        _require_known_experts(content, dim // heads)
        keys |= {"norm_topk_prob": _value(content, "norm_topk_prob", bool, False)}
    return keys | _rope_keys(content, model_type) | _layer_keys(content, model_type, keys["n_layers"])


def _layer_keys(content: Mapping[str, Any], model_type: str, n_layers: int) -> dict[str, Any]:
    """The window, and the kind of each layer."""
    n_layers = min(n_layers, 2048)  # more are refused later
    window: int = 0 if content.get("sliding_window") is None else _count(content, "sliding_window")
    if model_type == "mistral":
        if content.get("layer_types"):
            raise CheckpointError("config.json: layer_types are not supported for mistral: each layer has the window")
        return {"window": window}
    if model_type == "smollm3":
        if content.get("use_sliding_window"):
            raise CheckpointError("config.json: use_sliding_window = true is not supported for smollm3")
        if _WINDOWED in (content.get("layer_types") or ()):
            raise CheckpointError(f"config.json: layer_types with {_WINDOWED} are not supported for smollm3")
        every = _count(content, "no_rope_layer_interval", 4)
        rotates = content.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(n_layers)]
        return {"layer_pattern": _pattern("no_rope_layers", rotates, {0: "nope", 1: "full"}, n_layers)}
    if model_type in ("llama", "olmo2") and content.get("use_sliding_window"):
        raise CheckpointError(f"config.json: use_sliding_window = true is not supported for {model_type}; mistral does")
    if model_type in ("olmo2", *_WITH_EXPERTS):
        return {}
    if model_type == "olmo_hybrid":
        default = [_FULL if i % 4 == 3 or i + 1 == n_layers < 4 else _LINEAR for i in range(n_layers)]
        types = default if content.get("layer_types") is None else content["layer_types"]
        kinds = {_LINEAR: "delta", _FULL: "full" if _rotates(content) else "nope"}
        return {"layer_pattern": _pattern("layer_types", types, kinds, n_layers)}
    if model_type in _TWO_ROPES:
        every = _count(content, "sliding_window_pattern")
        default = [_FULL if (i + 1) % every == 0 else _WINDOWED for i in range(n_layers)]
    elif content.get("use_sliding_window"):
        after = _count(content, "max_window_layers", 28)
        default = [_WINDOWED if i >= after else _FULL for i in range(n_layers)]
    else:
        return {"window": 0, "layer_pattern": ["window"]}
    types = content.get("layer_types")
    pattern = _pattern("layer_types", default if types is None else types, _LAYER_TYPES, n_layers)
    return {"window": window if "window" in pattern else 0, "layer_pattern": pattern}


def _require_known_gemma3(content: Mapping[str, Any], head_dim: int) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if value := content.get(key):
            raise CheckpointError(f"config.json: {key} = {shortened(value)} is not supported")
    if (scalar := _count(content, "query_pre_attn_scalar", 256)) != head_dim:
        raise CheckpointError(
            f"config.json: query_pre_attn_scalar = {scalar} is not supported; head_dim = {head_dim} is"
        )


def _require_known_experts(content: Mapping[str, Any], head_dim: int) -> None:
    for key in ("mlp_only_layers", "use_sliding_window", "clip_qkv"):
        if value := content.get(key):
            raise CheckpointError(f"config.json: {key} = {shortened(value)} is not supported")
    if (step := _count(content, "decoder_sparse_step", 1)) != 1:
        raise CheckpointError(f"config.json: decoder_sparse_step = {step} is not supported; 1 is")
    if content["model_type"] == "olmoe" and content.get("head_dim") not in (None, head_dim):
        raise CheckpointError(
            f"config.json: head_dim = {shortened(content['head_dim'])} is not {head_dim}, as for olmoe"
        )


def _require_known_hybrid(content: Mapping[str, Any], head_dim: int) -> None:
    config = ModelConfig(dim=_count(content, "hidden_size"), n_heads=_count(content, "num_attention_heads"))
    for key, known in (_hybrid_keys(config) | {"head_dim": head_dim}).items():
        if (found := content.get(key)) is not None and (type(found), found) != (type(known), known):
            raise CheckpointError(f"config.json: {key} = {shortened(found)} is not supported; {known} is")


def _hybrid_keys(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of layers of the kind delta."""
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), config.n_heads)
    dims = dict(zip(("linear_key_head_dim", "linear_value_head_dim"), config.delta_dims, strict=True))
    return heads | dims | {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True}


def _rotates(content: Mapping[str, Any]) -> bool:
    """Whether a hybrid's attention has rotary positions: not if rope_theta is null, as in the released model."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if "rope_theta" not in {**content, **rope} and "rope_parameters" in content:
        raise CheckpointError(
            "config.json: rope_parameters = null does not say whether attention has rotary positions, as versions of "
            "transformers differ; rope_theta = null says that it has none"
        )
    return {"rope_theta": 1e4, **content, **rope}["rope_theta"] is not None


def _pattern(key: str, values: Any, kinds: Mapping[Any, str], n_layers: int) -> list[str]:
    """The shortest list of kinds that gives those of all layers if it is repeated."""
    if not isinstance(values, list) or len(values) < n_layers or any(value not in [*kinds] for value in values):
        known = " or ".join(map(str, kinds))
        raise CheckpointError(f"config.json: {key} = {shortened(values)} should be {known} for each layer")
    all_kinds = [kinds[value] for value in values[:n_layers]]
    periods = range(1, n_layers + 1)
    return next(all_kinds[:n] for n in periods if all(all_kinds[i] == all_kinds[i % n] for i in range(n_layers)))


def _require_known_t5(content: Mapping[str, Any]) -> None:
    activation = _value(content, "feed_forward_proj", str, "relu")
    if activation not in ("relu", "gated-gelu"):
        raise CheckpointError(f"feed_forward_proj {shortened(activation)} is not supported; relu and gated-gelu are")
    for key, value in _T5_FIXED.items():
        if (found := _value(content, key, int, value)) != value:
            raise CheckpointError(f"config.json: {key} = {found} is not supported; {value} is")


def _rope_keys(content: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"  # transformers prefers the first
    rope: dict[str, Any] = _value(content, key, dict, {})
    theta = _value(content, "rope_theta", float, 1e4)
    windowed: dict[str, Any] = {}
    if model_type in _TWO_ROPES:
        both: dict[str, Any] = _value(content, "rope_parameters", dict, {})
        full, windowed = (_value(both, kind, dict, {}) for kind in (_FULL, _WINDOWED))
        rope = full | (rope if key == "rope_scaling" else {})  # which is of the full layers
    keys = {"rope_theta": _value(rope, "rope_theta", float, theta)}
    if model_type in _TWO_ROPES:
        is_gemma = model_type == "gemma3_text"
        local = _value(content, "rope_local_base_freq", float, 1e4) if is_gemma else 5e5  # whatever rope_theta is
        local = _value(windowed, "rope_theta", float, local)
        if is_gemma:
            keys |= {"window_rope_theta": local}
        elif local != keys["rope_theta"]:
            raise CheckpointError(f"config.json: rope_theta = {local} of {_WINDOWED} is not that of {_FULL}")
        if (other := windowed.get("rope_type") or windowed.get("type") or "default") != "default":
            raise CheckpointError(f"rope_type {shortened(other)} of {_WINDOWED} is not supported; default is")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaled = "llama" in _KINDS[model_type][2].values()
    if scaled:
        keys |= {"rope_factor": 1.0}
    if kind == "llama3" and scaled:
        keys |= {
            "rope_factor": _value(rope, "factor", float),
            "rope_low_freq_factor": _value(rope, "low_freq_factor", float),
            "rope_high_freq_factor": _value(rope, "high_freq_factor", float),
            "rope_original_max_seq_len": _count(rope, "original_max_position_embeddings"),
        }
    elif kind != "default":
        known = "default and llama3 are" if scaled else f"default is, for {model_type}"
        raise CheckpointError(f"rope_type {shortened(kind)} is not supported; {known}")
    return keys


def to_hf_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json for one of our models.

    Raises:
        CheckpointError: Hugging Face has no such architecture.
    """
    known = sorted({str(fixed["family"]) for _, _, fixed in _KINDS.values()})
    if config.family not in known:
        raise CheckpointError(
            f'model.family = "{config.family}" has no Hugging Face names, only {", ".join(known)} do '
            "(huggingface/names.py); model.safetensors of a full checkpoint has its tensors under our names"
        )
    if config.qk_norm and config.qkv_bias:
        raise CheckpointError("no architecture of Hugging Face has both model.qk_norm and model.qkv_bias")
    model_type = {"gpt": "gpt2", "gemma3": "gemma3_text"}.get(config.family, config.family)
    if config.router_bias:
        raise CheckpointError(f"no {config.family} of Hugging Face has a bias of its routers (model.router_bias)")
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
    architecture, names, _ = _KINDS[model_type]
    resolved = config.resolved()
    named = {theirs: resolved[ours] for ours, theirs in names.items()}
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }
    if model_type == "gpt2":
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)
        return common | named | {"activation_function": "gelu_new"} | dropout
    if model_type == "t5":
        # transformers 4 and 5 read tie_word_embeddings = false as: do not scale. Only version 4 also unties the head,
        # so an unscaled model is written with a head of its own. Version 4 can't read a scaled model with one.
        common |= {"tie_word_embeddings": config.scale_output, "scale_decoder_outputs": config.scale_output}
        activation = "gated-gelu" if config.gated else "relu"
        more = {"dropout_rate": config.dropout, "feed_forward_proj": activation}
        return common | {"is_encoder_decoder": True} | named | more | _T5_FIXED
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor > 1:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_max_seq_len,
        }
    if model_type == "olmo_hybrid" and "nope" in config.layer_kinds:
        rope["rope_theta"] = None
    more = {"hidden_act": "silu", "rope_theta": rope["rope_theta"], "rope_parameters": rope}
    more |= _layers_of(config, model_type)
    if model_type in _WITH_EXPERTS:
        more |= {"norm_topk_prob": config.norm_topk_prob}
    if model_type not in ("llama", "qwen2", "qwen3"):  # their default may not be in the vocabulary
        more |= {"pad_token_id": None}
    return common | named | more | ({"rope_scaling": rope} if config.rope_factor > 1 else {})


def _layers_of(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """What `_layer_keys` reads."""
    if model_type == "mistral":
        return {"sliding_window": config.window or None}
    if model_type == "smollm3":
        rotates = [int(kind != "nope") for kind in config.layer_kinds]
        return {"no_rope_layers": rotates, "layer_types": [_FULL] * config.n_layers, "sliding_window": None}
    if model_type in _WITH_EXPERTS:
        return {}
    if model_type == "olmo_hybrid":
        types = [_LINEAR if kind == "delta" else _FULL for kind in config.layer_kinds]
        return {"layer_types": types, **_hybrid_keys(config)}
    types = [_WINDOWED if kind == "window" else _FULL for kind in config.layer_kinds]
    layers: dict[str, Any] = {"sliding_window": config.window or None, "layer_types": types}
    if model_type in _TWO_ROPES:
        layers["sliding_window"] = config.window or config.max_seq_len  # transformers needs one, and no token is beyond
        thetas = {_FULL: config.rope_theta, _WINDOWED: config.rope_theta}
        if model_type == "gemma3_text":
            thetas[_WINDOWED] = config.window_rope_theta
            layers |= {"hidden_activation": _GELU, "query_pre_attn_scalar": config.dim_of_heads}
        ropes = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
        return layers | {"rope_parameters": ropes, "rope_local_base_freq": thetas[_WINDOWED]}
    return layers | {"use_sliding_window": True} if config.window else {}
