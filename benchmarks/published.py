"""Published throughputs, as our configs, compared with the expectation of `plan`.

Some rows calibrate the constants of planned_run.py and `Device.sustained`. The others test them. Includes all rows
whose settings the source states and `plan` supports: bfloat16, FSDP alone or one GPU, no host offload. From llm-foundry
it takes the rows with 2,048 tokens on 8, 128 or 256 GPUs, and 70 B on 64. llm.c and llmq are CUDA programs that shard
only the optimizer's state; here they are compiled and keep parameters gathered. `python -m benchmarks.published` prints
the table of docs/lab/plan.md in a few minutes.
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config
from torchtitan_lite.run.mfu import DEVICES, Device
from torchtitan_lite.tools.estimate import planned_run
from torchtitan_lite.tools.estimate.planned_run import Plan, make_plan
from torchtitan_lite.tools.estimate.work import Matmul, Work

TORCHTITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (Dec 2024)"
TORCHTITAN_A100 = "torchtitan, docs/performance.md at 1ea476e9f (2024)"
FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md (2023)"
FMS = "fms-fsdp, README.md (2024)"
TORCHAO = "torchao, torchao/float8/README.md (Aug 2025), without float8"
KEMPNER = "KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md (2026)"
LLMC = "llm.c, discussion 677: 32,000 steps of 1,048,576 tokens in 24 hours (2024)"
LLMQ = "llmq, benchmarks/*.md, bf16 (Dec 2025)"
OURS = "this project, docs/lab/gpu.md"

A100, H100, H200 = DEVICES["a100"], DEVICES["h100"], DEVICES["h200"]
# torchtitan states 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W. Power grows with clock times voltage squared, so
# the rate grows with the cube root of the limit. The others state the network of a machine with 8 GPUs
_H100_500W = replace(
    H100, memory_gib=95.0, memory_bandwidth=2.4e12, sustained=(H100.sustained or 1) * (500 / 700) ** (1 / 3)
)
MACHINES: dict[str, Device] = {
    "H100": H100,
    "H100 500 W": _H100_500W,
    "H100, 800 Gbit/s": replace(H100, inter_node=12.5e9),
    "A100": A100,
    "A100, 400 Gbit/s": replace(A100, inter_node=6.25e9),
    "A100 40 GB": DEVICES["a100-40gb"],
    "H200, 4 a machine": replace(H200, per_node=4),
    "MI300X": DEVICES["mi300x"],
    "RTX 4090": DEVICES["rtx4090"],
    "RTX PRO 6000": DEVICES["rtxpro6000"],
}


def _llama(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, vocab_size: int = 32000, **more: Any
) -> dict[str, Any]:
    names = "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size"
    values = dict(zip(names, (dim, n_layers, n_heads, n_kv_heads, hidden_dim, vocab_size), strict=True))
    return {f"model.{k}": v for k, v in {**values, "qk_norm": False, **more}.items()}


_MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {"model.size": "8B", "model.vocab_size": 128256},
    "Llama 3 70B": {"model.size": "70B", "model.vocab_size": 128256},
    "Llama 2 7B": _llama(4096, 32, 32, 32, 11008),
    "Llama 2 13B": _llama(5120, 40, 40, 40, 13824),
    "Llama 2 70B": _llama(8192, 80, 64, 8, 28672),
    "Llama 3 15B": _llama(5120, 40, 40, 8, 17920, 128256),
    "Llama 3.2 1B": {"model.size": "1B", "model.vocab_size": 128256, "model.tie_embeddings": True},
    "Llama 3.2 1B, not tied": {"model.size": "1B", "model.vocab_size": 128256},
    "Qwen2.5 0.5B": _llama(896, 24, 14, 2, 4864, 151936, tie_embeddings=True),
    "Qwen2.5 1.5B": _llama(1536, 28, 12, 2, 8960, 151936, tie_embeddings=True),
    "Qwen2.5 3B": _llama(2048, 36, 16, 2, 11008, 151936, tie_embeddings=True),
    "Qwen2.5 7B": _llama(3584, 28, 28, 4, 18944, 152064),
    "GPT-2 1.6B": {"model.size": "1558M", "model.vocab_size": 50304},
    "MPT 1B": {"model.dim": 2048, "model.n_layers": 24, "model.n_heads": 16},
    "MPT 3B": {"model.dim": 2560, "model.n_layers": 32, "model.n_heads": 20},
    "MPT 7B": {"model.dim": 4096, "model.n_layers": 32, "model.n_heads": 32},
    "MPT 13B": {"model.dim": 5120, "model.n_layers": 40, "model.n_heads": 40},
    "MPT 30B": {"model.dim": 7168, "model.n_layers": 48, "model.n_heads": 56},
    "MPT 70B": {"model.dim": 8192, "model.n_layers": 80, "model.n_heads": 64},
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "compiled": {"compile.enabled": True},
    "selective": {"activation_checkpointing.mode": "selective"},
    "full": {"activation_checkpointing.mode": "full"},
    "stay gathered": {"fsdp.reshard_after_forward": False},
    "bf16 sums": {"fsdp.reduce_dtype": "bfloat16"},
    "HSDP": {"fsdp.dp_shard": 8},
    "chunked loss": {"speed.chunked_loss": True},
    "kept": {  # keep parameters gathered and gradients unreduced over all micro-batches
        "fsdp.reshard_after_forward": False,
        "fsdp.reshard_after_backward": False,
        "fsdp.grad_sync": "last",
    },
}


@dataclass(frozen=True)
class Row:
    """One published figure."""

    source: str
    model: str
    machine: str
    gpus: int
    seq_len: int
    micro_batch: int
    micro_batches: int  # per step
    options: tuple[str, ...]
    tokens_per_second: float  # per GPU
    calibrates: bool  # whether constants were fitted to this row

    def config(self) -> Config:
        """Return these settings as a config of ours."""
        values: dict[str, Any] = {"fsdp.param_dtype": "bfloat16", "speed.chunked_loss": False, "optim.name": "adamw"}
        llama = self.model.startswith(("Llama", "Qwen"))
        vocabulary = {"model.vocab_size": 32000 if llama else 50368, "model.tie_embeddings": not llama}
        values |= {"model.family": "llama" if llama else "gpt", **vocabulary, **_MODELS[self.model]}
        values |= {"model.max_seq_len": self.seq_len, "train.seq_len": self.seq_len}
        values |= {"train.micro_batch_size": self.micro_batch}
        values |= {"train.global_batch_size": self.micro_batch * self.micro_batches * self.gpus}
        for option in self.options:
            values |= _OPTIONS[option]
        local = min(self.gpus, MACHINES[self.machine].per_node)
        return load.load(
            None, values, world_size=self.gpus, n_gpus=local, local_world_size=local, elsewhere=True
        ).config


def _rows() -> Iterator[Row]:
    selective, compiled = ("selective",), ("compiled", "selective")
    for gpus, eager, fused in ((8, 5762, 6667), (128, 5605, 6514)):
        yield Row(TORCHTITAN, "Llama 3 8B", "H100 500 W", gpus, 8192, 2, 1, selective, eager, gpus == 8)
        yield Row(TORCHTITAN, "Llama 3 8B", "H100 500 W", gpus, 8192, 2, 1, compiled, fused, gpus == 8)
    titan: list[tuple[str, int, int, tuple[str, ...], int]] = [
        ("Llama 3 8B", 8192, 1, selective, 2973),
        ("Llama 3 70B", 8192, 1, ("full",), 331),
        ("Llama 2 13B", 4096, 2, (), 2162),
        ("Llama 2 13B", 4096, 2, selective, 1904),
        ("Llama 2 70B", 4096, 1, selective, 355),
        ("Llama 2 70B", 4096, 2, ("full",), 353),
    ]
    for model, seq_len, size, options, speed in titan:
        yield Row(TORCHTITAN_A100, model, "A100", 64, seq_len, size, 1, options, speed, False)
    hybrid = ("compiled", "HSDP", "bf16 sums")
    yield Row(FMS, "Llama 2 7B", "A100, 400 Gbit/s", 128, 4096, 2, 1, hybrid, 4550, False)
    yield Row(FMS, "Llama 2 7B", "H100, 800 Gbit/s", 96, 4096, 2, 1, hybrid, 9600, False)
    for (machine, gpus), lines in _FOUNDRY.items():
        for billions, micro_batch, micro_batches, options, speed in lines:
            yield Row(
                FOUNDRY, f"MPT {billions}", machine, gpus, 2048, micro_batch, micro_batches, options, speed, gpus == 8
            )
    yield Row(TORCHAO, "Llama 3 8B", "MI300X", 8, 8192, 1, 1, compiled, 5376.5, True)
    four, full = "H200, 4 a machine", ("compiled", "full")
    yield Row(KEMPNER, "Llama 3 8B", four, 1, 4096, 2, 4, full, 10471, False)
    yield Row(KEMPNER, "Llama 3 8B", four, 2, 4096, 2, 4, full, 18728 / 2, False)
    yield Row(KEMPNER, "Llama 3 8B", four, 4, 4096, 4, 2, full, 38983 / 4, True)
    yield Row(KEMPNER, "Llama 3 15B", four, 8, 4096, 4, 4, ("full",), 35405 / 8, False)
    yield Row(LLMC, "GPT-2 1.6B", "H100", 8, 1024, 16, 8, _CUDA, 32000 * 1048576 / 86400 / 8, False)
    for machine, gpus, billions, micro_batch, micro_batches, speed, fitted in _LLMQ:
        yield Row(
            LLMQ, f"Qwen2.5 {billions}", machine, gpus, 1024, micro_batch, micro_batches, _CUDA, speed / gpus, fitted
        )
    for model, micro_batch, micro_batches, options, speed in _OURS:
        options = (*options, "chunked loss")
        yield Row(OURS, f"Llama 3.2 1B{model}", "H100", 1, 4096, micro_batch, micro_batches, options, speed, False)


_CUDA = ("compiled", "kept", "bf16 sums", "chunked loss")
# machine, GPUs, size, micro-batch, micro-batches per step, tokens per second of all GPUs, whether it calibrates
_LLMQ = [
    *(("H100", 1, "0.5B", 32, 16, 149500, False), ("H100", 1, "1.5B", 32, 16, 59200, False)),
    *(("H100", 1, "3B", 16, 32, 30900, False), ("H100", 1, "7B", 4, 128, 13830, False)),
    *(("H100", 8, "0.5B", 32, 2, 1175000, False), ("H100", 8, "1.5B", 32, 2, 457000, True)),
    *(("H100", 8, "3B", 16, 4, 239000, True), ("H100", 8, "7B", 8, 8, 112000, True)),
    *(("RTX 4090", 1, "0.5B", 16, 32, 39860, False), ("RTX 4090", 1, "1.5B", 4, 128, 14070, True)),
    *(("RTX 4090", 4, "0.5B", 16, 8, 154000, False), ("RTX PRO 6000", 1, "0.5B", 32, 16, 86200, False)),
    *(("RTX PRO 6000", 1, "1.5B", 32, 16, 32420, False), ("RTX PRO 6000", 1, "3B", 16, 32, 17185, True)),
    ("RTX PRO 6000", 1, "7B", 8, 64, 8079, False),
]
_OURS: list[tuple[str, int, int, tuple[str, ...], int]] = [
    *(("", 2, 4, ("compiled", "selective"), 55440), ("", 2, 4, ("selective",), 37000)),
    *((", not tied", 2, 4, ("compiled", "selective"), 52785), (", not tied", 2, 4, ("compiled",), 53583)),
    ("", 4, 2, ("compiled", "kept"), 61798),
]

_FULL, _PURE, _GATHERED = ("full",), ("full", "bf16 sums"), ("stay gathered",)
# machine, GPUs: size, micro-batch, micro-batches per step, options, tokens per second and GPU
_FOUNDRY: dict[tuple[str, int], list[tuple[str, int, int, tuple[str, ...], int]]] = {
    ("H100", 8): [
        *(("30B", 3, 21, _FULL, 2002), ("13B", 2, 1, (), 4792), ("7B", 6, 1, (), 10643), ("1B", 14, 1, (), 45455)),
    ],
    ("A100", 8): [
        *(("30B", 3, 21, _FULL, 916), ("13B", 2, 3, (), 2262), ("7B", 6, 2, (), 4641), ("3B", 10, 2, (), 10811)),
        ("1B", 14, 4, (), 20513),
    ],
    ("H100", 64): [("70B", 8, 4, _FULL, 1039)],
    ("H100", 128): [
        *(("70B", 8, 1, _FULL, 1058), ("30B", 8, 1, _FULL, 2199), ("13B", 16, 1, _FULL, 5080)),
        *(("7B", 6, 1, (), 10475), ("3B", 8, 1, _GATHERED, 23422), ("1B", 12, 1, _GATHERED, 44123)),
    ],
    ("H100", 256): [
        *(("70B", 8, 1, _FULL, 1035), ("30B", 8, 1, _FULL, 2148), ("13B", 16, 1, _FULL, 4989)),
        *(("7B", 6, 1, (), 10119), ("3B", 8, 1, _GATHERED, 22772), ("1B", 12, 1, _GATHERED, 42555)),
    ],
    ("A100", 64): [("70B", 8, 4, _PURE, 410)],
    ("A100 40 GB", 128): [
        *(("70B", 4, 1, _PURE, 376), ("30B", 6, 1, _PURE, 865), ("13B", 16, 1, _PURE, 1972)),
        *(("7B", 18, 1, _PURE, 3623), ("3B", 6, 1, ("bf16 sums",), 9538), ("1B", 10, 1, ("bf16 sums",), 18647)),
    ],
}
ROWS = tuple(_rows())


@dataclass(frozen=True)
class Compared:
    """A row and the expectation of `plan`."""

    row: Row
    expected: int  # tokens per second and GPU

    @property
    def error(self) -> float:
        """The relative difference from the published figure."""
        return self.expected / self.row.tokens_per_second - 1


def compare(row: Row) -> Compared:
    """Plan a row."""
    device = MACHINES[row.machine]
    plan = make_plan(row.config(), row.gpus, device)
    if row.source.startswith(("torchtitan", "torchao")) and "selective" in row.options:
        recomputing = [_with_recomputed_matmuls(work, plan) for work in plan.simulated.work]
        plan = replace(plan, simulated=replace(plan.simulated, work=recomputing))
    tokens = row.micro_batches * row.micro_batch * row.seq_len
    return Compared(row, round(tokens / planned_run.expected(plan, device).total))


def _with_recomputed_matmuls(work: Counter[Work], plan: Plan) -> Counter[Work]:
    """Add torchtitan's selective checkpointing, which torchao used: it recomputes every second matmul in blocks."""
    found = Counter(work)
    for matmul, n in work.items():
        if isinstance(matmul, Matmul) and matmul.phase == "forward" and plan.vocab_size not in _sizes(matmul):
            found[replace(matmul, phase="backward")] += n // 2
    return found


def _sizes(matmul: Matmul) -> tuple[int, int, int]:
    return matmul.m, matmul.n, matmul.k


def table(compared: list[Compared]) -> str:
    """Return the table of docs/lab/plan.md."""
    sources = list(dict.fromkeys(c.row.source for c in compared))
    lines = [
        "| model | GPUs | micro-batch x length | options | source | published | expected | error |",
        "|---|---|---|---|---|---:|---:|---:|",
    ]
    for c in sorted(compared, key=lambda c: not c.row.calibrates):
        r = c.row
        lines.append(
            f"| {r.model} | {r.gpus} x {r.machine} | {r.micro_batch} x {r.seq_len:,} | {', '.join(r.options)} "
            f"| {sources.index(r.source) + 1}{', calibrates' if r.calibrates else ''} "
            f"| {r.tokens_per_second:,.0f} | {c.expected:,.0f} | {c.error:+.1%} |"
        )
    lines += ["", *(f"{i}. {source}" for i, source in enumerate(sources, 1)), ""]
    for name, calibrates in (("used for calibration", True), ("not used", False)):
        errors = [abs(c.error) for c in compared if c.row.calibrates is calibrates]
        if errors:
            lines.append(
                f"{len(errors)} rows {name}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}."
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([compare(row) for row in ROWS]))
