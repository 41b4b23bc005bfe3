"""The benchmarks run. Their results are not checked."""

from pathlib import Path

from benchmarks import learning
from tests.helpers import ROOT
from torchtitan_lite.config import cli, load
from torchtitan_lite.config.schema import Config


def config_of(options: dict[str, object]) -> Config:
    """The config of a run of benchmarks/learning.py."""
    given = [f"--{key}={value}" for key, value in options.items()]
    return cli.parse([*given, "--check-config"], world_size=1, n_gpus=0, local_world_size=1).loaded.config


def test_the_measured_default_is_the_default() -> None:
    """That is: the defaults of the keys."""
    default, found = config_of({}), config_of(learning.OURS["default"])
    assert (found.model, found.optim, found.tokenizer) == (default.model, default.optim, default.tokenizer)
    assert found.train.model_copy(update={"micro_batch_size": default.train.micro_batch_size}) == default.train


def test_the_larger_default_is_the_larger_config() -> None:
    larger = load.load(ROOT / "configs" / "larger.toml", {}, world_size=1, n_gpus=0).config
    found = config_of(learning.LARGER_RECIPE)
    assert (found.model, found.optim) == (larger.model, larger.optim)
    assert found.train.model_copy(update={"micro_batch_size": larger.train.micro_batch_size}) == larger.train


def test_no_result_is_of_a_recipe_that_changed_since(tmp_path: Path) -> None:
    search = learning.Search(tmp_path, learning.RESULTS)
    jobs = [*learning.search_jobs(), *learning.end_jobs(learning.OURS | learning.LARGER), *learning.config_jobs()]
    jobs += [learning.width_job(dim, base, rate) for dim, base in learning.WIDTHS for rate in learning.RATES]
    jobs += [job for name in learning.PEERS for job in learning.trial_jobs(name) + learning.peer_jobs(search, name)]
    assert len(search.results) > 40
    assert not search.results.keys() - {job.key for job in [*jobs, *learning.phase_jobs(), *learning.cost_jobs()]}
