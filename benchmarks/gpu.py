"""Checks on a GPU, in a quarter of an hour: `python -m benchmarks.gpu --budget-s 560 --wheels wheels --out out`.

Each item of ITEMS runs in its own process with a time limit, so that a crash or a hang ends only that item. Its result
is appended to OUT/gpu.jsonl at once, and OUT/gpu.tar.gz gets its log. The next call skips items with a result for the
same commit, card and torch, and runs the others in order while their estimates fit into the budget. Those that the
budget ended come last. Then it prints the tables. What is least known comes first: with several cards, what needs them
(`on_cards`). Logs, and the figures of the item that runs, are in OUT.logs: some job systems keep few files of OUT.

    --list          print the items and their estimates (seconds, not measured)
    --only WORDS    run only the items whose names contain this, even if they have a result
    --wheels DIR    first install missing packages from this folder (docs/lab/gpu.md says how to fill it)
    --out DIR       the folder for results (runs/gpu)
    --stand-in      no GPU: run the items on the CPU, with tiny sizes. This tests the command, not the card.

This command needs only the standard library; the items need torch and the packages.
"""

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CALL_S = 560  # per call
CUT = "ended with the budget"
ARCHIVE_BYTES = 15_000_000  # of all files in the archive, before compression
# imports of train.py and the tests, except torch and its dependencies
PACKAGES = ["filelock", "numpy", "pydantic", "pyyaml", "safetensors", "tokenizers", "tomli", "tomli-w", "tqdm"]
PACKAGES += ["pytest", "pytest-xdist", "torchao"]


@dataclass(frozen=True)
class Item:
    """One measurement."""

    seconds: int  # an estimate, including the import of torch and compilation
    name: str
    function: str  # of gpu_items.py
    options: dict[str, Any] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()  # torchrun's options; empty: one process


def row(seconds: int, name: str, config: str, *values: dict[str, Any], **options: Any) -> Item:
    """Make an item that runs steps of a shipped config with some values."""
    merged = {key: value for some in values for key, value in some.items()}
    return Item(seconds, name, "row", {"config": f"{config}.toml", "values": merged, **options})


def fake(seconds: int, name: str, config: str, world_size: int, *values: dict[str, Any]) -> Item:
    """Make an item that runs one rank of a world."""
    return replace(row(seconds, name, config, *values, world_size=world_size), function="fake_rank")


def ends(name: str, fault: str, code: int, words: str, **options: Any) -> Item:
    """Make an item that runs train.py with a fault of tests/faults/worker.py, and expects this end."""
    return Item(90, name, "ends", {"fault": fault, "code": code, "words": words, **options})


# 1.24 B parameters, 8 sequences of 4,096 tokens per step. torchtitan computes the same as the baseline.
ONE: dict[str, Any] = {"train.global_batch_size": 8, "train.micro_batch_size": 2, "optim.warmup_steps": 2}
ONE |= {"fsdp.reshard_after_forward": "default", "fsdp.explicit_prefetching": False}
SELECTIVE = {"activation_checkpointing.mode": "selective"}
UNTIED = {"model.tie_embeddings": False}
BEST: dict[str, Any] = {
    "train.micro_batch_size": 4,
    "fsdp.reshard_after_forward": False,
    "fsdp.reshard_after_backward": False,
}
BEST |= {"fsdp.grad_sync": "last"}
EIGHT: dict[str, Any] = {
    "model.n_layers": 8,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 2,
    "optim.warmup_steps": 2,
}
SMALL: dict[str, Any] = {"train.global_batch_size": 64, "optim.warmup_steps": 2}
DOCUMENTS = {"data.packing": "best_fit", "data.document_mask": True}
PAIRS: dict[str, Any] = {"model.size": "t5-base", "model.vocab_size": 32128, "data.target_len": 128}
PAIRS |= {"train.seq_len": 512}
PAIRS |= {"train.micro_batch_size": 32, "train.global_batch_size": 64, "fsdp.param_dtype": "bfloat16"}
PAIRS |= {"compile.enabled": True, "optim.warmup_steps": 2}
TITAN = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
MUON: dict[str, Any] = {"optim.name": "muon"}
PREFETCH: dict[str, Any] = {"fsdp.explicit_prefetching": True}
HSDP = {"fsdp.dp_replicate": 2}
MANY = {"fsdp.dp_replicate": 16}
# fewer sequences than 65,536, which some kernels refuse before memory is short
HUGE: dict[str, Any] = {"train.micro_batch_size": 16384, "train.global_batch_size": 16384, "train.seq_len": 1024}
RANKS = {
    "FSDP": {"optim.name": "adamw"},
    "explicit prefetching": {"optim.name": "adamw", **PREFETCH},
    "HSDP": {"optim.name": "adamw", **PREFETCH, **HSDP},
    "Muon": MUON,
    "Muon, HSDP": {**MUON, **HSDP},
}
COMPILED = {"compiled": {"optim.name": "adamw", "compile.enabled": True}}
FLOAT8 = {"float8": {"optim.name": "adamw", "speed.float8": True, "fsdp.param_dtype": "bfloat16"}}
OFFLOADED = {"HSDP, offloaded": {"optim.name": "adamw", **HSDP, "fsdp.cpu_offload": True}}
EVALUATED = {"compile.enabled": True, "eval.every": 2, "profile.steps": [3, 4], "profile.memory_snapshot": True}
ITEMS = [
    # collectives between ranks
    Item(60, "4 ranks on one card, five settings", "ranks", {"n": 4, "cases": RANKS}),
    Item(60, "4 ranks on one card, saves and loads on 2", "saves", {"n": 4}),
    Item(60, "4 ranks on one card, compiled", "ranks", {"n": 4, "cases": COMPILED}),
    Item(40, "4 ranks on one card, float8", "ranks", {"n": 4, "cases": FLOAT8}),
    Item(30, "4 ranks on one card, one is slow", "slow_rank", {"n": 4}),
    Item(70, "124M, bitwise resume, deterministic", "resume", {"config": "gpt_124m_scratch.toml", "values": SMALL}),
    Item(230, "tests on the GPU, without memory", "gpu_tests", {"memory": False}),
    # one rank of a large world
    fake(60, "8B, one rank of 64", "llama_8b", 64, {"train.global_batch_size": 256}),
    fake(70, "8B, one rank of 16 x 64, Muon", "llama_8b", 1024, MUON, {"train.global_batch_size": 2048}, MANY),
    # the best settings
    row(50, "1B, no checkpointing, micro-batch 4, kept gathered, summed last", "llama_1b", ONE, BEST),
    row(45, "8 of 32 layers of 8B, sequences of 8,192", "llama_8b", EIGHT),
    row(45, "8 of 32 layers of 8B, float8", "llama_8b", EIGHT, {"speed.float8": True}),
    Item(80, "1B, pause of a background save", "save_pause", {"config": "llama_1b.toml", "values": ONE}),
    # failures
    ends("a NaN", "nan:0:3:forward", 3, "the loss is not finite"),
    ends("out of memory", "", 1, "out of memory", values=HUGE),
    ends("SIGTERM while the device hangs", "device:0:3", 1, "FAULT device fired", ranks=1),
    # torch looks up the name of each C++ frame
    replace(
        ends("profile with memory history, evaluation compiled", "", 0, "val", values=EVALUATED, file="profile/*"),
        seconds=120,
    ),
    # rates
    Item(40, "matmuls of three models", "matmuls"),
    Item(40, "attention by each backend", "attention"),
    Item(40, "vocabularies and the kernel of the loss", "vocabularies"),
    Item(20, "copies", "copies"),
    row(150, "T5 base on pairs, compiled", "t5_summarize", PAIRS),
    row(50, "ours, 1B, not tied, selective, first", "llama_1b", ONE, SELECTIVE, UNTIED),
    Item(55, "torchtitan, 1B, not tied, selective, first", "torchtitan", {"arguments": TITAN}),
    row(40, "ours, 1B, not tied, selective, second", "llama_1b", ONE, SELECTIVE, UNTIED),
    Item(55, "torchtitan, 1B, not tied, selective, second", "torchtitan", {"arguments": TITAN}),
    row(35, "124M, vocabulary 50,257", "gpt_124m", SMALL),
    row(35, "124M, vocabulary 50,304", "gpt_124m_scratch", SMALL),
    row(45, "1B, selective, Muon", "llama_1b", ONE, SELECTIVE, MUON),
    row(45, "1B, selective, document mask", "llama_1b", ONE, SELECTIVE, DOCUMENTS),
    fake(45, "1B, one rank of 8", "llama_1b", 8, {"train.global_batch_size": 128}),
    fake(110, "70B, one rank of 64", "llama_70b", 64, {"train.global_batch_size": 128}),
    Item(40, "2 ranks on one card, one dies while the other waits in a kernel", "dead_rank"),
    Item(45, "1B, profile of three steps", "profiled", {"config": "llama_1b.toml", "values": {**ONE, **BEST}}),
    Item(40, "4 ranks on one card, HSDP with CPU offload", "ranks", {"n": 4, "cases": OFFLOADED}),
    Item(120, "tests on the GPU, memory", "gpu_tests", {"memory": True}),
]


def on_cards(n: int) -> list[Item]:
    """Return the items that run on n cards, through NCCL. The rows are of the 1B, with 8 sequences per card."""
    launcher = "--standalone", "--nproc-per-node", str(n)
    cases = {name: values for name, values in RANKS.items() if n >= 4 or "HSDP" not in name}
    batch = {**ONE, "train.global_batch_size": 8 * n}
    rows = {", default": {}, ", explicit prefetching": PREFETCH, ", Muon": MUON, ", NUMA binding": PREFETCH}
    rows |= {", HSDP": {**PREFETCH, **HSDP}} if n >= 4 else {}
    found = [
        Item(40, f"{n} cards, collectives of NCCL", "collectives", {}, launcher),
        Item(60, f"{n} cards, settings", "ranks", {"n": n, "cases": cases, "cards": True}),
        Item(60, f"{n} cards, saves and loads on {n // 2}", "saves", {"n": n, "cards": True}),
        Item(30, f"{n} cards, one is slow", "slow_rank", {"n": n, "cards": True}),
    ]
    for name, values in rows.items():
        item = row(70, f"{n} cards, 1B{name}", "llama_1b", batch, SELECTIVE, values)
        binding = ("--numa-binding=node",) if "NUMA" in name else ()
        found.append(replace(item, launcher=(*launcher, *binding)))
    return [*found, ends(f"{n} cards, a rank is killed", f"kill:{n - 1}:3", 1, f"died: rank {n - 1}", ranks=n)]


def run_item(
    item: Item, limit_s: float, log: Path, flags: Sequence[str], env: dict[str, str]
) -> tuple[dict[str, Any], str]:
    """Run an item. Returns its figures, and the reason of a failure; empty if it succeeded."""
    out, error = log.with_suffix(".json").resolve(), ""
    out.unlink(missing_ok=True)
    with log.open("w") as output:
        arguments = [item.function, json.dumps(item.options), str(out), *flags]
        options = [option for option in item.launcher if not (flags and "numa" in option)]  # a stand-in has no GPUs
        launcher = ["-m", "torch.distributed.run", *options] if options else []
        command = [sys.executable, *launcher, "-m", "benchmarks.gpu_items", *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if process.wait(limit_s):
                error = reason(log.read_text(errors="replace")) or f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"ended after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including its child processes
            process.wait()
    return json.loads(out.read_text()) if out.is_file() else {}, error


def reason(output: str) -> str:
    """Return the last line that names an error, and the next one if that has the details."""
    lines = [line.strip() for line in output.splitlines()] + [""]
    last = next((i for i in reversed(range(len(lines))) if "rror: " in lines[i]), len(lines) - 1)
    return " ".join(lines[last : last + 2] if lines[last].endswith(":") else lines[last : last + 1])[:300]


def read(results: Path) -> list[dict[str, Any]]:
    """Return all records. Skips lines that a kill or a damaged disk has made invalid."""
    records = []
    for line in results.read_bytes().splitlines() if results.is_file() else []:
        with contextlib.suppress(ValueError):  # not JSON, or not UTF-8
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def append(results: Path, record: dict[str, Any]) -> None:
    """Append a line, and sync it to disk."""
    torn = results.is_file() and not results.read_bytes().endswith(b"\n") and results.stat().st_size > 0
    with results.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def missing(items: Sequence[Item], records: Sequence[dict[str, Any]], key: dict[str, Any]) -> list[Item]:
    """Return the items without a result for this commit, card and torch, then those that the budget ended."""
    errors = {
        record["item"]: record["error"] for record in records if all(record.get(name) == key[name] for name in key)
    }
    left = (item for item in items if errors.get(item.name, CUT) == CUT)
    return sorted(left, key=lambda item: item.name in errors)


def run_all(items: Sequence[Item], key: dict[str, Any], given: argparse.Namespace, env: dict[str, str]) -> None:
    """Run the items that fit into the budget, in order."""
    deadline = given.start + given.budget_s
    for item in items:
        left = deadline - time.monotonic()
        estimate = 0 if given.stand_in else item.seconds
        if left <= estimate:
            print(f"later   {item.name}: {item.seconds} s do not fit into {max(left, 0):.0f} s", flush=True)
            continue
        own_limit = 2 * item.seconds if not given.stand_in else 300
        log = given.logs / log_name(item)
        print(f"run     {item.name}: about {item.seconds} s; {log}", flush=True)
        before = time.monotonic()
        figures, error = run_item(item, min(own_limit, left), log, flags_of(given), env)
        seconds = round(time.monotonic() - before, 1)
        print(f"        {error or 'done'}, {seconds} s", flush=True)
        if error and time.monotonic() >= deadline:
            error = CUT  # the next call repeats it, with more time
        append(given.results, {"item": item.name, **key, "seconds": seconds, "figures": figures, "error": error})
        pack(given.out, given.logs)


def log_name(item: Item) -> str:
    """Return an item's log file: letters, digits, dots, dashes and underscores, as some job systems demand."""
    return f"{re.sub('[^A-Za-z0-9.-]+', '_', item.name)}.log"


def pack(out: Path, logs: Path) -> None:
    """Write OUT/gpu.tar.gz with the results and the end of each log, at most ARCHIVE_BYTES."""
    files = [out / "gpu.jsonl", *sorted(logs.glob("*.log"))]
    part = out / "gpu.tar.gz.part"
    with tarfile.open(part, "w:gz") as archive:
        for file in files:
            with file.open("rb") as stream:
                stream.seek(max(file.stat().st_size - ARCHIVE_BYTES // len(files), 0))
                data = stream.read()
            entry = tarfile.TarInfo(f"gpu/{file.name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    part.replace(out / "gpu.tar.gz")


def tables(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield all figures, then those that `plan` predicts. Uses the newest result of each item."""
    newest = {record["item"]: record for record in records}
    yield "\n| item | seconds | figures |\n|---|---:|---|"
    for name, record in newest.items():
        own = {key: shown(value) for key, value in record["figures"].items() if not key.startswith("plan_")}
        own |= {"failed": record["error"]} if record["error"] else {}
        text = "; ".join(f"{key}: {value}" for key, value in own.items())
        yield f"| {name} | {record['seconds']:.0f} | {text.replace('|', '/')} |"
    yield "\nmeasured against plan\n"
    yield "| item | figure | measured | planned | measured / planned |\n|---|---|---:|---:|---:|"
    for name, record in newest.items():
        figures = record["figures"]
        for key, planned in figures.items():
            if key.startswith("plan_") and (figure := key.removeprefix("plan_")) in figures:
                ratio = f"{figures[figure] / planned:.2f}" if planned else ""
                yield f"| {name} | {figure} | {shown(figures[figure])} | {shown(planned)} | {ratio} |"


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def flags_of(given: argparse.Namespace) -> list[str]:
    return ["--stand-in"] if given.stand_in else []


def environment(given: argparse.Namespace) -> dict[str, str]:
    """Return the items' environment: without torchrun's variables, with the packages of --wheels."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    if given.wheels:
        target = given.wheels.resolve() / "installed"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", f"--find-links={given.wheels}"]
        if not target.is_dir():
            subprocess.run([*pip, f"--target={target}", *PACKAGES], check=True)
        paths.append(str(target))
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


def commit() -> str:
    """Return the commit, with "-dirty" if files differ from it; "unknown" without git."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def stop(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str]) -> None:
    """Run the missing items, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=CALL_S)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--stand-in", action="store_true")
    given = parser.parse_args(argv)
    given.start = time.monotonic()
    if given.list:
        for item in [*on_cards(2), *on_cards(8), *ITEMS]:
            print(f"{item.seconds:4} s  {item.name}")
        return
    if given.out.is_file():
        parser.error(f"--out {given.out} is a file; name a folder")
    given.results, given.logs = given.out / "gpu.jsonl", Path(f"{given.out.resolve()}.logs")
    for folder in (given.out, given.logs):
        folder.mkdir(parents=True, exist_ok=True)
    env = environment(given)
    log = given.logs / "device.log"
    found, error = run_item(Item(60, "device", "device"), 120, log, flags_of(given), env)
    if error:
        sys.exit(f"benchmarks.gpu: {error} ({log})")
    cards = found.pop("cards")
    several = [item for n in sorted({cards, 2}, reverse=True) if 2 <= n <= cards for item in on_cards(n)]
    items = [item for item in [*several, *ITEMS] if given.only in item.name]
    key = {"commit": commit(), **found}
    run_all(items if given.only else missing(items, read(given.results), key), key, given, env)
    mine = [record for record in read(given.results) if all(record.get(name) == key[name] for name in key)]
    print("\n".join(tables(mine)))


if __name__ == "__main__":
    for signal_number in (signal.SIGTERM, signal.SIGHUP):  # by default they end this process, but not the item
        signal.signal(signal_number, stop)
    main(sys.argv[1:])
