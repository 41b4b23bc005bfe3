"""The smallest case of `python -m benchmarks.oracle`: implementations that others wrote compute the same."""

from pathlib import Path

import pytest

from benchmarks import oracle
from benchmarks.oracle import OURS, THEIRS, WHOLE
from tests.helpers import run_distributed


@pytest.mark.extended
def test_transformers_and_one_process_compute_the_same_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    oracle.export(tmp_path)
    jobs = [(way, "float32") for way in (OURS, THEIRS, WHOLE)]
    for of in run_distributed(oracle.curves, 2, tmp_path, 1, 3, jobs):
        whole = of[WHOLE, "float32"]
        # AdamW does not see a factor that all gradients have, so a wrong clip needs steps that are not clipped
        assert {norm > oracle.MAX_NORM for _, norm in whole} == {True, False}
        for way in (OURS, THEIRS):
            curve = of[way, "float32"]
            assert not oracle.beyond_rounding(curve, whole), (way, curve, whole)


def test_the_bound_is_tight() -> None:
    curve = [(5.5, 0.8), (5.4, 0.9)]
    assert oracle.beyond_rounding([(5.5, 0.8 * (1 + 2e-6)), (5.4 * (1 - 1e-6), 0.9)], curve) == [1]
    assert oracle.beyond_rounding([(5.5, 0.8), (5.4 * (1 - 1.2e-6), 0.9)], curve) == [2]
    assert oracle.beyond_rounding([(5.5, float("nan")), (5.4, 0.9)], curve) == [1]
