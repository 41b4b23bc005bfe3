"""Checks and figures that need a GPU: `python -m benchmarks.gpu [--skip-tests] [--only WORDS]`.

First runs the tests that need a GPU (bitwise resume, the CPU's initial parameters and losses, the table of FSDP2's
options). Then runs train.py on all GPUs of this machine for a table of settings: MFU, tokens per second, peak memory,
and the share of time spent waiting for data. The first Llama row is the baseline, the others change one thing each, and
the last ones aim for the highest throughput. A row that fails (out of memory, something missing) gives the reason. The
rows of torchtitan run torchtitan_peer.py on the same GPUs, if it is installed: published figures are of other cards.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_lite import models
from torchtitan_lite.config import load
from torchtitan_lite.monitoring import mfu

ROOT = Path(__file__).parent.parent
STEPS, LOG_EVERY, SEQUENCES = 40, 5, 8  # per GPU and step
VARIANT = "variant="  # of gpu_variants.py
PLAIN = ["--fsdp.explicit_prefetching=false", "--fsdp.reshard_after_forward=default", "--compile.enabled=false"]
GPT = ["--config=configs/gpt_124m.toml", *PLAIN, "--train.micro_batch_size=8"]
# 1.24 B parameters, sequences of 4,096 tokens, Llama 3's vocabulary
LLAMA = ["--config=configs/llama_1b.toml", *PLAIN, "--train.micro_batch_size=2"]
FIELD = [*LLAMA, "--fsdp.param_dtype=bfloat16", "--compile.enabled=true", "--activation_checkpointing.mode=selective"]
NO_CHECKPOINTING = "--activation_checkpointing.mode=none"
BEST = [
    *(*FIELD, NO_CHECKPOINTING, "--train.micro_batch_size=4", "--fsdp.reshard_after_forward=false"),
    *("--fsdp.reshard_after_backward=false", "--fsdp.grad_sync=last"),
]
EIGHT = ["--config=configs/llama_8b.toml", *FIELD[1:]]
UNTIED = "--model.tie_embeddings=false"
# torchtitan's arguments for the rows of torchtitan_peer.py, and ours that compute the same
TITAN = {
    "selective": (
        [*FIELD, UNTIED],
        ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
    ),
    "no checkpointing": ([*FIELD, UNTIED, NO_CHECKPOINTING], ["--activation_checkpoint.mode=none"]),
}
SETTINGS = {
    "llama 1B: bf16, compiled, selective": FIELD,
    "  without the chunked loss": [*FIELD, "--speed.chunked_loss=false"],
    "  not compiled": [*FIELD, "--compile.enabled=false"],
    "  full checkpointing": [*FIELD, "--activation_checkpointing.mode=full"],
    "  Python collects garbage as it likes": [*FIELD, "--speed.gc_every=0"],
    "  explicit prefetching": [*FIELD, "--fsdp.explicit_prefetching=true"],
    "  parameters stay gathered": [*FIELD, "--fsdp.reshard_after_forward=false"],
    "  muon": [*FIELD, "--optim.name=muon"],
    "  muon in float32": [*FIELD, "--optim.name=muon", "--optim.muon_dtype=float32"],
    "  micro-batch 4": [*FIELD, "--train.micro_batch_size=4"],
    "  micro-batch 8": [*FIELD, "--train.micro_batch_size=8"],
    "  no checkpointing, micro-batch 1": [*FIELD, NO_CHECKPOINTING, "--train.micro_batch_size=1"],
    "  no checkpointing, micro-batch 2": [*FIELD, NO_CHECKPOINTING, "--train.micro_batch_size=2"],
    "  no checkpointing, micro-batch 4": [*FIELD, NO_CHECKPOINTING, "--train.micro_batch_size=4"],
    "  no checkpointing, micro-batch 8": [*FIELD, NO_CHECKPOINTING, "--train.micro_batch_size=8"],
    "  no checkpointing, micro-batch 4, kept gathered, summed last": BEST,
    "    and explicit prefetching": [*BEST, "--fsdp.explicit_prefetching=true"],
    "    and attention by cudnn": [*BEST, "variant=cudnn"],
    "    and attention by flash": [*BEST, "variant=flash"],
    "    and attention by efficient": [*BEST, "variant=efficient"],
    "    and attention by math": [*BEST, "variant=math"],
    "    and symmetric memory": [*BEST, "variant=symmetric-memory"],
    "    and a reduce-scatter group": [*BEST, "variant=separate-groups"],
    "    and float8 by torchao, rowwise": [*BEST, "variant=float8"],
    "llama 1B, not tied: bf16, compiled, selective": TITAN["selective"][0],
    "llama 1B, not tied: bf16, compiled, no checkpointing": TITAN["no checkpointing"][0],
    "llama 8B: bf16, compiled, selective, micro-batch 2": EIGHT,
    "gpt 124M: bf16": [*GPT, "--fsdp.param_dtype=bfloat16"],
    "  compiled": [*GPT, "--fsdp.param_dtype=bfloat16", "--compile.enabled=true"],
    "  compiled, micro-batch 32": [
        *(*GPT, "--fsdp.param_dtype=bfloat16", "--compile.enabled=true", "--train.micro_batch_size=32")
    ],
    "  float32": [*GPT, "--fsdp.param_dtype=float32"],
    "  deterministic": [*GPT, "--fsdp.param_dtype=bfloat16", "--run.deterministic=true"],
}


@dataclass(frozen=True)
class Measured:
    """Medians of the log lines after the first two."""

    tokens_per_second: float
    peak_memory_gib: float
    data_share: float  # of the time in which the loop waited for a batch


def command_line(options: list[str], n: int, out_dir: str) -> list[str]:
    """Everything but the launcher and train.py."""
    common = ["--tokenizer.path=", "--tokenizer.vocab_size=16384", f"--train.steps={STEPS}", "--run.name=run"]
    common += [f"--train.global_batch_size={SEQUENCES * n}", "--optim.warmup_steps=10", f"--log.every={LOG_EVERY}"]
    common += ["--eval.every=0", "--sample.every=0", "--checkpoint.every=0", f"--run.out_dir={out_dir}"]
    if "gpt" in options[0]:  # small: with more sequences the optimizer counts for as little as in a real run
        common = [c for c in common if "global_batch_size" not in c] + [f"--train.global_batch_size={64 * n}"]
    return [*(option for option in options if not option.startswith(VARIANT)), *common]


def program_of(options: list[str]) -> list[str]:
    """train.py, or what runs it with the variant that the options name."""
    variants = [option.removeprefix(VARIANT) for option in options if option.startswith(VARIANT)]
    return ["-m", "benchmarks.gpu_variants", *variants] if variants else ["train.py"]


def flops_per_token(options: list[str], *, causal: bool) -> int:
    """6 (N - N_embedding) + 12 L H Q T as torchtitan counts, the output matrix included also where it is tied.

    Args:
        causal: count only the half of attention that a causal model needs.
    """
    given: load.ConfigValues = {}
    for option in options[1:]:
        if option.startswith(VARIANT):
            continue
        key, value = option.removeprefix("--").split("=", 1)
        given[key] = load.ConfigValue(load.parse_value(key, value), "benchmark")
    config = load.load(ROOT / options[0].split("=")[1], given).config
    with torch.device("meta"):
        model = models.build(config.model, config.tokenizer.vocab_size)
    inside = sum(p.numel() for p in (*model.layers.parameters(), *model.norm.parameters(), model.output.weight))
    width = config.model.n_heads * config.model.dim_of_heads
    return 6 * inside + 12 * config.model.n_layers * width * config.train.seq_len // (2 if causal else 1)


def peak_flops(name: str) -> float:
    """Of a GPU by the name that its driver reports; NaN if it is not known."""
    known = mfu.named(name)
    return known.half_flops if known else math.nan


def reason(stderr: str) -> str:
    """Why a run failed: our own message, an exception, or the first line that looks like one. All of it to stderr."""
    print(stderr[-6000:], file=sys.stderr)
    lines = [re.sub(r"^(\[[\w.:]*\]:?\s*)+", "", line).strip() for line in stderr.splitlines()]
    ours = [line for line in lines if line.startswith(("train.py: ", "benchmarks.gpu_variants: "))]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Unsupported): ", line)]
    others = [line for line in lines if "rror" in line or "memory" in line]
    return next(iter([*ours, *raised, *others]), "no message")[:160].replace("|", "/")


def measure_torchtitan(arguments: list[str], n: int) -> Measured | str:
    """Run torchtitan_peer.py with these arguments; the reason, if that fails."""
    if importlib.util.find_spec("torchtitan") is None:
        return "torchtitan is not installed"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    launcher += ["--local-ranks-filter", "0", "--role", "rank", "--tee", "3"]
    sizes = {"seq_len": 4096, "local_batch_size": 2, "global_batch_size": SEQUENCES * n, "steps": STEPS}
    with tempfile.TemporaryDirectory() as out_dir:
        common = [*(f"--training.{name}={size}" for name, size in sizes.items()), "--compile.enable"]
        common += [f"--metrics.log_freq={LOG_EVERY}", f"--job.dump_folder={out_dir}"]
        command = [*launcher, "-m", "benchmarks.torchtitan_peer", *common, *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = read_torchtitan(result.stdout + result.stderr, n)
    return reason(result.stderr) if result.returncode else found or "it logged no throughput"


def read_torchtitan(log: str, n: int) -> Measured | None:
    """Medians of its lines "memory:  9.46GiB(64.99%)  tps: 7,049" after the first two; None if there are fewer."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    lines = re.findall(r"memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", plain)[2:]
    if not lines:
        return None
    rates = [float(tps.replace(",", "")) for _, tps in lines]
    return Measured(n * statistics.median(rates), float(lines[-1][0]), math.nan)


def measure(options: list[str], n: int) -> Measured | str:
    """Run train.py; the reason, if it fails (out of memory, most likely)."""
    with tempfile.TemporaryDirectory() as out_dir:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*launcher, *program_of(options), *command_line(options, n, out_dir)]
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if result.returncode:
            return reason(result.stderr)
        lines = (Path(out_dir) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record][2:]
    tokens = records[1]["tokens"] - records[0]["tokens"]
    seconds = [tokens / record["tokens_per_second"] for record in records]
    return Measured(
        statistics.median(record["tokens_per_second"] for record in records),
        records[-1]["peak_memory_gib"],
        sum(record["data_s"] for record in records) / sum(seconds),
    )


def line(label: str, found: Measured | str, options: list[str], n: int, peak: float) -> str:
    """A row of the table."""
    if isinstance(found, str):
        return f"| {label} | failed: {found} | | | | |"
    rate = found.tokens_per_second / n
    full, once = (rate * flops_per_token(options, causal=causal) / peak for causal in (False, True))
    memory, data = found.peak_memory_gib, found.data_share
    return f"| {label} | {full:.1%} | {once:.1%} | {rate:,.0f} | {memory:.1f} | {data:.1%} |"


def main() -> None:
    """Test, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--only", default="", help="settings whose names contain this")
    given = parser.parse_args()
    n = torch.cuda.device_count()
    if n == 0:
        sys.exit("torch sees no GPU here")
    if not given.skip_tests:
        subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu/test_cuda.py"], cwd=ROOT, check=True)
    name = torch.cuda.get_device_name()
    peak = peak_flops(name)
    nominal = "peak unknown" if math.isnan(peak) else f"{peak / 1e12:.0f} TFLOP/s nominal"
    print(f"{n} x {name}, {nominal}, torch {torch.__version__}, {STEPS} steps each\n")
    print("| | MFU | MFU, causal attention once | tokens/s per GPU | peak GiB | waiting for data |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for label, options in SETTINGS.items():
        if given.only in label:
            print(line(label, measure(options, n), options, n, peak), flush=True)
    for label, (ours, arguments) in TITAN.items():
        name = f"torchtitan 1B, not tied: bf16, compiled, {label}"
        if given.only in name:
            print(line(name, measure_torchtitan(arguments, n), ours, n, peak), flush=True)


if __name__ == "__main__":
    main()
