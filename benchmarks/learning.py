"""What a token teaches: `python -m benchmarks.learning STAGE [--out DIR]` searches for the best default recipe.

    screen     every candidate at the default experiment (1.8 M parameters, 1,024,000 tokens), one seed
    blocks     the best of the optimizer's settings with two blocks instead of four, and changes to that
    survivors  the best candidates of the same length of sequences, three seeds
    defaults   the former and the present default on the held-out text of the default split, three seeds, and the
               present one with a part of its tokens
    larger     Muon, and AdamW at five rates, with a model of 5 M parameters
    widths     rates of models of three widths, with and without model.mup_base_dim
    recipes    the present default against those of nanoGPT, litgpt and Hugging Face Trainer after 60, 120 and 300 s
    peers      nanochat's and nanoGPT's own code (--nanochat, --nanogpt: clones) in the time of the present default
    peers-larger  nanochat's models of 5 to 10 M parameters in ten minutes of two cores
    table      print what is known, and plot it

Results are appended to benchmarks/learning.jsonl, and a stage runs only what is not there: a search can be stopped at
any time, and `table` prints those of docs/lab without training. Each run is one process with one thread, and
two run at a time.

Scores are bits per byte of the raw text, over whole documents. The search trains without the tenth of the documents
with the lowest hashes, and is scored on the upper half of those. The lower half is the held-out text of the default
split, which only `defaults` and the last part of `recipes` read. Seconds are processor time of one core, without the
start of the process and without scoring; "60 s" is 120 of them, as on two cores.
"""

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import svg
from benchmarks.machine import cpu

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "learning.jsonl"
TOKENS = 250 * 16 * 256  # of the default experiment
WORKERS = 2
_lock = threading.Lock()


def recipe(batch: int = 16, *, tokens: int = TOKENS, seq_len: int = 256, **keys: Any) -> dict[str, Any]:
    """The options of a run of `tokens` tokens, `batch` sequences a step."""
    found: dict[str, Any] = {
        "train.steps": tokens // (batch * seq_len),
        "train.seq_len": seq_len,
        "train.global_batch_size": batch,
        "train.micro_batch_size": min(batch, 2048 // seq_len),
    }
    return found | {key.replace("__", "."): value for key, value in keys.items()}


# what the repository's defaults have changed since is named, so that a result keeps its meaning
ADAMW: dict[str, Any] = {
    "model__qk_norm": "false",
    "optim__name": "adamw",
    "optim__lr": 4e-3,
    "optim__schedule": "cosine",
    "optim__min_lr_ratio": 0.1,
}
MUON: dict[str, Any] = ADAMW | {"optim__name": "muon", "optim__muon_embedding_lr_factor": 1.0}
TO_ZERO: dict[str, Any] = {"optim__schedule": "linear", "optim__min_lr_ratio": 0.0}

HEAD = '[{match="output*", lr_factor=2.0}]'
BLOCKS = '[{match="layers.*", lr_factor=2.0}]'
BOTH: dict[str, Any] = {"optim__muon_embedding_lr_factor": 3.0, "model__qk_norm": "true"}


def best(batch: int = 8, **keys: Any) -> dict[str, Any]:
    """Muon with 8 sequences a step, and changes. The candidates below differ from it in what their name says."""
    return recipe(batch, **(MUON | keys))


CANDIDATES: dict[str, dict[str, Any]] = {
    "adamw (default of 0.2)": recipe(**ADAMW),
    "muon": recipe(**MUON),
    "muon, batch 8": recipe(8, **MUON),
    "muon, batch 8, linear to zero": best(**TO_ZERO),
    "muon, batch 4, linear to zero": best(4, **TO_ZERO),
    "adamw, batch 8, linear to zero": recipe(8, **(ADAMW | TO_ZERO)),
    "muon, batch 4": best(4),
    "rate 8e-3": best(optim__lr=8e-3),
    "rate 1.6e-2": best(optim__lr=1.6e-2),
    "blocks at twice the rate": best(optim__groups=BLOCKS),
    "embeddings at three times the rate": best(optim__muon_embedding_lr_factor=3.0),
    "queries and keys normalised": best(model__qk_norm="true"),
    "both of these": best(**BOTH),
    "both, blocks at twice the rate": best(optim__groups=BLOCKS, **BOTH),
    "both, residual projections begin at 1/100": best(variant="small_residual", **BOTH),
    "both, sequences of 128, batch 16": best(16, seq_len=128, **BOTH),
    "both, embeddings at six times the rate": best(**(BOTH | {"optim__muon_embedding_lr_factor": 6.0})),
    "both, head at twice the rate": best(optim__groups=HEAD, **BOTH),
    "both, blocks at 0.7 of the rate": best(optim__groups=BLOCKS.replace("2.0", "0.7"), **BOTH),
    "both, vocabulary of 2,048": best(tokenizer__vocab_size=2048, **BOTH),
    "both, head begins 1/20 as large": best(variant="small_head", **BOTH),
    "both, ReLU^2": best(variant="relu2", **BOTH),
    "both, softcap of 15": best(variant="softcap", speed__chunked_loss="false", **BOTH),
    "both, momentum 0.9": best(optim__muon_momentum=0.9, **BOTH),
    "both, betas 0.9, 0.99": best(optim__betas="[0.9, 0.99]", **BOTH),
    "both, momentum 0.9 and betas 0.9, 0.99": best(optim__muon_momentum=0.9, optim__betas="[0.9, 0.99]", **BOTH),
    "both, no weight decay": best(optim__weight_decay=0.0, **BOTH),
    "both, cautious weight decay": best(optim__muon_cautious_decay="true", **BOTH),
    "both, NorMuon": best(variant="normuon", **BOTH),
}

# two blocks instead of four, with the best of the optimizer's settings above, at more tokens in less time
TWO: dict[str, Any] = BOTH | {"model__n_layers": 2, "optim__muon_momentum": 0.9, "optim__betas": "[0.9, 0.99]"}
THREE: dict[str, Any] = TWO | {
    **{"optim__groups": HEAD, "optim__muon_embedding_lr_factor": 6.0, "variant": "small_residual"}
}
TWO_TOKENS = 600 * 8 * 256


def two(batch: int = 8, tokens: int = TWO_TOKENS, **keys: Any) -> dict[str, Any]:
    """A run with two blocks."""
    return best(batch, tokens=tokens, **(TWO | keys))


RATE_8: dict[str, Any] = {"optim__lr": 8e-3}
TWO_BLOCKS: dict[str, dict[str, Any]] = {
    "two blocks": two(),
    "head at twice the rate": two(optim__groups=HEAD),
    "embeddings at six times the rate": two(optim__muon_embedding_lr_factor=6.0),
    "rate 6e-3": two(optim__lr=6e-3),
    "rate 8e-3": two(**RATE_8),
    "rate 6e-3, head at twice that": two(optim__lr=6e-3, optim__groups=HEAD),
    "sequences of 128, batch 16": two(16, seq_len=128),
    "sequences of 128, batch 16, rate 8e-3": two(16, seq_len=128, **RATE_8),
    "the same, tied": two(16, seq_len=128, model__tie_embeddings="true", **RATE_8),
    "the same, vocabulary of 2,048, 1.4 times the tokens": two(
        16, tokens=840 * 2048, seq_len=128, tokenizer__vocab_size=2048, **RATE_8
    ),
    "sequences of 128, batch 8, rate 6e-3, head at twice that": two(8, seq_len=128, optim__lr=6e-3, optim__groups=HEAD),
    "head twice, embeddings six times, residual projections begin at 1/100": two(**THREE),
    "these three, rate 6e-3": two(optim__lr=6e-3, **THREE),
    "these three, batch 4": two(4, **THREE),
    "these three, sequences of 128, batch 16": two(16, seq_len=128, **THREE),
    "these three, linear to zero": two(**TO_ZERO, **THREE),
}

_SURVIVORS = "both of these", "both, momentum 0.9", "both, momentum 0.9 and betas 0.9, 0.99"
SURVIVORS = {name: [(name, CANDIDATES[name], seed) for seed in range(3)] for name in _SURVIVORS}

LARGER: dict[str, Any] = {"model__size": "3M", "model__qk_norm": "true"}  # 5.0 M with this vocabulary
LARGER_TOKENS = TOKENS // 2


def larger(tokens: int = LARGER_TOKENS, **keys: Any) -> dict[str, Any]:
    """A run of the larger model with 8 sequences a step."""
    return recipe(8, tokens=tokens, **(ADAMW | keys | LARGER))


_MUON: dict[str, Any] = {"optim__name": "muon", "optim__muon_embedding_lr_factor": 3.0}
LARGER_JOBS: dict[str, dict[str, Any]] = {
    "adamw, rate 4e-3": larger(),
    "muon, 75 % of the steps": larger(LARGER_TOKENS * 3 // 4, **_MUON),
    "adamw, rate 2e-3": larger(optim__lr=2e-3),
    "adamw, rate 8e-3": larger(optim__lr=8e-3),
    "muon": larger(**_MUON),
    "adamw, rate 1e-3": larger(optim__lr=1e-3),
    "adamw, rate 5e-4": larger(optim__lr=5e-4),
    "muon, 50 % of the steps": larger(LARGER_TOKENS // 2, **_MUON),
}


def of_width(dim: int, rate: float, base: int) -> dict[str, Any]:
    """A short run of the default experiment with a model of another width, scaled from `base` by muP (0: not)."""
    keys = {"dim": dim, "n_layers": 4, "n_heads": dim // 32, "n_kv_heads": dim // 64, "hidden_dim": 3 * dim}
    keys |= {"mup_base_dim": base, "max_seq_len": 256}
    model = {f"model__{key}": value for key, value in keys.items()}
    return best(tokens=153_600, optim__lr=rate, optim__warmup_steps=10, **model, **BOTH)


RATES = 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2
WIDTHS = [(dim, base) for dim in (64, 128, 256) for base in (128, 0) if (dim, base) != (128, 0)]
WIDTH_JOBS = {
    (dim, base, rate): (f"dim {dim}, {f'scaled from {base}' if base else 'not scaled'}", of_width(dim, rate, base), 0)
    for dim, base in WIDTHS
    for rate in RATES
}


HELD_OUT, UNSCORED = "held out", "unscored"
Job = tuple[str, dict[str, Any], int]  # name, options, seed


class Search:
    """Runs what has no result yet, two at a time, and keeps results in a file."""

    def __init__(self, out: Path, file: Path, clones: dict[str, Path], workers: int = WORKERS) -> None:
        self.out, self.clones, self.workers = out, clones, workers
        out.mkdir(parents=True, exist_ok=True)
        self.start: float | None = None
        self.file = file
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        self.results: dict[str, dict[str, Any]] = {one["key"]: one for one in map(json.loads, lines)}

    def run(self, jobs: Iterable[Job], stage: str) -> None:
        """Run jobs of (name, options, seed)."""
        with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            found = [pool.submit(self._one, stage, *job) for job in jobs]
        for one in found:
            if error := one.exception():
                print(f"{type(error).__name__}: {error}", file=sys.stderr)

    def result(self, stage: str, name: str, options: dict[str, Any], seed: int) -> dict[str, Any] | None:
        """What is known of a job."""
        return self.results.get(json.dumps([stage, name, options, seed]))

    def _one(self, stage: str, name: str, options: dict[str, Any], seed: int) -> None:
        if self.result(stage, name, options, seed):
            return
        key = json.dumps([stage, name, options, seed])
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]  # a name stands for several rates and lengths
        folder = f"{stage}-{''.join(c if c.isalnum() else '-' for c in name)}-{seed}-{digest}"
        made = self._peer if "peer" in options else self._ours
        found: dict[str, Any] = {"key": key, "stage": stage, "name": name, "seed": seed, "cpu": cpu()}
        found |= made(folder, options, seed, text=self._text(stage))
        with _lock:
            self.results[key] = found
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(
                f"{stage}: {name}, seed {seed}: {found.get('bits_per_byte', 0):.4f}, {found['seconds']:,.0f} s",
                flush=True,
            )

    def _peer(self, folder: str, options: dict[str, Any], seed: int, *, text: str) -> dict[str, Any]:
        """A run of a peer's own code."""
        scored = self.out / f"{folder}.json"
        command = [sys.executable, "-m", "benchmarks.learning_peer", str(self.clones[options["peer"]])]
        command += [json.dumps(options), str(seed), str(scored), text]
        _cpu_seconds(command, self.out / f"{folder}.log")
        row = json.loads(scored.read_text(encoding="utf-8"))
        found = {key: row[key] for key in ("seconds", "commit", "parameters")}
        return found | ({} if text == UNSCORED else _scores(row))

    def _ours(self, folder: str, options: dict[str, Any], seed: int, *, text: str) -> dict[str, Any]:
        """A run of train.py."""
        shutil.rmtree(self.out / folder, ignore_errors=True)  # of a search that was stopped: its seconds are not whole
        given = ["--run.device=cpu", "--run.threads=1", f"--run.out_dir={self.out}", f"--run.name={folder}"]
        given += [f"--run.seed={seed}", "--eval.every=0", "--sample.every=0", "--checkpoint.every=0", "--log.every=25"]
        if text != HELD_OUT:
            given += ["--data.val_fraction=0.1"]
        variant = options.get("variant", "")
        command = [sys.executable, "-m", "benchmarks.learning_train", "train", variant, *given]
        command += [f"--{key}={value}" for key, value in options.items() if key != "variant"]
        seconds = _cpu_seconds(command, self.out / f"{folder}.log") - self._start()
        if text == UNSCORED:
            return {"seconds": seconds}
        scored = self.out / folder / "score.json"
        score = ["-m", "benchmarks.learning_train", "evaluate", variant]
        score += [str(self.out / folder), *([] if text == HELD_OUT else ["--data", text]), "--json", str(scored)]
        _cpu_seconds([sys.executable, *score], self.out / f"{folder}.log")
        [row] = json.loads(scored.read_text(encoding="utf-8"))["models"][0]["texts"].values()
        return {"seconds": seconds} | _scores(row)

    def _text(self, stage: str) -> str:
        """What a stage is scored on: the default split's held-out text, the search's, or nothing."""
        if stage.endswith("final"):
            return HELD_OUT
        return UNSCORED if stage == "peers cost" else str(self._dev())

    def _start(self) -> float:
        """Processor time of a run of one step."""
        with _lock:
            if self.start is None:
                log, name = self.out / "start.log", f"--run.name=start-{time.time_ns()}"
                more = ["--train.steps=1", "--optim.warmup_steps=0", "--run.device=cpu", "--run.threads=1", name]
                more += ["--eval.every=0", "--sample.every=0", "--checkpoint.every=0", "--data.val_fraction=0.1"]
                more += [f"--run.out_dir={self.out}"]
                self.start = _cpu_seconds([sys.executable, "-m", "benchmarks.learning_train", "train", "", *more], log)
        return self.start

    def _dev(self) -> Path:
        """The documents that the search is scored on."""
        from torchtitan_lite.data.prepare import corpus, plan, split

        with _lock:
            file = self.out / "dev.jsonl"
            if not file.exists():
                texts = split.documents(corpus.find(""), plan.Options())
                hashed = ((plan.document_hash(text.encode()) / plan.HASH_RANGE, text) for text in texts)
                chosen = [json.dumps({"text": text}) for at, text in hashed if 0.05 <= at < 0.1]
                partial = file.with_suffix(".partial")
                partial.write_text("\n".join(chosen) + "\n", encoding="utf-8")
                partial.replace(file)
        return file


def _scores(row: dict[str, Any]) -> dict[str, Any]:
    """The score of a text, and the bits and bytes of each document: two runs are compared document by document."""
    scores = {"bits_per_byte": row["bits_per_byte"], "stderr": row["bits_per_byte_stderr"]}
    return scores | {key: row[key] for key in ("bits", "bytes")}


def _cpu_seconds(command: list[str], log: Path) -> float:
    """Run a command; its processor time, with that of its children. Raises RuntimeError if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {status}: see {log}")
    return used.ru_utime + used.ru_stime


# --- against the recipes that people use --------------------------------------------------------------------------


def nanogpt(rate: float, tokens: int) -> dict[str, Any]:
    """nanoGPT's GPT with the batch of its CPU example and the AdamW of its small config, at this file's length."""
    keys: dict[str, Any] = {"model__family": "gpt", "model__tie_embeddings": "true", "optim__betas": "[0.9, 0.99]"}
    steps = tokens // (12 * 256)  # its 100 steps of warm-up are too many for the shortest runs
    keys["optim__warmup_steps"] = min(100, steps // 10)
    found = recipe(12, tokens=tokens, **(ADAMW | keys)) | {"optim.lr": rate, "train.micro_batch_size": 12}
    del found["model.qk_norm"]  # of llama
    return found


def litgpt(rate: float, tokens: int) -> dict[str, Any]:
    """litgpt's pretraining defaults. Its batch of 512 sequences would take five steps: it gets our former one."""
    return recipe(16, tokens=tokens, **ADAMW) | {"optim.lr": rate}


def hf_trainer(rate: float, tokens: int) -> dict[str, Any]:
    """TrainingArguments' defaults with a Llama, whose initial values are all of deviation 0.02."""
    keys: dict[str, Any] = {"optim__betas": "[0.9, 0.999]", "optim__weight_decay": 0.0, "optim__warmup_steps": 0}
    return recipe(8, tokens=tokens, **(ADAMW | TO_ZERO | keys)) | {"optim.lr": rate, "variant": "plain_residual"}


def default(rate: float, tokens: int) -> dict[str, Any]:
    """The default of this repository."""
    return best(tokens=tokens, **BOTH) | {"optim.lr": rate}


SHORT = 122_880  # tokens of a run that measures what they cost
RECIPES: dict[str, tuple[Callable[[float, int], dict[str, Any]], tuple[float, ...]]] = {
    "torchtitan_lite": (default, (4e-3,)),
    "nanoGPT": (nanogpt, (1e-3, 3e-3, 6e-3, 4e-4)),
    "litgpt": (litgpt, (4e-4, 2e-3, 6e-3, 1.2e-2)),
    "Hugging Face Trainer": (hf_trainer, (5e-5, 5e-4, 3e-3, 8e-3)),
}
SECONDS = 60, 120, 300  # of two cores
DEFAULTS: list[Job] = [
    *((f"default, {part} % of its steps", best(tokens=TOKENS * part // 100, **BOTH), 0) for part in (40, 50)),
    *(job for seed in range(3) for job in (("default", best(**BOTH), seed), ("default of 0.2", recipe(**ADAMW), seed))),
]


def rate_jobs(search: Search) -> list[Job]:
    """Every rate of every recipe, for the shortest time."""
    return [
        (name, make(rate, tokens_in(search, name, SECONDS[0])), 0)
        for name, (make, rates) in RECIPES.items()
        for rate in rates
        if len(rates) > 1
    ]


def cost_jobs() -> list[Job]:
    """Short runs in turn, which measure what a token costs."""
    return [(name, make(rates[0], SHORT), seed) for seed in range(3) for name, (make, rates) in RECIPES.items()]


def tokens_in(search: Search, name: str, seconds: int) -> int:
    """How many tokens a recipe trains on in this time, rounded to three digits; 0 if it was not measured."""
    costs = [one["seconds"] for job in cost_jobs() if job[0] == name and (one := search.result("cost", *job))]
    return int(float(f"{WORKERS * seconds * SHORT / statistics.median(costs):.3g}")) if costs else 0


def best_rate(search: Search, name: str) -> float:
    """The rate of the lowest score on the search's text, or the first."""
    make, rates = RECIPES[name]
    found = {rate: search.result("rate", name, make(rate, tokens_in(search, name, SECONDS[0])), 0) for rate in rates}
    scores = {rate: one["bits_per_byte"] for rate, one in found.items() if one}
    return min(scores, key=scores.__getitem__, default=rates[0])


def recipe_job(search: Search, name: str, seconds: int) -> Job:
    """The run of a recipe that counts."""
    return name, RECIPES[name][0](best_rate(search, name), tokens_in(search, name, seconds)), 0


# --- against the programs themselves ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A peer's model, and the rates to choose from."""

    options: dict[str, Any]
    rates: tuple[float, ...]
    part: int = 4  # rates are chosen in 1/part of the time

    def run(self, rate: float, tokens: int) -> dict[str, Any]:
        """The options of a run. Compiled, a step costs less and computes the same, but compiling takes minutes."""
        return self.options | {"rate": rate, "steps": tokens // (self.options["batch"] * 256), "compile": False}


def peer(name: str, depth: int, dim: int, heads: int, batch: int) -> dict[str, Any]:
    """The options of benchmarks/learning_peer.py."""
    sizes = {"depth": depth, "dim": dim, "heads": heads, "batch": batch}
    return {"peer": name} | sizes | ({"decay": 1.0} if name == "nanochat" else {}) | {"dtype": "float32"}


NANOCHAT_RATES = 4.0, 8.0, 12.0, 16.0  # times those of base_train.py
PEERS: dict[str, Peer] = {
    "nanochat, 2 x 128, 8 sequences": Peer(peer("nanochat", 2, 128, 1, 8), NANOCHAT_RATES),
    "nanochat, 2 x 128, 4 sequences": Peer(peer("nanochat", 2, 128, 1, 4), NANOCHAT_RATES),
    "nanoGPT, 4 x 128, 12 sequences": Peer(peer("nanoGPT", 4, 128, 4, 12), (4e-4, 1e-3, 3e-3, 6e-3)),
}
LARGER_PEERS: dict[str, Peer] = {
    "nanochat, 4 x 256, 8 sequences": Peer(peer("nanochat", 4, 256, 2, 8), NANOCHAT_RATES),
    "nanochat, 2 x 384, 8 sequences": Peer(peer("nanochat", 2, 384, 3, 8), NANOCHAT_RATES),
}
PEER_SHORT = 61_440  # tokens of a run that measures what they cost
LARGER_SECONDS = 1200.0  # ten minutes of two cores


def peer_costs(peers: dict[str, Peer]) -> list[Job]:
    """Short runs in turn, which measure what a token costs: the default, and each peer with and without compile."""
    turn: list[tuple[str, dict[str, Any]]] = [("torchtitan_lite", default(4e-3, PEER_SHORT))]
    for name, one in peers.items():
        turn += [(name, one.run(one.rates[1], PEER_SHORT) | {"compile": compiled}) for compiled in (False, True)]
    return [(name, options, seed) for seed in range(3) for name, options in turn]


def peer_seconds(search: Search, name: str, peers: dict[str, Peer]) -> float:
    """The median processor time of a token, with or without compile: whichever costs less."""
    found: dict[bool, list[float]] = {}
    for job in peer_costs(peers):
        if job[0] == name and (one := search.result("peers cost", *job)):
            found.setdefault(job[1].get("compile", False), []).append(one["seconds"] / PEER_SHORT)
    return min(map(statistics.median, found.values()), default=math.nan)


def peer_tokens(search: Search, name: str, peers: dict[str, Peer], budget: float, part: int = 1) -> int:
    """How many tokens a peer trains on in this processor time (0: that of the present default), to three digits."""
    whole = budget or peer_seconds(search, "torchtitan_lite", peers) * TOKENS
    tokens = whole / part / peer_seconds(search, name, peers)
    return 0 if math.isnan(tokens) else int(float(f"{tokens:.3g}"))


def peer_rates(search: Search, peers: dict[str, Peer], budget: float) -> list[Job]:
    """Every rate of every peer, in a part of the time."""
    return [
        (name, one.run(rate, peer_tokens(search, name, peers, budget, one.part)), 0)
        for name, one in peers.items()
        for rate in one.rates
    ]


def peer_finals(search: Search, peers: dict[str, Peer], budget: float) -> list[Job]:
    """Three seeds of each peer at its best rate on the search's text."""
    jobs: list[Job] = []
    for name, one in peers.items():
        found = {
            options["rate"]: score["bits_per_byte"]
            for job_name, options, seed in peer_rates(search, {name: one}, budget)
            if (score := search.result("peers rate", job_name, options, seed))
        }
        if len(found) == len(one.rates):
            rate = min(found, key=found.__getitem__)
            options = one.run(rate, peer_tokens(search, name, peers, budget))
            jobs += [(name, options, seed) for seed in range(3)]
    return jobs


def peers_table(search: Search, peers: dict[str, Peer], budget: float) -> list[str]:
    """The rates that were tried, and each peer at its best."""
    lines = ["| program | rate | tokens | bits per byte of the search's text |", "|---|---:|---:|---:|"]
    for name, options, seed in peer_rates(search, peers, budget):
        if one := search.result("peers rate", name, options, seed):
            tokens = options["steps"] * options["batch"] * 256
            lines.append(f"| {name} | {options['rate']:g} | {tokens:,} | {one['bits_per_byte']:.4f} |")
    lines += ["", "| program | parameters | tokens | core seconds | bits per byte, by seed | mean |"]
    lines.append("|---|---:|---:|---:|---|---:|")
    finals: dict[str, list[Job]] = {}
    for job in peer_finals(search, peers, budget):
        finals.setdefault(job[0], []).append(job)
    for name, jobs in finals.items():
        if found := [one for job in jobs if (one := search.result("peers final", *job))]:
            bits, options = [one["bits_per_byte"] for one in found], jobs[0][1]
            tokens = options["steps"] * options["batch"] * 256
            seconds = tokens * peer_seconds(search, name, peers)
            cells = f"{found[0]['parameters']:,}", f"{tokens:,}", f"{seconds:,.0f}", ", ".join(f"{b:.3f}" for b in bits)
            lines.append(f"| {name} | {' | '.join(cells)} | {statistics.mean(bits):.3f} |")
    return lines


# --- tables ---------------------------------------------------------------------------------------------------


def screen_table(search: Search) -> list[str]:
    """A row for each candidate with a result, best first."""
    rows = [
        (one["bits_per_byte"], name, one["seconds"])
        for name, options in CANDIDATES.items()
        if (one := search.result("screen", name, options, 0))
    ]
    lines = ["| candidate | bits per byte | seconds |", "|---|---:|---:|"]
    return lines + [f"| {name} | {bits:.4f} | {seconds:,.0f} |" for bits, name, seconds in sorted(rows)]


def two_blocks_table(search: Search) -> list[str]:
    """The candidates with two blocks, best first, scored by windows of the length that they were trained with."""
    rows = [
        (one["bits_per_byte"], name, options["train.seq_len"], one["seconds"])
        for name, options in TWO_BLOCKS.items()
        if (one := search.result("two blocks", name, options, 0))
    ]
    lines = ["| with two blocks | window | bits per byte | seconds |", "|---|---:|---:|---:|"]
    return lines + [f"| {name} | {n} | {bits:.4f} | {seconds:,.0f} |" for bits, name, n, seconds in sorted(rows)]


def survivors_table(search: Search) -> list[str]:
    """The mean over seeds, and each seed."""
    lines = ["| candidate | bits per byte, by seed | mean |", "|---|---:|---:|"]
    for name, jobs in SURVIVORS.items():
        found = [one["bits_per_byte"] for job in jobs if (one := search.result("screen", *job))]
        if found:
            lines.append(f"| {name} | {', '.join(f'{bits:.4f}' for bits in found)} | {statistics.mean(found):.4f} |")
    return lines


def larger_table(search: Search) -> list[str]:
    """The runs of the larger model."""
    lines = ["| 5 M parameters | steps | bits per byte | seconds |", "|---|---:|---:|---:|"]
    for name, options in LARGER_JOBS.items():
        if one := search.result("larger", name, options, 0):
            row = name, f"{options['train.steps']:,}", f"{one['bits_per_byte']:.4f}", f"{one['seconds']:,.0f}"
            lines.append(f"| {' | '.join(row)} |")
    return lines


def widths_table(search: Search) -> list[str]:
    """Bits per byte by rate for each width, and the best rate of a parabola through the best three."""
    lines = [f"| | {' | '.join(f'{rate:g}' for rate in RATES)} | best rate |", "|---|" + "---:|" * (len(RATES) + 1)]
    for dim, base in WIDTHS:
        jobs = {rate: WIDTH_JOBS[dim, base, rate] for rate in RATES}
        found = {rate: one["bits_per_byte"] for rate, job in jobs.items() if (one := search.result("widths", *job))}
        if found:
            cells = [f"{found[rate]:.3f}" if rate in found else "" for rate in RATES]
            lines.append(f"| {jobs[RATES[0]][0]} | {' | '.join(cells)} | {lowest(found)} |")
    return lines


def lowest(found: dict[float, float]) -> str:
    """The minimum of a parabola through the lowest value and its neighbours, over the logarithm of the rate."""
    rates = sorted(found)
    i = min(range(len(rates)), key=lambda i: found[rates[i]])
    if not 0 < i < len(rates) - 1:
        return f"{'below' if i == 0 else 'above'} {rates[i]:g}"
    x, y = [math.log(rate) for rate in rates[i - 1 : i + 2]], [found[rate] for rate in rates[i - 1 : i + 2]]
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    middle = (x[0] + x[1]) / 2 - left * (x[2] - x[0]) / 2 / (right - left)  # where the slope is 0
    return f"{math.exp(middle):.2g}"


def defaults_table(search: Search) -> list[str]:
    """Both defaults over seeds, and the present one on a part of its tokens."""
    lines = ["| | tokens | bits per byte, by seed | mean | seconds |", "|---|---:|---:|---:|---:|"]
    for name in dict.fromkeys(name for name, _, _ in DEFAULTS):
        jobs = [job for job in DEFAULTS if job[0] == name]
        found = [one for job in jobs if (one := search.result("final", *job))]
        if found:
            bits, cost = ([one[key] for one in found] for key in ("bits_per_byte", "seconds"))
            options = jobs[0][1]
            tokens = options["train.steps"] * options["train.global_batch_size"] * options["train.seq_len"]
            each = ", ".join(f"{one:.3f}" for one in bits)
            mean, seconds = statistics.mean(bits), statistics.mean(cost)
            lines.append(f"| {name} | {tokens:,} | {each} | {mean:.3f} | {seconds:,.0f} |")
    return lines


def recipe_tables(search: Search) -> list[str]:
    """The rates that were tried, and bits per byte after each time."""
    lines = ["| recipe | rate | bits per byte of the search's text after 60 s |", "|---|---:|---:|"]
    for name, options, seed in rate_jobs(search):
        if one := search.result("rate", name, options, seed):
            lines.append(f"| {name} | {options['optim.lr']:g} | {one['bits_per_byte']:.4f} |")
    lines += ["", "| recipe | rate | tokens per second of a core | " + " | ".join(f"{n} s" for n in SECONDS) + " |"]
    lines.append("|---|---:|---:|" + "---:|" * len(SECONDS))
    for name in RECIPES:
        found = [search.result("final", *recipe_job(search, name, n)) for n in SECONDS]
        cells = [f"{one['bits_per_byte']:.3f} +- {one['stderr']:.3f}" if one else "" for one in found]
        rate = tokens_in(search, name, 120) / (WORKERS * 120)
        lines.append(f"| {name} | {best_rate(search, name):g} | {rate:,.0f} | {' | '.join(cells)} |")
    return lines


def curve(axis: Any, search: Search, stage: str, jobs: dict[float, Job], label: str) -> None:
    """Bits per byte: the mean over seeds, with their standard deviation as an error bar if there are several."""
    points = {}
    for x, (name, options, _) in jobs.items():
        scores = [one["bits_per_byte"] for seed in range(3) if (one := search.result(stage, name, options, seed))]
        if scores:
            points[x] = statistics.mean(scores), statistics.stdev(scores) if len(scores) > 1 else math.nan
    if points:
        y, error = zip(*points.values(), strict=True)
        (line,) = axis.plot(list(points), y, marker="o", label=label)
        if not all(map(math.isnan, error)):
            axis.errorbar(list(points), y, yerr=error, fmt="none", ecolor=line.get_color(), capsize=3)


def plot(search: Search, file: Path) -> None:
    """Bits per byte of each recipe over seconds."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for name in RECIPES:
        curve(axis, search, "final", {seconds: recipe_job(search, name, seconds) for seconds in SECONDS}, name)
    if not axis.lines:
        return  # no recipe has been run
    axis.set(xlabel="seconds of two cores", ylabel="bits per byte of held-out text", xscale="log")
    axis.set_xticks(SECONDS, [str(n) for n in SECONDS])
    axis.minorticks_off()
    axis.legend()
    note = f"Bits per byte of held-out text (lower is better) over seconds of two cores. {SEEDS}"
    svg.save(figure, file, "What four recipes learn in the same time", note)


def plot_widths(search: Search, file: Path) -> None:
    """Bits per byte over rates, for each width with and without muP."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
    for axis, scaled in zip(axes, (False, True), strict=True):
        for dim in sorted({dim for dim, _ in WIDTHS}):
            base = 128 if scaled or dim == 128 else 0  # the base width is the same with both
            jobs: dict[float, Job] = {rate: WIDTH_JOBS[dim, base, rate] for rate in RATES}
            curve(axis, search, "widths", jobs, f"model.dim = {dim}")
        axis.set(title="model.mup_base_dim = 128" if scaled else "not scaled", xlabel="optim.lr", xscale="log")
        axis.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axis.minorticks_off()
    if axes[0].lines:
        axes[0].set_ylabel("bits per byte")
        axes[1].legend()
        note = f"Bits per byte of held-out text (lower is better) over the learning rate. {SEEDS}"
        svg.save(figure, file, "The best learning rate of three widths, with and without muP", note)


SEEDS = "Error bars, if any, are standard deviations over seeds; a point without one has one seed."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = (
        "screen",
        "blocks",
        "survivors",
        "defaults",
        "larger",
        "widths",
        "recipes",
        "peers",
        "peers-larger",
        "table",
    )
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learning", help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=WORKERS, help="runs at a time")
    parser.add_argument("--nanochat", type=Path, help="peers: a clone of karpathy/nanochat")
    parser.add_argument("--nanogpt", type=Path, help="peers: a clone of karpathy/nanoGPT")
    parser.add_argument("--only", default="", help="peers: those whose name has this")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "learning.svg")
    given = parser.parse_args()
    named = {"nanochat": given.nanochat, "nanoGPT": given.nanogpt}
    clones = {name: path.absolute() for name, path in named.items() if path}
    search = Search(given.out.absolute(), given.results, clones, given.workers)
    if given.stage == "screen":
        search.run(((name, options, 0) for name, options in CANDIDATES.items()), "screen")
    if given.stage == "blocks":
        search.run(((name, options, 0) for name, options in TWO_BLOCKS.items()), "two blocks")
    if given.stage == "defaults":
        search.run(DEFAULTS, "final")
    if given.stage == "larger":
        search.run(((name, options, 0) for name, options in LARGER_JOBS.items()), "larger")
    if given.stage == "widths":
        search.run(WIDTH_JOBS.values(), "widths")
    if given.stage == "survivors":
        search.run(itertools.chain(*zip(*SURVIVORS.values(), strict=True)), "screen")
    if given.stage == "recipes":
        search.run(cost_jobs(), "cost")
        search.run(rate_jobs(search), "rate")
        if missing := [job for job in rate_jobs(search) if not search.result("rate", *job)]:
            sys.exit(f"{len(missing)} rates have no result, so the best ones are not known")
        search.run([recipe_job(search, name, seconds) for seconds in SECONDS for name in RECIPES], "final")
    if given.stage in ("peers", "peers-larger"):
        peers, budget = (PEERS, 0.0) if given.stage == "peers" else (LARGER_PEERS, LARGER_SECONDS)
        peers = {name: one for name, one in peers.items() if given.only in name}
        if unnamed := {one.options["peer"] for one in peers.values()} - clones.keys():
            sys.exit(f"name the clones: {', '.join(f'--{name.lower()}=FOLDER' for name in sorted(unnamed))}")
        search.run(peer_costs(peers), "peers cost")
        search.run(peer_rates(search, peers, budget), "peers rate")
        search.run(peer_finals(search, peers, budget), "peers final")
    for lines in (
        screen_table(search),
        two_blocks_table(search),
        survivors_table(search),
        defaults_table(search),
        larger_table(search),
        recipe_tables(search),
        widths_table(search),
        peers_table(search, PEERS, 0.0),
        peers_table(search, LARGER_PEERS, LARGER_SECONDS),
    ):
        print("\n".join(["", *lines]))
    if given.stage == "table":
        plot(search, given.plot)
        plot_widths(search, given.plot.with_name("mup.svg"))


if __name__ == "__main__":
    main()
