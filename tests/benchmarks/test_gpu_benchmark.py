"""What benchmarks/gpu.py does apart from measuring on a GPU: its variants of train.py, its table, its reasons."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from benchmarks import gpu, gpu_variants
from tests.helpers import ranks, succeeded, tiny
from torchtitan_lite.config import load
from torchtitan_lite.distributed import initialize, parallelize
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import build

# every call of attention prints the backend that it is allowed
_LOGS = """
import sys, torch
import torch.nn.functional as F
original = F.scaled_dot_product_attention
def logged(*args, **kwargs):
    print("ALLOWED", torch.nn.attention._cur_sdpa_kernel_backends())
    return original(*args, **kwargs)
F.scaled_dot_product_attention = logged
from benchmarks import gpu_variants
from torchtitan_lite.distributed.process_group import exit_process
exit_process(gpu_variants.main(sys.argv[1:]))
"""


@pytest.mark.extended
def test_a_backend_of_attention_is_the_only_one_allowed(text: Path, tmp_path: Path) -> None:
    script = tmp_path / "logs.py"
    script.write_text(_LOGS)
    options = tiny(text, tmp_path, train__steps=1, optim__warmup_steps=0, speed__block_attention=False)
    said = succeeded(ranks(1, "math", *options, entry=str(script)))
    allowed = {line for line in said.splitlines() if line.startswith("ALLOWED")}
    assert allowed == {"ALLOWED [<SDPBackend.MATH: 0>]"}


def test_fsdp_methods_are_called_or_reported_as_missing() -> None:
    called: list[str] = []

    class Sharded(FSDPModule, torch.nn.Linear):
        def __new__(cls, *_: Any, **__: Any) -> "Sharded":
            return object.__new__(cls)

        def set_symm_mem_for_comm(self, *_: Any) -> None:
            called.append("symmetric")

        def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
            called.append(f"sum {enable}")

        def set_separate_reduce_scatter_group(self, *_: Any, **__: Any) -> None:
            called.append("separate")

    model = torch.nn.Sequential(Sharded(2, 2))
    gpu_variants.symmetric_memory(model)
    gpu_variants.separate_groups(model[0])
    assert called == ["symmetric", "sum True", "separate"]
    with pytest.raises(ConfigError, match=r"has no FSDPModule\.set_separate_reduce_scatter_group"):
        gpu_variants.separate_groups(torch.nn.Linear(2, 2))  # what an older torch lacks


def test_float8_without_torchao_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="torchao is not installed"):
        gpu_variants.to_float8(torch.nn.Module())


def test_float8_converts_the_blocks_before_they_are_sharded() -> None:
    """torchao emulates the GPU's products. Names stay the same; the loss changes by a rounding."""
    pytest.importorskip("torchao.float8")
    config = load.load(None, {"model.size": load.ConfigValue("1M", "test")}).config
    tokens = torch.arange(2 * 64).view(2, 64) % 61
    found = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        for name, convert in (("plain", lambda _: None), ("float8", lambda m: gpu_variants.to_float8(m, emulate=True))):
            with torch.device("meta"):
                model = build(config.model, 61)
            names = [name for name, _ in model.named_parameters()]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallelize, "apply_fsdp", parallelize.apply_fsdp)  # is put back
                gpu_variants.around_fsdp(convert, lambda _: None)
                parallelize.apply_fsdp(model, init_device_mesh("cpu", (1,)), config.fsdp)
            initialize.materialise(model, torch.device("cpu"), 0)
            loss = model(tokens, tokens)
            loss.backward()
            assert [name for name, _ in model.named_parameters()] == names
            assert all(p.grad is not None for p in model.parameters())
            found[name] = loss.item(), type(model.get_submodule("layers.0.attention.wq")), type(model.output)
    finally:
        dist.destroy_process_group()
    assert found["float8"][1].__name__ == "Float8Linear"
    assert found["float8"][2] is found["plain"][2], "the output matrix stays as it is"
    assert found["float8"][0] != found["plain"][0]
    assert found["float8"][0] == pytest.approx(found["plain"][0], rel=0.01)


@pytest.mark.extended
def test_failing_rows_give_the_reason_and_do_not_end_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(options: list[str], _n: int) -> gpu.Measured | str:
        if "variant=float8" in options:
            return gpu.reason("W0 noise\nbenchmarks.gpu_variants: torchao is not installed (No module)\n[rank0] Error")
        if "--train.micro_batch_size=8" in options:
            trace = '[rank0]:   File "/x/errors.py", line 95\n[rank0]: torch.OutOfMemoryError: CUDA out of memory.\n'
            return gpu.reason(f"noise\n{trace}")
        return gpu.Measured(20_000.0, 40.0, 0.0)

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(sys, "argv", ["gpu", "--skip-tests"])
    gpu.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(gpu.SETTINGS) + len(gpu.TITAN)
    failed = {row.split("|")[1].strip(): row for row in rows if "failed" in row}
    assert "torchao is not installed" in failed["and float8 by torchao, rowwise"]
    assert "OutOfMemoryError" in failed["no checkpointing, micro-batch 8"]
    assert "torchtitan is not installed" in rows[-1]
    assert sum("10,000" in row for row in rows) == len(rows) - len(failed)


def test_throughput_of_torchtitan_is_read_from_its_log() -> None:
    line = "[rank0]:\x1b[31mstep: {0}  loss: 2.7  grad_norm:  0.2  memory: {1}GiB(64.99%)  tps: {2}  mfu: 39%\x1b[39m"
    log = "\n".join(line.format(i, 76.5, f"{tps:,}") for i, tps in enumerate([100, 200, 6667, 6600, 6700]))
    found = gpu.read_torchtitan(log, 8)
    assert found is not None
    assert (found.tokens_per_second, found.peak_memory_gib) == (8 * 6667, 76.5)
    assert math.isnan(found.data_share)
    assert gpu.read_torchtitan("no such lines", 8) is None
