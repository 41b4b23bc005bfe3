"""What a token teaches: `python -m benchmarks.learning STAGE [--out DIR]` searches for the best default recipe.

    search        changes to the default recipe, one at a time, on 819,200 tokens, one seed
    defaults      the default recipe, and with model.family = "resformer": cost, and the held-out text, three seeds
    bfloat16      the default and nanochat in bfloat16, in the same time, one seed
    peers         nanochat's and nanoGPT's own code (--nanochat, --nanogpt: clones), in the time of the former default
    configs       the small configs of other architectures, next to the default
    larger        configs/larger.toml, with value embeddings and without, and nanochat, in ten minutes of two cores
    widths        rates of models of three widths, with and without model.mup_base_dim
    table         print what is known, and plot it

Results are appended to benchmarks/learning.jsonl, and a stage runs only what is not there: a search can be stopped at
any time. `table` also prints the results of former stages, which this file can no longer run. Each run is one process
with one thread, and two run at a time.

Scores are bits per byte of the raw text, over whole documents, in windows of 256 tokens. The search trains without the
tenth of the documents with the lowest hashes, and is scored on the upper half of those. The lower half is the held-out
text of the default split, which only stages with "final" in their name read. Seconds are processor time of one core,
without the start of the process and without scoring.
"""

import argparse
import concurrent.futures
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import svg
from benchmarks.machine import cpu

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "learning.jsonl"
FORMER_TOKENS = 1_024_000  # of the former default
WORKERS = 2
_lock = threading.Lock()

HELD_OUT, UNSCORED = "held out", "unscored"
Job = tuple[str, dict[str, Any], int]  # name, options, seed

# every key of the recipe is named, so that a result keeps its meaning if a default changes
ORDINARY: dict[str, Any] = {
    **{"model.dim": 128, "model.n_layers": 2, "model.n_heads": 2, "model.n_kv_heads": 2, "model.hidden_dim": 384},
    **{"model.qk_norm": "true", "optim.name": "muon", "optim.lr": 8e-3, "optim.muon_momentum": 0.9},
    **{"optim.betas": "[0.9, 0.99]", "optim.schedule": "cosine", "optim.min_lr_ratio": 0.1, "optim.groups": "[]"},
    **{"optim.muon_embedding_lr_factor": 3.0},
}
STACK = ORDINARY | {"model.induction_head": "true"}
FORMER: dict[str, Any] = {  # the former default
    **{"model.qk_norm": "true", "optim.name": "muon", "optim.lr": 4e-3, "optim.schedule": "cosine"},
    **{"optim.min_lr_ratio": 0.1, "optim.muon_embedding_lr_factor": 3.0, "model.n_layers": 4, "model.n_heads": 4},
    **{"model.n_kv_heads": 2, "optim.muon_momentum": 0.95, "optim.betas": "[0.9, 0.95]"},
}


def run(tokens: int, keys: dict[str, Any], *, batch: int = 8, seq_len: int = 256) -> dict[str, Any]:
    """The options of a run of `tokens` tokens, `batch` sequences a step."""
    return {
        "train.steps": tokens // (batch * seq_len),
        "train.seq_len": seq_len,
        "train.global_batch_size": batch,
        "train.micro_batch_size": min(batch, 2048 // seq_len),
    } | keys


def changed(tokens: int, batch: int = 8, **keys: Any) -> dict[str, Any]:
    """The recipe without an induction head, with other values."""
    return run(tokens, ORDINARY | {key.replace("__", "."): value for key, value in keys.items()}, batch=batch)


SEARCH_TOKENS = 400 * 2048
HEAD = '[{match="output*", lr_factor=2.0}]'  # the head at twice the rate, as in the recipe that was searched


def wide_heads(batch: int = 8, **keys: Any) -> dict[str, Any]:
    """Two heads of 64."""
    return changed(SEARCH_TOKENS, batch, **({"optim__groups": HEAD} | keys))


def first(**keys: Any) -> dict[str, Any]:
    """What the search began with: four heads of 32."""
    return wide_heads(**({"model__n_heads": 4} | keys))


CANDIDATES: dict[str, dict[str, Any]] = {
    "4 heads of 32": first(),
    "4 heads of 32, bfloat16": first(fsdp__param_dtype="bfloat16"),
    "4 heads of 32, constant, then linear to zero over 60 %": first(
        optim__schedule="wsd", optim__decay_ratio=0.6, optim__min_lr_ratio=0.0
    ),
    "4 heads of 32, each with keys of its own": first(model__n_kv_heads=4),
    "4 heads of 32, feed-forward of 512": first(model__hidden_dim=512),
    "4 heads of 32, rate 1.2e-2": first(optim__lr=1.2e-2),
    "2 heads of 64": wide_heads(),
    "2 heads of 64, no clipping": wide_heads(optim__max_norm="inf"),
    "2 heads of 64, momentum 0.85, betas 0.8, 0.99": wide_heads(optim__muon_momentum=0.85, optim__betas="[0.8, 0.99]"),
    "2 heads of 64, 4 sequences a step": wide_heads(4),
    "1 head of 128": wide_heads(model__n_heads=1, model__n_kv_heads=1),
    "induction head": wide_heads(model__induction_head="true"),
    "induction head, head at the common rate": wide_heads(model__induction_head="true", optim__groups="[]"),
}


def of_width(dim: int, rate: float, base: int) -> dict[str, Any]:
    """A short run of the former default with a model of another width, scaled from `base` by muP (0: not)."""
    keys: dict[str, Any] = {"dim": dim, "n_layers": 4, "n_heads": dim // 32, "n_kv_heads": dim // 64}
    keys |= {"hidden_dim": 3 * dim, "mup_base_dim": base, "max_seq_len": 256}
    model = {f"model.{key}": value for key, value in keys.items()}
    return run(153_600, FORMER | {"optim.lr": rate, "optim.warmup_steps": 10} | model)


RATES = 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2
WIDTHS = [(dim, base) for dim in (64, 128, 256) for base in (128, 0) if (dim, base) != (128, 0)]
WIDTH_JOBS: dict[tuple[int, int, float], Job] = {
    (dim, base, rate): (f"dim {dim}, {f'scaled from {base}' if base else 'not scaled'}", of_width(dim, rate, base), 0)
    for dim, base in WIDTHS
    for rate in RATES
}


def _key(stage: str, name: str, options: dict[str, Any], seed: int) -> str:
    return json.dumps([stage, name, options, seed], sort_keys=True)


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
        return self.results.get(_key(stage, name, options, seed))

    def _one(self, stage: str, name: str, options: dict[str, Any], seed: int) -> None:
        if self.result(stage, name, options, seed):
            return
        key = _key(stage, name, options, seed)
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
        command = [sys.executable, "-m", "benchmarks.learning_train", "train", *given]
        if "model.dim" in options:  # the results so far: a shape of its own was without
            options = {"model.induction_head": "false"} | options
        command += [f"--{key}={value}" for key, value in options.items()]
        seconds = _cpu_seconds(command, self.out / f"{folder}.log") - self._start()
        if text == UNSCORED:
            return {"seconds": seconds}
        scored = self.out / folder / "score.json"
        score = ["-m", "benchmarks.learning_train", "evaluate"]
        score += [str(self.out / folder), *([] if text == HELD_OUT else ["--data", text]), "--json", str(scored)]
        _cpu_seconds([sys.executable, *score], self.out / f"{folder}.log")
        [row] = json.loads(scored.read_text(encoding="utf-8"))["models"][0]["texts"].values()
        return {"seconds": seconds} | _scores(row)

    def _text(self, stage: str) -> str:
        """What a stage is scored on: the default split's held-out text, the search's, or nothing."""
        if stage.endswith("final"):
            return HELD_OUT
        return UNSCORED if stage.endswith("cost") else str(self._dev())

    def _start(self) -> float:
        """Processor time of a run of one step."""
        with _lock:
            if self.start is None:
                log, name = self.out / "start.log", f"--run.name=start-{time.time_ns()}"
                more = ["--train.steps=1", "--optim.warmup_steps=0", "--run.device=cpu", "--run.threads=1", name]
                more += ["--eval.every=0", "--sample.every=0", "--checkpoint.every=0", "--data.val_fraction=0.1"]
                more += [f"--run.out_dir={self.out}"]
                self.start = _cpu_seconds([sys.executable, "-m", "benchmarks.learning_train", "train", *more], log)
        return self.start

    def _dev(self) -> Path:
        """The documents that the search is scored on."""
        from torchtitan_lite.data.prepare.documents import HASH_RANGE, usable
        from torchtitan_lite.data.prepare.texts import standard_library

        with _lock:
            file = self.out / "dev.jsonl"
            if not file.exists():
                hashed = ((document.hash / HASH_RANGE, document.texts[0]) for document in usable(standard_library()))
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


# --- our recipe, and the programs of others, in the same time ---------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A recipe or a peer's program, and the rates to choose from."""

    options: dict[str, Any]
    rates: tuple[float, ...]
    trial: int = 0  # tokens of the runs that choose among the rates; 0: those of a quarter of the time

    @property
    def ours(self) -> bool:
        """Whether train.py runs it."""
        return "peer" not in self.options

    def run(self, rate: float, tokens: int) -> dict[str, Any]:
        """The options of a run."""
        if self.ours:
            return run(tokens, self.options | {"optim.lr": rate})
        return self.options | {"rate": rate, "steps": tokens // (self.options["batch"] * 256), "compile": False}

    def costs(self, tokens: int) -> list[dict[str, Any]]:
        """Runs that measure what a token costs. Compiled, a peer's step costs less and computes the same."""
        one = self.run(self.rates[min(1, len(self.rates) - 1)], tokens)
        one.pop("model.induction_head", None)  # initial values cost nothing
        return [one] if self.ours else [one | {"compile": compiled} for compiled in (False, True)]


def peer(name: str, depth: int, dim: int, heads: int, batch: int) -> dict[str, Any]:
    """The options of benchmarks/learning_peer.py."""
    sizes = {"depth": depth, "dim": dim, "heads": heads, "batch": batch}
    return {"peer": name} | sizes | ({"decay": 1.0} if name == "nanochat" else {}) | {"dtype": "float32"}


NANOCHAT_RATES = 4.0, 8.0, 12.0, 16.0  # times those of base_train.py
NANOCHAT = "nanochat, 2 x 128, 8 sequences"
PEERS: dict[str, Program] = {
    NANOCHAT: Program(peer("nanochat", 2, 128, 1, 8), NANOCHAT_RATES),
    "nanochat, 2 x 128, 4 sequences": Program(peer("nanochat", 2, 128, 1, 4), NANOCHAT_RATES),
    "nanoGPT, 4 x 128, 12 sequences": Program(peer("nanoGPT", 4, 128, 4, 12), (4e-4, 1e-3, 3e-3, 6e-3)),
}
FORMER_DEFAULT = Program(FORMER, (4e-3,))
RESFORMER: dict[str, Any] = {"model.family": "resformer"}
OURS: dict[str, Program] = {"default": Program(STACK, (8e-3,)), "resformer": Program(STACK | RESFORMER, (8e-3,))}
WITHOUT = ", no induction head"
ORDINARY_OURS = {
    f"default{WITHOUT}": Program(ORDINARY, (8e-3,)),
    f"resformer{WITHOUT}": Program(ORDINARY | RESFORMER, (8e-3,)),
}
STEPS = 750  # of the default


NANOCHAT_LARGER = "nanochat, 4 x 256"
LARGER_STACK: dict[str, Any] = STACK | {
    **{"model.dim": 256, "model.n_layers": 4, "model.n_heads": 4, "model.n_kv_heads": 4, "model.hidden_dim": 768},
    "model.mup_base_dim": 128,
}
# 5.5 M parameters, 7.6 M with value embeddings, nanochat 7.3 M
LARGER: dict[str, Program] = {
    "default, 4 x 256": Program(LARGER_STACK, (8e-3,)),
    "resformer, 4 x 256": Program(LARGER_STACK | RESFORMER, (8e-3,)),
    NANOCHAT_LARGER: Program(peer("nanochat", 4, 256, 2, 8), NANOCHAT_RATES, 307_200),
}
SHORT = 61_440  # tokens of a run that measures what they cost
LONGER = 4 * SHORT  # a run's beginning and end cost ours 6 % of a short run, and those of peers are not counted
LARGER_SECONDS = 1200.0  # ten minutes of two cores


def cost_jobs(programs: dict[str, Program], tokens: int = SHORT, seeds: Iterable[int] = range(3)) -> list[Job]:
    """Short runs of all programs in turn."""
    return [(name, o, seed) for seed in seeds for name, one in programs.items() for o in one.costs(tokens)]


def cost(search: "Search", stage: str, jobs: Iterable[Job], name: str) -> float:
    """The median processor time of a token, with or without compile: whichever costs less. NaN: not measured."""
    found: dict[bool, list[float]] = {}
    for job in jobs:
        if job[0] == name and (one := search.result(stage, *job)):
            found.setdefault(job[1].get("compile", False), []).append(one["seconds"] / tokens_of(job[1]))
    return min(map(statistics.median, found.values()), default=math.nan)


def three_digits(tokens: float) -> int:
    """Rounded, 0 if it is not known."""
    return 0 if math.isnan(tokens) else int(float(f"{tokens:.3g}"))


def rate_jobs(programs: dict[str, Program], tokens: dict[str, int]) -> list[Job]:
    """Every rate of every program that has several, in a part of the time."""
    return [
        (name, one.run(rate, one.trial or three_digits(tokens[name] / 4)), 0)
        for name, one in programs.items()
        for rate in one.rates
        if len(one.rates) > 1 or one.trial
    ]


def final_jobs(
    search: "Search", stage: str, programs: dict[str, Program], tokens: dict[str, int], seeds: int = 3
) -> list[Job]:
    """Seeds of each program at its best rate on the search's text."""
    jobs: list[Job] = []
    for name, one in programs.items():
        tried = dict(zip(one.rates, rate_jobs({name: one}, tokens), strict=False))
        found = {r: score["bits_per_byte"] for r, job in tried.items() if (score := search.result(stage, *job))}
        found = found or dict.fromkeys(one.rates, 0.0) if len(one.rates) == 1 else found
        if tokens[name] and len(found) == len(one.rates):
            rate = min(found, key=found.__getitem__)
            jobs += [(name, one.run(rate, tokens[name]), seed) for seed in range(seeds)]
    return sorted(jobs, key=lambda job: job[2])


def former_seconds(search: "Search") -> float:
    """The processor time of the former default, by the costs that were measured beside the peers."""
    both = {"torchtitan_lite": FORMER_DEFAULT}
    return cost(search, "peers cost", cost_jobs(both), "torchtitan_lite") * FORMER_TOKENS


def peer_tokens(search: "Search") -> dict[str, int]:
    """How many tokens each peer trains on in the former default's time."""
    each = {name: cost(search, "peers cost", cost_jobs({name: one}), name) for name, one in PEERS.items()}
    return {name: three_digits(former_seconds(search) / seconds) for name, seconds in each.items()}


def larger_tokens(search: "Search") -> dict[str, int]:
    """How many tokens each larger program trains on in its time. Those of nanochat were fixed first."""
    here = {name: cost(search, "larger cost", cost_jobs(LARGER, LONGER), name) for name in LARGER}
    then = cost(search, "larger cost", cost_jobs(LARGER, seeds=range(2)), NANOCHAT_LARGER)
    scale = then / here[NANOCHAT_LARGER]
    return {name: three_digits(LARGER_SECONDS / (seconds * scale)) for name, seconds in here.items()}


COST_SEEDS = range(3, 6)  # measured beside nanochat, whose seeds 0 to 2 were beside the former default
BESIDE = {NANOCHAT: PEERS[NANOCHAT], **OURS}


IN_BFLOAT16 = {"fsdp.param_dtype": "bfloat16"}
BFLOAT16 = {
    "default, bfloat16": Program(STACK | IN_BFLOAT16, (8e-3,)),
    "resformer, bfloat16": Program(STACK | RESFORMER | IN_BFLOAT16, (8e-3,)),
    "nanochat, bfloat16": Program(peer("nanochat", 2, 128, 1, 8) | {"dtype": "bfloat16"}, (12.0,)),
}


def bfloat16_timed() -> dict[str, Program]:
    """What is timed in turn."""
    return {NANOCHAT: PEERS[NANOCHAT], **{name: one for name, one in BFLOAT16.items() if "resformer" not in name}}


def bfloat16_jobs(search: "Search") -> list[Job]:
    """As many tokens as cost what nanochat's cost in float32, which are measured in turn."""
    both = bfloat16_timed()
    each = {name: cost(search, "bfloat16 cost", cost_jobs(both), name) for name in both}
    whole = peer_tokens(search)[NANOCHAT] * each[NANOCHAT]
    tokens = {name: three_digits(whole / each[name]) for name in BFLOAT16 if name in each}
    tokens["resformer, bfloat16"] = tokens["default, bfloat16"]  # in float32 a token of both costs the same within 2 %
    return [(name, one.run(one.rates[0], tokens[name]), 0) for name, one in BFLOAT16.items()]


CONFIGS = {"windows": STEPS, "experts": 600, "hybrid": 350}  # and their steps


def config_jobs() -> list[Job]:
    """The default and small configs on the held-out text."""
    jobs = [(name, run(steps * 2048, {"config": f"configs/{name}.toml"}), 0) for name, steps in CONFIGS.items()]
    return [("default", OURS["default"].run(8e-3, STEPS * 2048), 0), *jobs]


def default_jobs() -> list[Job]:
    """The default and the resformer on the held-out text."""
    return [
        (name, one.run(one.rates[0], STEPS * 2048), seed)
        for seed in range(3)
        for name, one in (OURS | ORDINARY_OURS).items()
    ]


# --- tables ---------------------------------------------------------------------------------------------------


def stored(search: "Search", stage: str) -> list[str]:
    """All results of a stage, the best first: also of stages and jobs that are no longer here."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, one in search.results.items():
        which, name, options, _ = json.loads(key)
        if which == stage and "bits_per_byte" in one:
            rows.setdefault((name, json.dumps(options)), []).append(one)
    lines = [f"| {stage} | rate | tokens | bits per byte, by seed | mean | seconds |", "|---|---:|---:|---|---:|---:|"]
    for (name, key), found in sorted(rows.items(), key=lambda row: statistics.mean(mean_of(row[1]))):
        options, bits = json.loads(key), mean_of(found)
        tokens = tokens_of(options)
        rate = options.get("optim.lr", options.get("rate", ""))
        seconds = statistics.mean(one["seconds"] for one in found)
        cells = str(rate), f"{tokens:,}", ", ".join(f"{b:.4f}" for b in bits), f"{statistics.mean(bits):.4f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds:,.0f} |")
    return lines


def tokens_of(options: dict[str, Any]) -> int:
    """The tokens that a run of ours or of a peer trains on."""
    steps = options["steps"] if "peer" in options else options["train.steps"]
    batch = options["batch"] if "peer" in options else options["train.global_batch_size"]
    return int(steps * batch * options.get("train.seq_len", 256))


def mean_of(rows: list[dict[str, Any]]) -> list[float]:
    """Bits per byte of each seed."""
    return [one["bits_per_byte"] for one in sorted(rows, key=lambda one: one["seed"])]


def comparison(search: "Search") -> dict[str, tuple[int, float, list[dict[str, Any]]]]:
    """Of each program in about the same time: tokens, core seconds, and results on the held-out text."""
    found: dict[str, tuple[int, float, list[dict[str, Any]]]] = {}
    tokens = peer_tokens(search)
    here = {name: cost(search, "cost", cost_jobs(BESIDE, seeds=COST_SEEDS), name) for name in BESIDE}
    then = {name: cost(search, "peers cost", cost_jobs({name: one}), name) for name, one in PEERS.items()}
    scale = then[NANOCHAT] / here[NANOCHAT]  # to the seconds of the peers
    both = bfloat16_jobs(search)
    peers = final_jobs(search, "peers rate", PEERS, tokens)
    for jobs, stage in ((peers, "peers final"), (default_jobs(), "final"), (both, "bfloat16 final")):
        for name, options, seed in jobs:
            if one := search.result(stage, name, options, seed):
                n = tokens_of(options)
                known = tokens[NANOCHAT] * then[NANOCHAT]  # bfloat16: in the same time
                timed = name.removesuffix(WITHOUT)
                seconds = n * then[name] if name in then else n * here[timed] * scale if timed in here else known
                found.setdefault(name, (n, seconds, []))[2].append(one)
    return found


def paired(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[float, float]:
    """Bits per byte of ours less those of theirs, means over seeds, and its standard error over documents."""
    one, other = (
        [statistics.mean(bits) for bits in zip(*(r["bits"] for r in rows), strict=True)] for rows in (ours, theirs)
    )
    sizes = ours[0]["bytes"]
    total, n = sum(sizes), len(sizes)
    difference = (sum(one) - sum(other)) / total
    errors = sum((a - b - difference * size) ** 2 for a, b, size in zip(one, other, sizes, strict=True))
    return difference, math.sqrt(errors * n / (n - 1)) / total


def repeated() -> tuple[float, list[float]]:
    """The share of held-out positions that begin 64 tokens which also occur in the text for training; by document."""
    import numpy as np

    from torchtitan_lite.api import load_config
    from torchtitan_lite.data.dataset import prepare_all
    from torchtitan_lite.tools.incidents.which import Documents

    config = load_config()
    (source,) = prepare_all(config.data, config.tokenizer, lambda _: None).sources

    def hashes(tokens: Any) -> Any:
        """Of each 64 tokens: a polynomial modulo 2^64, by doubling the length six times."""
        found, factor = tokens.astype(np.uint64) + 1, np.uint64(0x9E3779B97F4A7C15)
        for n in (1, 2, 4, 8, 16, 32):
            with np.errstate(over="ignore"):
                found, factor = found[:-n] * factor + found[n:], factor * factor
        return found

    train, held_out = Documents(source), Documents(source, "val")
    known = np.unique(hashes(train.stream.read(0, int(train.ends[-1]))))
    parts = [held_out.stream.read(*held_out.span(i)) for i in range(len(held_out.ends))]
    hits = [np.isin(hashes(part), known) if len(part) >= 64 else np.zeros(0, bool) for part in parts]
    total = sum(hit.sum() for hit in hits) / sum(map(len, parts))
    return float(total), [float(hit.sum() / len(part)) for hit, part in zip(hits, parts, strict=True)]


def unrepeated_table(found: dict[str, tuple[int, float, list[dict[str, Any]]]]) -> list[str]:
    """The comparison on the documents that hold no 64 tokens of the text for training."""
    share, of_documents = repeated()
    fresh = [i for i, part in enumerate(of_documents) if part == 0]
    lines = [f"{share:.1%} of held-out positions begin 64 tokens that also occur in the text for training.", ""]
    lines.append(f"| program | all {len(of_documents)} documents | the {len(fresh)} without such positions |")
    lines.append("|---|---:|---:|")
    for name, (_, _, rows) in found.items():
        both = [statistics.mean(mean_of(rows))]
        both.append(
            statistics.mean(sum(one["bits"][i] for i in fresh) / sum(one["bytes"][i] for i in fresh) for one in rows)
        )
        lines.append(f"| {name} | {both[0]:.3f} | {both[1]:.3f} |")
    return lines


def programs_table(found: dict[str, tuple[int, float, list[dict[str, Any]]]], against: str) -> list[str]:
    """Each program, and its difference from `against` on the same documents."""
    lines = ["| program | tokens | core seconds | bits per byte, by seed | mean | less nanochat, by document |"]
    lines.append("|---|---:|---:|---|---:|---:|")
    for name, (tokens, seconds, rows) in sorted(found.items(), key=lambda item: statistics.mean(mean_of(item[1][2]))):
        bits, difference = mean_of(rows), ""
        if name != against and against in found:
            difference = "{:+.3f} +- {:.3f}".format(*paired(rows, found[against][2]))
        cells = f"{tokens:,}", f"{seconds:,.0f}", ", ".join(f"{b:.3f}" for b in bits), f"{statistics.mean(bits):.3f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {difference} |")
    return lines


def larger_table(search: "Search") -> list[str]:
    """The larger programs in ten minutes of two cores."""
    found: dict[str, tuple[int, float, list[dict[str, Any]]]] = {}
    tokens = larger_tokens(search)
    for name, options, seed in final_jobs(search, "larger rate", LARGER, tokens):
        if one := search.result("larger final", name, options, seed):
            found.setdefault(name, (tokens[name], LARGER_SECONDS, []))[2].append(one)
    return programs_table(found, NANOCHAT_LARGER)


def widths_table(search: "Search") -> list[str]:
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


def plot(search: "Search", file: Path) -> None:
    """Bits per byte of each program in about the same processor time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    found = comparison(search)
    if "default" not in found:
        return
    figure, axis = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
    names = sorted(found, key=lambda name: -statistics.mean(mean_of(found[name][2])))
    for at, name in enumerate(names):
        bits = mean_of(found[name][2])
        error = statistics.stdev(bits) if len(bits) > 1 else 0.0
        ours = not name.startswith("nano")
        axis.errorbar(statistics.mean(bits), at, xerr=error, fmt="o", capsize=3, color="tab:blue" if ours else "gray")
        place: dict[str, Any] = {"ha": "center", "textcoords": "offset points", "fontsize": 9}
        axis.annotate(f"{statistics.mean(bits):.3f}", (statistics.mean(bits), at), (0, 6), **place)
    axis.set_yticks(range(len(names)), [f"{name}: {found[name][1]:,.0f} s" for name in names])
    axis.set_ylim(-0.6, len(names))
    axis.margins(x=0.08)
    figure.suptitle("Bits per byte of held-out text (lower is better) in the same core seconds", fontsize=10)
    values = "; ".join(f"{name}: {statistics.mean(mean_of(found[name][2])):.3f}" for name in reversed(names))
    note = f"Points are means over seeds, error bars their standard deviations. {values}."
    svg.save(figure, file, "What programs learn in the same processor time", note)


def plot_widths(search: "Search", file: Path) -> None:
    """Bits per byte over rates, for each width with and without muP."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
    for axis, scaled in zip(axes, (False, True), strict=True):
        for dim in sorted({dim for dim, _ in WIDTHS}):
            base = 128 if scaled or dim == 128 else 0  # the base width is the same with both
            jobs = {rate: WIDTH_JOBS[dim, base, rate] for rate in RATES}
            known = {rate: one for rate, job in jobs.items() if (one := search.result("widths", *job))}
            axis.plot(list(known), [one["bits_per_byte"] for one in known.values()], marker="o", label=f"dim {dim}")
        axis.set(title="model.mup_base_dim = 128" if scaled else "not scaled", xlabel="optim.lr", xscale="log")
        axis.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axis.minorticks_off()
    axes[0].set_ylabel("bits per byte")
    axes[1].legend()
    note = "Bits per byte of held-out text (lower is better) over the learning rate. One seed."
    svg.save(figure, file, "The best learning rate of three widths, with and without muP", note)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = "search", "defaults", "bfloat16", "configs", "peers", "larger", "widths", "table"
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learning", help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=WORKERS, help="runs at a time")
    parser.add_argument("--nanochat", type=Path, help="a clone of karpathy/nanochat")
    parser.add_argument("--nanogpt", type=Path, help="a clone of karpathy/nanoGPT")
    parser.add_argument("--only", default="", help="of the jobs of a stage, those whose name has this")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "learning.svg")
    given = parser.parse_args()
    named = {"nanochat": given.nanochat, "nanoGPT": given.nanogpt}
    clones = {name: path.absolute() for name, path in named.items() if path}
    search = Search(given.out.absolute(), given.results, clones, given.workers)

    def do(stage: str, jobs: Iterable[Job]) -> None:
        chosen = [job for job in jobs if given.only in job[0] and not search.result(stage, *job)]
        if unnamed := {job[1]["peer"] for job in chosen if "peer" in job[1]} - clones.keys():
            sys.exit(f"name the clones: {', '.join(f'--{name.lower()}=FOLDER' for name in sorted(unnamed))}")
        search.run(chosen, stage)

    if given.stage == "search":
        do("search", ((name, options, 0) for name, options in CANDIDATES.items()))
    if given.stage == "widths":
        do("widths", WIDTH_JOBS.values())
    if given.stage == "defaults":
        do("cost", cost_jobs(BESIDE, seeds=COST_SEEDS))
        do("final", default_jobs())
    if given.stage == "bfloat16":
        do("bfloat16 cost", cost_jobs(bfloat16_timed()))
        do("bfloat16 final", bfloat16_jobs(search))
    if given.stage == "configs":
        do("configs final", config_jobs())
    if given.stage == "peers":
        do("peers cost", cost_jobs({"torchtitan_lite": FORMER_DEFAULT} | PEERS))
        do("peers rate", rate_jobs(PEERS, peer_tokens(search)))
        do("peers final", final_jobs(search, "peers rate", PEERS, peer_tokens(search)))
    if given.stage == "larger":
        do("larger cost", cost_jobs({NANOCHAT_LARGER: LARGER[NANOCHAT_LARGER]}, seeds=range(2)))
        do("larger cost", cost_jobs(LARGER, LONGER))
        do("larger rate", rate_jobs(LARGER, larger_tokens(search)))
        do("larger final", final_jobs(search, "larger rate", LARGER, larger_tokens(search)))
    every = dict.fromkeys(json.loads(key)[0] for key in search.results)
    tables = [stored(search, stage) for stage in every if stage != "widths" and "cost" not in stage]
    found = comparison(search)
    tables += [programs_table(found, NANOCHAT), unrepeated_table(found), larger_table(search), widths_table(search)]
    for lines in tables:
        print("\n".join(["", *lines]))
    if given.stage == "table":
        plot(search, given.plot)
        plot_widths(search, given.plot.with_name("mup.svg"))


if __name__ == "__main__":
    main()
