"""Value embeddings: which blocks have them, what they add, and who trains them."""

from typing import Any

import pytest
import torch

from tests.models.test_model import make
from torchtitan_lite.config.schema import ModelConfig

SIZES = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 16}
TOKENS = torch.arange(30).reshape(2, 15) % 97


def made(family: str, n_layers: int) -> Any:
    return make(ModelConfig.model_validate({"family": family, "n_layers": n_layers, **SIZES}))


@pytest.mark.parametrize(("n_layers", "tables"), [(1, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3])])
def test_the_last_block_and_every_other_one_before_it_has_a_table(n_layers: int, tables: list[int]) -> None:
    model = made("resformer", n_layers)
    assert [i for i, layer in enumerate(model.layers) if hasattr(layer, "gate")] == tables
    assert model.value_embeddings.weight.shape == (97, len(tables) * 2 * 8)
    assert [model.layers[i].table for i in tables] == list(range(len(tables)))


@torch.no_grad()
def test_without_values_it_is_llama_and_with_them_the_formula() -> None:
    llama, model = made("llama", 3), made("resformer", 3)
    model.load_state_dict(llama.state_dict(), strict=False)
    table = model.value_embeddings.weight.normal_(generator=torch.Generator().manual_seed(0)).clone()
    values: list[Any] = []
    for layer in model.layers:
        layer.attention.wv.register_forward_hook(lambda _, args, v: values.append((args[0], v)))
    seen: list[Any] = []
    attend = model.layers[2].attention.attend

    def noted(q: Any, k: Any, v: Any, **more: Any) -> Any:
        seen.append(v)
        return attend(q, k, v, **more)

    model.layers[2].attention.attend = noted
    model(TOKENS)
    x, v = values[2]
    gates = 3 * torch.sigmoid(x @ model.layers[2].gate.weight.T)  # (B, T, K)
    added = table[TOKENS][..., 16:].unflatten(-1, (2, 8))  # the second table
    torch.testing.assert_close(seen[0], v.unflatten(-1, (2, 8)) + gates[..., None] * added)
    model.value_embeddings.weight.zero_()
    torch.testing.assert_close(model(TOKENS), llama(TOKENS))
