"""[model]: what a family and a size set, and what follows from a shape that is given."""

from pathlib import Path

import pytest

from tests.config.parsing import parse, write
from torchtitan_lite.config import toml
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


def test_the_defects_that_a_number_without_a_size_had() -> None:
    assert model("--model.family=gemma3", "--model.n_layers=12").tie_embeddings
    assert model("--model.family=qwen3_moe", "--model.n_layers=2").norm_topk_prob
    wide = model("--model.dim=256")
    assert (wide.qk_norm, wide.n_heads, wide.kv_heads, wide.dim_of_ffn) == (True, 4, 4, 704)


@pytest.mark.parametrize(
    ("dim", "heads"), [(32, 1), (128, 2), (192, 3), (200, 2), (512, 8), (36, 1), (1600, 25), (4096, 64)]
)
def test_heads_of_a_dim_that_is_given_without_a_size_are_of_64_or_the_next_divisor(dim: int, heads: int) -> None:
    assert model(f"--model.dim={dim}").n_heads == heads
    assert model(f"--model.dim={dim}", "--model.n_heads=1").n_heads == 1


def test_a_number_without_a_size_leaves_the_others_of_the_default_size() -> None:
    deep = model("--model.n_layers=12")
    assert deep == model().model_copy(update={"n_layers": 12})


def test_a_size_fills_the_numbers_that_are_not_given(tmp_path: Path) -> None:
    loaded = parse("--model.size=3M", "--model.n_layers=2")
    assert (loaded.config.model.dim, loaded.config.model.n_layers, loaded.config.model.hidden_dim) == (256, 2, 704)
    assert not loaded.notes
    file = write(tmp_path / "a.toml", '[model]\nsize = "3M"\nn_layers = 2\n')
    assert parse("--config", str(file)).config.model == loaded.config.model


def test_a_size_over_a_file_with_numbers_replaces_them_and_says_so(tmp_path: Path) -> None:
    """A run's config.toml has every number."""
    file = write(tmp_path / "mine.toml", toml.to_toml(parse("--model.size=15M").config))
    given = ["--config", str(file)]
    assert parse(*given).config == parse("--model.size=15M", "--run.name=default").config
    assert not parse(*given).notes
    loaded = parse(*given, "--model.size=3M")
    assert loaded.config.model == model("--model.size=3M")
    (note,) = loaded.notes
    assert note.startswith("model.dim, model.n_layers, ")
    assert note.endswith('size "3M" of command line replaces what is below it')
    assert loaded.origins["model.dim"] == 'size "3M"'
    child = write(tmp_path / "child.toml", 'base = "mine.toml"\n[model]\nsize = "3M"\n')
    assert parse("--config", str(child)).config.model == loaded.config.model


def test_a_published_size_is_the_published_model() -> None:
    """Whatever is below it, another published size for example."""
    small, large = model("--model.size=1B"), model("--model.size=8B")
    assert (small.qk_norm, small.induction_head, small.tie_embeddings) == (False, False, True)
    assert (large.qk_norm, large.induction_head, large.tie_embeddings) == (False, False, False)


def test_the_defaults_of_a_family_make_its_architecture() -> None:
    """Whatever numbers are given; a key that is given wins."""
    assert model("--model.family=gpt").tie_embeddings
    assert model("--model.family=gpt", "--model.n_layers=2").tie_embeddings
    assert not model("--model.family=gpt", "--model.size=124M", "--model.tie_embeddings=false").tie_embeddings


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match="no such size of llama; known: 1M, 3M, 15M"):
        ModelConfig(size="16M")
