"""What `plan` computes: links, and published runs."""

from typing import Any

import pytest

from benchmarks import published
from tests.helpers import ROOT
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config
from torchtitan_lite.run.mfu import DEVICES
from torchtitan_lite.tools.estimate import command
from torchtitan_lite.tools.estimate.planned_run import SPREAD, expected, likely, link_s, make_plan, unlike_published
from torchtitan_lite.tools.estimate.work import Collective

SMALL: dict[str, Any] = {"tokenizer.vocab_size": 1000, "model.dim": 128, "model.n_heads": 4, "model.n_layers": 1}
SMALL |= {"train.seq_len": 256, "train.micro_batch_size": 2}


def config_of(values: dict[str, Any], world_size: int) -> Config:
    return load.load(None, SMALL | values, world_size=world_size, n_gpus=8, elsewhere=True).config


@pytest.mark.parametrize(
    ("kind", "ranks", "world_size", "expected_s"),
    [  # of 8 GB: at 450 GB/s within a machine of 8, 50 GB/s between machines for each of its devices
        ("reduce-scatter", 8, 8, 8 * 7 / 8 / 450),
        ("reduce-scatter", 4, 4, 8 * 3 / 4 / 450),
        ("reduce-scatter", 128, 128, 8 * 15 / 16 / (50 * 8)),
        ("all-gather, forward", 16, 16, 8 * 15 / 16 / 450),
        ("all-reduce", 4, 64, 2 * 8 * 3 / 4 / 50),
        ("all-reduce", 4, 8, 2 * 8 * 3 / 4 / 450),
        ("all-gather, muon", 4, 16, 8 * 1 / 2 / 50),
    ],
)
def test_a_collective_takes_the_time_of_its_slowest_link(
    kind: str, ranks: int, world_size: int, expected_s: float
) -> None:
    assert link_s(Collective(kind, 8 * 10**9, ranks), DEVICES["h100"], world_size) == pytest.approx(expected_s)


# --- published runs ---------------------------------------------------------------------------------------------


def documented() -> dict[tuple[str, ...], tuple[float, float, float, bool]]:
    """docs/lab/plan.md: model, GPUs, batch and options -> published, expected, error, and whether it calibrates."""
    found = {}
    for line in (ROOT / "docs/lab/plan.md").read_text().splitlines():
        if line.startswith(("| Llama", "| MPT", "| Qwen", "| GPT")):
            *what, source, was, expected, error = (cell.strip() for cell in line.strip("|").split("|"))
            figures = float(was.replace(",", "")), float(expected.replace(",", "")), float(error.strip("%+")) / 100
            found[tuple(what)] = (*figures, "calibrates" in source)
    return found


def key(row: published.Row) -> tuple[str, ...]:
    batch = f"{row.micro_batch} x {row.seq_len:,}"
    return row.model, f"{row.gpus} x {row.machine}", batch, ", ".join(row.options)


SAMPLE = [r for r in published.ROWS if r.model in ("MPT 1B", "GPT-2 1.6B") or (r.model == "Llama 3 8B" and r.gpus == 8)]


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=pytest.mark.extended if r in SAMPLE else pytest.mark.slow) for r in published.ROWS],
    ids=lambda row: " ".join(key(row)),
)
def test_the_documented_expectations_are_those_of_plan(row: published.Row) -> None:
    found = published.compare(row)
    assert found.expected == pytest.approx(documented()[key(row)][1], rel=0.02)
    assert abs(found.error) <= 0.25


@pytest.mark.parametrize(
    ("values", "unlike"),
    [
        (
            {"model.family": "t5", "model.size": "t5-base", "data.objective": "pairs"},
            "of an encoder-decoder or on pairs",
        ),
        ({"model.family": "t5", "data.objective": "span_corruption"}, "of an encoder-decoder"),
        ({"data.objective": "pairs"}, "on pairs"),
        ({"model.family": "olmoe"}, "with experts"),
        ({"model.family": "olmo_hybrid"}, "with delta layers"),
        ({"model.family": "gemma3"}, ""),
    ],
)
def test_the_range_of_a_run_unlike_the_published_ones_holds_the_slowest_measured_one(
    values: dict[str, Any], unlike: str
) -> None:
    """docs/lab/gpu.md has it."""
    found = make_plan(config_of({"optim.name": "adamw", "data.target_len": 128} | values, 1), 1, DEVICES["h100"])
    step, (_, most) = expected(found, DEVICES["h100"]), likely(found, DEVICES["h100"])
    assert (unlike_published(found.config), most > step.total * 54_540 / 33_280) == (unlike, bool(unlike))
    said = "\n".join(command._time_lines(found))
    assert ("nine of ten" in said, f"none of them was {unlike}" in said) == (not unlike, bool(unlike))


def test_the_range_holds_nine_of_ten_published_runs() -> None:
    held = [abs(error) for _, _, error, calibrates in documented().values() if not calibrates]
    assert sum(error <= SPREAD for error in held) >= 0.9 * len(held)
