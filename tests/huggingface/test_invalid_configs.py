"""A config that Hugging Face or this package can't express is an error that names the reason."""

from typing import Any

import pytest

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.huggingface import names

LLAMA = {"model_type": "llama", "vocab_size": 9, "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
LLAMA |= {"intermediate_size": 8, "max_position_embeddings": 16}
MOE = LLAMA | {"model_type": "qwen3_moe"}
HYBRID = LLAMA | {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}}
SCALED = {"rope_scaling": {"type": "linear"}, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LLAMA | {"max_position_embeddings": None}, "config.json lacks 'max_position_embeddings', which is null"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads = 0 should be above 0"),
        (LLAMA | {"rms_norm_eps": "small"}, "rms_norm_eps = 'small' should be a number"),
        (LLAMA | {"model_type": ["llama"]}, "model_type = ['llama'] should be a text"),
        (LLAMA | {"rope_parameters": 3}, "rope_parameters = 3 should be a table"),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type yarn is not supported"),
        (LLAMA | {"num_hidden_layers": 10**9}, "n_layers = 1000000000: Input should be less than or equal to 2048"),
        ({"model_type": "llama", "vocab_size": 9}, "config.json lacks 'num_attention_heads'"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"model_type": "mamba"}, 'model_type "mamba" is not among llama, qwen2, qwen3, '),
        ({"model_type": "llama", "mlp_bias": True}, "biases of attention or feed-forward"),
        (LLAMA | {"use_sliding_window": True}, "use_sliding_window = true is not supported for llama"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act gelu is not supported; silu is"),
        (LLAMA | {"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types are not supported for"),
        (LLAMA | {"model_type": "mistral", "sliding_window": -1}, "sliding_window = -1 should be above 0"),
        (LLAMA | {"model_type": "mistral", "rope_scaling": {"type": "yarn"}}, "rope_type yarn is not supported; def"),
        (LLAMA | {"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window = true is not supported"),
        (LLAMA | {"model_type": "smollm3", "no_rope_layers": [2]}, "no_rope_layers = [2] should be 0 or 1 for each"),
        (LLAMA | {"model_type": "qwen3", "use_sliding_window": True, "layer_types": []}, "layer_types = [] should be"),
        (LLAMA | {"model_type": "smollm3", "layer_types": ["sliding_attention"]}, "layer_types with sliding_attention"),
        (LLAMA | {"model_type": "olmo3", "layer_types": [["a"]]}, "layer_types = [['a']] should be sliding_attention"),
        (LLAMA | {"model_type": "olmo3", "rope_theta": 1e4}, "rope_theta = 500000.0 of sliding_attention is not that"),
        (LLAMA | {"model_type": "olmo3"} | SCALED, "rope_type linear is not supported; default is, for olmo3"),
        (LLAMA | SCALED, "rope_type linear is not supported; default and llama3 are"),
        (
            LLAMA | {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"type": "linear"}}},
            "rope_type linear of sliding_attention is not supported",
        ),
        (MOE | {"mlp_only_layers": [1]}, "mlp_only_layers = [1] is not supported"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported; 1 is"),
        (MOE | {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (MOE | {"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        (MOE | {"model_type": "olmoe", "head_dim": 7}, "head_dim = 7 is not 4, as for olmoe"),
        (HYBRID | {"linear_num_key_heads": 1}, "linear_num_key_heads = 1 is not supported; 2 is"),
        (HYBRID | {"linear_num_value_heads": 4}, "linear_num_value_heads = 4 is not supported; 2 is"),
        (HYBRID | {"linear_key_head_dim": 4}, "linear_key_head_dim = 4 is not supported; 3 is"),
        (HYBRID | {"linear_value_head_dim": 3}, "linear_value_head_dim = 3 is not supported; 6 is"),
        (HYBRID | {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim = 3 is not supported; 4 is"),
        (HYBRID | {"linear_allow_neg_eigval": False}, "linear_allow_neg_eigval = False is not supported; True is"),
        (HYBRID | {"head_dim": 8}, "head_dim = 8 is not supported; 4 is"),
        (HYBRID | {"layer_types": ["sliding_attention"]}, "should be linear_attention or full_attention for each"),
        (HYBRID | {"rope_parameters": None}, "rope_parameters = null does not say whether attention has rotary"),
        (HYBRID | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type yarn is not supported; default is, for"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function relu is not gelu_new"),
        ({"model_type": "gpt2", "n_embd": 32, "n_inner": 96}, "n_inner = 96 is not 4 times n_embd = 32"),
    ],
)
def test_a_config_of_theirs_that_is_wrong_or_not_supported_is_refused(content: dict[str, Any], expected: str) -> None:
    assert names.from_hf_config(LLAMA)["max_seq_len"] == 16
    with pytest.raises(CheckpointError) as caught:
        names.from_hf_config(content)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            ModelConfig(family="olmoe", router_bias=True),
            r"no olmoe .* has a bias of its routers \(model\.router_bias\)",
        ),
        (ModelConfig(family="resformer"), '"resformer" has no Hugging Face names'),
        (ModelConfig(family="olmo_hybrid", layer_pattern=["delta"]), r'kind "delta", and either "full" or "nope"'),
        (ModelConfig(family="olmo_hybrid", layer_pattern=["delta", "full", "nope"]), r'either "full" or "nope"'),
        (ModelConfig(family="llama", window=8), r'no Llama .* \(model\.window\); model\.family = "mistral" has'),
        (ModelConfig(family="llama", layer_pattern=["nope"]), r'has "nope", which only model\.family = "smollm3"'),
        (ModelConfig(family="llama", qk_norm=True, qkv_bias=True), r"both model\.qk_norm and model\.qkv_bias"),
        (
            ModelConfig.model_construct(family="parallel"),
            '"parallel" has no Hugging Face names, only gemma3, gpt, llama, ',
        ),
    ],
)
def test_a_model_without_an_architecture_of_theirs_is_not_exported(config: ModelConfig, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        names.to_hf_config(config, 97)
