"""Compares `plan`'s memory, communication and time with measurements and manual counts."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import ROOT, python, run_distributed, succeeded, tiny
from tests.tools.memory import CASES, EXTENDED, FULL, HYBRID, SLOW, T5, VOCABULARY, config_of, config_with, peaks_of
from torchtitan_lite import plan
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config, ModelConfig
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.distributed import initialize
from torchtitan_lite.distributed.process_group import build_mesh
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.run.mfu import DEVICES, flops_per_token, multiplied_parameters, named
from torchtitan_lite.terminal import size
from torchtitan_lite.tools.estimate import command, simulate
from torchtitan_lite.tools.estimate.planned_run import Plan, link_s, make_plan, vocabulary
from torchtitan_lite.tools.estimate.work import Collective, Product

H100 = DEVICES["h100"]


def collectives_of(found: Plan) -> Counter[Collective]:
    """The collectives of forward and backward in a step."""
    total: Counter[Collective] = Counter()
    for i, times in found.simulated.micro_batches(found.layout.grad_accum_steps):
        total.update({key: times * n for key, n in found.simulated.collectives[i].items()})
    return total


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


def test_a_checkpoint_has_the_parameters_and_the_state_of_all_ranks() -> None:
    """However many ranks there are: 12 bytes a parameter with AdamW, and 4 more with averages."""
    values: dict[str, Any] = {"tokenizer.vocab_size": VOCABULARY, "model.n_layers": 2, "optim.name": "adamw"}
    for ranks, decay, each in ((1, 0.0, 12), (4, 0.0, 12), (4, 0.9, 16)):
        found = make_plan(config_with(values | {"optim.ema_decay": decay}, ranks), ranks, H100)
        assert found.checkpoint_bytes == pytest.approx(each * found.n_parameters, rel=0.01)
        assert f"        a checkpoint on disk: {size(found.checkpoint_bytes)}" in command._memory_lines(found)


MESHES = pytest.mark.parametrize("mesh", [{}, {"fsdp.dp_replicate": 2}], ids=["shards", "hybrid"])


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@MESHES
def test_averages_take_one_copy_of_the_shards(mesh: dict[str, Any], optimizer: str) -> None:
    """With each optimizer on each mesh. The shards of the hybrid one are twice as large."""
    values = mesh | {"optim.name": optimizer, "model.n_layers": 2}
    plain, averaged = (
        make_plan(config_with(values | {"tokenizer.vocab_size": VOCABULARY, "optim.ema_decay": decay}, 4), 4, H100)
        for decay in (0.0, 0.9)
    )
    assert plain.layout.dp_shard == (2 if mesh else 4)
    start, more = plain.simulated.peaks["start"], averaged.simulated.peaks["start"]
    shards = 4 * plain.n_parameters // plain.layout.dp_shard
    assert more == {**start, "optimizer state": start["optimizer state"] + shards}
    assert collectives_of(averaged) == collectives_of(plain), "they are computed on each rank's shards"
    assert averaged.simulated.exchanges == plain.simulated.exchanges
    assert bool(plain.simulated.exchanges) == (optimizer == "muon")
    assert {c.ranks for c in plain.simulated.exchanges} <= {plain.layout.dp_shard, plain.layout.dp_replicate}


def test_offloading_moves_shards_gradients_and_state_to_the_host() -> None:
    values: dict[str, Any] = {"tokenizer.vocab_size": VOCABULARY, "optim.ema_decay": 0.9, "model.n_layers": 2}
    on_device, offloaded = (
        make_plan(config_with(values | {"fsdp.cpu_offload": on}, 4), 4, H100) for on in (False, True)
    )
    assert offloaded.simulated.peak == on_device.simulated.peak
    moved = {"parameters", "optimizer state", "gradients"}
    assert offloaded.device_bytes == {k: n for k, n in on_device.device_bytes.items() if k not in moved}
    host = sum(n for kind, n in on_device.device_bytes.items() if kind in moved)
    assert f"        on the host, per rank: {size(host)}" in command._memory_lines(offloaded)
    assert not any("on the host" in line for line in command._memory_lines(on_device))
    assert command._time_lines(offloaded) == ["time    unknown: copies to the host are not estimated"]


def test_float8_is_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    plan = make_plan(config_with({"speed.float8": True, "fsdp.param_dtype": "bfloat16"}, 1), 1, H100)
    assert "        (float8 is not estimated: this is bfloat16)" in command._memory_lines(plan)
    assert command._time_lines(plan) == ["time    unknown: float8 is not estimated"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama, full, every other of 6", {"model.n_layers": 9}),
        ("tied, bfloat16, prefetching", {"model.n_layers": 9}),
        ("t5", {"model.n_layers": 9, "model.n_decoder_layers": 7, "model.hidden_dim": 96}),
        ("t5", {"model.n_layers": 9, "model.n_decoder_layers": 7, **FULL, "activation_checkpointing.every": 2}),
    ],
)
@pytest.mark.extended
def test_extrapolation_matches_a_simulation_at_full_depth(name: str, more: dict[str, Any]) -> None:
    config = config_of(name, 4, **more, **{"train.global_batch_size": 32})
    extrapolated = simulate.simulate(config, 4, VOCABULARY, on_gpu=False)
    with simulate.fake_world(4):
        mesh = build_mesh(config.fsdp, torch.device("cpu"))
        whole = simulate.simulate_depths(config, mesh, VOCABULARY, list(config.model.stacks), False)
    assert extrapolated.peak == whole.peak
    assert extrapolated.collectives == whole.collectives


def triangular_flops(a: torch.Size, b: torch.Size, **_: Any) -> int:
    """Torch counts none: half of those of the product with a whole matrix."""
    return b.numel() * a[-1]


def counted_flops(values: dict[str, Any], inputs: torch.Tensor, targets: torch.Tensor) -> tuple[Transformer, int]:
    """A model, and the FLOPs of the products of a step as torch counts them, without the kernels of attention."""
    with torch.device("meta"):
        model = build(ModelConfig.model_validate(values), 97)
    initialize.materialise(model, torch.device("cpu"), 0)
    triangular: Any = {torch.ops.aten.linalg_solve_triangular: triangular_flops}
    with FlopCounterMode(display=False, custom_mapping=triangular) as counter:
        model(inputs, targets).backward()
    counts = counter.get_flop_counts()["Global"]
    return model, sum(n for operator, n in counts.items() if "attention" not in str(operator))


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_flops_match_those_counted_by_torch(family: str) -> None:
    for tied in (False, True):
        values = {"family": family, "dim": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 32, "tie_embeddings": tied}
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        model, products = counted_flops(values, tokens, tokens)
        attention = 12 * 3 * 64 * 32
        # vectors are parameters too: the formula counts them, and nothing multiplies with them
        assert flops_per_token(model, 32) - attention == pytest.approx(products / 64, rel=0.02)


def test_experts_take_the_products_of_a_dense_model_as_wide_as_the_active_ones() -> None:
    """And those of the routers, 8 outputs in 4 layers."""
    work, flops = {}, {}
    for family in ("llama", "qwen3_moe"):  # 384, and 2 of 8 experts with 192 each
        same = {"model.n_layers": 4, "model.n_heads": 4, "model.n_kv_heads": 2, "tokenizer.vocab_size": VOCABULARY}
        plan = make_plan(config_with({"model.family": family, **same}, 1), 1, None)
        products = [(p, n) for p, n in plan.simulated.work[0].items() if isinstance(p, Product)]
        work[family] = sum(n * 2 * p.batch * p.m * p.n * p.k for p, n in products)
        flops[family] = plan.flops_per_token
    assert plan.n_parameters - plan.n_active == 4 * 6 * 3 * 192 * 128
    assert flops["qwen3_moe"] - flops["llama"] == 6 * 4 * 8 * 128
    assert work["qwen3_moe"] - work["llama"] == 4 * 256 * 6 * 4 * 8 * 128


def test_flops_of_a_recurrence_are_those_of_its_chunks() -> None:
    """The first chunk needs no gradient of its initial memory, the last no final one. Of the others all are counted."""
    values = {"family": "olmo_hybrid", "dim": 48, "n_heads": 3, "n_layers": 3, "layer_pattern": ["delta", "full"]}
    products = []
    for length in (128, 256):
        tokens = torch.zeros(2, length, dtype=torch.int64)
        model, n = counted_flops(values, tokens, tokens)
        products.append(n)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and ".conv_" not in name)
    matrices -= model.tok_embeddings.weight.numel()
    of_all = flops_per_token(model, 256) - 12 * 48 * 256  # of the one layer with attention
    vectors = multiplied_parameters(model) - matrices  # the formula counts them
    assert products[1] - products[0] == 2 * 128 * (of_all - 6 * vectors)
    assert of_all - 6 * multiplied_parameters(model) == 2 * 3 * (18 * 12 * 24 + 64 * (12 * 12 + 10 * 24))

    same = {"model.family": "olmo_hybrid", "model.n_layers": 2, "model.layer_pattern": ["delta", "full"]}
    ours = {"tokenizer.vocab_size": VOCABULARY, "speed.block_attention": False}  # whose products are no kernel
    plan = make_plan(config_with(same | ours, 1), 1, None)
    planned = [(p, n) for p, n in plan.simulated.work[0].items() if isinstance(p, Product)]
    tokens = torch.zeros(4, 256, dtype=torch.int64)
    model_config = load.load(None, same | {"model.vocab_size": VOCABULARY}, elsewhere=True).config.model
    _, counted = counted_flops(model_config.model_dump(), tokens, tokens)
    assert sum(n * 2 * p.batch * p.m * p.n * p.k for p, n in planned) == counted


def test_flops_of_llama_8b() -> None:
    with torch.device("meta"):
        config = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 14336}
        model = build(ModelConfig.model_validate(config), 128256)
    n, embedding = 8_030_261_248, 128256 * 4096
    assert flops_per_token(model, 8192) == 6 * (n - embedding) + 12 * 32 * 32 * 128 * 8192


@pytest.mark.extended
def test_communication_follows_from_the_shards() -> None:
    config = config_of("llama", 8, **{"train.global_batch_size": 3 * 8 * 4, "model.n_layers": 9})
    found = make_plan(config, 8, H100)
    assert found.layout.grad_accum_steps == 3
    sent: dict[str, int] = {}
    for collective, times in collectives_of(found).items():
        assert collective.ranks == 8
        sent[collective.kind] = sent.get(collective.kind, 0) + collective.bytes * times
    everything = 4 * found.n_parameters
    table = 4 * 4096 * 128  # tok_embeddings; the head is as large, and has the last norm
    assert sent["all-gather, forward"] == 3 * everything
    assert sent["all-gather, backward"] == 3 * (everything - 2 * table - 4 * 128)
    assert sent["reduce-scatter"] == 3 * everything


def test_a_reduction_that_waits_for_the_last_micro_batch_is_planned_once() -> None:
    config = config_of("llama", 8, **{"train.global_batch_size": 3 * 8 * 4, "model.n_layers": 9})
    last = config.model_copy(update={"fsdp": config.fsdp.model_copy(update={"grad_sync": "last"})})
    every, once = (
        sum(
            times for collective, times in collectives_of(make_plan(c, 8, H100)).items() if "scatter" in collective.kind
        )
        for c in (config, last)
    )
    assert every == 3 * once > 0


def test_link_times_follow_from_bytes_and_bandwidth() -> None:
    gathered = Collective("reduce-scatter", 8_000_000_000, 8)
    assert link_s(gathered, H100, 8) == pytest.approx(7 / 450)
    over_4_machines = Collective("reduce-scatter", 8_000_000_000, 32)
    assert link_s(over_4_machines, H100, 32) == pytest.approx(8 * 31 / 32 / 450)
    assert link_s(over_4_machines, DEVICES["a100"], 32) == pytest.approx(8 * 0.75 / 200)
    of_4, of_2 = (Collective("all-reduce", 1_000_000_000, copies) for copies in (4, 2))
    assert link_s(of_4, H100, 32) == pytest.approx(2 * 0.75 / 50)
    assert link_s(of_2, H100, 8) == pytest.approx(2 * 0.5 / 450)


@pytest.mark.extended
def test_405b_on_1024_ranks_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(ROOT / "configs/llama_70b.toml"), "--model.size=405B", "--train.micro_batch_size=1"]
    assert plan.main([*command, "--world-size=1024", "--device=b200", "--activation_checkpointing.mode=full"]) == 0
    out = capsys.readouterr().out
    assert "405,853,388,800 parameters" in out
    assert ": fits into 179.0 GiB with a reserve" in out
    assert "1024 x b200 = dp_replicate 1 x dp_shard 1024" in out


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
    words = [str(text), "--out", str(tmp_path / "data"), "--train-tokenizer", "400"]
    succeeded(python(*words, script="-m torchtitan_lite.data.prepare"))
    small = ["--model.dim=32", "--model.n_layers=2", "--model.n_heads=2", "--train.seq_len=32", "--train.steps=100"]
    assert plan.main([*small, "--device=cpu", f"--data.path={tmp_path / 'data'}"]) == 0
    found = re.search(
        rf"^data    {tmp_path / 'data'}: ([\d,]+) .* ([\d.]+) epochs in 100", capsys.readouterr().out, re.M
    )
    assert found
    assert float(found[2]) == pytest.approx(100 * 8 * 32 / int(found[1].replace(",", "")), abs=0.01)


def test_a_device_is_one_of_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan.main(["--device=h1000"])
    assert "'h1000' (choose from" in capsys.readouterr().err
    assert plan.main(["--device=cpu", "--model.dim=32", "--model.n_layers=2", "--model.n_heads=2"]) == 0
    assert "time    unknown" in capsys.readouterr().out


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


def test_figures_of_devices_are_plausible() -> None:
    """Units slip easily: each is between the least and the most of what is sold."""
    for device in DEVICES.values():
        assert 6e13 < device.half_flops < 3e15
        assert 1.5 < device.half_flops / device.fp32_flops < 35
        assert 14 < device.memory_gib < 300
        assert 0.3e12 <= device.memory_bandwidth <= 8e12
        assert 1e9 < device.inter_node <= device.intra_node < 1e12
        assert device.per_node in (1, 8, 72)


def test_a_device_without_bfloat16_computes_it_at_the_rate_of_float32() -> None:
    """And float32 at that of TF32, if it has that."""
    bf16, fp16 = ({"fsdp.param_dtype": dtype} for dtype in ("bfloat16", "float16"))
    for name, expected in {"v100": 15.7e12, "h100": 989e12}.items():
        plan_ = make_plan(load.load(None, bf16).config, 1, DEVICES[name])
        assert plan_.device
        assert plan_.device.peak_flops("bfloat16") == expected
    assert DEVICES["v100"].computing(load.load(None, fp16).config).peak_flops("float16") == 125e12
    tf32 = load.load(None, {"run.tf32": True}).config
    found = {name: DEVICES[name].computing(tf32).peak_flops("float32") for name in ("h100", "v100", "mi300x")}
    assert found == {"h100": 494.5e12, "v100": 15.7e12, "mi300x": 163.4e12}


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


def test_the_vocabulary_is_the_one_that_training_would_have(tmp_path: Path) -> None:
    """That of the prepared folder or of the tokenizer; if neither is named, of the one that is trained."""

    def found(key: str, value: object) -> tuple[int, str]:
        return vocabulary(load.load(None, {key: value}, elsewhere=True).config)

    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert found("tokenizer.path", str(tmp_path / "tokenizer.json")) == (257, "")
    (tmp_path / "x.txt").write_text("def")
    assert found("data.path", str(tmp_path / "x.txt")) == (4096, "")
    (tmp_path / "meta.json").write_text("{}")
    (tmp_path / "train.idx").touch()  # the folder of a preparation, whatever its meta.json says
    assert found("data.path", str(tmp_path)) == (257, "")
    assert found("data.sources", {str(tmp_path): 1.0}) == (257, "")
    entries, note = found("data.path", "/cluster/text")
    assert entries == 4096
    assert "give --model.vocab_size=N" in note


def t5_config(world_size: int, **more: Any) -> Config:
    return config_with(T5 | {key.replace("__", "."): value for key, value in more.items()}, world_size)


@pytest.mark.parametrize("more", [{}, {"tie_embeddings": True, "scale_output": True}], ids=["untied", "tied"])
def test_flops_of_an_encoder_decoder_match_those_counted_by_torch(more: dict[str, Any]) -> None:
    """On the CPU, attention with a bias is two products; torch counts the efficient kernel's in another way."""
    values = {"family": "t5", "dim": 64, "n_heads": 4, "n_layers": 3, "n_decoder_layers": 2, "hidden_dim": 160} | more
    ones = torch.ones(2, 48, dtype=torch.int64)
    model, products = counted_flops(values, ones, ones[:, :32])
    # self-attention is counted as products, cross-attention, which has a kernel, is not
    scores = 12 * 64 * 2 * 32 * 48
    assert flops_per_token(model, 48, 32) == pytest.approx((products / 2 + scores) / 32, rel=0.02)


def test_a_gpu_does_not_store_the_scores() -> None:
    config = t5_config(1, train__seq_len=512)
    gpu, cpu = (simulate.simulate(config, 1, VOCABULARY, on_gpu=on_gpu).peak for on_gpu in (True, False))
    scores = 4 * config.model.n_heads * 512**2 * 4
    # CPU: the probabilities of two encoder blocks; GPU: the bias that both read
    assert sum(cpu.values()) - sum(gpu.values()) > scores
    assert gpu["activations"] > scores


def test_the_collectives_are_those_of_both_stacks() -> None:
    """Each group is gathered in forward and in backward, but for the inputs, and the head, which stays."""
    config = t5_config(2, model__n_layers=3, model__n_decoder_layers=2)
    (found,) = simulate.simulate(config, 2, VOCABULARY, on_gpu=False).collectives
    calls = {kind: sum(n for c, n in found.items() if c.kind == kind) for kind in {c.kind for c in found}}
    assert calls["all-gather, forward"] == 1 + 5 + 1
    assert calls["all-gather, backward"] == 5
    assert calls["reduce-scatter"] == 7


@pytest.mark.extended
def test_the_printed_plan_of_an_encoder_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.family=t5", "--model.size=t5-v1_1-base", "--model.vocab_size=32128", "--train.seq_len=512"]
    words += ["--data.objective=span_corruption", "--fsdp.param_dtype=bfloat16", "--sample.every=0"]
    assert plan.main([*words, "--world-size=8"]) == 0
    out = capsys.readouterr().out
    assert "247,577,856 parameters" in out
    assert "at most 512 tokens and 114 targets" in out
    assert f": fits into {DEVICES['h100'].memory_gib:.1f} GiB" in out


@pytest.mark.extended
def test_inspect_lists_the_groups_of_both_stacks(text: Path, tmp_path: Path) -> None:
    shape = {"model__family": "t5", "data__objective": "span_corruption", "model__n_decoder_layers": 1}
    out = succeeded(python(*tiny(text, tmp_path, **shape), "--inspect"))
    table = [line.split("  ")[0] for line in out.splitlines()[-7:]]
    assert table == [
        *("group", "tok_embeddings, encoder_bias, decoder_bias", "layers.0", "layers.1, encoder_norm", "layers.2"),
        *("norm, output", "total"),
    ]


@pytest.mark.extended
def test_a_plan_has_the_memory_of_the_z_loss() -> None:
    """Computed from all logits, it keeps more of them for backward."""
    for chunked, grows in ((False, True), (True, False)):
        off, on = (make_plan(t5_config(1, train__z_loss=z, speed__chunked_loss=chunked), 1, None) for z in (0, 0.1))
        assert (sum(on.device_bytes.values()) > sum(off.device_bytes.values())) == grows


def test_patterns_may_name_a_block_that_the_shallow_models_lack(capsys: pytest.CaptureFixture[str]) -> None:
    deep = ["--world-size", "4", "--device", "h100", "--model.size=1M", "--model.n_layers=6"]
    for key in ("optim.freeze", "fsdp.shard_columns"):
        assert plan.main([*deep, f"--{key}=layers.5.attention.wk.weight"]) == 0
