"""What a token teaches: `python -m benchmarks.learning [STAGE]` compares recipes, and nanochat's code, on two texts.

    search      changes to the default recipe in a quarter of its tokens
    peers       nanochat (--nanochat: a clone of karpathy/nanochat) in the same way, then at its best at the end
    defaults    the default at the end, with value embeddings (model.family = "resformer"), without an induction head
    larger      configs/larger.toml in half of its steps, and nanochat of that size
    configs     the small configs of other architectures
    widths      rates of models of three widths, with and without model.mup_base_dim
    phases      the decay on one of two texts, and on both as before (docs/phases.md)
    cost        short runs of all programs in turn, on a quiet machine: seconds of a token
    plot        docs/learning.svg and docs/mup.svg, with matplotlib
    table       print what is known (the default)

The texts are the source of Python's standard library, and English prose (benchmarks/learning_prose.py). Trials train
without the tenth of the documents with the lowest hashes, and are scored on the upper half of those. The lower half is
the held-out text of the default split, on which the runs at the end are scored. Scores are bits per byte of the raw
text, over whole documents, in windows of 256 tokens.

Results are appended to benchmarks/learning.jsonl, and a stage runs only what is not there: it can be stopped at any
time. Each run is one process with one thread, one at a time. Seconds are processor time.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks import learning_prose, svg
from benchmarks.machine import cpu

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "learning.jsonl"
TEXTS = "code", "prose"
HELD_OUT, NOTHING = "held out", "nothing"  # what a run is scored on, if not on the text of the search
SEEDS = range(3)
CHANCE = 0.003  # bits per byte: trials this close are equal, as seeds differ by 0.005

# every key of the recipe is named, so that a result keeps its meaning if a default changes
RECIPE: dict[str, Any] = {
    **{"model.dim": 128, "model.n_layers": 2, "model.n_heads": 2, "model.n_kv_heads": 2, "model.hidden_dim": 384},
    **{"model.qk_norm": "true", "model.induction_head": "true", "optim.name": "muon", "optim.lr": 8e-3},
    **{"optim.muon_momentum": 0.9, "optim.betas": "[0.9, 0.99]", "optim.schedule": "cosine"},
    **{"optim.min_lr_ratio": 0.1, "optim.muon_embedding_lr_factor": 3.0, "optim.weight_decay": 0.1},
    **{"train.seq_len": 256, "train.global_batch_size": 8, "train.micro_batch_size": 8, "train.steps": 750},
}
LARGER_RECIPE: dict[str, Any] = RECIPE | {
    **{"model.dim": 256, "model.n_layers": 4, "model.n_heads": 4, "model.n_kv_heads": 4, "model.hidden_dim": 768},
    **{"model.mup_base_dim": 128, "train.steps": 1100},
}
WITHOUT_NAME = ", no induction head"
WITHOUT, RESFORMER = {"model.induction_head": "false"}, {"model.family": "resformer"}
OURS: dict[str, dict[str, Any]] = {
    "default": RECIPE,
    "resformer": RECIPE | RESFORMER,
    f"default{WITHOUT_NAME}": RECIPE | WITHOUT,
    f"resformer{WITHOUT_NAME}": RECIPE | RESFORMER | WITHOUT,
}
HALF = LARGER_RECIPE | {"train.steps": 550}
LARGER: dict[str, dict[str, Any]] = {
    "default, 4 x 256": HALF,
    "resformer, 4 x 256": HALF | RESFORMER,
    f"default, 4 x 256{WITHOUT_NAME}": HALF | WITHOUT,
}
CONFIGS = {"windows": 750, "experts": 600, "hybrid": 350}  # and their steps

# a run on both texts, in an eighth of its tokens, and what changes for the last fifth of them, while the rate decays
PHASES = {
    "both texts throughout": "[]",
    "the decay on prose": '[{ from_fraction = 0.8, data.sources = { "PROSE" = 1.0 } }]',
}
BOTH = " and ".join(TEXTS)

# rows beside the comparison
ONE_SEED = {f"resformer{WITHOUT_NAME}", "nanochat, 2 x 128, our initial values", *[*LARGER][1:]}
# the recipe in a quarter of the steps, and what each trial changes. The last have as much processor time as the default
TRIALS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rate 4e-3": {"optim.lr": 4e-3},
    "rate 6e-3": {"optim.lr": 6e-3},
    "rate 1.2e-2": {"optim.lr": 1.2e-2},
    "weight decay 0": {"optim.weight_decay": 0.0},
    "weight decay 0.3": {"optim.weight_decay": 0.3},
    "4 sequences a step": {"train.global_batch_size": 4, "train.micro_batch_size": 4, "train.steps": 374},
    "16 sequences a step": {"train.global_batch_size": 16, "train.steps": 94},
    "momentum 0.95": {"optim.muon_momentum": 0.95},
    "embeddings at six times the rate": {"optim.muon_embedding_lr_factor": 6.0},
    "as it is, 750 steps": {"train.steps": 750},
    "rate 1.2e-2, 750 steps": {"optim.lr": 1.2e-2, "train.steps": 750},
    "4 sequences a step, 1,250 steps": {"train.global_batch_size": 4, "train.micro_batch_size": 4, "train.steps": 1250},
}


@dataclass(frozen=True)
class Peer:
    """nanochat in a size, and the steps that cost what ours cost. Those tried longest are the ones to choose from."""

    depth: int
    dim: int
    steps: int
    tried: tuple[tuple[int, float, float, int], ...]  # heads, rate, decay, steps
    induction_head: bool = False  # whether it begins with our initial values

    def options(self, heads: int, rate: float, decay: float, steps: int) -> dict[str, Any]:
        """Those of benchmarks/learning_peer.py. Rates and decay are times those of its script."""
        sizes = {"depth": self.depth, "dim": self.dim, "heads": heads, "batch": 8, "steps": steps}
        begin = {"induction_head": True} if self.induction_head else {}
        return sizes | {"rate": rate, "decay": decay, "compile": False} | begin


KEPT = round(1 / 12, 4)  # the decay that keeps the product of rate and decay of base_train.py at 12 times its rates
FIRST = (1, 12.0, 1.0), (1, 12.0, KEPT), (2, 12.0, KEPT), (2, 12.0, 1.0), (2, 12.0, 3.0), (2, 8.0, 1.0), (2, 18.0, 1.0)
TRIED = [*((*one, 168) for one in FIRST), *((2, 12.0, decay, 673) for decay in (1.0, 0.0, KEPT))]
SMALL_PEER, LARGER_PEER = "nanochat, 2 x 128", "nanochat, 4 x 256"
PORTED, AS_LONG = ", our initial values", ", the default's tokens"
PEERS = {
    SMALL_PEER: Peer(2, 128, 673, tuple(TRIED)),
    f"{SMALL_PEER}{PORTED}": Peer(2, 128, 673, ((2, 12.0, KEPT, 168),), induction_head=True),
    LARGER_PEER: Peer(4, 256, 575, tuple((4, rate, KEPT, 100) for rate in (8.0, 12.0))),
}


@dataclass(frozen=True)
class Job:
    """A run of train.py or, in a stage of a peer, of benchmarks/learning_peer.py."""

    stage: str
    name: str
    text: str
    options: dict[str, Any]
    seed: int = 0

    @property
    def key(self) -> str:
        """A result is that of the job with this key."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def tokens(self) -> int:
        """What it trains on."""
        if self.is_peer:
            return int(self.options["steps"] * self.options["batch"] * 256)
        return int(self.options["train.steps"] * self.options["train.global_batch_size"] * 256)

    @property
    def is_peer(self) -> bool:
        """Whether nanochat's code runs."""
        return "depth" in self.options


class Search:
    """Runs what has no result yet, one at a time, and keeps results in a file."""

    def __init__(self, out: Path, file: Path, clone: Path | None = None) -> None:
        self.out, self.file, self.clone = out, file, clone
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        results = map(json.loads, lines)
        self.results = {Job(**{key: one[key] for key in Job.__annotations__}).key: one for one in results}

    def result(self, job: Job) -> dict[str, Any] | None:
        """What is known of a job."""
        return self.results.get(job.key)

    def run(self, jobs: Iterable[Job]) -> None:
        """Run jobs in order."""
        for job in jobs:
            if not self.result(job):
                if job.is_peer and not self.clone:
                    sys.exit("name the clone: --nanochat=FOLDER")
                found = asdict(job) | {"cpu": cpu()} | (self._peer(job) if job.is_peer else self._ours(job))
                self.results[job.key] = found
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
                score = f"{found.get('bits_per_byte', found.get('prose', 0)):.4f}, {found['seconds']:,.0f} s"
                print(f"{job.stage}: {job.name}, {job.text}, seed {job.seed}: {score}", flush=True)

    def _peer(self, job: Job) -> dict[str, Any]:
        """A run of nanochat's code."""
        result = self.out / f"{_folder(job)}.json"
        command = [sys.executable, "-m", "benchmarks.learning_peer", str(self.clone), json.dumps(job.options)]
        command += [str(job.seed), str(result), self._text(job.text), self._scored(job)]
        _cpu_seconds(command, result.with_suffix(".log"))
        row = json.loads(result.read_text(encoding="utf-8"))
        return {key: row[key] for key in ("seconds", "commit", "parameters")} | _scores(row)

    def _ours(self, job: Job) -> dict[str, Any]:
        """A run of train.py."""
        folder = self.out / _folder(job)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped: its seconds are not whole
        prose = self._text("prose") if job.text == BOTH else ""
        given = [f"--{key}={value}".replace("PROSE", prose) for key, value in job.options.items()]
        given += ["--run.device=cpu", "--run.threads=1", f"--run.out_dir={self.out}", f"--run.name={folder.name}"]
        both = f'--data.sources={{ "{self._code()}" = 0.5, "{prose}" = 0.5 }}' if prose else ""
        given += [f"--run.seed={job.seed}", both or f"--data.path={self._text(job.text)}"]
        given += ["--eval.every=0", "--sample.every=0", "--checkpoint.every=0", "--log.every=25"]
        scored = self._scored(job)
        if scored != HELD_OUT:
            given.append("--data.val_fraction=0.1")
        program = [sys.executable, "-m", "benchmarks.learning_train"]
        log = folder.with_suffix(".log")
        seconds = _cpu_seconds([*program, "train", *given], log)
        if scored == NOTHING:  # without the start of the process
            shutil.rmtree(folder)
            one = ["--train.steps=1", "--optim.warmup_steps=0"]
            return {"seconds": seconds - _cpu_seconds([*program, "train", *given, *one], log)}
        result = folder / "score.json"
        text = [] if scored == HELD_OUT else ["--data", scored]
        _cpu_seconds([*program, "evaluate", str(folder), *text, "--json", str(result)], log)
        *others, row = json.loads(result.read_text(encoding="utf-8"))["models"][0]["texts"].values()
        if others:  # both texts, code first
            return {"seconds": seconds, "code": others[0]["bits_per_byte"], "prose": row["bits_per_byte"]}
        return {"seconds": seconds} | _scores(row)

    def _text(self, text: str) -> str:
        """What data.path names: the prose, which is made here, or the default text."""
        file = self.out / "prose.jsonl"
        self.out.mkdir(parents=True, exist_ok=True)
        if text == "prose" and not file.exists():
            learning_prose.make(file)
        return str(file) if text == "prose" else ""

    def _code(self) -> Path:
        """The default text as a file, to mix it."""
        from torchtitan_lite.data.prepare.documents import usable
        from torchtitan_lite.data.prepare.texts import standard_library

        file = self.out / "code.jsonl"
        if not file.exists():
            lines = [json.dumps({"text": document.texts[0]}) for document in usable(standard_library())]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    def _scored(self, job: Job) -> str:
        """What a job is scored on: at the end the held-out text of the default split, in trials the search's."""
        if job.stage in ("end", "configs", "phases"):
            return HELD_OUT
        return NOTHING if job.stage == "cost" else str(self._search_text(job.text))

    def _search_text(self, text: str) -> Path:
        """The documents that trials are scored on."""
        from torchtitan_lite.data.prepare.documents import HASH_RANGE, usable
        from torchtitan_lite.data.prepare.texts import find, standard_library

        file = self.out / f"search-{text}.jsonl"
        if not file.exists():
            documents = usable(find(self._text(text)) if self._text(text) else standard_library())
            hashed = ((document.hash / HASH_RANGE, document.texts[0]) for document in documents)
            chosen = [json.dumps({"text": text}) for at, text in hashed if 0.05 <= at < 0.1]
            partial = file.with_suffix(".partial")
            partial.write_text("\n".join(chosen) + "\n", encoding="utf-8")
            partial.replace(file)
        return file


def _folder(job: Job) -> str:
    """The name of a run's files."""
    name = "".join(c if c.isalnum() else "-" for c in job.name)
    return f"{job.stage}-{name}-{job.text}-{job.seed}-{sha256(job.key.encode()).hexdigest()[:8]}"


def _scores(row: dict[str, Any]) -> dict[str, Any]:
    """The score, and the bits and bytes of each document, by which two runs are compared."""
    return {key: row[key] for key in ("bits_per_byte", "bits", "bytes") if key in row}


def _cpu_seconds(command: list[str], log: Path) -> float:
    """Run a command; its processor time, with that of its children. Raises RuntimeError if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {status}: see {log}")
    return used.ru_utime + used.ru_stime


# --- the stages -------------------------------------------------------------------------------------------------


def search_jobs() -> list[Job]:
    """Our trials on both texts."""
    quarter = RECIPE | {"train.steps": 187}
    return [Job("search", name, text, quarter | keys) for name, keys in TRIALS.items() for text in TEXTS]


def trial_jobs(name: str) -> list[Job]:
    """The trials of a peer on both texts."""
    one = PEERS[name]
    return [Job("peers", name, text, one.options(*tried)) for tried in one.tried for text in TEXTS]


def peer_jobs(search: Search, name: str) -> list[Job]:
    """A peer on each text at its best on the search's, once all trials are known, and with as many steps as ours."""
    jobs: list[Job] = []
    longest = max(steps for *_, steps in PEERS[name].tried)
    for text in TEXTS:
        trials = [job for job in trial_jobs(name) if job.text == text and job.options["steps"] == longest]
        scores = [one["bits_per_byte"] for job in trials if (one := search.result(job))]
        if len(scores) == len(trials):
            equal = [job for job, score in zip(trials, scores, strict=True) if score < min(scores) + CHANCE]
            best = equal[-1].options | {"steps": PEERS[name].steps}
            jobs += [Job("end", name, text, best, seed) for seed in SEEDS]
            if name == SMALL_PEER:
                longer = best | {"steps": RECIPE["train.steps"]}
                jobs += [Job("end", f"{name}{AS_LONG}", text, longer)]
    return sorted((job for job in jobs if job.seed == 0 or name not in ONE_SEED), key=lambda job: job.seed)


def end_jobs(programs: dict[str, dict[str, Any]]) -> list[Job]:
    """Our programs on both texts."""
    jobs = [Job("end", name, text, keys, seed) for seed in SEEDS for name, keys in programs.items() for text in TEXTS]
    return [job for job in jobs if job.seed == 0 or job.name not in ONE_SEED]


def config_jobs() -> list[Job]:
    """The small configs on code."""
    sizes = {key: RECIPE[key] for key in ("train.seq_len", "train.global_batch_size", "train.micro_batch_size")}
    return [
        Job("configs", name, "code", sizes | {"config": f"configs/{name}.toml", "train.steps": steps})
        for name, steps in CONFIGS.items()
    ]


def phase_jobs() -> list[Job]:
    """Runs on both texts, with and without a last phase on prose alone."""
    keys = RECIPE | {"train.steps": 94, "optim.schedule": "wsd", "optim.decay_ratio": 0.2}
    runs = ((seed, name, phases) for seed in SEEDS for name, phases in PHASES.items())
    return [Job("phases", name, BOTH, keys | {"train.phases": phases}, seed) for seed, name, phases in runs]


def cost_jobs() -> list[Job]:
    """Short runs in turn, the small programs first. Compiled, a step of nanochat costs less and computes the same."""
    jobs: list[Job] = []
    for ours, peer in ((OURS, SMALL_PEER), (LARGER, LARGER_PEER)):
        timed = {name: [keys | {"train.steps": 150}] for name, keys in ours.items() if WITHOUT_NAME not in name}
        plain = PEERS[peer].options(*PEERS[peer].tried[-1]) | {"steps": 150}
        timed[peer] = [plain | {"compile": compiled} for compiled in (False, True)]
        jobs += [Job("cost", name, "code", o, seed) for seed in SEEDS for name, each in timed.items() for o in each]
    return jobs


# widths: a recipe of four blocks with heads of 32
RATES = 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2
WIDTHS = [(dim, base) for dim in (64, 128, 256) for base in (128, 0) if (dim, base) != (128, 0)]


def width_job(dim: int, base: int, rate: float) -> Job:
    """A short run with a model of another width, scaled from `base` by muP (0: not)."""
    keys: dict[str, Any] = {"dim": dim, "n_layers": 4, "n_heads": dim // 32, "n_kv_heads": dim // 64}
    keys |= {"hidden_dim": 3 * dim, "mup_base_dim": base, "max_seq_len": 256, "induction_head": "false"}
    other = {"optim.lr": rate, "optim.muon_momentum": 0.95, "optim.betas": "[0.9, 0.95]", "optim.warmup_steps": 10}
    name = f"dim {dim}, {f'scaled from {base}' if base else 'not scaled'}"
    model = {f"model.{key}": value for key, value in keys.items()}
    return Job("widths", name, "code", RECIPE | model | other | {"train.steps": 75})


# --- tables -----------------------------------------------------------------------------------------------------


def trials_table(search: Search, jobs: list[Job]) -> list[str]:
    """Trials, and their scores on the search's text of each kind."""
    rows: dict[str, dict[str, float]] = {}
    for job in jobs:
        if one := search.result(job):
            name, o = job.name, job.options
            if job.is_peer:
                name += f", {o['steps']} steps: {o['heads']} heads, {o['rate']:g}, {o['decay']:g}"
            rows.setdefault(name, {})[job.text] = one["bits_per_byte"]
    lines = [f"| trial | {' | '.join(TEXTS)} |", "|---|---:|---:|"]
    cells = {name: [f"{row[text]:.4f}" if text in row else "" for text in TEXTS] for name, row in rows.items()}
    return lines + [f"| {name} | {' | '.join(row)} |" for name, row in cells.items()]


def seconds_of_token(search: Search, name: str) -> float:
    """The median processor time, of the cheapest way to run it. NaN: not measured."""
    found: dict[str, list[float]] = {}
    for job in cost_jobs():
        if job.name == re.sub(f"{WITHOUT_NAME}|{PORTED}|{AS_LONG}", "", name) and (one := search.result(job)):
            found.setdefault(json.dumps(job.options), []).append(one["seconds"] / job.tokens)
    return min(map(statistics.median, found.values()), default=math.nan)


Rows = list[tuple[Job, dict[str, Any]]]


def ends(search: Search, size: str, text: str) -> dict[str, Rows]:
    """The runs at the end of each program of a size ("2 x 128" or "4 x 256"), the best first."""
    found: dict[str, Rows] = {}
    peers = [job for name in PEERS if size in name for job in peer_jobs(search, name)]
    for job in end_jobs(LARGER if "256" in size else OURS) + peers:
        if job.text == text and (one := search.result(job)):
            found.setdefault(job.name, []).append((job, one))
    return dict(sorted(found.items(), key=lambda item: statistics.mean(bits_of(item[1]))))


def bits_of(rows: Rows) -> list[float]:
    """Bits per byte of each seed."""
    return [one["bits_per_byte"] for _, one in rows]


def paired(ours: Rows, theirs: Rows) -> tuple[float, float]:
    """Bits per byte of ours less those of theirs, means over seeds, and its standard error over documents."""
    one, other = (
        [statistics.mean(bits) for bits in zip(*(r["bits"] for _, r in rows), strict=True)] for rows in (ours, theirs)
    )
    sizes = ours[0][1]["bytes"]
    total, n = sum(sizes), len(sizes)
    difference = (sum(one) - sum(other)) / total
    errors = sum((a - b - difference * size) ** 2 for a, b, size in zip(one, other, sizes, strict=True))
    return difference, math.sqrt(errors * n / (n - 1)) / total


def ends_table(search: Search, size: str, text: str) -> list[str]:
    """Each program, and its difference from nanochat's on the same documents."""
    found = ends(search, size, text)
    lines = [f"| {text} | tokens | core seconds | bits per byte, by seed | mean | less nanochat, by document |"]
    lines.append("|---|---:|---:|---|---:|---:|")
    for name, rows in found.items():
        peer, difference, tokens = f"nanochat, {size}", "", rows[0][0].tokens
        if name != peer and peer in found:
            seeds = {job.seed for job, _ in rows} & {job.seed for job, _ in found[peer]}
            both = ([row for row in each if row[0].seed in seeds] for each in (rows, found[peer]))
            difference = "{:+.3f} +- {:.3f}".format(*paired(*both))
        seconds = tokens * seconds_of_token(search, name)
        cells = (
            f"{tokens:,}",
            "" if math.isnan(seconds) else f"{seconds:,.0f}",
            ", ".join(f"{bits:.3f}" for bits in bits_of(rows)),
        )
        lines.append(f"| {name} | {' | '.join(cells)} | {statistics.mean(bits_of(rows)):.3f} | {difference} |")
    return lines


def configs_table(search: Search) -> list[str]:
    """The small configs."""
    lines = ["| config | tokens | bits per byte of held-out code |", "|---|---:|---:|"]
    known = [(job, one) for job in config_jobs() if (one := search.result(job))]
    return lines + [f"| {job.name} | {job.tokens:,} | {one['bits_per_byte']:.3f} |" for job, one in known]


def phases_table(search: Search) -> list[str]:
    """Runs with and without a last phase, by seed."""
    lines = ["| 80 % both texts, then | prose, by seed | mean | code, by seed | mean |", "|---|---|---:|---|---:|"]
    for name in PHASES:
        if found := [one for job in phase_jobs() if job.name == name and (one := search.result(job))]:
            cells = [([one[text] for one in found]) for text in ("prose", "code")]
            texts = (f"{', '.join(f'{bits:.3f}' for bits in c)} | {statistics.mean(c):.3f}" for c in cells)
            lines.append(f"| {name} | {' | '.join(texts)} |")
    return lines


def widths_table(search: Search) -> list[str]:
    """Bits per byte by rate for each width, and the best rate of a parabola through the best three."""
    lines = [f"| | {' | '.join(f'{rate:g}' for rate in RATES)} | best rate |", "|---|" + "---:|" * (len(RATES) + 1)]
    for dim, base in WIDTHS:
        jobs = {rate: width_job(dim, base, rate) for rate in RATES}
        if found := {rate: one["bits_per_byte"] for rate, job in jobs.items() if (one := search.result(job))}:
            cells = [f"{found[rate]:.3f}" if rate in found else "" for rate in RATES]
            lines.append(f"| {jobs[RATES[0]].name} | {' | '.join(cells)} | {lowest(found)} |")
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


def plot(search: Search, file: Path) -> None:
    """Bits per byte of each small program in about the same processor time, on both texts."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharex=True, sharey=True)
    values: list[str] = []
    timed = {
        text: {name: rows for name, rows in ends(search, "2 x 128", text).items() if AS_LONG not in name}
        for text in TEXTS
    }
    names = list(reversed(timed["code"] | timed["prose"]))
    for axis, text in zip(axes, TEXTS, strict=True):
        for name, rows in timed[text].items():
            bits, at = bits_of(rows), names.index(name)
            mean, error = statistics.mean(bits), statistics.stdev(bits) if len(bits) > 1 else 0.0
            color = "gray" if name.startswith("nano") else "tab:blue"
            axis.errorbar(mean, at, xerr=error, fmt="o", capsize=3, color=color)
            place: dict[str, Any] = {"ha": "center", "textcoords": "offset points", "fontsize": 9}
            axis.annotate(f"{mean:.3f}", (mean, at), (0, 6), **place)
            values.append(f"{name}, {text}: {mean:.3f}")
        axis.set(title=f"held-out {text}", ylim=(-0.6, len(names)))
        axis.margins(x=0.12)
    axes[0].set_yticks(range(len(names)), names)
    figure.suptitle("Bits per byte (lower is better) in about the same processor time", fontsize=10)
    note = f"Points are means over seeds, error bars their standard deviations. {'; '.join(values)}."
    svg.save(figure, file, "What programs learn in about the same processor time", note)
    plt.close(figure)


def plot_widths(search: Search, file: Path) -> None:
    """Bits per byte over rates, for each width with and without muP."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
    for axis, scaled in zip(axes, (False, True), strict=True):
        for dim in sorted({dim for dim, _ in WIDTHS}):
            base = 128 if scaled or dim == 128 else 0  # the base width is the same with both
            known = {rate: one for rate in RATES if (one := search.result(width_job(dim, base, rate)))}
            axis.plot(list(known), [one["bits_per_byte"] for one in known.values()], marker="o", label=f"dim {dim}")
        axis.set(title="model.mup_base_dim = 128" if scaled else "not scaled", xlabel="optim.lr", xscale="log")
        axis.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axis.minorticks_off()
    axes[0].set_ylabel("bits per byte")
    axes[1].legend()
    note = "Bits per byte of held-out text (lower is better) over the learning rate. One seed."
    svg.save(figure, file, "The best learning rate of three widths, with and without muP", note)
    plt.close(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = "search", "peers", "defaults", "larger", "configs", "widths", "phases", "cost", "plot", "table"
    parser.add_argument("stage", choices=stages, nargs="?", default="table")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learning", help="folder of the runs")
    parser.add_argument("--nanochat", type=Path, help="a clone of karpathy/nanochat")
    given = parser.parse_args()
    search = Search(given.out.absolute(), RESULTS, given.nanochat and given.nanochat.absolute())
    if given.stage == "search":
        search.run(search_jobs())
    if given.stage == "peers":
        for name in SMALL_PEER, f"{SMALL_PEER}{PORTED}":
            search.run(trial_jobs(name))
            search.run(peer_jobs(search, name))
    if given.stage == "defaults":
        search.run(end_jobs(OURS))
    if given.stage == "larger":
        search.run(trial_jobs(LARGER_PEER))
        jobs = end_jobs(LARGER) + peer_jobs(search, LARGER_PEER)
        search.run(sorted(jobs, key=lambda job: (job.name in ONE_SEED, job.seed)))
    if given.stage == "configs":
        search.run(config_jobs())
    if given.stage == "widths":
        search.run(width_job(dim, base, rate) for dim, base in WIDTHS for rate in RATES)
    if given.stage == "phases":
        search.run(phase_jobs())
    if given.stage == "cost":
        search.run(cost_jobs())
    tables = [ends_table(search, size, text) for size in ("2 x 128", "4 x 256") for text in TEXTS]
    tables += [trials_table(search, [*search_jobs(), *(job for name in PEERS for job in trial_jobs(name))])]
    tables += [configs_table(search), widths_table(search), phases_table(search)]
    for lines in tables:
        print("\n".join(["", *lines]))
    if given.stage == "plot":
        plot(search, ROOT / "docs" / "learning.svg")
        plot_widths(search, ROOT / "docs" / "mup.svg")


if __name__ == "__main__":
    main()
