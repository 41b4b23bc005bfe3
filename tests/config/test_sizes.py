"""[model]: what a family and a size set, and what follows from a shape that is given."""

from pathlib import Path
from typing import Any

import pytest

from tests.config.parsing import parse, write
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import ModelConfig


def model(*options: str) -> ModelConfig:
    return parse(*options).config.model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_number_that_is_given_keeps_the_architecture_of_the_family(family: str) -> None:
    """Switches and patterns are defaults of the family, with any shape."""
    default = model(f"--model.family={family}", *_objective(family))
    changes = {"n_layers": 3, "dim": 256, "max_seq_len": 2048}
    for key, value in changes.items():
        other = model(f"--model.family={family}", f"--model.{key}={value}", *_objective(family))
        for switch, on in FAMILIES[family].defaults.items():
            assert getattr(other, switch) == getattr(default, switch) == on, (key, switch)


def _objective(family: str) -> list[str]:
    return ["--data.objective=span_corruption"] if FAMILIES[family].encoder_decoder else []


def test_a_size_fills_the_numbers_that_are_not_given(tmp_path: Path) -> None:
    loaded = parse("--model.size=3M", "--model.n_layers=2")
    assert (loaded.config.model.dim, loaded.config.model.n_layers, loaded.config.model.hidden_dim) == (256, 2, 704)
    assert not loaded.notes
    file = write(tmp_path / "a.toml", '[model]\nsize = "3M"\nn_layers = 2\n')
    assert parse("--config", str(file)).config.model == loaded.config.model


def test_a_published_size_is_the_published_model() -> None:
    """Whatever is below it, another published size for example."""
    small, large = model("--model.size=1B"), model("--model.size=8B")
    assert (small.qk_norm, small.induction_head, small.tie_embeddings) == (False, False, True)
    assert (large.qk_norm, large.induction_head, large.tie_embeddings) == (False, False, False)


@pytest.mark.parametrize(("options", "expected"), [  # heads, their width, those of keys, the feed-forward's width
    (["--model.dim=320"], (5, 64, 5, 896)),
    (["--model.dim=200"], (2, 100, 2, 576)),
    (["--model.dim=70"], (1, 70, 1, 192)),
    (["--model.dim=320", "--model.size=3M"], (4, 80, 2, 704)),
    (["--model.family=gpt", "--model.dim=320"], (5, 64, 5, 1280)),
    (["--model.n_layers=9"], (2, 64, 2, 384)),
])  # fmt: skip
def test_heads_and_feed_forward_follow_from_a_dim_without_a_size(options: list[str], expected: tuple[int, ...]) -> None:
    found = model(*options)
    assert (found.n_heads, found.dim_of_heads, found.kv_heads, found.dim_of_ffn) == expected


@pytest.mark.parametrize(("values", "windows", "room"), [
    ({"layer_pattern": ["window", "full"], "window": 7, "n_layers": 5}, [7, 0, 7, 0, 7], True),
    ({"layer_pattern": ["full", "nope", "window"], "window": 7}, [0, 0], False),
    ({"layer_pattern": ["full", "full", "nope"], "n_layers": 3}, [0, 0, 0], True),
    ({"layer_pattern": ["full", "full", "window"], "window": 1, "n_layers": 3}, [0, 0, 1], True),
    ({"window": 1}, [1, 1], False),
    *(({key: value}, [0, 0], False) for key, value in (("qk_norm", False), ("tie_embeddings", True), ("n_heads", 8))),
    ({"n_layers": 1}, [0], False),
    ({"n_heads": 1}, [0, 0], False),
    ({"n_heads": 4}, [0, 0], True),
    ({"family": "olmo2", "window": 5}, [0, 0], False),
])  # fmt: skip
def test_the_windows_of_the_layers_and_whether_two_of_them_can_do_induction(
    values: dict[str, Any], windows: list[int], room: bool
) -> None:
    found = ModelConfig.model_validate({"dim": 64, "n_heads": 2, "n_layers": 2, "qk_norm": True} | values)
    assert (found.windows, found.has_room_for_induction) == (windows, room)


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match="no such size of llama; known: 1M, 3M, 15M"):
        ModelConfig(size="16M")
