"""`plan --mtbf`: the simulation against Daly's closed form, Daly's interval, and the shares of the time."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers import python, succeeded
from torchtitan_lite.tools.estimate import failures
from torchtitan_lite.tools.estimate.failures import INPUTS, Parts, Saves

PARTS = Parts(mtbf_s=3600.0, stall_s=40.0, restart_s=120.0)
OFTEN = Parts(mtbf_s=900.0, stall_s=60.0, restart_s=300.0)  # failures also hit saves and restarts


@pytest.mark.parametrize("parts", [PARTS, OFTEN], ids=["rare", "often"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_the_simulation_is_dalys_closed_form(parts: Parts, factor: float) -> None:
    interval = factor * failures.daly_s(parts)
    simulated = failures.simulate(parts, np.array([interval]), runs=40, seed=1).steps[0]
    assert simulated == pytest.approx(failures.daly_goodput(parts, interval), rel=0.01)


def test_the_best_interval_is_near_dalys() -> None:
    found = failures.best(PARTS)
    assert found.interval_s == pytest.approx(failures.daly_s(PARTS), rel=0.25)
    assert found.range_s[0] < failures.daly_s(PARTS) < found.range_s[1]
    far = failures.simulate(PARTS, np.array([0.3, 3.0]) * failures.daly_s(PARTS), runs=10)
    assert (far.steps < found.shares["steps"] - 0.02).all()


def test_a_save_in_the_background_costs_repeated_steps_not_time() -> None:
    interval = np.array([600.0])
    slow = replace(PARTS, stall_s=0.0, background_s=300.0)
    at_once, later = (failures.simulate(p, interval, runs=20) for p in (replace(slow, background_s=0.0), slow))
    assert at_once.saves[0] == later.saves[0] == 0
    assert later.repeated[0] == pytest.approx(at_once.repeated[0] + 300 / 3600, rel=0.1)  # a failure loses 300 s more
    often = failures.simulate(slow, np.array([100.0]), runs=20)  # a save waits for the one before
    assert often.saves[0] > 0.5


def test_shares_add_up_and_equal_seeds_give_equal_results() -> None:
    parts = replace(OFTEN, machine_share=0.5, replace_s=600.0, spares=2, repair_s=7200.0, detect_s=20.0)
    intervals = np.array([100.0, 400.0])
    one, again, other = (vars(failures.simulate(parts, intervals, days=9, runs=8, seed=seed)) for seed in (3, 3, 4))
    assert np.allclose(sum(one.values()), 1.0)
    assert all((share >= 0).all() for share in one.values())
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not np.array_equal(one["steps"], other["steps"])


def test_spares_save_the_wait_for_machines_until_there_are_too_few() -> None:
    parts = replace(PARTS, machine_share=1.0, replace_s=1800.0, repair_s=6 * 3600.0)
    waiting = [failures.simulate(replace(parts, spares=n), np.array([500.0]), runs=10).waiting[0] for n in (0, 3, 40)]
    assert waiting[0] == pytest.approx(1800 / (3600 + 1800 + 120), rel=0.1)  # for each failure
    assert waiting[0] > waiting[1] > waiting[2] == 0


def test_without_failures_only_saves_take_time() -> None:
    parts = replace(PARTS, mtbf_s=1e15)
    outcome = failures.simulate(parts, np.array([360.0]), runs=1)
    assert outcome.steps[0] == pytest.approx(0.9, abs=1e-3)
    assert (outcome.repeated[0], outcome.restarts[0], outcome.waiting[0]) == (0, 0, 0)


def test_parts_follow_the_stated_rules() -> None:
    values = {name: default for name, (default, _, _) in INPUTS.items()} | {"storage-gbs": 2.0, "save-s": 0.0}

    def parts(gpus: int, *, sharded: bool = True, background: bool = True) -> Parts:
        return failures.parts_of(gpus, 50_000, Saves(1e12, sharded, background), values, per_machine=8)

    few, many = parts(8), parts(1024)
    assert (few.background_s, many.background_s) == (500.0, 500.0 / 128)
    assert many.mtbf_s == 50_000 * 3600 / 1024
    assert few.stall_s == 128 * many.stall_s == 1e12 / 8 / 10e9
    later = few.restart_s - few.background_s + 7 * values["rendezvous-s"]
    assert many.restart_s - many.background_s == pytest.approx(later)
    synchronous, full = parts(8, background=False), parts(1024, sharded=False)
    assert (synchronous.stall_s, synchronous.background_s, full.background_s) == (500.0, 0.0, 500.0)


def test_columns_stay_apart_where_failures_are_many() -> None:
    values = {name: default for name, (default, _, _) in INPUTS.items()}
    lines = failures.failure_lines([100_000], 1.0, Saves(1e12, True, True), values, per_machine=8)
    row = lines[-1].partition("(")[0].split() + lines[-1].partition(")")[2].split()
    assert len(row) == 8 + 6, lines[-1]
    assert row[1] == f"{100_000 * 54 * 24:,.1f}"


def test_the_command_names_what_it_assumes() -> None:
    config = (
        "--config=configs/debug.toml",
        "--model.vocab_size=512",
        "--world-size=16",
        "--train.global_batch_size=16",
    )
    said = succeeded(python(*config, "--mtbf=50677", "--detect-s=99", script="-m torchtitan_lite.plan"))
    assert "one interruption in 50,677 GPU-hours (Llama 3's report: 419 in 54 days on 16,384 GPUs, 50,677)" in said
    assert all(f"--{name}=" in said for name in INPUTS)
    assert "--detect-s=99 " in said
    assert "until a failure is noticed (given)" in said
    assert "expected: --checkpoint.every=" in said
    alone = python(*config, "--detect-s=99", script="-m torchtitan_lite.plan")
    assert alone.returncode == 2
    assert "--detect-s needs --mtbf=HOURS" in alone.stderr
    refused = python(*config, "--mtbf=0", "--copy-gbs=0", script="-m torchtitan_lite.plan")
    assert refused.returncode == 2
    assert "--mtbf=0 should be from 1 to 1e12 hours" in refused.stderr
