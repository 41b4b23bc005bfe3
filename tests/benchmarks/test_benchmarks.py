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
    # of products this small a busy machine may do no whole GFLOP in a second
    found = {name: float(re.sub(r"[ ,].*", "", rate.replace(",", ""))) for name, rate in rates.items()}
    assert all(rate > 0 or name.startswith("*product") for name, rate in found.items()), said


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


def our_jobs() -> list[learning.Job]:
    """All jobs of benchmarks/learning.py that train.py runs."""
    widths = [learning.width_job(dim, base, rate) for dim, base in learning.WIDTHS for rate in learning.RATES]
    jobs = [*learning.search_jobs(), *learning.end_jobs(learning.OURS | learning.LARGER), *learning.config_jobs()]
    return [*jobs, *widths, *(job for job in learning.cost_jobs() if not job.is_peer)]


def test_each_recipe_is_a_config() -> None:
    options = {json.dumps(job.options): job for job in our_jobs()}
    for job in options.values():
        assert config_of(job.options).train.steps == job.options["train.steps"]


def test_the_measured_default_is_the_default() -> None:
    """That is: the defaults of the keys."""
    default, found = config_of({}), config_of(learning.OURS["default"])
    assert (found.model, found.optim, found.tokenizer) == (default.model, default.optim, default.tokenizer)
    assert found.train.model_copy(update={"micro_batch_size": default.train.micro_batch_size}) == default.train


def test_the_larger_default_is_the_larger_config() -> None:
    larger = load.load(ROOT / "configs" / "larger.toml", {}, world_size=1, n_gpus=0).config
    found = config_of(learning.LARGER["default, 4 x 256"])
    assert (found.model, found.optim) == (larger.model, larger.optim)
    assert found.train.model_copy(update={"micro_batch_size": larger.train.micro_batch_size}) == larger.train


def test_no_result_is_of_a_recipe_that_changed_since(tmp_path: Path) -> None:
    search = learning.Search(tmp_path, learning.RESULTS)
    peers = [job for name in learning.PEERS for job in learning.trial_jobs(name) + learning.peer_jobs(search, name)]
    known = {job.key for job in [*our_jobs(), *learning.cost_jobs(), *peers]}
    assert len(search.results) > 40
    for key in search.results:
        assert key in known, key


def test_two_programs_are_compared_on_the_same_documents() -> None:
    """Against the formula of a ratio, by hand: differences of 8 and 12 bits in documents of 10 and 30 bytes."""
    job = learning.end_jobs(learning.OURS)[0]
    ours = [(job, {"bits": bits, "bytes": [10, 30]}) for bits in ([20.0, 40.0], [24.0, 44.0])]
    difference, error = learning.paired(ours, [(job, {"bits": [14.0, 30.0], "bytes": [10, 30]})])
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
    search = learning.Search(tmp_path, learning.RESULTS)
    for text in learning.TEXTS:
        found = learning.ends(search, "2 x 128", text)
        assert len(found) >= 3
        for rows in found.values():
            assert f">{statistics.mean(learning.bits_of(rows)):.3f}<" in plotted
