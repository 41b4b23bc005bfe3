"""What can only be shown on a GPU: one rank, NCCL. Run by hand where there is one: `pytest tests/test_cuda.py`."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import checkpoint, losses, succeeded, tensors, tiny, torchrun
from torchtitan_lite import init
from torchtitan_lite.config import ModelConfig
from torchtitan_lite.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


FAMILIES: dict[str, dict[str, Any]] = {
    "dtensor": {"model__dropout": 0.1},
    "dcp": {"model__family": "llama", "model__tie_embeddings": True},
}


@pytest.mark.parametrize("api", FAMILIES)
def test_resume_is_bitwise_when_deterministic(api: str, text: Path, tmp_path: Path) -> None:
    more = {"run__device": "cuda", "run__deterministic": True, "checkpoint__api": api, **FAMILIES[api]}
    command = tiny(text, tmp_path, run__name="run", fsdp__param_dtype="bfloat16", **more)
    succeeded(torchrun(1, *command))
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    shutil.rmtree(checkpoint(tmp_path / "run", 20))
    assert "resumed after step 10" in succeeded(torchrun(1, *command))
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    ours, theirs = (tensors(checkpoint(tmp_path / name, 20)) for name in ("run", "straight"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_initial_parameters_are_those_of_the_cpu() -> None:
    models = []
    for device in ("cpu", "cuda"):
        with torch.device("meta"):
            model = build(ModelConfig(), 517)
        init.materialise(model, torch.device(device), 0)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.equal(other.cpu())


def test_losses_are_those_of_the_cpu(text: Path, tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        succeeded(torchrun(1, *tiny(text, tmp_path, run__name=device, run__device=device)))
    ours, theirs = losses(tmp_path / "cuda"), losses(tmp_path / "cpu")
    assert all(ours[step] == pytest.approx(theirs[step], rel=1e-3) for step in theirs)
