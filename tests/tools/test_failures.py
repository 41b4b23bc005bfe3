"""`plan --mtbf`: Daly's interval and goodput, against drawn failures, and what they follow from."""

import numpy as np
import pytest

from tests.helpers import python, succeeded
from torchtitan_lite.tools.estimate.failures import INPUTS, best_interval, expected_goodput, failure_lines

VALUES = {name: default for name, (default, _, _) in INPUTS.items()}


@pytest.mark.parametrize(("mtbf_s", "save_s", "restart_s"), [(3600.0, 40.0, 120.0), (900.0, 60.0, 300.0)])
def test_goodput_is_that_of_drawn_failures_and_best_at_the_interval(
    mtbf_s: float, save_s: float, restart_s: float
) -> None:
    rng, n, interval_s = np.random.default_rng(0), 4000, best_interval(save_s, mtbf_s)
    spent = 0.0
    for _ in range(n):
        while (lasts := rng.exponential(mtbf_s)) < interval_s + save_s:
            spent += lasts
            while (lasts := rng.exponential(mtbf_s)) < restart_s:
                spent += lasts
            spent += restart_s
        spent += interval_s + save_s
    assert expected_goodput(interval_s, save_s, restart_s, mtbf_s) == pytest.approx(n * interval_s / spent, rel=0.02)
    intervals = interval_s * np.geomspace(1 / 4, 4, 401)
    best = max(intervals, key=lambda t: expected_goodput(t, save_s, restart_s, mtbf_s))
    assert interval_s == pytest.approx(best, rel=0.05)


def said(mtbf_hours: float = 50_000, gpus: int = 8, *, sharded: bool = True, background: bool = True) -> list[str]:
    """Of a checkpoint of 1 TB, on machines of 8 GPUs."""
    machines = max(gpus // 8, 1)
    more = {"sharded": sharded, "background": background, "step_s": 2.0}
    return failure_lines(mtbf_hours, gpus, machines, 1e12, VALUES, **more)  # type: ignore[arg-type]


def test_saves_and_restarts_take_what_the_bytes_take() -> None:
    assert "blocks training for 12 s, written in the background" in said()[-2]
    assert "blocks training for 1e+03 s, written while training waits" in said(background=False)[-2]
    assert f"a restart takes {1060 // 60}m{1060 % 60}s" in said(sharded=False, gpus=1024)[-2]
    assert "blocks training for 0.098 s" in said(gpus=1024)[-2]
    assert "a restart takes 1m08s" in said(gpus=1024)[-2]
    often = said(1.0, 8)[-1]
    assert "save    every 16m40s" in often, "a save waits for the one before it"
    assert "--checkpoint.every=500 at" in often


def test_more_failures_than_a_restart_survives_are_no_error() -> None:
    assert said(1.0, 100_000)[-1].endswith("expected goodput 0.0%")


def test_the_command_names_what_it_assumes() -> None:
    config = "--config=configs/debug.toml", "--model.vocab_size=512", "--world-size=16", "--train.global_batch_size=16"
    output = succeeded(python(*config, "--mtbf=50677", "--restart-s=99", script="-m torchtitan_lite.plan"))
    assert "one in 50,677 GPU-hours (given; Llama 3's report: 50,677): one in 131d23h on 16 GPUs" in output
    assert "--restart-s=99: from a failure to the next step, without loading (given)" in output
    assert "--copy-gbs=10: copying shards to the host, GB per second and GPU (assumed)" in output
    assert "--checkpoint.every=" in output
    alone = python(*config, "--restart-s=99", script="-m torchtitan_lite.plan")
    assert alone.returncode == 2
    assert "--restart-s needs --mtbf=HOURS" in alone.stderr
    refused = python(*config, "--mtbf=0", "--copy-gbs=0", script="-m torchtitan_lite.plan")
    assert refused.returncode == 2
    assert "--mtbf=0 should be from 1 to 1e12 hours" in refused.stderr
