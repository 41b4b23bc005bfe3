"""Tests that need a GPU, with one rank and NCCL. Run by hand: `pytest tests/gpu/test_cuda.py`."""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.knob_table import ON_CUDA, TOLERANCE
from tests.distributed.knob_worker import measure, training
from tests.distributed.test_knobs import MISSING, reference
from tests.distributed.test_launcher import NAMESPACES, namespaces_work
from tests.helpers import assert_same_end, forget_after, losses, meta_model, start, succeeded, tiny, torchrun
from tests.tools.memory import GPU_CASES, LARGE, VOCABULARY, config_of
from torchtitan_lite.config.schema import ActivationCheckpointingConfig, ModelConfig, RunConfig
from torchtitan_lite.distributed import initialize, recompute_and_compile
from torchtitan_lite.distributed.process_group import process_group
from torchtitan_lite.models import build, chunked_loss, kernels
from torchtitan_lite.models.loss import IGNORE, summed_cross_entropy
from torchtitan_lite.tools.estimate.simulate import simulate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

CUBLAS_WORKSPACE = 2 * (32 << 20)  # bytes on an H100, less on older GPUs: one for each thread, forward and backward


@pytest.mark.parametrize("name", ON_CUDA)
def test_every_knob_computes_the_same(name: str) -> None:
    """Kernels of another library sum in another order."""
    if reason := MISSING.get(name):
        pytest.skip(reason)
    case = ON_CUDA[name]
    with process_group(RunConfig(device="cuda", threads=1)) as process:
        found = measure(training(case.config("cuda"), process))
    assert found["skipped"] == 0
    assert found["frozen"][0] == found["frozen"][1]
    assert found["devices"] == (["cpu"] if "offload" in name else ["cuda"])
    if case.reference:
        for column, tolerance in enumerate(TOLERANCE[case.dtype]):
            ours, theirs = ([row[column] for row in curve] for curve in (found["curve"], reference(case)))
            assert ours == pytest.approx(theirs, rel=10 * tolerance)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The most bytes that a step of each case takes."""
    file = tmp_path_factory.mktemp("memory") / "found.json"
    succeeded(torchrun(1, str(file), script="tests/tools/memory.py"))
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", GPU_CASES)
def test_memory_is_what_was_planned(name: str, memory: dict[str, int]) -> None:
    simulated = simulate(config_of(name, 1, **LARGE), 1, VOCABULARY, on_gpu=True)
    assert memory[name] == pytest.approx(sum(simulated.peak.values()) + CUBLAS_WORKSPACE, rel=0.1)


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
    forget_after(tmp_path / "run", 10)
    assert "resumed after step 10" in succeeded(torchrun(1, *command))
    assert_same_end(tmp_path / "run", tmp_path / "straight", 20)


MASKED = {"data__packing": "best_fit", "data__document_mask": True, "model__dim": 64}
RECOMPUTED = {"activation_checkpointing__mode": "full"}


@pytest.mark.parametrize(("more", "on_cuda"), [
    ({}, {}),
    *(
        ({**MASKED, "model__family": family}, {**RECOMPUTED, "compile__enabled": compiled})
        for family in ("gpt", "llama") for compiled in (False, True)
    ),
])  # fmt: skip
def test_losses_are_those_of_the_cpu(more: dict[str, Any], on_cuda: dict[str, Any], text: Path, tmp_path: Path) -> None:
    """With a mask of documents: FlexAttention against SDPA."""
    succeeded(torchrun(1, *tiny(text, tmp_path, run__name="cpu", **more)))
    succeeded(torchrun(1, *tiny(text, tmp_path, run__name="cuda", run__device="cuda", **more, **on_cuda)))
    ours, theirs = losses(tmp_path / "cuda"), losses(tmp_path / "cpu")
    assert all(ours[step] == pytest.approx(theirs[step], rel=1e-3) for step in theirs)


def test_initial_parameters_are_those_of_the_cpu() -> None:
    models = []
    for device in ("cpu", "cuda"):
        model = meta_model(ModelConfig(), 517)
        initialize.materialize(model, torch.device(device), 0)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.equal(other.cpu())


@pytest.mark.parametrize("z", [0.0, 0.01])
def test_the_loss_in_chunks_is_the_loss_and_makes_the_host_wait_for_nothing(
    z: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 2048 * 5000 * 2)  # three chunks
    x = torch.randn(2, 3000, 64, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(5000, 64, device="cuda") * 0.1).bfloat16()
    targets = torch.randint(5000, (2, 3000), device="cuda")
    targets[:, ::7] = IGNORE
    assert kernels.kernel_works(x.device, x.dtype, 5000)
    found = []
    for way in (chunked_loss.chunked_cross_entropy, lambda x, w, t, z: summed_cross_entropy(x @ w.T, t, z)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss, _ = way(*leaves, targets, z)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"fsdp__param_dtype": "bfloat16"},
    "float16": {"fsdp__param_dtype": "float16"},
    "float32, tied, full": {"model__tie_embeddings": True, "activation_checkpointing__mode": "full"},
    "prefetching, selective": {"fsdp__explicit_prefetching": True, "activation_checkpointing__mode": "selective"},
    "document mask, selective": {
        **{"data__packing": "best_fit", "data__document_mask": True, "fsdp__param_dtype": "bfloat16"},
        **{"activation_checkpointing__mode": "selective", "model__dim": 64},
    },
    "windows, selective": {
        **{"model__window": 8, "model__layer_pattern": "window,full", "fsdp__param_dtype": "bfloat16"},
        **{"activation_checkpointing__mode": "selective", "model__dim": 64},
    },
    "compiled": {"compile__enabled": True, "fsdp__param_dtype": "bfloat16"},
    "compiled, shared heads": {
        **{"compile__enabled": True, "fsdp__param_dtype": "bfloat16", "activation_checkpointing__mode": "selective"},
        "model__n_kv_heads": 1,
    },
    "kept gathered": {"fsdp__reshard_after_forward": False, "fsdp__reshard_after_backward": False},
    "muon, averages": {"optim__name": "muon", "fsdp__param_dtype": "bfloat16", "optim__ema_decay": 0.9},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_host_waits_for_nothing_during_a_step(name: str, text: Path, tmp_path: Path) -> None:
    """Apart from events: torch does not report the wait for the event of the step before."""
    more = {"model__family": "llama", "run__device": "cuda", "train__steps": 6, "eval__every": 0}
    command = tiny(text, tmp_path, run__name="run", **more, **SETTINGS[name])
    succeeded(torchrun(1, *command, script="tests/gpu/waiting_worker.py"))


def test_attention_within_documents_is_kept_by_selective_checkpointing() -> None:
    """The kernel of FlexAttention runs once forward, not twice."""
    config = ModelConfig.model_validate(
        {"family": "llama", "dim": 128, "n_heads": 2, "n_layers": 2, "max_seq_len": 256}
    )
    with torch.device("cuda"):
        model = build(config, 517).bfloat16()
        tokens = torch.zeros(2, 256, dtype=torch.int64)
        positions = torch.arange(128).repeat(2, 2)
    runs = {}
    for mode in ("selective", "full"):
        checkpointed = copy.deepcopy(model)
        settings = ActivationCheckpointingConfig.model_validate({"mode": mode})
        recompute_and_compile.apply_activation_checkpointing(checkpointed, settings)
        checkpointed(tokens, tokens, None, positions).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            checkpointed(tokens, tokens, None, positions).backward()
        names = [event.name for event in profile.events()]
        runs[mode] = sum("flex_attention" in name and "backward" not in name for name in names)
    assert 0 < runs["selective"] < runs["full"]


@pytest.mark.skipif(not namespaces_work(), reason="unshare can't make a PID namespace here")
def test_torchrun_can_be_process_1_on_a_gpu(text: Path, tmp_path: Path) -> None:
    """Neither CUDA nor NCCL may make a worker look like one whose launcher died."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "train.py"]
    more = {"run__device": "cuda", "train__steps": 3}
    said = succeeded(start([*NAMESPACES, *command, *tiny(text, tmp_path, run__name="run", **more)]))
    assert "done    3 steps" in said
