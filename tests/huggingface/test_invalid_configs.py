"""A Hugging Face config.json with wrong values is an error that names them."""

from typing import Any

import pytest

from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.huggingface import names


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"max_position_embeddings": None}, "config.json lacks 'max_position_embeddings', which is null"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 should be above 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small' should be a number"),
        ({"model_type": ["llama"]}, "model_type = ['llama'] should be a text"),
        ({"rope_parameters": 3}, "rope_parameters = 3 should be a table"),
        ({"num_hidden_layers": 10**9}, "n_layers = 1000000000: Input should be less than or equal to 2048"),
    ],
)
def test_an_invalid_hugging_face_config_is_an_error(changed: dict[str, Any], expected: str) -> None:
    good = {"model_type": "llama", "vocab_size": 9, "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}
    good |= {"intermediate_size": 8, "max_position_embeddings": 16}
    assert names.from_hf_config(good)["max_seq_len"] == 16
    with pytest.raises(CheckpointError) as caught:
        names.from_hf_config(good | changed)
    assert expected in str(caught.value)
