"""The benchmarks run. Their results are not checked."""

import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import contenders, gpu_items, learning
from tests.helpers import ROOT, start, succeeded
from torchtitan_lite.config import cli, load
from torchtitan_lite.config.schema import Config
from torchtitan_lite.models import build
from torchtitan_lite.run import mfu


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.extended
def test_the_comparison_of_speeds_runs(n: int) -> None:
    said = succeeded(start([sys.executable, "-m", "benchmarks.train", "--smoke", f"--ranks={n}"]))
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| ")]
    rates = {row[0].strip("| "): row[1] for row in rows[1:]}
    assert {"torchtitan_lite", "bare FSDP2 loop", "DDP"} < rates.keys(), said
    # a busy machine may do less than one GFLOP/s of matmuls this small
    found = {name: float(re.sub(r"[ ,].*", "", rate.replace(",", ""))) for name, rate in rates.items()}
    assert all(rate > 0 or name.startswith("*matmul") for name, rate in found.items()), said


def test_flops_are_counted_as_torchtitan_does() -> None:
    """Llama 3.2 1B: 1,235,814,400 parameters, whose embeddings are the output matrix; 16 layers, 32 heads of 64."""
    attention = 12 * 16 * 32 * 64 * 4096
    with torch.device("meta"):
        llama = build(gpu_items.config_of("llama_1b.toml", {}).model, 128256)
    assert mfu.flops_per_token(llama, 4096) == 6 * 1_235_814_400 + attention
    shape = contenders.Shape()
    with torch.device("meta"):
        model = build(contenders.config_of(shape, 2, {}).model, shape.vocab_size)
    inside = sum(p.numel() for p in model.parameters()) - model.tok_embeddings.weight.numel()
    assert shape.flops_per_token() == 6 * inside + 12 * 6 * 384 * 512
    # and all contenders have the same model
    theirs = sum(p.numel() for p in contenders.hugging_face_llama(shape).parameters())
    assert theirs == sum(p.numel() for p in model.parameters())


def config_of(options: dict[str, object]) -> Config:
    """The config of a run of benchmarks/learning.py."""
    given = [f"--{key}={value}" for key, value in options.items()]
    return cli.parse([*given, "--check-config"], world_size=1, n_gpus=0, local_world_size=1).loaded.config


def test_each_recipe_is_a_config() -> None:
    larger = [one.run(one.rates[0], 614_400) for one in learning.LARGER.values() if one.ours]
    jobs = [*learning.WIDTH_JOBS.values(), *learning.default_jobs(), *learning.config_jobs()]
    for options in [*learning.CANDIDATES.values(), *larger, *(options for _, options, _ in jobs)]:
        assert config_of(options).train.steps == options["train.steps"]


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


def test_two_programs_are_compared_on_the_same_documents() -> None:
    """Against the formula of a ratio, by hand: differences of 8 and 12 bits in documents of 10 and 30 bytes."""
    ours = [{"bits": [20.0, 40.0], "bytes": [10, 30]}, {"bits": [24.0, 44.0], "bytes": [10, 30]}]
    theirs = [{"bits": [14.0, 30.0], "bytes": [10, 30]}]
    difference, error = learning.paired(ours, theirs)
    assert difference == (8 + 12) / 40
    assert error == pytest.approx(math.sqrt(((8 - 5) ** 2 + (12 - 15) ** 2) * 2) / 40)


def test_figures_have_a_title_a_description_and_a_ground(tmp_path: Path) -> None:
    """Also on a dark page, and to a screen reader; they are small, because their text is text."""
    figures = sorted((ROOT / "docs").glob("*.svg"))
    assert figures
    for file in figures:
        svg = file.read_text(encoding="utf-8")
        assert re.search(r"<svg [^>]*>\s*<title>[^<]{20,}</title>\s*<desc>[^<]{20,}</desc>", svg), file
        assert re.search(r'<g id="patch_1">\s*<path d="M 0 [^"]*" style="fill: #ffffff"', svg), file
        assert "<text" in svg
        assert len(svg) < 64 << 10
    plotted = (ROOT / "docs/learning.svg").read_text()
    found = learning.comparison(learning.Search(tmp_path, learning.RESULTS, {}))
    assert len(found) >= 3  # until the present default is measured, the peers
    for _, _, rows in found.values():
        assert f">{statistics.mean(learning.mean_of(rows)):.3f}<" in plotted
