"""Learning rates, groups of parameters, and optimizers."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.models.test_model import make
from torchtitan_lite.checkpointing.tensor_names import optimizer_tensors
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.config.sections.optim import OPTIMIZERS, Optimizer
from torchtitan_lite.errors import CheckpointError, ConfigError
from torchtitan_lite.optim.guarded import set_learning_rate
from torchtitan_lite.optim.optimizer import build_optimizer, learning_rate
from torchtitan_lite.tools.estimate.simulate import fake_world


def rates(schedule: str, steps: int = 110, last: int = 0, **more: float) -> list[float]:
    """Of each step up to the last one, which may be after those of the schedule."""
    values = {"lr": 1.0, "warmup_steps": 10, "min_lr_ratio": 0.1, "schedule": schedule} | more
    config = OptimConfig.model_validate(values)
    return [learning_rate(config, step, steps) for step in range(1, (last or steps) + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules_warm_up_to_lr_and_end_at_their_minimum(schedule: str) -> None:
    found = rates(schedule, last=130)
    assert found[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert found[9:] == sorted(found[9:], reverse=True)
    assert found[109:] == pytest.approx([1.0 if schedule == "constant" else 0.1] * 21)
    assert rates(schedule, warmup_steps=0)[0] == pytest.approx(1.0, rel=0.02)
    assert rates(schedule, steps=4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0], "a warm-up may be the whole run"


def test_schedules_have_their_shapes() -> None:
    assert [rates("cosine")[i] for i in (34, 59)] == pytest.approx([0.1 + 0.9 * 0.5 * (1 + 2**-0.5), 0.55])
    assert rates("linear")[34] == pytest.approx(0.1 + 0.9 * 0.75)
    wsd = rates("wsd", steps=100, decay_ratio=0.3)
    assert wsd[10:70] == [1.0] * 60
    assert wsd[84] == pytest.approx(0.55)
    falls = rates("step", step_every=30, step_gamma=0.5)
    assert [falls[i] for i in (9, 29, 30, 59, 60)] == [1.0, 1.0, 0.5, 0.5, 0.25], "the warm-up counts, too"


GROUPS = [
    {"match": "layers.0.*.wq.*", "lr_factor": 0.0},
    {"match": "layers.0.*", "lr_factor": 0.5},
    {"match": "*norm*", "weight_decay": 0.2},
    {"match": "output.*", "weight_decay": 0.0},
]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_groups_have_their_own_rate_and_decay(name: str) -> None:
    model = make()
    optimizer = build_optimizer(
        model, OptimConfig.model_validate({"name": name, "groups": GROUPS, "weight_decay": 0.1})
    )
    set_learning_rate(optimizer, 0.01)
    of = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert len(of) == len(list(model.parameters()))
    expected = {
        "layers.0.attention.wq.weight": (0.0, 0.1),
        "layers.0.attention.wk.weight": (0.005, 0.1),
        "layers.0.attention_norm.weight": (0.005, 0.0),  # the first match counts
        "layers.1.attention_norm.weight": (0.01, 0.2),
        "layers.1.attention.wq.weight": (0.01, 0.1),
        "output.weight": (0.01, 0.0),
    }
    assert {key: of[id(model.get_parameter(key))] for key in expected} == expected
    assert [value.any().item() for state in optimizer.state.values() for value in state.values()] == [False] * (
        len(of) * (name == "sgd")
    ), "momenta that a load can fill even if every step so far was withheld; they have no decay"


def test_state_that_a_checkpoint_would_lose_is_refused() -> None:
    with fake_world(2):
        model = make()
        fully_shard(model)
        optimizer = build_optimizer(model, OptimConfig(name="sgd"))
        state = optimizer.state[model.output.weight]
        state |= {"step": torch.tensor(3.0), "of_one": torch.ones(1), "unused": None}
        assert {"state.output.weight.step", "state.output.weight.of_one"} <= optimizer_tensors(model, optimizer).keys()
        for value, kind in ((3, "int"), (torch.ones(2), "Tensor")):  # not a DTensor: whose rows are they?
            state["steps"] = value
            with pytest.raises(CheckpointError, match=f'SGD keeps "steps" of output.weight as {kind}, which can\'t be'):
                optimizer_tensors(model, optimizer)


def test_an_optimizer_that_clips_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "plain", Optimizer("tests.optim.test_optim:plain"))
    with pytest.raises(ConfigError, match=r"plain builds a SGD. It should be a GuardedOptimizer"):
        build_optimizer(make(), OptimConfig(name="plain"))


def plain(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr)
