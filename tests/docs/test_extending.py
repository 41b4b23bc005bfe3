"""Follows docs/extending.md: one run uses its optimizer, reader, tracker and task."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.docs.pages import blocks
from tests.docs.sources import Copy, apply
from tests.helpers import ROOT, checkpoint, losses, records, tensors, tiny
from torchtitan_lite.config.schema import OptimConfig

PAGE = (ROOT / "docs/extending.md").read_text()
FILES = dict(re.findall(r"`(torchtitan_lite/[\w/]+\.py)`:\n\n```python\n(.*?)^```", PAGE, re.M | re.S))
DIFFS = blocks(PAGE, "diff")


@pytest.fixture
def extended(tmp_path: Path) -> Iterator[Copy]:
    copy = Copy(tmp_path / "copy", FILES, DIFFS)
    yield copy
    copy.close()


def test_the_optimizer_reader_tracker_and_task_of_the_page_work_in_one_run(
    extended: Copy, text: Path, tmp_path: Path
) -> None:
    assert len(FILES) == 2
    assert len(DIFFS) == 4
    (tmp_path / "books").mkdir()
    for file in text.glob("*.txt"):
        lines = file.read_text().splitlines(keepends=True)
        for i in range(4):
            part = lines[len(lines) * i // 4 : len(lines) * (i + 1) // 4]
            cells = [{"source": part}, {"source": "the last cell\n"}]
            (tmp_path / f"books/{file.stem}{i}.ipynb").write_text(json.dumps({"cells": cells}))
    given = re.findall(r"--(?:optim|log|eval)\.[\w.]+=[\w.,-]+", PAGE.replace("lr=1e-4", "lr=3e-3"))
    assert len(given) == 5
    keys = {word.split("=")[0] for word in given}
    plain = tiny(tmp_path / "books", tmp_path, run__name="mine", train__steps=6, checkpoint__every=3, eval__every=3)
    command = [*(word for word in plain if word.split("=")[0] not in keys), *given, "--optim.max_norm=0.1"]
    extended.run(2, "train", *command)
    run = tmp_path / "mine"
    straight, state = losses(run), tensors(checkpoint(run, 6))
    assert straight[6][0] < straight[1][0]
    assert state["exp_avg.layers.0.attention.wq.weight"].shape == (32, 32), "not a DTensor: the rows of one rank"

    # a resume has the same bits, so the optimizer's state is saved and loaded; the tracker drops the later rows
    shutil.rmtree(checkpoint(run, 6))
    assert "resumed after step 3" in extended.run(2, "train", *command)
    assert losses(run) == straight
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors(checkpoint(run, 6)).items())
    with (run / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    in_csv = {int(row["step"]): float(row["value"]) for row in rows if row["name"] == "loss"}
    assert in_csv == {step: loss for step, (loss, _) in straight.items()}
    assert [int(row["step"]) for row in rows if row["name"] == "loss"] == list(range(1, 7))
    assert any("task_recall" in record or "task/recall" in record for record in records(run))


def test_the_optimizer_of_the_page_obeys_the_guard_and_the_clipping() -> None:
    """On plain tensors: an update that is withheld changes nothing, and gradients are divided by grad_scale."""
    module = types.ModuleType("lion")
    exec(FILES["torchtitan_lite/optim/lion.py"], vars(module))
    torch.manual_seed(0)
    start, gradients = torch.randn(7, 3), [torch.randn(7, 3) for _ in range(3)]

    def trained(scale: float, withheld: int) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = torch.nn.Parameter(start.clone())
        groups = [{"params": [parameter], "weight_decay": 0.1, "lr_factor": 1.0}]
        optimizer = module.Lion(groups, OptimConfig(name="muon", lr=0.01))
        optimizer.grad_scale = torch.tensor(scale)
        for gradient in [*gradients[:withheld], None, *gradients[withheld:]]:
            parameter.grad = torch.full((7, 3), torch.nan) if gradient is None else gradient * scale
            optimizer.found_inf = torch.tensor(float(gradient is None))
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]["exp_avg"]

    expected = trained(1.0, withheld=3)
    assert not torch.equal(expected[0], start)
    for scale, withheld in ((1.0, 0), (1.0, 1), (4.0, 2)):
        for actual, tensor in zip(trained(scale, withheld), expected, strict=True):
            assert torch.equal(actual, tensor)


@pytest.mark.extended
def test_with_what_both_pages_add_the_tests_pass(tmp_path: Path) -> None:
    """Those that know names of families, optimizers, readers, trackers or tasks, in a copy of the whole tree."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "runs")
    folder = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    own = (ROOT / "docs/own_model.md").read_text()
    (model,) = blocks(own, "python")
    for name, code in (FILES | {"torchtitan_lite/models/parallel.py": model}).items():
        (folder / name).write_text(code)
    for diff in [*DIFFS, *blocks(own, "diff")]:
        apply(diff, folder)
    env = os.environ | {"PYTHONPATH": str(folder)}
    reference = [sys.executable, "-m", "torchtitan_lite.tools.config_reference"]
    with (folder / "docs/config.md").open("w") as page:
        subprocess.run(reference, cwd=folder, env=env, stdout=page, check=True)
    known = "config/test_hints config/test_messages config/test_unused_keys config/test_layers models/test_model"
    known += " test_architecture data/test_finding_text monitoring/test_trackers huggingface/test_exported_text"
    files = [f"tests/{name}.py" for name in known.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not extended", "-p", "no:cacheprovider"]
    said = subprocess.run([*command, *files, "tests/docs"], cwd=folder, env=env, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-4000:]
