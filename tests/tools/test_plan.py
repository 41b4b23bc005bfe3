"""Compares `plan`'s memory, communication and time with measurements and manual counts."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import ROOT, run_distributed
from tests.tools.memory import CASES, EXTENDED, HYBRID, SLOW, VOCABULARY, config_of, config_with, peaks_of
from torchtitan_lite import plan
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.distributed import initialize
from torchtitan_lite.models import build
from torchtitan_lite.run.mfu import DEVICES, flops_per_token, named
from torchtitan_lite.tools.estimate import simulate
from torchtitan_lite.tools.estimate.planned_run import make_plan

H100 = DEVICES["h100"]


def cases() -> Iterator[Any]:
    """The name of a case, and a number of ranks."""
    for name in CASES:
        mark = [pytest.mark.slow] if name in SLOW else [pytest.mark.extended] if name in EXTENDED else []
        if name in HYBRID:
            yield pytest.param(name, 4, marks=mark)
        else:
            yield pytest.param(name, 1, marks=pytest.mark.slow)
            yield pytest.param(name, 2, marks=mark)


@pytest.mark.parametrize(("name", "world_size"), [*cases()])
def test_planned_memory_matches_measured_memory(name: str, world_size: int) -> None:
    config = config_of(name, world_size)
    planned = simulate.simulate(config, world_size, VOCABULARY, on_gpu=False)
    (measured,) = run_distributed(peaks_of, world_size, [config])[0]
    assert sum(planned.peak.values()) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_flops_match_those_counted_by_torch(family: str, tied: bool) -> None:
    values = {"family": family, "dim": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 32, "tie_embeddings": tied}
    with torch.device("meta"):
        model = build(ModelConfig.model_validate(values), 97)
    initialize.materialize(model, torch.device("cpu"), 0)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counts = counter.get_flop_counts()["Global"]
    matmuls = sum(n for operator, n in counts.items() if "attention" not in str(operator))
    # vectors are parameters too: the formula counts them, and nothing multiplies with them
    assert flops_per_token(model, 32) - 12 * 3 * 64 * 32 == pytest.approx(matmuls / 64, rel=0.02), "without attention"


@pytest.mark.slow
def test_advised_options_make_the_run_fit(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(ROOT / "configs/llama_8b.toml"), "--world-size=16", "--device=rtx4090"]
    command += ["--train.seq_len=2048", "--model.max_seq_len=2048", "--train.micro_batch_size=4"]
    command += ["--activation_checkpointing.mode=none"]
    assert plan.main(command) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    *not_yet, last = [line for line in out.splitlines() if line.startswith("try ")]
    assert not_yet
    assert all("not yet" in line for line in not_yet)
    assert "fits" in last
    advised = last.split("fits: ")[1].split()
    assert plan.main([*command, *advised]) == 0
    again = capsys.readouterr().out
    assert "DOES NOT FIT" not in again
    assert last.removeprefix("try").split("GiB")[0].strip() in again


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size=0"], "--world-size=0 should be 1 or more"),
        (["--tokenizer.path=nowhere.json"], "nowhere.json is not on this machine; --model.vocab_size=N"),
        (["--train.stepps=1"], "train.steps"),
        (["--world-size=6", "--fsdp.dp_shard=4"], "does not give the world size 6"),
    ],
)
def test_invalid_options_are_errors_that_say_what_works(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_prepared_data_gives_the_epochs_of_the_run(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare([str(text), "--out", str(tmp_path / "data"), "--train-tokenizer", "400"]) == 0
    capsys.readouterr()
    small = ["--model.dim=32", "--model.n_layers=2", "--model.n_heads=2", "--train.seq_len=32", "--train.steps=100"]
    assert plan.main([*small, "--device=cpu", f"--data.path={tmp_path / 'data'}"]) == 0
    out = capsys.readouterr().out
    assert "vocabulary 400; computes in float32\nmesh    1 x cpu = dp_replicate 1 x dp_shard 1\n" in out
    found = re.search(rf"^data    {tmp_path / 'data'}: ([\d,]+) .* ([\d.]+) epochs in 100", out, re.M)
    assert found
    assert float(found[2]) == pytest.approx(100 * 8 * 32 / int(found[1].replace(",", "")), abs=0.01)

    # on a cluster, whose GPUs, compiler, trackers and files are not here
    assert plan.main([*small, *ELSEWHERE, "--world-size=16", "--fsdp.sharding_strategy=HYBRID_SHARD"]) == 0
    assert (
        "        /cluster/text is not on this machine: if it is a prepared folder, give --model.vocab_size=N\n"
        "mesh    16 x h100 = dp_replicate 2 x dp_shard 8\n"
    ) in capsys.readouterr().out


# as drivers report them, then as configs have them
NAMES = {
    **{"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200"},
    **{"NVIDIA GH200 480GB": "gh200", "NVIDIA B300 SXM6 AC": "b300", "NVIDIA GB200": "gb200", "NVIDIA GB300": "gb300"},
    **{"NVIDIA L40S": "l40s", "NVIDIA L40": "l40", "NVIDIA L4": "l4", "AMD Instinct MI325X": "mi325x"},
    **{"AMD Instinct MI300X": "mi300x", "AMD Instinct MI300X VF": "mi300x", "AMD Instinct MI355X": "mi355x"},
    **{"NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce RTX 5090": "rtx5090"},
    **{"NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA RTX 6000 Ada Generation": "rtx6000ada"},
    **{"NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000", "NVIDIA RTX A6000": "rtxa6000"},
    **{"NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb"},
    **{"NVIDIA A100 80GB PCIe": "a100-pcie", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H100 NVL": "h100-nvl"},
    **{"NVIDIA H200 NVL": "h200-nvl", "NVIDIA A10": "a10", "NVIDIA A10G": "a10g"},
    **{"NVIDIA A40": "a40", "NVIDIA A30": "a30", "Tesla V100-SXM2-16GB": "v100-16gb", "Tesla T4": "t4"},
    **{"Tesla V100-SXM2-32GB": "v100", "Tesla V100-PCIE-32GB": "v100-pcie", "AMD Instinct MI350X": "mi350x"},
    **{"Tesla V100-PCIE-16GB": "v100-pcie-16gb"},
    **{"H100 80 GB": "h100", "A100 80 GB": "a100", "RTX 4090 24 GB": "rtx4090"},
}
VARIANTS = """
    NVIDIA H800, NVIDIA H20, NVIDIA H20-3e, Tesla V100S-PCIE-32GB, , cpu, NVIDIA A100-SXM-64GB, NVIDIA RTX A1000,
    NVIDIA A800-SXM4-80GB, NVIDIA GH200 144G HBM3e, NVIDIA A10G MIG 1g, NVIDIA A40-48Q,
    NVIDIA H100 80GB HBM3 MIG 1g.10gb, NVIDIA A100-SXM4-80GB MIG 3g.40gb, NVIDIA H200 MIG 7g.141gb,
    NVIDIA GeForce RTX 4090 D, NVIDIA GeForce RTX 4090 Laptop GPU, NVIDIA GeForce RTX 5090 D,
    NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition, NVIDIA RTX PRO 6000 Blackwell Server Edition,
    NVIDIA GeForce RTX 3090 Ti, AMD Instinct MI300A, AMD Instinct MI250X
"""


def test_devices_are_recognised_by_name_and_their_variants_are_not() -> None:
    """Each variant has other figures."""
    assert {name: named(name) for name in NAMES} == {name: DEVICES[device] for name, device in NAMES.items()}
    assert set(NAMES.values()) == set(DEVICES)
    assert not [name for name in VARIANTS.split(",") if named(name.strip())]


class CountedOperators(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CountedOperators.n += 1
        return function(*args, **(kwargs or {}))


class CountedFakes(FakeTensorMode):
    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        CountedOperators.n += 1
        return super().__torch_dispatch__(*args, **kwargs)


def test_the_work_of_a_plan_does_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Muon: FSDP's chunks of each parameter, and what each of up to 4,096 ranks has of a matrix."""
    monkeypatch.setattr(simulate, "FakeTensorMode", CountedFakes)
    model = {"n_layers": 1, "dim": 64, "n_heads": 4, "hidden_dim": 4096}
    config = config_with({f"model.{key}": n for key, n in model.items()} | {"optim.name": "muon"}, 2)

    def operators(world_size: int) -> int:
        CountedOperators.n = 0
        with CountedOperators():  # type: ignore[no-untyped-call]
            make_plan(config, world_size, H100)
        return CountedOperators.n

    few = operators(2)
    assert operators(5000) < 1.1 * few
    assert not torch.distributed.is_initialized(), "a process group remains"


ELSEWHERE = ["--compile.enabled=true", '--log.trackers=["wandb","tensorboard"]', "--data.path=/cluster/text"]
ELSEWHERE += ["--model.init_from=/cluster/run", "--checkpoint.resume=/cluster/other", "--fsdp.param_dtype=bfloat16"]


@pytest.mark.parametrize("device", ["h100", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.extended
def test_a_plan_is_the_same_on_every_machine(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No compiler, no triton, no trackers, no files of the run; other cores, kernels and launchers; GPUs or none."""
    command = ["--world-size=16", f"--device={device}", "--fsdp.sharding_strategy=HYBRID_SHARD", *ELSEWHERE]
    command = [c for c in command if device != "cpu" or "HYBRID" not in c]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert plan.main(command) == 0, capsys.readouterr().err
    here = capsys.readouterr().out
    assert "/cluster/text is not on this machine" in here
    env = {"OMP_NUM_THREADS": "7", "ATEN_CPU_CAPABILITY": "default", "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    env |= {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": str(ROOT), "ONEDNN_MAX_CPU_ISA": "SSE41", "HOME": str(tmp_path)}
    hidden = "import sys; sys.modules.update(triton=None, wandb=None, tensorboard=None)"
    code = f"{hidden}\nfrom torchtitan_lite import plan; sys.exit(plan.main(sys.argv[1:]))"
    there = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert there.stdout == here, there.stderr
