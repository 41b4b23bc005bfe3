"""What `plan` says of memory, communication and time, against measurements, against counting, and by hand."""

import functools
import json
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import ROOT, ranks, succeeded
from tests.memory_cases import CASES, EXTENDED, SLOW, VOCABULARY, config_of
from torchtitan_lite import init, plan, simulate
from torchtitan_lite.config import ModelConfig
from torchtitan_lite.devices import DEVICES, named
from torchtitan_lite.flops import flops_per_token
from torchtitan_lite.layout import Layout
from torchtitan_lite.models import build
from torchtitan_lite.simulate import Collective


def mark_of(name: str) -> str:
    return "slow" if name in SLOW else "extended" if name in EXTENDED else ""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [getattr(pytest.mark, mark)] if (mark := mark_of(name)) else []


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], dict[str, int]]:
    """Bytes by case, for a world size and those cases that are marked in the same way."""

    @functools.cache
    def measure(world_size: int, marked: str) -> dict[str, int]:
        file = tmp_path_factory.mktemp("memory") / "found.json"
        names = [name for name in CASES if mark_of(name) == marked]
        succeeded(ranks(world_size, str(file), "cpu", *names, entry="tests.plan_worker"))
        return json.loads(file.read_text())

    return measure


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", [pytest.param(n, marks=marks_of(n)) for n in CASES])
def test_memory_is_what_is_measured(name: str, world_size: int, measured: Callable[[int, str], dict[str, int]]) -> None:
    found = simulate.simulate(config_of(name, world_size), world_size, VOCABULARY, on_gpu=False)
    assert found.peak_bytes == pytest.approx(measured(world_size, mark_of(name))[name], rel=0.05)


@pytest.mark.parametrize("name", [
    pytest.param("llama, full, every other of 6", marks=pytest.mark.extended), "tied, bfloat16, prefetching",
])  # fmt: skip
def test_a_deep_model_is_what_two_shallow_ones_say(name: str) -> None:
    config = config_of(name, 4, **{"model.n_layers": 9, "train.global_batch_size": 32})
    found = simulate.simulate(config, 4, VOCABULARY, on_gpu=False)
    with simulate.fake_world(4):
        whole = simulate._simulate(config, 4, VOCABULARY, 9, False)
    assert found.peak == whole.peak
    assert found.kept == whole.kept
    assert found.collectives == whole.collectives


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_flops_are_those_that_are_counted(family: str) -> None:
    for tied in (False, True):
        values = {"family": family, "dim": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 32, "tie_embeddings": tied}
        with torch.device("meta"):
            model = build(ModelConfig.model_validate(values), 97)
        init.materialise(model, torch.device("cpu"), 0)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
        counts = counter.get_flop_counts()["Global"]
        products = sum(n for operator, n in counts.items() if "attention" not in str(operator))
        attention = 12 * 3 * 64 * 32
        # vectors are parameters too: the formula counts them, and nothing multiplies with them
        assert flops_per_token(model, 32) - attention == pytest.approx(products / 64, rel=0.02)


def test_flops_of_llama_8b() -> None:
    with torch.device("meta"):
        config = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 14336}
        model = build(ModelConfig.model_validate(config), 128256)
    n, embedding = 8_030_261_248, 128256 * 4096
    assert flops_per_token(model, 8192) == 6 * (n - embedding) + 12 * 32 * 32 * 128 * 8192


def test_what_is_sent_is_what_is_sharded() -> None:
    config = config_of("llama", 8, **{"train.global_batch_size": 3 * 8 * 4, "model.n_layers": 9})
    found = plan.make_plan(config, 8, DEVICES["h100"])
    assert found.layout.grad_accum_steps == 3
    sent: dict[str, int] = {}
    for collective, times in found.collectives.items():
        assert collective.ranks == 8
        sent[collective.kind] = sent.get(collective.kind, 0) + collective.bytes * times
    everything = 4 * found.n_parameters
    table = 4 * 4096 * 128  # tok_embeddings; the head is as large, and has the last norm
    assert sent["all-gather, forward"] == 3 * everything
    assert sent["all-gather, backward"] == 3 * (everything - 2 * table - 4 * 128)
    assert sent["reduce-scatter"] == 3 * everything


def test_a_link_takes_its_time() -> None:
    h100 = DEVICES["h100"]

    def layout(replicate: int, shard: int) -> Layout:
        return Layout(replicate, shard, 1, 0, 1)

    gathered = Collective("reduce-scatter", 8_000_000_000, 8)
    assert plan.link_s(gathered, h100, layout(1, 8), 8) == pytest.approx(7 / 450)
    over_4_machines = Collective("reduce-scatter", 8_000_000_000, 32)
    assert plan.link_s(over_4_machines, h100, layout(1, 32), 32) == pytest.approx(8 * 31 / 32 / 450)
    assert plan.link_s(over_4_machines, DEVICES["a100"], layout(1, 32), 32) == pytest.approx(8 * 0.75 / 200)
    summed = Collective("all-reduce", 1_000_000_000, 0)
    assert plan.link_s(summed, h100, layout(4, 8), 32) == pytest.approx(2 * 0.75 / 50)
    assert plan.link_s(summed, h100, layout(2, 4), 8) == pytest.approx(2 * 0.5 / 450)


BIG = ["--config", str(ROOT / "configs/llama_70b.toml"), "--model.size=405B", "--model.vocab_size=128256"]


def test_405b_on_1024_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*BIG, "--world-size=1024", "--device=b200", "--activation_checkpointing.mode=full"]) == 0
    out = capsys.readouterr().out
    assert "405,853,388,800 parameters" in out
    assert "fits: 179.0 GiB" in out
    assert "1024 x b200 = dp_replicate 1 x dp_shard 1024" in out
    assert "bound by computing" in out


@pytest.mark.slow
def test_advice_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--train.seq_len=2048", "--model.max_seq_len=2048", "--model.size=8B", "--train.micro_batch_size=4"]
    command = ["--config", str(ROOT / "configs/llama_8b.toml"), *small, "--world-size=16", "--device=rtx4090"]
    assert plan.main(command) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    *not_yet, last = out.split("what to change\n")[1].splitlines()
    assert not_yet
    assert all("not yet" in line for line in not_yet)
    assert "fits" in last
    advised = last.split("fits")[1].split()
    assert plan.main([*command, *advised]) == 0
    again = capsys.readouterr().out
    assert "DOES NOT FIT" not in again
    assert last.split("GiB")[0].strip() in again


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device=h1000"], "--device=h1000 is not known: a100, h100, h200"),
        (["--device=mine", "--peak-tflops=100"], "--memory-gib=N"),
        (["--world-size=0"], "--world-size=0 should be 1 or more"),
        (["--peak-tflops=-1"], "--peak-tflops should be above 0"),
        (["--train.stepps=1"], "train.steps"),
        (["--world-size=6", "--fsdp.dp_shard=4"], "does not give the world size 6"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_own_figures(capsys: pytest.CaptureFixture[str]) -> None:
    figures = ["--peak-tflops=100", "--memory-gib=10", "--memory-gbs=1000", "--intra-node-gbs=10", "--inter-node-gbs=1"]
    assert plan.main(["--device=mine", *figures, "--world-size=2"]) == 0
    out = capsys.readouterr().out
    assert "2 x mine" in out
    assert "10.0 GiB on the device" in out
    assert plan.main(["--device=cpu", "--world-size=2"]) == 0
    assert "not bounded" in capsys.readouterr().out


def test_names_of_drivers() -> None:
    assert named("NVIDIA H100 80GB HBM3") == DEVICES["h100"]
    assert named("NVIDIA GeForce RTX 4090") == DEVICES["rtx4090"]
    assert named("NVIDIA H100 PCIe") is None
    assert named("Tesla T4") is None


def test_nothing_is_left_of_the_fake_world() -> None:
    assert not torch.distributed.is_initialized()
