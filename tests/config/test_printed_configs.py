"""A printed config loads as the same config."""

from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.config.parsing import parse, write
from torchtitan_lite.config import load, toml
from torchtitan_lite.errors import ConfigError


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    config = parse("--optim.betas=[0.8, 0.9]", '--data.path=["tests/*.py"]', "--optim.max_norm=inf").config
    assert config.optim.betas == (0.8, 0.9)
    for text in (toml.to_toml(config), toml.to_toml_with_origins(toml.Loaded(config, {}))):
        file = write(tmp_path / "config.toml", text)
        assert parse("--config", str(file)).config == config


_NAMES = st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=20)
_POSITIVE = st.floats(min_value=1e-300, max_value=1e300)
_GROUP = st.fixed_dictionaries(
    {"match": st.text(max_size=9)}, optional={"lr_factor": _POSITIVE, "weight_decay": _POSITIVE}
)
_OVERRIDE = st.fixed_dictionaries(
    {"match": st.text(max_size=9)}, optional={"param_dtype": st.sampled_from(["bfloat16", "float16"])}
)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "run.name": _NAMES,
    "run.out_dir": st.text(max_size=9),
    "run.seed": st.integers(0, 2**63 - 1),
    "model.family": st.sampled_from(["gpt", "llama"]),
    "model.size": st.sampled_from(["1M", "3M"]),
    "model.rope_factor": st.sampled_from([1.0, 8.0]),
    "optim.name": st.sampled_from(["adamw", "muon"]),
    "optim.muon_momentum": st.floats(0.1, 0.9),
    "optim.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(list),
    "optim.max_norm": st.one_of(_POSITIVE, st.just(float("inf"))),
    "optim.freeze": st.lists(st.text(max_size=9), max_size=2),
    "optim.groups": st.lists(_GROUP, max_size=2),
    "fsdp.precision_overrides": st.lists(_OVERRIDE, max_size=2),
    "fsdp.sharding_strategy": st.sampled_from(["", "FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"]),
    "sample.prompts": st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3),
    "data.text_key": st.text(max_size=9),
    "log.wandb_project": st.text(max_size=9),
    "profile.steps": st.sampled_from([[], [1, 2]]),
}


@hypothesis_settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
@given(
    chosen=st.fixed_dictionaries({}, optional=_VALUES),
    mixed=st.dictionaries(_NAMES, _POSITIVE, max_size=3),
    origin=st.text(max_size=9),
    local=st.sampled_from([1, 4]),
)
@pytest.mark.extended
def test_what_is_printed_loads_and_gives_the_same_config(
    tmp_path: Path, chosen: dict[str, Any], mixed: dict[str, float], origin: str, local: int
) -> None:
    values = dict(chosen)
    try:
        for name in mixed:
            (tmp_path / name).touch()
    except OSError:  # a name of dots, or too long
        assume(False)
    if mixed:
        values["data.sources"] = {str(tmp_path / name): w for name, w in mixed.items()}
    try:
        loaded = load.load(None, values, origin=origin, world_size=8, local_world_size=local)
    except ConfigError:
        assume(False)
    file = tmp_path / "printed" / "config.toml"
    file.parent.mkdir(exist_ok=True)
    for text in (toml.to_toml_with_origins(loaded), toml.to_toml(loaded.config)):
        assert tomli.loads(text)
        file.write_text(text, encoding="utf-8")
        again = load.load(file, {}, world_size=8, local_world_size=local)
        assert again.config == loaded.config
