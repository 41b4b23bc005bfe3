"""What `plan` computes and prints: small models whose figures are written down, number by number; published runs."""

from collections import Counter
from dataclasses import astuple, replace
from typing import Any

import pytest

from benchmarks import published
from tests.helpers import ROOT
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config
from torchtitan_lite.run.mfu import DEVICES
from torchtitan_lite.tools import dry_run
from torchtitan_lite.tools.estimate import command, simulate
from torchtitan_lite.tools.estimate.planned_run import SPREAD, Plan, expected, likely, link_s, make_plan, shares
from torchtitan_lite.tools.estimate.simulate import Simulated
from torchtitan_lite.tools.estimate.work import Collective, Matmul, Traffic

SMALL: dict[str, Any] = {"tokenizer.vocab_size": 1000, "model.dim": 128, "model.n_heads": 4, "model.n_layers": 1}
SMALL |= {"train.seq_len": 256, "train.micro_batch_size": 2}
HYBRID = {"fsdp.dp_replicate": 2, "optim.name": "adamw", "fsdp.param_dtype": "bfloat16"}
EXPERTS = {"model.family": "qwen3_moe", "model.n_experts": 6, "optim.name": "muon", "compile.enabled": True}
T5 = {"model.family": "t5", "model.n_decoder_layers": 1, "data.objective": "span_corruption", "optim.name": "adamw"}
WINDOW = {"model.family": "mistral", "model.window": 100, "model.n_kv_heads": 2, "optim.name": "muon"}
# by device: values and ranks; bytes by kind; microseconds of matmuls, attention, others, communication and optimizer;
# bytes and kernels of the first micro-batch's forward; bytes of a checkpoint, parameters, active ones, FLOPs of a token
FIGURES: dict[str, tuple[dict[str, Any], int, list[int], list[float], tuple[int, int], tuple[int, ...]]] = {
    "h100": (
        HYBRID | {"train.global_batch_size": 256},
        32,
        [380_016, 235_800, 117_872, 258_304, 258_304, 5_220_360],
        [25.8, 1.3, 6162.9, 562.2, 0.4],
        (29_234_860, 133),
        (5_634_172, 469_440, 469_440, 2_441_856),
    ),
    "l4": (
        EXPERTS | {"train.global_batch_size": 16},
        8,
        [866_016, 732_124, 64_064, 3_806_464, 4_318_976, 13_924_408],
        [180.7, 11.4, 637.9, 238.0, 278.6],
        (47_285_860, 85),
        (10_685_703, 1_207_488, 617_664, 3_331_200),
    ),
    "a100": (
        T5 | {"optim.ema_decay": 0.9, "train.global_batch_size": 32},
        16,
        [212_256, 636_884, 0, 1_312_256, 1_312_256, 12_908_884],
        [102.1, 33.8, 2104.2, 155.1, 1.3],
        (62_874_964, 224),
        (13_553_468, 846_976, 846_976, 12_576_052),
    ),
    "b200": (
        WINDOW | {"fsdp.dp_replicate": 4, "train.global_batch_size": 32},
        16,
        [715_136, 709_396, 0, 512_512, 512_512, 8_947_720],
        [32.2, 4.3, 1038.5, 81.1, 340.5],
        (28_078_356, 90),
        (4_649_552, 452_992, 452_992, 2_103_552),
    ),
}
LINES = """\
model   llama dim 128, 1 layer, 4 heads of 32, feed-forward 384, qk_norm, induction_head: 469,440 parameters, \
vocabulary 1,000; computes in bfloat16
mesh    32 x h100 = dp_replicate 2 x dp_shard 16
batch   2 sequences x 32 ranks x 4 accumulation steps, of 256 tokens = 65,536 tokens per step
run     20,000,000 steps, 1,310,720,000,000 tokens
memory  6.17 MiB peak per rank: fits in 79.6 GiB with a reserve of 6%
        parameters 0.36 MiB, optimizer state 0.22 MiB, gradients 0.11 MiB, gathered parameters 0.25 MiB, \
communication buffers 0.25 MiB, activations 4.98 MiB
        a checkpoint on disk: 5.37 MiB
time    a step takes 0.007 s, likely 0.006 to 0.008: 303,291 tokens per second per device, 0% MFU
        matmuls 0.000 s, attention 0.000, other operators 0.006, exposed communication 0.001, optimizer 0.000
        based on published runs of h100; nine of ten runs that were not used for fitting are within 15% \
of their estimates (docs/plan.md)
        the run takes 1d13h, likely 1d08h to 1d20h: 1,200 device hours"""
OFFLOADED = """\
memory  5.47 MiB peak per rank: fits in 79.6 GiB with a reserve of 6%
        gathered parameters 0.25 MiB, communication buffers 0.25 MiB, activations 4.98 MiB
        a checkpoint on disk: 5.37 MiB
        on the host, per rank: 0.70 MiB
time    unknown: copies to the host are not estimated"""
FLOAT8 = [
    "        (these estimates are for bfloat16; float8 is not estimated)",
    "time    unknown: float8 is not estimated",
]
COMPILED = "        (compiled blocks need less memory; this estimate ignores that)"
ADVICE = """\
try     {peak}, not yet, 0.007 s a step: --activation_checkpointing.mode=selective
try     {peak}, not yet, 0.007 s a step: --activation_checkpointing.mode=full
try     {peak}, not yet, 0.007 s a step: {one}
try     {peak}, not yet, 0.007 s a step: {all}
try     {peak}, not yet, 0.007 s a step: {all} --world-size=64
try     {peak}, not yet, 0.007 s a step: {all} --world-size=128
try     {peak}, {last}, 0.007 s a step: {all} --world-size=256"""
ENOUGH_MISSING = "        none of these is enough; use more ranks, a smaller model, or a device with more memory"


DRY_RUN = """\
dry run of {root}/runs/mine: three steps in a temporary folder; the run itself was not changed
model   llama dim 128, 1 layer, 4 heads of 32, feed-forward 384, qk_norm, induction_head: 469,440 parameters; \
computes in bfloat16
batch   2 sequences x 32 ranks x 4 accumulation steps, of 256 tokens = 65,536 tokens per step
fsdp    reshard_after_forward default; reduces in float32

                               planned   measured
memory of rank 0 at the peak  6.17 MiB   2.50 MiB
time of a step                 0.007 s    0.016 s
20,000,000 steps                 1d13h      3d16h
tokens per second                       4,096,000
times exclude saves, validations and samples"""


def config_of(values: dict[str, Any], world_size: int) -> Config:
    return load.load(None, SMALL | values, world_size=world_size, n_gpus=8, elsewhere=True).config


def changed(plan: Plan, section: str, **values: Any) -> Plan:
    """The plan of a config with other values, as if they changed nothing in the simulation."""
    table = getattr(plan.config, section).model_copy(update=values)
    return replace(plan, config=plan.config.model_copy(update={section: table}))


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {
        device: make_plan(config_of(values, ranks), ranks, DEVICES[device])
        for device, (values, ranks, *_) in FIGURES.items()
    }


@pytest.mark.parametrize("device", FIGURES)
def test_the_figures_of_a_plan(device: str, plans: dict[str, Plan]) -> None:
    plan, (_, _, memory, times, forward, sizes) = plans[device], FIGURES[device]
    assert [*plan.simulated.peak.values()] == pytest.approx(memory, rel=0.005)
    assert [1e6 * seconds for seconds in astuple(expected(plan, DEVICES[device]))] == pytest.approx(times, abs=0.06)
    work = plan.simulated.work[0]
    moved = work[Traffic("forward")], work[Traffic("forward", kernels=True)]
    assert moved == pytest.approx(forward, rel=0.005)
    assert (plan.checkpoint_bytes, plan.n_parameters, plan.n_active, plan.flops_per_token) == sizes


def test_the_lines_of_a_plan(plans: dict[str, Plan]) -> None:
    plan = changed(plans["h100"], "train", steps=20_000_000)
    lines = [*command._model_lines(plan), *command._memory_lines(plan), *command._time_lines(plan)]
    assert "\n".join(lines) == LINES
    offloaded = changed(plan, "fsdp", cpu_offload=True)
    assert "\n".join([*command._memory_lines(offloaded), *command._time_lines(offloaded)]) == OFFLOADED
    float8 = changed(plan, "speed", float8=True)
    assert [*command._memory_lines(float8), *command._time_lines(float8)][3:] == FLOAT8
    assert command._memory_lines(changed(plan, "compile", enabled=True))[3:] == [COMPILED]
    epochs = changed(plan, "train", steps=0, epochs=1.5)
    last = "run     train.epochs = 1.5; the number of steps needs prepared data in data.path"
    assert command._model_lines(epochs)[-1] == last
    assert "the run takes" not in "".join(command._time_lines(replace(epochs, device=DEVICES["h100"])))
    on_cpu = replace(plan, device=None)
    assert "mesh    32 x cpu = dp" in command._model_lines(on_cpu)[1]
    assert command._memory_lines(on_cpu)[0] == "memory  6.17 MiB peak per rank"
    assert command._time_lines(on_cpu) == ["time    unknown: the peak of this device is not known"]
    assert command._model_lines(plans["l4"])[0].endswith(
        "1,207,488 parameters, 617,664 of them active, vocabulary 1,000; computes in float32"
    )
    assert "based on other devices: l4 has no published run" in command._time_lines(plans["l4"])[2]
    for n_bytes, shown in ((99_999_999_999, "93.13 GiB"), (10**11, "0.1 TB"), (2_345 * 10**9, "2.35 TB")):
        assert command._memory_lines(replace(plan, checkpoint_bytes=n_bytes))[2].endswith(f"disk: {shown}")
    # in a schedule, 4 steps of 64 and 6 of 256 are 7 of the last size
    schedule = changed(plan, "train", steps=10, batch_schedule=((0, 64), (4, 256)))
    assert schedule.full_steps == 7


def test_the_table_of_a_dry_run(plans: dict[str, Plan]) -> None:
    plan = changed(plans["h100"], "train", steps=20_000_000)
    found = [
        dry_run.compare(one, 5 * 2**19, 0.016, ROOT / "runs/mine")
        for one in (
            plan,
            replace(plan, device=None),
            changed(plan, "speed", float8=True),
            changed(plan, "compile", enabled=True),
        )
    ]
    assert found[0] == DRY_RUN.format(root=ROOT)
    assert [table.splitlines()[-2] for table in found[2:]] == [
        "(the plan is for bfloat16: float8 is not estimated)",
        "(the plan ignores the memory that compiled blocks save)",
    ]
    assert [table.count("0.007 s") + table.count("1d13h") for table in found] == [2, 0, 0, 2]


def test_the_advice_of_a_plan(plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no change, or the last one, had an effect."""
    plan = plans["h100"]
    assert plan.device
    room = sum(plan.device_bytes.values()) / 0.94 / 2**30
    fits, too_small = (replace(plan, device=replace(plan.device, memory_gib=room * k)) for k in (1.0001, 0.9999))
    assert [*command._advice(fits)] == []
    one = "--activation_checkpointing.mode=full --train.micro_batch_size=1"
    words = {"peak": "6.17 MiB", "one": one, "all": f"{one} --fsdp.dp_shard=-1 --fsdp.dp_replicate=1"}
    monkeypatch.setattr(command, "make_plan", lambda config, ranks, device: fits if ranks == 256 else too_small)
    assert [*command._advice(too_small)] == ADVICE.format(**words, last="fits").split("\n")
    monkeypatch.setattr(command, "make_plan", lambda config, ranks, device: too_small)
    assert [*command._advice(too_small)] == [*ADVICE.format(**words, last="not yet").split("\n"), ENOUGH_MISSING]
    assert next(command._changes(plans["a100"]))[0] == "--fsdp.param_dtype=bfloat16"
    least = changed(changed(plan, "activation_checkpointing", mode="full"), "train", micro_batch_size=1)
    least = replace(least, layout=replace(least.layout, dp_replicate=1))
    assert next(command._changes(least))[0] == "--world-size=64"
    given = changed(least, "fsdp", dp_shard=16, dp_replicate=1)
    assert next(command._changes(given))[0] == "--fsdp.dp_shard=-1 --fsdp.dp_replicate=1"


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ({"model.n_layers": 11}, [5]),
        ({"model.n_layers": 13, "fsdp.blocks_per_group": 2}, [11]),
        ({"model.n_layers": 14, "model.family": "gemma3", "model.layer_pattern": ["window"] * 2 + ["full"]}, [11]),
        (
            {"model.n_layers": 17, "activation_checkpointing.mode": "full", "activation_checkpointing.every": 3},
            [11],
        ),
        (T5 | {"model.n_layers": 9, "model.n_decoder_layers": 12}, [5, 5]),
        ({"model.n_layers": 11, "fsdp.explicit_prefetching": True, "fsdp.backward_prefetch": 3}, [7]),
        ({"model.n_layers": 7, "optim.freeze": ["layers.0.*"]}, [7]),
        ({"model.n_layers": 5}, [5]),
    ],
)
def test_a_deep_model_is_extrapolated_in_whole_periods(
    values: dict[str, Any], most: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is linear in the number of layers, and differs between those of a period, comes out exactly."""
    config, made = config_of(values, 2), list[list[int]]()
    pattern, every = len(config.model.layer_pattern), config.activation_checkpointing.every
    matmul, gather = Matmul("forward", 1, 2, 3, 4, 4), Collective("all-reduce", 8, 2)

    def of_depths(_config: Config, _mesh: Any, _vocabulary: int, depths: list[int], _on_gpu: bool) -> Simulated:
        made.append(depths)
        n = 100 + sum((7 + 2 * i) * depth for i, depth in enumerate(depths))
        n += sum(
            1000 * -(-d // pattern) + 20_000 * -(-d // every) + -(-d // config.fsdp.blocks_per_group) for d in depths
        )
        return Simulated(
            {"part": {"kind": n}}, [Counter({gather: n})], [Counter({matmul: n})], Counter({matmul: 2 * n})
        )

    monkeypatch.setattr(simulate, "simulate_depths", of_depths)
    found = simulate.simulate(config, 2, 1000, on_gpu=True)
    assert [max(depths) for depths in zip(*made, strict=True)] == most
    assert found == of_depths(config, None, 0, [*config.model.stacks], True)


@pytest.mark.parametrize(
    ("kind", "ranks", "world_size", "expected_s"),
    [  # of 8 GB: at 450 GB/s within a machine of 8, 50 GB/s between machines for each of its devices
        ("reduce-scatter", 8, 8, 8 * 7 / 8 / 450),
        ("reduce-scatter", 4, 4, 8 * 3 / 4 / 450),
        ("reduce-scatter", 128, 128, 8 * 15 / 16 / (50 * 8)),
        ("all-gather, forward", 16, 16, 8 * 15 / 16 / 450),
        ("all-reduce", 4, 64, 2 * 8 * 3 / 4 / 50),
        ("all-reduce", 4, 8, 2 * 8 * 3 / 4 / 450),
        ("all-gather, muon", 4, 16, 8 * 1 / 2 / 50),
    ],
)
def test_a_collective_takes_the_time_of_its_slowest_link(
    kind: str, ranks: int, world_size: int, expected_s: float
) -> None:
    assert link_s(Collective(kind, 8 * 10**9, ranks), DEVICES["h100"], world_size) == pytest.approx(expected_s)


# --- published runs ---------------------------------------------------------------------------------------------


def documented() -> dict[tuple[str, ...], tuple[float, float, float, bool]]:
    """docs/lab/plan.md: model, GPUs, batch and options -> published, expected, error, and whether it calibrates."""
    found = {}
    for line in (ROOT / "docs/lab/plan.md").read_text().splitlines():
        if line.startswith(("| Llama", "| MPT", "| Qwen", "| GPT")):
            *what, source, was, expected, error = (cell.strip() for cell in line.strip("|").split("|"))
            figures = float(was.replace(",", "")), float(expected.replace(",", "")), float(error.strip("%+")) / 100
            found[tuple(what)] = (*figures, "calibrates" in source)
    return found


def key(row: published.Row) -> tuple[str, ...]:
    batch = f"{row.micro_batch} x {row.seq_len:,}"
    return row.model, f"{row.gpus} x {row.machine}", batch, ", ".join(row.options)


SAMPLE = [r for r in published.ROWS if r.model in ("MPT 1B", "GPT-2 1.6B") or (r.model == "Llama 3 8B" and r.gpus == 8)]


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=pytest.mark.extended if r in SAMPLE else pytest.mark.slow) for r in published.ROWS],
    ids=lambda row: " ".join(key(row)),
)
def test_the_documented_expectations_are_those_of_plan(row: published.Row) -> None:
    found = published.compare(row)
    assert found.expected == pytest.approx(documented()[key(row)][1], rel=0.02)
    assert abs(found.error) <= 0.25


def test_the_range_holds_nine_of_ten_published_runs_and_is_wider_without_any(plans: dict[str, Plan]) -> None:
    held = [abs(error) for _, _, error, calibrates in documented().values() if not calibrates]
    assert sum(error <= SPREAD for error in held) >= 0.9 * len(held)
    found, h100 = plans["h100"], DEVICES["h100"]
    (least, most), step = likely(found, h100), expected(found, h100).total
    assert (least, most) == pytest.approx((step / (1 + SPREAD), step / (1 - SPREAD)))
    assert shares(h100) == (0.62, 0.62)
    assert shares(DEVICES["b200"]) == (0.31, 0.72), "from MI300X to H200"
    fast, slow = (expected(found, replace(DEVICES["b200"], sustained=share)).total for share in (0.72, 0.31))
    assert likely(found, DEVICES["b200"]) == pytest.approx((fast / (1 + SPREAD), slow / (1 - SPREAD)))
