"""A config that Hugging Face or this package can't express is an error that names the reason."""

from typing import Any

import pytest

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.huggingface import names

LLAMA = {"model_type": "llama", "vocab_size": 9, "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
LLAMA |= {"intermediate_size": 8, "max_position_embeddings": 16}


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
        ({"model_type": "mamba"}, 'model_type "mamba" is not among llama, qwen2, qwen3, gpt2'),
        ({"model_type": "llama", "mlp_bias": True}, "biases of attention or feed-forward"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding windows"),
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
        (ModelConfig(family="llama", qk_norm=True, qkv_bias=True), r"both model\.qk_norm and model\.qkv_bias"),
        (
            ModelConfig.model_construct(family="parallel"),
            '"parallel" has no Hugging Face names, only gpt, llama, t5 do',
        ),
    ],
)
def test_a_model_without_an_architecture_of_theirs_is_not_exported(config: ModelConfig, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        names.to_hf_config(config, 97)
