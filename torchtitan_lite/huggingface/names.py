"""Maps Hugging Face's tensor names and layouts to ours.

Llama, Qwen2 and Qwen3 map to the family llama, GPT-2 to gpt, and the others to families of the same name. The layouts
are equal, except that GPT-2 transposes its matrices and merges queries, keys and values.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError, shortened
from torchtitan_lite.huggingface.stacks import unstack_experts
from torchtitan_lite.models import build

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
# experts' matrices have two numbers, layer and expert: see stacks.py
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
# families with a one-to-one mapping of tensors
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
_TRANSPOSED = (".wq.weight", ".wo.weight", ".w1.weight", ".w2.weight")  # GPT-2's Conv1D
_T5 = {
    "tok_embeddings.weight": "shared.weight",
    "encoder_bias.weight": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder_bias.weight": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder_norm.weight": "encoder.final_layer_norm.weight",
    "norm.weight": "decoder.final_layer_norm.weight",
    "output.weight": "lm_head.weight",
}
# of a block; {} is the number of the feed-forward: 1 in the encoder, 2 in the decoder
_T5_BLOCK = {
    "attention_norm": "0.layer_norm",
    **{f"attention.w{letter}": f"0.SelfAttention.{letter}" for letter in "qkvo"},
    "cross_attention_norm": "1.layer_norm",
    **{f"cross_attention.w{letter}": f"1.EncDecAttention.{letter}" for letter in "qkvo"},
    "ffn_norm": "{}.layer_norm",
    "feed_forward.w2": "{}.DenseReluDense.wo",
}
_T5_GATED = _T5_BLOCK | {"feed_forward.w1": "{}.DenseReluDense.wi_0", "feed_forward.w3": "{}.DenseReluDense.wi_1"}
_T5_PLAIN = _T5_BLOCK | {"feed_forward.w1": "{}.DenseReluDense.wi"}
# not read: rotary tables and causal masks in old files; T5's copies of shared.weight, and a table in its first
# checkpoints that no block uses
_SKIPPED = (
    r".*rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias|(encoder|decoder)\.embed_tokens\.weight"
    r"|.*\.EncDecAttention\.relative_attention_bias\.weight"
)
_WRAPPERS = r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.|^base_model\.model\."


def _t5_name(ours: str, n_encoder: int, *, gated: bool) -> str:
    """Return the name of a T5's tensor. Our layers are the encoder's blocks, then the decoder's."""
    if ours in _T5:
        return _T5[ours]
    _, layer, part = ours.removesuffix(".weight").split(".", 2)
    stack, block = ("encoder", int(layer)) if int(layer) < n_encoder else ("decoder", int(layer) - n_encoder)
    theirs = (_T5_GATED if gated else _T5_PLAIN)[part].format(1 if stack == "encoder" else 2)
    return f"{stack}.block.{block}.layer.{theirs}.weight"


def rename(name: str, table: Mapping[str, str]) -> str:
    """Translate a tensor's name by a table. Table entries may omit the last part (weight or bias)."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    general = ".".join("{}" if part.isdigit() else part for part in name.split("."))
    known = general if general in table else general.rpartition(".")[0]
    return table[known].format(*numbers) + general[len(known) :]


# --- weights ----------------------------------------------------------------------------------------------------


def hf_names(ours: Iterable[str], config: ModelConfig) -> dict[str, list[str]]:
    """Return, for each Hugging Face tensor, our names of its parts."""
    if config.family in _TABLES:
        return {rename(name, _TABLES[config.family]): [name] for name in ours}
    if config.family == "t5":
        return {_t5_name(name, config.stacks[0], gated=config.gated): [name] for name in ours}
    parts: dict[str, list[str]] = {}
    for name in ours:
        parts.setdefault(rename(re.sub(r"\.w[qkv]\.", ".wqkv.", name), _GPT2), []).append(name)
    in_order = (".wq.", ".wk.", ".wv.")
    return {t: sorted(names, key=lambda n: [w in n for w in in_order], reverse=True) for t, names in parts.items()}


def to_hf(names: Sequence[str], weight: Callable[[str], Tensor], family: str) -> Tensor:
    """Build one Hugging Face tensor from ours."""
    whole = torch.cat([weight(name) for name in names]) if len(names) > 1 else weight(names[0])
    if ".delta.conv_" in names[0]:
        whole = whole.unsqueeze(1)
    return (whole.T if _is_transposed(names, family) else whole).contiguous()


def _is_transposed(names: Sequence[str], family: str) -> bool:
    return family == "gpt" and names[0].endswith(_TRANSPOSED)


def from_hf(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return Hugging Face's tensors under our names and in our layout. They are views, so nothing is read yet.

    Wrappers leave prefixes in the names of a model that is saved through them: torch.compile, DDP, FSDP, peft.

    Raises:
        CheckpointError: the model has no such tensor.
    """
    with torch.device("meta"):
        model = build(config.model_copy(update={"tie_embeddings": False}), 1)
    parts = hf_names(unstack_experts(model.state_dict()), config)
    ours: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        theirs = re.sub(_WRAPPERS, "", name)
        if re.fullmatch(_SKIPPED, theirs):
            continue
        if config.family == "gpt" and not theirs.startswith(("transformer.", "lm_head.")):
            theirs = f"transformer.{theirs}"  # GPT2Model has no prefix
        if theirs not in parts:
            raise CheckpointError(
                f"the model has no tensor that corresponds to {shortened(theirs)}"
                + ("; peft's merge_and_unload merges a LoRA adapter" if re.search("lora_|base_layer", theirs) else "")
            )
        if "_conv1d." in theirs:
            tensor = tensor.flatten(1)
        if tensor.ndim == 2 and _is_transposed(parts[theirs], config.family):
            tensor = tensor.T
        ours |= zip(parts[theirs], tensor.chunk(len(parts[theirs])), strict=False)  # the caller compares names, shapes
    return ours
