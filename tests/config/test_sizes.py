"""[model]: what a family and a size set, and what follows from a shape that is given."""

from pathlib import Path

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


FOUR = "n_heads", "dim_of_heads", "kv_heads", "dim_of_ffn"
LAYERS = "windows", "has_room_for_induction"
TWO = ["--model.n_layers=2", "--model.n_heads=2", "--model.dim=64"]
PATTERN = "--model.layer_pattern"


@pytest.mark.parametrize(("options", "names", "expected"), [
    (["--model.dim=320"], FOUR, (5, 64, 5, 896)),
    (["--model.dim=200"], FOUR, (2, 100, 2, 576)),
    (["--model.dim=70"], FOUR, (1, 70, 1, 192)),
    (["--model.dim=320", "--model.size=3M"], FOUR, (4, 80, 2, 704)),
    (["--model.family=gpt", "--model.dim=320"], FOUR, (5, 64, 5, 1280)),
    (["--model.n_layers=9"], FOUR, (2, 64, 2, 384)),
    ([*TWO, f"{PATTERN}=window,full", "--model.window=7", "--model.n_layers=5"], LAYERS, ([7, 0, 7, 0, 7], True)),
    ([*TWO, f"{PATTERN}=full,nope,window", "--model.window=7"], LAYERS, ([0, 0], False)),
    ([*TWO, f"{PATTERN}=full,full,nope", "--model.n_layers=3"], LAYERS, ([0, 0, 0], True)),
    ([*TWO, f"{PATTERN}=full,full,window", "--model.window=1", "--model.n_layers=3"], LAYERS, ([0, 0, 1], True)),
    ([*TWO, "--model.window=1"], LAYERS, ([1, 1], False)),
    ([*TWO, "--model.qk_norm=false"], LAYERS, ([0, 0], False)),
    ([*TWO, "--model.tie_embeddings"], LAYERS, ([0, 0], False)),
    ([*TWO, "--model.n_heads=8"], LAYERS, ([0, 0], False)),
    ([*TWO, "--model.n_heads=1"], LAYERS, ([0, 0], False)),
    ([*TWO, "--model.n_heads=4"], LAYERS, ([0, 0], True)),
    ([*TWO, "--model.n_layers=1"], LAYERS, ([0], False)),
    ([*TWO, "--model.family=olmo2", "--model.window=5"], LAYERS, ([0, 0], False)),
])  # fmt: skip
def test_what_follows_from_the_sizes_of_a_model(
    options: list[str], names: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    assert tuple(getattr(model(*options), name) for name in names) == expected
