"""Compares every row of knob_table.py with an unsharded reference. Three launches, on 2 to 4 ranks, run them all."""

import fnmatch
import functools
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.distributed.knob_table import CASES, EXTENDED, REDUCES, STEPS, TOLERANCE, VOCABULARY, Case, FixedSamples
from tests.distributed.knob_worker import rows
from tests.helpers import meta_model, run_distributed
from tests.optim.on_ranks import muon_update
from torchtitan_lite.config.rules.local import missing_for_inductor
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.models import LossOptions
from torchtitan_lite.optim import optimizer as optim

# rows that this machine or its torch can't run
MISSING = {"compile": "there is no C++ compiler here"} if missing_for_inductor("cpu", 0) else {}
if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
    needs = "fsdp.separate_reduce_scatter_group needs torch 2.13"
    MISSING |= {name: needs for name, case in CASES.items() if REDUCES.items() <= case.set.items()}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What rank 0 measured: of the rows whose tests are to run, and those that these are compared with."""
    tests = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    wanted = {str(test.callspec.params["name"]) for test in tests} - MISSING.keys()
    wanted |= {CASES[name].same_as for name in wanted} - {""}
    found: dict[str, dict[str, Any]] = {}
    for n in (2, 3, 4):
        found |= run_distributed(rows, n, [name for name in CASES if name in wanted and CASES[name].ranks == n])[0]
    return found


@functools.cache
def _reference(
    base: str, shape: tuple[tuple[str, Any], ...], patterns: tuple[str, ...], optimizer_name: str
) -> list[tuple[float, float, dict[str, float]]]:
    """Loss, gradient norm and norms by block of each step of one whole model in float32, on the whole batch at once."""
    config = Case(2, dict(shape) | {"optim.name": optimizer_name}, base=base).config()
    model = meta_model(config.model, VOCABULARY, LossOptions.from_config(config))
    materialize(model, torch.device("cpu"), seed=7)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_muon = {n: p for n, p in trained.items() if optimizer_name == "muon" and p.ndim > 1 and n.startswith("layers.")}
    momenta = {name: torch.zeros_like(p).double() for name, p in by_muon.items()}
    decayed = [p for name, p in trained.items() if p.ndim > 1 and name not in by_muon]
    others = [p for p in trained.values() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.optim.betas, weight_decay=config.optim.weight_decay)
    samples = FixedSamples(config.train.seq_len)
    curve = []
    for step in range(1, STEPS + 1):
        rows = torch.stack([samples[i] for i in range((step - 1) * 6, step * 6)])
        # with experts one by one, as they balance the loads of a micro-batch, which is one sequence
        parts = rows.split(1 if config.model.has_experts else len(rows))
        loss = sum(model(part[:, :-1], part[:, 1:]) for part in parts) / rows[:, 1:].numel()
        loss.backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        blocks = by_block("weight_norm", before) | by_block("grad_norm", {n: p.grad for n, p in trained.items()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = optim.learning_rate(config.optim, step, config.train.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            for name, p in by_muon.items():
                assert p.grad is not None
                update = muon_update(momenta[name], p.grad.double(), config.optim.muon_momentum)
                size = 0.2 * max(p.shape[-2:]) ** 0.5  # that of AdamW's updates
                p.sub_((rate * (size * update + config.optim.weight_decay * p)).float())
        blocks |= by_block("update_norm", {name: p.detach() - before[name] for name, p in model.named_parameters()})
        model.zero_grad()
        curve.append((loss.item(), norm.item(), blocks))
    return curve


def by_block(kind: str, tensors: dict[str, Any]) -> dict[str, float]:
    """The norms of tensors by block."""
    squares = Counter[str]()
    for name, tensor in tensors.items():
        layer = re.match(r"layers\.\d+", name)
        block = layer[0] if layer else "head" if re.match(r"(norm|output)\.", name) else "inputs"
        squares[f"{kind}/{block}"] += tensor.double().square().sum().item()
    return {key: math.sqrt(square) for key, square in squares.items()}


def reference(case: Case) -> list[tuple[float, float, dict[str, float]]]:
    """Of the row's model and frozen parameters."""
    shape = tuple((key, value) for key, value in case.set.items() if key.startswith(("model.", "train.router")))
    return _reference(case.base, shape, tuple(case.set.get("optim.freeze", ())), case.set.get("optim.name", "adamw"))


MARKS = dict.fromkeys(EXTENDED, pytest.mark.extended)
MARKS |= {name: pytest.mark.skip(reason=reason) for name, reason in MISSING.items()}
ROWS = [pytest.param(name, marks=MARKS.get(name, [])) for name in CASES]


@pytest.mark.parametrize("name", ROWS)
def test_each_row_computes_the_losses_of_the_reference(name: str, results: dict[str, dict[str, Any]]) -> None:
    case, found = CASES[name], results[name]
    curve = found["curve"]
    assert (len(curve), found["skipped"]) == (STEPS, 0)
    assert found["held"][0] == found["held"][-1], "a step leaves something behind"
    if case.reference:
        loss_tolerance, norm_tolerance = TOLERANCE[case.dtype]
        for (loss, norm, blocks), (expected_loss, expected_norm, expected) in zip(curve, reference(case), strict=True):
            assert loss == pytest.approx(expected_loss, rel=loss_tolerance), curve
            assert norm == pytest.approx(expected_norm, rel=norm_tolerance), curve
            # a frozen block has no gradient; the reference's updates are differences of rounded weights
            wanted = {key: pytest.approx(expected.get(key, 0.0), rel=max(norm_tolerance, 3e-5)) for key in blocks}
            assert blocks == wanted, curve
        rounded = any(
            norm != pytest.approx(n, rel=1e-5) for (_, norm, _), (_, n, _) in zip(curve, reference(case), strict=True)
        )
        assert rounded == (case.dtype != "float32"), "a coarser dtype shows, and no other"
    if case.same_as:
        for (*mine, blocks), (*theirs, others) in zip(curve, results[case.same_as]["curve"], strict=True):
            assert mine == theirs, "not bit for bit"
            assert blocks == {key: others[key] for key in blocks}


@pytest.mark.parametrize("name", ROWS)
def test_names_stay_as_they_are_and_frozen_tensors_too(name: str, results: dict[str, dict[str, Any]]) -> None:
    found, config = results[name], CASES[name].config()
    model = meta_model(config.model, VOCABULARY)
    assert found["names"] == list(model.state_dict())
    before, after = found["frozen"]
    assert before == after
    frozen = [n for n, _ in model.named_parameters() if any(fnmatch.fnmatchcase(n, p) for p in config.optim.freeze)]
    assert list(before) == frozen
