"""The expected time of a step: its parts, the figures it prints, and docs/lab/plan.md against published runs."""

from dataclasses import replace

import pytest

from benchmarks import published
from tests.helpers import ROOT
from tests.tools.memory import config_of
from torchtitan_lite.run.mfu import DEVICES
from torchtitan_lite.tools.estimate.planned_run import (
    SPREAD,
    expected,
    likely,
    make_plan,
    shares,
)

WORST = 0.25  # error of a time, at most
H100 = DEVICES["h100"]


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
    assert abs(found.error) <= WORST


def test_the_range_holds_nine_of_ten_published_runs_and_is_wider_without_any() -> None:
    held = [abs(error) for _, _, error, calibrates in documented().values() if not calibrates]
    assert sum(error <= SPREAD for error in held) >= 0.9 * len(held)
    found = make_plan(config_of("llama, bfloat16, selective", 8), 8, H100)
    (least, most), step = likely(found, H100), expected(found, H100).total
    assert (least, most) == pytest.approx((step / (1 + SPREAD), step / (1 - SPREAD)))
    assert shares(H100) == (0.62, 0.62)
    assert shares(DEVICES["b200"]) == (0.31, 0.72), "from MI300X to H200"
    fast, slow = (expected(found, replace(DEVICES["b200"], sustained=share)).total for share in (0.72, 0.31))
    assert likely(found, DEVICES["b200"]) == pytest.approx((fast / (1 + SPREAD), slow / (1 - SPREAD)))
