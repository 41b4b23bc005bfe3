"""A config that Hugging Face or this package can't express is an error that names the reason."""

import json
from typing import Any

import pytest
import torch

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.huggingface import configs, names, stacks

LLAMA = {"model_type": "llama", "vocab_size": 9, "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
LLAMA |= {"intermediate_size": 8, "max_position_embeddings": 16}
MOE = LLAMA | {"model_type": "qwen3_moe"}
HYBRID = LLAMA | {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}, "num_hidden_layers": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16}
T5 = {"model_type": "t5", "vocab_size": 9, "d_model": 8, "num_heads": 2, "num_layers": 1, "d_kv": 4, "d_ff": 8}
GATED = T5 | {"feed_forward_proj": "gated-gelu"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn"}
SCALED = {"rope_scaling": {"type": "linear"}, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}}
ONLY = "is not supported for this model_type;"
OFF = f"{ONLY} False is"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LLAMA | {"max_position_embeddings": None}, "max_position_embeddings = None: Input should be a valid integer"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads = 0: Input should be greater than 0"),
        (LLAMA | {"rms_norm_eps": "small"}, "rms_norm_eps = small: Input should be a valid number"),
        (LLAMA | {"model_type": ["llama"]}, "model_type ['llama'] is not among llama, qwen2, qwen3, "),
        (LLAMA | {"rope_parameters": 3}, "rope_parameters = 3: Input should be"),
        (LLAMA | {"rope_parameters": YARN}, "rope_parameters.rope_type = yarn: Input should be 'default' or 'llama3'"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "llama3 needs factor, low_freq_factor, high_freq_factor"),
        (
            LLAMA | {"model_type": "mistral", "rope_scaling": LLAMA3},
            "rope_factor = 8.0 is not supported",
        ),
        (LLAMA | {"rope_theta": None}, "rope_theta = None: Input should be a valid number"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: Input should be less than or equal to"),
        (LLAMA | {"quantization_config": {}}, "quantization_config = {} is not known for this model_type"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not known for this model_type"),
        (LLAMA | {"rope_parameters": {"factor": 2.0}}, "llama3 needs factor"),
        ({"model_type": "llama", "vocab_size": 9}, "config.json: num_attention_heads is missing"),
        ({"model_type": "mamba"}, "model_type mamba is not among llama, qwen2, qwen3, "),
        (LLAMA | {"mlp_bias": True}, f"mlp_bias = True {OFF}"),
        (LLAMA | {"attention_bias": True}, f"attention_bias = True {OFF}"),
        (LLAMA | {"use_sliding_window": True}, f"use_sliding_window = True {OFF}"),
        (LLAMA | {"hidden_act": "gelu"}, f"hidden_act = gelu {ONLY} silu is"),
        (
            LLAMA | {"model_type": "mistral", "layer_types": ["full_attention"]},
            f"layer_types = ['full_attention'] {ONLY}",
        ),
        (LLAMA | {"model_type": "mistral", "sliding_window": -1}, "sliding_window = -1: Input should be greater than"),
        (LLAMA | {"model_type": "mistral", "rope_scaling": {"type": "yarn"}}, "type = yarn: Input should be 'default'"),
        (LLAMA | {"model_type": "smollm3", "use_sliding_window": True}, f"use_sliding_window = True {OFF}"),
        (LLAMA | {"model_type": "smollm3", "no_rope_layers": [2]}, "no_rope_layers = [2] should be 0 or 1 for each"),
        (
            LLAMA | {"model_type": "qwen3", "use_sliding_window": True, "layer_types": []},
            "layer_types = [] should be",
        ),
        (
            LLAMA | {"model_type": "smollm3", "layer_types": ["sliding_attention"]},
            "should be full_attention for each",
        ),
        (LLAMA | {"model_type": "olmo3", "layer_types": [["a"]]}, "layer_types.0 = ['a']: Input should be a valid"),
        (LLAMA | {"model_type": "olmo3", "rope_theta": 1e4}, "rope_theta = 500000.0 of sliding_attention is not that"),
        (LLAMA | {"model_type": "olmo3"} | SCALED, "rope_scaling.type = linear: Input should be 'default'"),
        (
            LLAMA | {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
            f"final_logit_softcapping = 30.0 {ONLY}",
        ),
        (LLAMA | {"model_type": "gemma3_text", "head_dim": 4}, "query_pre_attn_scalar"),
        (MOE | {"mlp_only_layers": [1]}, f"mlp_only_layers = [1] {ONLY} [] is"),
        (MOE | {"decoder_sparse_step": 2}, f"decoder_sparse_step = 2 {ONLY} 1 is"),
        (MOE | {"use_sliding_window": True}, f"use_sliding_window = True {OFF}"),
        (MOE | {"model_type": "olmoe", "clip_qkv": 8.0}, f"clip_qkv = 8.0 {ONLY} None is"),
        (MOE | {"model_type": "olmoe", "head_dim": 7}, "head_dim = 7 is not supported for this model_type; 4 is"),
        (HYBRID | {"linear_num_key_heads": 1}, f"linear_num_key_heads = 1 {ONLY} 2 is"),
        (HYBRID | {"linear_num_value_heads": 4}, f"linear_num_value_heads = 4 {ONLY} 2 is"),
        (HYBRID | {"linear_key_head_dim": 4}, f"linear_key_head_dim = 4 {ONLY} 3 is"),
        (HYBRID | {"linear_value_head_dim": 3}, f"linear_value_head_dim = 3 {ONLY} 6 is"),
        (HYBRID | {"linear_conv_kernel_dim": 3}, f"linear_conv_kernel_dim = 3 {ONLY} 4 is"),
        (HYBRID | {"linear_allow_neg_eigval": False}, f"linear_allow_neg_eigval = False {ONLY} True is"),
        (HYBRID | {"head_dim": 8}, "head_dim = 8 is not supported for this model_type; 4 is"),
        (HYBRID | {"layer_types": ["sliding_attention"]}, "should be linear_attention or full_attention for each"),
        (HYBRID | {"rope_parameters": None}, "rope_theta is missing, here and in rope_parameters"),
        (HYBRID | {"rope_parameters": YARN}, "rope_parameters.rope_type = yarn: Input should be 'default'"),
        (GPT2 | {"activation_function": "relu"}, f"activation_function = relu {ONLY} gelu_new is"),
        (GPT2 | {"n_inner": 96}, f"n_inner = 96 {ONLY} 32 is"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, f"scale_attn_by_inverse_layer_idx = True {OFF}"),
        (T5 | {"feed_forward_proj": "gated-silu"}, "feed_forward_proj = gated-silu: Input should be 'relu' or 'gated-"),
        (T5 | {"dense_act_fn": "gelu"}, f"dense_act_fn = gelu {ONLY} relu is"),
        (GATED | {"dense_act_fn": "gelu"}, f"dense_act_fn = gelu {ONLY} gelu_new is"),
        (GATED | {"is_gated_act": None}, f"is_gated_act = None {ONLY} True is"),
        (GATED | {"is_gated_act": False}, f"is_gated_act = False {ONLY} True is"),
        (T5 | {"relative_attention_num_buckets": 64}, f"relative_attention_num_buckets = 64 {ONLY} 32 is"),
        (T5 | {"decoder_start_token_id": 2}, f"decoder_start_token_id = 2 {ONLY} 0 is"),
    ],
)
def test_a_config_of_theirs_that_is_wrong_or_not_supported_is_refused(content: dict[str, Any], expected: str) -> None:
    for complete in (LLAMA, MOE, HYBRID, GPT2, T5, GATED):
        assert configs.from_hf_config(complete)["vocab_size"] == 9
    unused = {"rope_theta": 7.0, **dict.fromkeys(configs.SCALED)}  # some files spell them out as null
    for rope in ("rope_parameters", "rope_scaling"):
        assert configs.from_hf_config(LLAMA | {rope: unused})["rope_theta"] == 7.0
    with pytest.raises(CheckpointError) as caught:
        configs.from_hf_config(content)
    assert expected in str(caught.value)


@pytest.mark.parametrize("model_type", configs.KINDS)
def test_a_key_that_is_missing_has_the_default_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert configs.from_hf_config(T5)["max_seq_len"] == 512  # its class has no such key
    needed = {*LLAMA, *T5, *GPT2, "rope_theta"} - {"model_type", "max_position_embeddings"}
    given = {"t5": T5, "gpt2": GPT2, "olmo_hybrid": LLAMA | {"rope_theta": None}}.get(model_type, LLAMA)
    given = {key: 9 if key == "num_hidden_layers" else value for key, value in given.items() if key in needed}
    complete = json.loads(transformers.AutoConfig.for_model(model_type, **given).to_json_string(use_diff=False))
    assert configs.from_hf_config(given | {"model_type": model_type}) == configs.from_hf_config(complete)


@pytest.mark.parametrize(
    ("name", "shape", "family", "expected"),
    [
        ("h.0.attn.masked_bias", (), "gpt", "[]"),  # the mask
        ("h.0.attn.c_attn.bias", (3,), "gpt", "['layers.0.attention.wq.bias', 'layers.0.attention.wk.bias', 'layers.0"),
        ("h.0.attn.c_attn.weight", (2, 4), "gpt", "h.0.attn.c_attn.weight of shape [2, 4] does not hold queries, keys"),
        ("h.0.rotary_emb.inv_freq", (2,), "llama", "[]"),  # in old files
        ("model.x", (2,), "llama", "the model has no tensor that corresponds to model.x"),
        ("encoder.x", (2,), "t5", "the model has no tensor that corresponds to encoder.x"),
        ("model.layers.0.mlp.experts.1.up_proj.weight", (2, 3), "olmoe", "feed_forward.w3.weight should be 0 to 0, of"),
    ],
)
def test_tensors_that_do_not_belong_are_left_out_or_named(
    name: str, shape: tuple[int, ...], family: str, expected: str
) -> None:
    try:
        found = str([*stacks.stack_experts(names.from_hf({name: torch.ones(shape)}, family))])
    except CheckpointError as error:
        found = str(error)
    assert expected in found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig(family="t5", scale_output=True), r"model\.tie_embeddings and model\.scale_output differ"),
        (ModelConfig(family="t5", tie_embeddings=True), r"model\.tie_embeddings and model\.scale_output differ"),
        (ModelConfig(family="olmoe", router_bias=True), r"can't have model\.router_bias = True"),
        (ModelConfig(family="resformer"), '"resformer" has no Hugging Face names'),
        (ModelConfig(family="olmo_hybrid", layer_pattern=["delta"]), "both linear_attention and full_attention"),
        (ModelConfig(family="olmo_hybrid", layer_pattern=["full"]), "both linear_attention and full_attention"),
        (ModelConfig(family="olmo_hybrid", layer_pattern=["delta", "full", "nope"]), "have model.layer_pattern = "),
        (ModelConfig(family="llama", window=8), "no LlamaForCausalLM .* should be full_attention for each"),
        (ModelConfig(family="llama", layer_pattern=["nope"]), r"can't have model\.layer_pattern = \['nope'\]"),
        (ModelConfig(family="llama", qk_norm=True, qkv_bias=True), r"no Qwen3.* can't have model\.qkv_bias = True"),
        (
            ModelConfig.model_construct(family="parallel"),
            '"parallel" has no Hugging Face names, only gemma3, gpt, llama, ',
        ),
    ],
)
def test_a_model_without_an_architecture_of_theirs_is_not_exported(config: ModelConfig, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        configs.to_hf_config(config, 97)
