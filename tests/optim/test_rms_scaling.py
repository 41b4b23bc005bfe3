"""optim.rms_scaling: its formula on any mesh, withheld updates, and what is refused."""

import pytest
import torch
from torch import Tensor

from tests.checkpointing.reload_worker import MESHES
from tests.helpers import python, run_distributed
from tests.optim.on_ranks import SCALED, gradient, rms_scaling


def reference(name: str, number: int, weight: Tensor, steps: int = 3) -> Tensor:
    """nanoT5's AdamW, in float64: the update of AdamW at lr * max(0.001, RMS(p)), and decay at lr."""
    special = name.startswith("layers.1.")
    lr = SCALED["lr"] * (0.5 if special else 1.0)
    decay = 0.3 if special else 0.1 if weight.ndim > 1 else 0.0
    weight, beta1, beta2 = weight.double(), 0.9, 0.99
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, steps + 1):
        grad = gradient(step, number, weight.shape).double()
        mean = beta1 * mean + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad.square()
        scale = max(1e-3, float(weight.square().mean().sqrt()))
        update = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + SCALED["eps"])
        weight = weight * (1 - lr * decay) - lr * scale * update
    return weight


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[] if mesh in ("1", "2x2", "3c") else [pytest.mark.extended]) for mesh in MESHES]
)
def test_updates_are_those_of_the_formula_on_any_mesh(mesh: str) -> None:
    """With uneven and empty shards, and copies; with one small all-reduce a step."""
    found = run_distributed(rms_scaling, MESHES[mesh][0], mesh, 3, 0)[0]
    names = [name.removeprefix("before.") for name in found if name.startswith("before.")]
    for number, name in enumerate(names):
        before = found[f"before.{name}"]
        expected = reference(name, number, before)
        moved = (expected - before).norm()
        assert (found[f"weight.{name}"] - expected).norm() < 2e-6 * before.norm() + 1e-5 * moved, name
    assert {name.split(".")[0] for name in found} == {"before", "weight", "calls", "exp_avg", "exp_avg_sq", "step"}
    zero = found["weight.layers.0.attention.wq.weight"]
    assert 0 < zero.abs().max() < 4 * 1e-3 * SCALED["lr"]
    assert int(found["calls"]) == (0 if mesh == "1" else 3)


def test_a_withheld_update_changes_nothing() -> None:
    """Not even with NaN in the gradients, nor the count of steps."""
    two, withheld = (run_distributed(rms_scaling, 2, "2", steps, 3)[0] for steps in (2, 3))
    assert set(two) == set(withheld)
    assert not [name for name in two if name != "calls" and not two[name].equal(withheld[name])]


def test_it_is_for_adamw() -> None:
    result = python("--optim.name=muon", "--optim.rms_scaling=true", "--check-config")
    assert result.returncode == 2
    assert 'optim.rms_scaling = True has no effect without optim.name = "adamw"' in result.stderr
