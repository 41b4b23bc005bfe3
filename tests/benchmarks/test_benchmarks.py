"""The benchmarks run. Their results are not checked."""

import json

from benchmarks import learning
from tests.helpers import ROOT
from torchtitan_lite.config import cli, load
from torchtitan_lite.config.schema import Config


def config_of(options: dict[str, object]) -> Config:
    """The config of a run of benchmarks/learning.py."""
    given = [f"--{key}={value}" for key, value in options.items()]
    return cli.parse([*given, "--check-config"], world_size=1, n_gpus=0, local_world_size=1).loaded.config


def test_the_searched_default_is_the_default() -> None:
    """That is: the defaults of the keys."""
    default = config_of({})
    found = config_of(learning.default_jobs()[0][1])
    assert (found.model, found.optim, found.tokenizer) == (default.model, default.optim, default.tokenizer)
    assert found.train.model_copy(update={"micro_batch_size": default.train.micro_batch_size}) == default.train


def test_the_larger_default_is_the_larger_config() -> None:
    larger = load.load(ROOT / "configs" / "larger.toml", {}, world_size=1, n_gpus=0).config
    found = config_of(learning.LARGER["default, 4 x 256"].run(8e-3, larger.train.steps * 2048))
    assert (found.model, found.optim) == (larger.model, larger.optim)
    assert found.train.model_copy(update={"micro_batch_size": larger.train.micro_batch_size}) == larger.train


def test_no_result_is_of_a_recipe_that_changed_since() -> None:
    """Of the stages that can still be run."""
    lines = learning.RESULTS.read_text(encoding="utf-8").splitlines()
    jobs = [("search", name, options, 0) for name, options in learning.CANDIDATES.items()]
    jobs += [("widths", *job) for job in learning.WIDTH_JOBS.values()]
    jobs += [("final", *job) for job in learning.default_jobs()]
    jobs += [("cost", *job) for job in learning.cost_jobs(learning.BESIDE, seeds=learning.COST_SEEDS)]
    keys = {learning._key(*job) for job in jobs}
    found = [one for one in map(json.loads, lines) if one["stage"] in ("search", "widths", "final", "cost")]
    assert len(found) > 40
    for one in found:
        assert one["key"] in keys, one
