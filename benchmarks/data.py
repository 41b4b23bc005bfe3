"""Preparing and loading data: `python -m benchmarks.data [megabytes]`.

1. Tokenising: the whole command (reading, tokenising, hashing, writing) compared with the bare
   `tokenizers.encode_batch_fast` on the same documents and cores, interleaved.
2. Peak memory of the command with all its processes, for a small and a ten times larger input.
3. The loader on one core: tokens per second for a small and a large corpus, near the start and far into it; and the
   time to the first batch of a run that resumes at step 1,000,000.
"""

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import tokenizers

from torchtitan_lite.data import token_files
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.prepare.texts import standard_library
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.files import write_durably

ROOT = Path(__file__).parent.parent
SEQ_LEN, BATCH = 1024, 512


def library(megabytes: float) -> bytes:
    """Return the standard library's source, repeated up to a size, as .jsonl lines of 4 KiB."""
    texts, size = [], 0
    while size < megabytes * 1e6:
        for file in standard_library().files:
            text = file.read_bytes().decode("utf-8", "ignore")
            lines = [json.dumps({"text": text[i : i + 4096]}) + "\n" for i in range(0, len(text), 4096)]
            texts += lines
            size += sum(map(len, lines))
            if size >= megabytes * 1e6:
                break
    return "".join(texts).encode()


def command(source: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "torchtitan_lite.data.prepare", str(source), "--out", str(out), *more]


def tokenising(folder: Path, megabytes: float) -> None:
    """Compare the command with the library."""
    source = folder / "text.jsonl"
    source.write_bytes(library(megabytes))
    subprocess.run(command(source, folder / "first", "--train-tokenizer", "8192"), cwd=ROOT, check=True, stdout=-3)
    given = folder / "first" / "tokenizer.json"
    documents = [json.loads(line)["text"] for line in source.read_bytes().splitlines()]
    n_bytes = sum(len(text.encode()) for text in documents)
    bare = """
import json, sys, time
from tokenizers import Tokenizer
texts = [json.loads(line)["text"] for line in open(sys.argv[1], "rb")]
tokenizer = Tokenizer.from_file(sys.argv[2])
before = time.perf_counter(), time.process_time()
for i in range(0, len(texts), 1000):
    tokenizer.encode_batch_fast(texts[i : i + 1000], add_special_tokens=False)
print(time.perf_counter() - before[0], time.process_time() - before[1])
"""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
    ours: list[tuple[float, float]] = []  # wall seconds, CPU seconds
    theirs: list[tuple[float, float]] = []
    for turn in range(3):
        line = [sys.executable, "-c", bare, str(source), str(given)]
        wall, busy = subprocess.run(line, env=environment, check=True, capture_output=True, text=True).stdout.split()
        theirs.append((float(wall), float(busy)))
        made = folder / f"turn-{turn}"
        before = time.perf_counter(), children_s()
        subprocess.run(command(source, made, "--tokenizer", str(given)), cwd=ROOT, check=True, stdout=-3)
        ours.append((time.perf_counter() - before[0], children_s() - before[1]))
        shutil.rmtree(made)
    cores = len(os.sched_getaffinity(0))
    print(f"tokenising {n_bytes / 1e6:.0f} MB, vocabulary 8192, {cores} cores, 3 interleaved pairs; median (range)")
    for name, times in (("bare encode_batch_fast", theirs), ("prepare, from end to end", ours)):
        print(f"  {name:26} {spread([n_bytes / 1e6 / t for t, _ in times])} MB/s")
    for i, name in enumerate(("ratio of the speeds", "ratio by time on the cores")):
        print(f"  {name:26} {spread([b[i] / a[i] for a, b in zip(ours, theirs, strict=True)])}")


def children_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f} to {max(values):.2f})"


def resident(pid: int) -> int:
    """Return the resident bytes of a process and its children."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += resident(int(child))
    except (OSError, ValueError):
        pass
    return total


def memory(folder: Path, sizes: tuple[float, float]) -> None:
    """Print the command's peak memory with the byte tokenizer, the fastest, so that queues fill most."""
    print("peak memory of prepare, all processes together")
    for megabytes in sizes:
        source, out = folder / "memory.jsonl", folder / "memory"
        source.write_bytes(library(megabytes))
        process = subprocess.Popen(command(source, out, "--tokenizer", "bytes"), cwd=ROOT, stdout=-3)
        peak, ended = 0, threading.Event()
        threading.Thread(target=lambda p=process, e=ended: (p.wait(), e.set()), daemon=True).start()
        while not ended.wait(0.02):
            peak = max(peak, resident(process.pid))
        print(f"  {megabytes:5.0f} MB input  {peak / 2**20:7.0f} MiB")
        shutil.rmtree(out)


def corpus_of(folder: Path, n_tokens: int) -> Path:
    """Make a prepared folder with n_tokens; all but the first million are a hole in the file."""
    out = folder / f"tokens-{n_tokens}"
    out.mkdir()
    write_durably(out / "tokenizer.json", b"{}")
    files = {"tokenizer.json": token_files.File.describe(out / "tokenizer.json")}
    for split, n in (("train", n_tokens), ("val", 4 * SEQ_LEN)):
        path = out / f"{split}.bin"
        path.write_bytes(np.random.default_rng(0).integers(0, 8192, min(n, 10**6), np.uint16).tobytes())
        os.truncate(path, n * 2)
        files[path.name] = token_files.File(n * 2, "", token_files.spots(path))
        np.array([n], np.int64).tofile(out / f"{split}.idx")
        files[f"{split}.idx"] = token_files.File.describe(out / f"{split}.idx")
    described = token_files.Meta(
        *(token_files.FORMAT_VERSION, 2, 1, 0, 0, n_tokens, 4 * SEQ_LEN, 0, 8192, 0, "", "", ""), files, {}
    )
    (out / "meta.json").write_text(json.dumps(asdict(described)))
    return out


def loader_of(folder: Path) -> Loader:
    """Build train.py's loader, with one source."""
    samples = Mixture([Samples(folder, "train", SEQ_LEN)], [1.0], ["one"])
    return Loader(samples, micro_batch_size=BATCH // 4, rank=0, world_size=1, seed=0)


def loading(folder: Path) -> None:
    """Print tokens per second on one core, and the time to the first batch after a resume."""
    print(f"loader on one core: batches of {BATCH} sequences of {SEQ_LEN} tokens; median of 20 after 5")
    for n_tokens in (10**7, 4 * 10**9):
        made = corpus_of(folder, n_tokens)
        for step in (0, 1_000_000):
            before = time.perf_counter()
            loader = loader_of(made)
            loader.batch(step * BATCH, BATCH)
            first_s = time.perf_counter() - before
            spent = []
            for turn in range(1, 26):
                before = time.perf_counter()
                loader.batch((step + turn) * BATCH, BATCH)
                spent.append(time.perf_counter() - before)
            rate = BATCH * SEQ_LEN / statistics.median(spent[5:]) / 1e6
            where = f"{n_tokens:>13,} tokens, from step {step:>9,}"
            print(f"  {where}: {rate:6.1f} M tokens/s; first batch after {1000 * first_s:6.1f} ms")


def main() -> None:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    print(f"Python {platform.python_version()}, tokenizers {tokenizers.__version__}, numpy {np.__version__}")
    with tempfile.TemporaryDirectory() as name:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        loading(Path(name))
        os.sched_setaffinity(0, cores)
        tokenising(Path(name), megabytes)
        memory(Path(name), (50, 500))


if __name__ == "__main__":
    main()
