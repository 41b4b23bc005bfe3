"""What `plan` prints, recorded: models, devices, meshes and options, and the figures behind the text.

Nothing else holds: the figures and names of each device (recorded_devices.json: compare them with its data sheet), and
the parts of the times; read their diffs. test_plan.py measures memory and counts FLOPs; test_estimate.py has
published times.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT
from tests.recorded import assert_recorded
from torchtitan_lite import plan
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.run.mfu import DEVICES, named
from torchtitan_lite.tools import dry_run
from torchtitan_lite.tools.estimate import command
from torchtitan_lite.tools.estimate.planned_run import Plan, expected, likely, make_plan, rate, shares

HERE = Path(__file__).parent
SMALL = ["--tokenizer.vocab_size=1000", "--model.dim=128", "--model.n_heads=4", "--model.n_layers=1"]
SMALL += ["--train.seq_len=256", "--train.micro_batch_size=2"]
BF16, ADAMW = "--fsdp.param_dtype=bfloat16", "--optim.name=adamw"
T5 = ["--model.family=t5", "--data.objective=span_corruption"]
ROWS: dict[str, list[str]] = {  # by device and ranks
    "h100 32": ["--fsdp.dp_replicate=2", ADAMW, BF16, "--train.global_batch_size=256"],
    "l4 8": [
        "--model.family=qwen3_moe",
        "--model.n_experts=6",
        "--compile.enabled=true",
        "--train.global_batch_size=16",
    ],
    "a100 16": [*T5, "--model.n_decoder_layers=2", ADAMW, "--optim.ema_decay=0.9", "--train.global_batch_size=32"],
    "B200 16": [
        *("--model.family=mistral", "--model.window=100", "--model.n_kv_heads=2", "--fsdp.dp_replicate=4"),
        *("--fsdp.reshard_after_backward=false", "--train.global_batch_size=96"),
    ],
    "v100 3": [
        BF16,
        "--optim.name=sgd",
        "--train.epochs=1.5",
        "--checkpoint.keep_best=true",
        "--train.global_batch_size=5",
        "--run.tf32=true",
    ],
    "t4 2": [
        *(
            "--fsdp.param_dtype=float16",
            "--optim.freeze=tok_embeddings.*,layers.0.attention.wq.*",
            "--train.steps=9",
            "--fsdp.grad_sync=last",
        ),
        *(
            "--fsdp.reshard_after_backward=false",
            "--fsdp.sharding_strategy=HYBRID_SHARD",
            "--train.global_batch_size=20",
        ),
    ],
    "a10 5": ["--run.tf32=true", "--model.family=gpt", "--model.dropout=0.1", "--train.batch_schedule=[[0,5],[4,50]]"],
    "mi300x 12": [
        *("--model.family=gemma3", "--model.n_layers=2", "--model.window=50", "--fsdp.blocks_per_group=2"),
        *("--activation_checkpointing.mode=full", "--activation_checkpointing.every=2"),
    ],
    "gb200 8": [
        "--model.family=olmo_hybrid",
        "--model.layer_pattern=delta",
        BF16,
        ADAMW,
        "--checkpoint.keep_every=500",
    ],
    "cpu 2": [
        *("--model.family=smollm3", "--activation_checkpointing.mode=selective", "--model.tie_embeddings=true"),
        *(
            "--data.objective=pairs",
            "--data.target_len=40",
            "--fsdp.output_dtype=float32",
            "--data.path=/gone/text,/gone/more",
        ),
    ],
    "h100 16": [
        *("--fsdp.sharding_strategy=HYBRID_SHARD", "--fsdp.explicit_prefetching=true", "--log.trackers=wandb"),
        *("--data.path=/cluster/text", "--model.init_from=/cluster/run", "--checkpoint.resume=/cluster/other"),
        *("--speed.float8=true", BF16),
    ],
    "l40s 2": [
        *("--train.micro_batch_size=200", "--model.dim=4096", "--model.n_heads=32", "--train.seq_len=1024", ADAMW),
        *("--fsdp.dp_shard=1", "--train.steps=90000"),
    ],
    "rtx4090 2 suggest": [  # without checkpointing, a micro-batch of 8 does not fit
        *("--suggest", ADAMW, BF16, "--train.global_batch_size=16", "--model.n_layers=2"),
        *("--model.dim=4096", "--model.n_heads=32", "--model.max_seq_len=8192", "--train.seq_len=8192"),
    ],
    "a100 4 phases": [
        *("--train.steps=1000000", "--train.global_batch_size=8", BF16),
        "--train.phases=[{from_step = 600000, train = {seq_len = 512, global_batch_size = 16}}]",
    ],
    "v100 4 later": [  # only the second phase does not fit
        *("--train.steps=9", "--train.global_batch_size=8"),
        "--train.phases=[{from_step = 5, train = {seq_len = 512, global_batch_size = 32000, micro_batch_size = 8000}}]",
    ],
    "a100-pcie 1 windows": [f"--config={ROOT}/configs/windows.toml", "--train.micro_batch_size=8"],
}
WRONG = [
    ["--world-size=0"],
    ["--world-siz=2"],
    ["--model.family=own:TYPO"],
    ["--tokenizer.path=nowhere.json"],
    ["--train.stepps=1", "--world_size=4", "--gpus=3", "stray"],
    ["--world-size=6", "--fsdp.dp_shard=4"],
    ["--device=cpu", "--fsdp.cpu_offload=true"],
    ["--data.path=.", "--model.size=9M"],
    ["--suggest", "--device=cpu", *SMALL],
    ["--device=cpu", *SMALL, "--train.phases=[{from_step=500,train.seq_len=64,train.global_batch_size=40}]"],
]


def figures(found: Plan, whole: bool) -> dict[str, Any]:
    """Bytes as numbers with decimals, which may differ a little between versions of torch."""
    simulated = found.simulated
    result: dict[str, Any] = {
        "sizes": [found.checkpoint_bytes, found.n_parameters, found.n_active, found.flops_per_token],
        "muon": {str(one): n for one, n in simulated.muon_collectives.items()},
    }
    if found.device:
        times = astuple(expected(found, found.device)), likely(found, found.device)
        result["us"] = [", ".join(f"{1e6 * seconds:.4f}" for seconds in each) for each in times]
    if whole:
        result["peak"] = {kind: float(n) for kind, n in simulated.peak.items()}
        result["work"] = {str(work): float(n) for work, n in (simulated.work[0] + simulated.optimizer).items()}
        result["sent"] = {str(one): n for sent in simulated.collectives for one, n in sent.items()}
    return result


def run(argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[Plan]]:
    """What is printed, and the plans that were made."""
    made = list[Plan]()

    def recorded(*args: Any, **kwargs: Any) -> Plan:
        made.append(make_plan(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(command, "make_plan", recorded)
    code = plan.main(argv)
    said = capsys.readouterr()
    return f"{code}\n{said.out}{said.err}".replace(str(Path.cwd()), "FOLDER").replace(str(ROOT), "ROOT"), made


def changed(one: Plan, section: str, **values: Any) -> Plan:
    """The plan of a config with other values, as if they changed nothing in the simulation."""
    table = getattr(one.config, section).model_copy(update=values)
    return replace(one, config=one.config.model_copy(update={section: table}))


def variants(usual: Plan) -> Iterator[tuple[str, Any]]:
    """Lines of other configs and lengths, the tables of a dry run, and advice, without a simulation."""
    usual = changed(usual, "train", steps=20_000_000)
    assert usual.device
    room = sum(usual.device_bytes.values()) / 0.94 / 2**30
    small, large = (replace(usual, device=replace(usual.device, memory_gib=room * k)) for k in (0.9999, 1.0001))
    plans = {
        "usual": usual,
        "offloaded": changed(small, "fsdp", cpu_offload=True),
        "float8": changed(usual, "speed", float8=True),
        "compiled": changed(usual, "compile", enabled=True),
        "epochs": changed(usual, "train", steps=0, epochs=1.5),
        "schedule": changed(usual, "train", steps=10, batch_schedule=((0, 64), (4, 256))),
        "cpu": replace(usual, device=None),
        "no published run": replace(usual, device=DEVICES["b200"]),
        "too small": small,
        "room": large,
    }
    seen = list[str]()
    for name, one in plans.items():
        lines = [*command._model_lines(one), *command._memory_lines(one), *command._time_lines(one)]
        lines += [*command._total_lines([one]), *dry_run.compare(one, 5 * 2**19, 0.016, Path("runs/mine")).splitlines()]
        yield name, [line for line in lines if line not in seen]  # the others are those of the first
        seen = seen or lines


def test_what_is_printed_of_each_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prepared data, too, and what is said about wrong options."""
    found: dict[str, Any] = {}
    plans: dict[str, Plan] = {}
    monkeypatch.chdir(tmp_path)
    for name, more in ROWS.items():
        device, ranks = name.split()[:2]
        argv = [f"--device={device}", f"--world-size={ranks}", *([] if "config" in more[0] else SMALL), *more]
        found[name], (plans[name], *_) = run(argv, capsys, monkeypatch)
        found[f"{name}: figures"] = figures(plans[name], whole=len(plans) <= 4)
    found |= dict(variants(plans["h100 32"]))
    words = [f"word{n}" for n in range(50)]
    draw = random.Random(7)
    texts = [" ".join(draw.choices(words, k=draw.randrange(9, 99))) for _ in range(80)]
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert prepare(["text.jsonl", "--out=data", "--train-tokenizer=300", "--val-fraction=0.2"]) == 0
    capsys.readouterr()
    argv = ["--device=cpu", *SMALL, "--data.path=data", "--train.seq_len=32", "--train.epochs=2.5"]
    found["prepared"] = run(argv, capsys, monkeypatch)[0]
    for argv in WRONG:
        found[" ".join(argv)] = run(argv, capsys, monkeypatch)[0]
    assert_recorded(found, HERE / "recorded_plans.json", rel=5e-3)


# as drivers report them, then as configs have them
NAMES = """
    NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3, NVIDIA H200, NVIDIA B200, NVIDIA GH200 480GB, NVIDIA B300 SXM6 AC,
    NVIDIA GB200, NVIDIA GB300, NVIDIA L40S, NVIDIA L40, NVIDIA L4, AMD Instinct MI325X, AMD Instinct MI300X,
    AMD Instinct MI300X VF, AMD Instinct MI355X, NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 5090,
    NVIDIA GeForce RTX 3090, NVIDIA RTX 6000 Ada Generation, NVIDIA RTX PRO 6000 Blackwell Workstation Edition,
    NVIDIA RTX A6000, NVIDIA A100-SXM4-40GB, NVIDIA A100-PCIE-40GB, NVIDIA A100 80GB PCIe, NVIDIA H100 PCIe,
    NVIDIA H100 NVL, NVIDIA H200 NVL, NVIDIA A10, NVIDIA A10G, NVIDIA A40, NVIDIA A30, Tesla V100-SXM2-16GB, Tesla T4,
    Tesla V100-SXM2-32GB, Tesla V100-PCIE-32GB, AMD Instinct MI350X, Tesla V100-PCIE-16GB, H100 80 GB, A100 80 GB,
    RTX 4090 24 GB
"""
VARIANTS = """
    NVIDIA H800, NVIDIA H20, NVIDIA H20-3e, Tesla V100S-PCIE-32GB, , cpu, NVIDIA A100-SXM-64GB, NVIDIA RTX A1000,
    NVIDIA A800-SXM4-80GB, NVIDIA GH200 144G HBM3e, NVIDIA A10G MIG 1g, NVIDIA A40-48Q,
    NVIDIA H100 80GB HBM3 MIG 1g.10gb, NVIDIA A100-SXM4-80GB MIG 3g.40gb, NVIDIA H200 MIG 7g.141gb,
    NVIDIA GeForce RTX 4090 D, NVIDIA GeForce RTX 4090 Laptop GPU, NVIDIA GeForce RTX 5090 D,
    NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition, NVIDIA RTX PRO 6000 Blackwell Server Edition,
    NVIDIA GeForce RTX 3090 Ti, AMD Instinct MI300A, AMD Instinct MI250X
"""


def test_the_figures_of_each_device() -> None:
    """And its names; variants with other figures are none of them."""
    reported = [" ".join(name.split()) for name in (NAMES + "," + VARIANTS).split(",")]
    found: dict[str, Any] = {"names": {name: getattr(named(name), "name", None) for name in reported}}
    for name, device in DEVICES.items():
        rates = {"shares": shares(device), "TFLOP/s": [rate(device, width) / 1e12 for width in (2, 4)]}
        found[name] = f"{device} TF32 {device.tf32_flops:g}", str(rates)
    assert_recorded(found, HERE / "recorded_devices.json")
