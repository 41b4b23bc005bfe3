"""The expected time of a step: its parts, the figures it prints, and docs/lab/plan.md against published runs."""

import re
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import published
from tests.helpers import ROOT
from tests.tools.memory import VOCABULARY, config_of
from torchtitan_lite import plan
from torchtitan_lite.models import build
from torchtitan_lite.run.mfu import DEVICES, flops_per_token
from torchtitan_lite.tools.estimate import command, simulate
from torchtitan_lite.tools.estimate.planned_run import (
    SPREAD,
    expected,
    expected_s,
    likely,
    make_plan,
    micro_batch,
    rate,
    shares,
    work_s,
)
from torchtitan_lite.tools.estimate.work import Attention, Collective, Product, Traffic, Work, _bytes

MEDIAN, WORST = 0.10, 0.25
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


def test_the_documented_errors_are_within_the_limits() -> None:
    rows = documented()
    assert rows.keys() == {key(row) for row in published.ROWS}
    errors = []
    for row in published.ROWS:
        was, expected, error, calibrates = rows[key(row)]
        assert (was, calibrates) == (round(row.tokens_per_second), row.calibrates)
        assert error == pytest.approx(expected / row.tokens_per_second - 1, abs=0.001)
        errors += [] if calibrates else [abs(error)]
    assert len(errors) >= 25
    assert statistics.median(errors) <= MEDIAN
    assert max(errors) <= WORST
    held = [row for row in published.ROWS if not row.calibrates]
    assert {128, 256} < {row.gpus for row in held}
    assert any("70B" in row.model for row in held)


@pytest.mark.parametrize(
    ("operator", "n_inputs", "times"),
    [(torch.ops.aten.zero_.default, 1, 1), (torch.ops.aten.copy_.default, 2, 2), (torch.ops.aten.add_.Tensor, 2, 3)],
)
def test_an_operator_reads_its_inputs_and_writes_what_it_changes(operator: Any, n_inputs: int, times: int) -> None:
    tensors = [torch.ones(10) for _ in range(n_inputs)]
    assert _bytes(operator, tuple(tensors), tensors, tensors[:1]) == times * 40


def test_a_call_takes_its_latency_however_small_it_is() -> None:
    found = expected_s({Collective("all-gather", 0, 8): 3}, H100, 8)
    assert found["all-gather"] == pytest.approx((3 * (20e-6 + 8 * 2e-6), 3))


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


def test_published_figures_are_printed_as_the_documented_table() -> None:
    compared = [published.Compared(row, int(documented()[key(row)][1])) for row in published.ROWS]
    text = (ROOT / "docs/lab/plan.md").read_text()
    missing = [line for line in published.table(compared).splitlines() if line not in text]
    assert not missing


@pytest.fixture(scope="module")
def simulated() -> simulate.Simulated:
    return simulate.simulate(config_of("llama, bfloat16, selective", 2), 2, VOCABULARY, on_gpu=True)


def test_products_are_those_of_the_model(simulated: simulate.Simulated) -> None:
    config = config_of("llama, bfloat16, selective", 2)
    with torch.device("meta"):
        model = build(config.model, VOCABULARY)
    (work,) = simulated.work
    flops = sum(2 * w.batch * w.m * w.n * w.k * n for w, n in work.items() if isinstance(w, Product))
    tokens, m = config.train.micro_batch_size * config.train.seq_len, config.model
    attention = 12 * m.n_layers * m.n_heads * m.dim_of_heads * config.train.seq_len
    assert flops / tokens == pytest.approx(flops_per_token(model, config.train.seq_len) - attention, rel=0.01)
    forward = [w for w in work if isinstance(w, Attention) and w.phase == "forward"]
    assert [(w.heads, w.scores, w.products) for w in forward] == [(4 * m.n_heads, 256**2 / 2, 2)]
    assert work[forward[0]] == config.model.n_layers


def test_a_window_has_fewer_scores_and_keeps_no_mask(simulated: simulate.Simulated) -> None:
    config = config_of("llama, bfloat16, selective", 2)
    windows = {"window": 64, "layer_pattern": ["window", "full"]}
    windowed = config.model_copy(update={"model": config.model.model_copy(update=windows)})
    found = simulate.simulate(windowed, 2, VOCABULARY, on_gpu=True)
    half = config.model.n_layers / 2
    forward = {w.scores: n for w, n in found.work[0].items() if isinstance(w, Attention) and w.phase == "forward"}
    assert forward == {256 * 64: half, 256**2 / 2: half}
    assert found.peak == pytest.approx(simulated.peak, rel=0.02)
    with torch.device("meta"):
        flops = [flops_per_token(build(c.model, VOCABULARY), 256) for c in (config, windowed)]
    assert flops[0] - flops[1] == 12 * half * config.model.n_heads * config.model.dim_of_heads * (256 - 64)


def test_fused_kernels_move_fewer_bytes_than_eager_ones(simulated: simulate.Simulated) -> None:
    (eager,) = simulated.work
    config = config_of("llama, bfloat16, selective", 2)
    compiled = config.model_copy(update={"compile": config.compile.model_copy(update={"enabled": True})})
    (fused,) = simulate.simulate(compiled, 2, VOCABULARY, on_gpu=True).work
    for phase in ("forward", "backward"):
        assert 0.1 * eager[Traffic(phase)] < fused[Traffic(phase)] < 0.9 * eager[Traffic(phase)]
        assert fused[Traffic(phase, kernels=True)] < eager[Traffic(phase, kernels=True)]
    products = [Counter({w: n for w, n in work.items() if not isinstance(w, Traffic)}) for work in (eager, fused)]
    assert products[0] == products[1]
    update = simulated.optimizer[Traffic("optimizer")]
    parameters = simulated.peaks["start"][simulate.PARAMETERS]
    assert 7 * parameters < update < 12 * parameters, "4 reads and 3 writes by AdamW, then clipping"


def product(m: int, n: int, k: int) -> Counter[Work]:
    return Counter({Product("forward", 1, m, n, k, 2): 1})


def test_narrow_products_are_less_efficient() -> None:
    rates = [
        m * 4096 * 4096 / work_s(product(m, 4096, 4096), "forward", H100, fused=False)[0] for m in (64, 1024, 16384)
    ]
    assert rates == sorted(rates)
    assert rates[0] < 0.3 * rates[2]
    assert 2 * rates[2] == pytest.approx(0.62 * 989e12, rel=0.15)
    fused, *_ = work_s(product(4096, 4096, 4096), "forward", H100, fused=True)
    assert 2 * 4096**3 / fused == rate(H100, 2), "hidden"


def test_communication_costs_what_computation_cannot_hide() -> None:
    work = product(16384, 16384, 16384)  # 15 ms
    kinds = "all-gather, forward", "all-gather, backward", "reduce-scatter"

    def exposed(seconds: float) -> float:
        sent = dict.fromkeys(kinds, (seconds, 10))
        return micro_batch(H100, work + product(1, 1, 1), sent, fused=False).exposed

    assert exposed(0.0) == 0
    assert 0.0001 < exposed(0.001) < 0.005, "the first all-gather, and a slowdown"
    assert exposed(0.1) == pytest.approx(0.3, rel=0.1)


LARGE = ["--model.size=1B", "--model.vocab_size=32000", "--train.steps=1000", "--fsdp.param_dtype=bfloat16"]


@pytest.mark.extended
def test_plan_prints_one_time_with_its_range_and_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--world-size=8", "--device=h100", *LARGE]) == 0
    out = capsys.readouterr().out
    found = re.search(r"^time    a step takes ([\d.]+) s, likely ([\d.]+) to ([\d.]+): [\d,]+ tokens", out, re.M)
    assert found
    step, least, most = map(float, found.groups())
    assert least < step < most
    parts = re.search(
        r"^ +products ([\d.]+) s, attention ([\d.]+), other operators ([\d.]+), .* ([\d.]+), opt.* ([\d.]+)$", out, re.M
    )
    assert parts
    assert sum(map(float, parts.groups())) == pytest.approx(step, abs=0.003)
    assert "rests on published runs of h100; nine of ten held-out" in out
    assert re.search(r"^ +the run takes \w+, likely \w+ to \w+: [\d,]+ device hours$", out, re.M)
    assert "try " not in out
    assert plan.main(["--world-size=8", "--device=b200"]) == 0
    assert "rests on other devices: b200 has no published run" in capsys.readouterr().out


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


def test_a_slower_device_is_expected_to_take_longer() -> None:
    config = config_of("llama, bfloat16, selective", 8)
    found = make_plan(config, 8, H100)
    half = replace(H100, half_flops=H100.half_flops / 2, memory_bandwidth=1e12, intra_node=1e9)
    assert expected(found, half).total > expected(found, H100).total


def test_device_hours_are_those_of_all_devices() -> None:
    """Of ten million steps, which take days."""
    plan_ = make_plan(config_of("llama, bfloat16, selective", 8, **{"train.steps": 10**7}), 8, H100)
    (line,) = (line for line in command._time_lines(plan_) if "device hours" in line)
    hours = float(line.rpartition(": ")[2].removesuffix(" device hours").replace(",", ""))
    assert hours == pytest.approx(8 * 10**7 * expected(plan_, H100).total / 3600, abs=1)
    assert hours > 50
