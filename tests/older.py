"""Does this code continue what an older commit began, bit for bit? `python -m tests.older OLD_CHECKOUT [names]`.

OLD_CHECKOUT is a worktree of the older commit: `git worktree add ../old COMMIT`. Its code prepares small texts, and so
does this one: the same bytes. Its train.py makes each run; what came after half of the steps is taken away, and this
train.py resumes it by the same command. Records and the last checkpoint's tensors must be those of the older commit.
"""

import argparse
import fnmatch
import importlib
import inspect
import itertools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.forkserver import Server
from tests.helpers import HANGS_S, TINY, checkpoint, options, records, server, tensors

STEPS = 12
MEASURED = re.compile(r"time|seconds|bytes|mfu|tokens_per_second|peak_memory_gib|.*_s")  # keys that no run repeats

# Arguments of torchtitan_lite.data.prepare, by the folder's name; later ones use the tokenizer of the first. In all
# values, @raw is the folder of the texts, @data that of the prepared folders, @runs that of the older commit's runs.
PREPARE = {
    "text": ["@raw/text", "--train-tokenizer", "517"],
    "second": ["@raw/second", "--tokenizer", "@data/text/tokenizer.json"],
    "lines": ["@raw/lines.jsonl", "--text-key", "body", "--tokenizer", "@data/text/tokenizer.json"],
    "pairs": ["@raw/pairs.csv", "--source-key", "q", "--target-key", "a", "--tokenizer", "bytes"],
    "t5": ["@raw/text", "--train-tokenizer", "600", "--sentinels"],
    "t5_pairs": ["@raw/pairs.csv", "--source-key", "q", "--target-key", "a", "--tokenizer", "@data/t5/tokenizer.json"],
}

BASE: dict[str, Any] = TINY | {
    **{"train.steps": STEPS, "eval.every": STEPS // 2, "checkpoint.every": STEPS // 2, "data.path": "@data/text"},
}
LLAMA = {"model.family": "llama", "model.n_heads": 4, "model.n_kv_heads": 1, "model.hidden_dim": 50}
SHARDED, DCP = {"checkpoint.state_dict": "sharded"}, {"checkpoint.api": "dcp"}
BESIDE, DROPOUT = {"checkpoint.async_save": True}, {"model.dropout": 0.1}
MUON = {"optim.name": "muon", "optim.lr": 0.004}
FP16 = {"fsdp.param_dtype": "float16", "grad_scaler.init_scale": 2.0**24, "grad_scaler.growth_interval": 2}
BF16 = {"fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "float32"}
GLOO, HSDP = {"speed.shared_memory": False}, {"fsdp.dp_replicate": 2}
T5 = {
    **{"model.family": "t5", "model.head_dim": 5, "model.hidden_dim": 50, "model.n_decoder_layers": 3},
    **{"data.objective": "span_corruption", "data.path": "@data/t5"},
}
PAIRS = {"data.objective": "pairs", "data.path": "@data/pairs", "data.target_len": 20, "model.max_seq_len": 64}
BEST_FIT = {"data.packing": "best_fit", "data.document_mask": True, "data.path": "@data/lines"}
MIXTURE = {"data.path": None, "data.sources": '{"@data/text" = 0.7, "@data/second" = 0.3}'}
PLAIN = dict.fromkeys(("chunked_loss", "block_attention", "fused_functions", "widened_products"), False)

RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and what differs from BASE; None: not given
    # what decides the numbers is left to the older defaults: the resume keeps them
    "defaults": (1, dict.fromkeys((*(k for k in TINY if k.startswith("model.")), "optim.name", "train.seq_len"))),
    "full_dtensor": (2, {}),
    "full_dcp": (2, DCP),
    "sharded_dtensor": (2, SHARDED),
    "sharded_dcp": (2, SHARDED | DCP),
    "async_full_dtensor": (2, DROPOUT | BESIDE),
    "async_sharded_dcp": (2, DROPOUT | SHARDED | DCP | BESIDE),
    "one_rank": (1, LLAMA | MUON),
    "three_ranks": (3, LLAMA),
    "llama_bf16": (2, LLAMA | BF16),
    "llama_gloo": (2, LLAMA | GLOO),
    "llama_plain": (2, LLAMA | GLOO | {f"speed.{key}": value for key, value in PLAIN.items()}),
    "qwen3": (2, LLAMA | {"model.qk_norm": True, "model.head_dim": 12}),
    "muon": (2, LLAMA | MUON),
    "muon_sharded_dcp": (2, LLAMA | MUON | SHARDED | DCP),
    "ema": (2, LLAMA | MUON | {"optim.ema_decay": 0.9}),
    "ema_sharded_dcp": (2, {"optim.ema_decay": 0.9} | SHARDED | DCP),
    "rms_scaling": (2, LLAMA | {"optim.rms_scaling": True, "optim.lr": 0.05}),
    "sgd_fp16": (2, FP16 | DROPOUT | {"optim.name": "sgd", "optim.lr": 0.1, "fsdp.grad_sync": "last"}),
    "adamw_fp16_dcp": (2, FP16 | DCP),
    "t5_spans": (2, T5),
    "t5_muon_sharded": (2, T5 | MUON | DROPOUT | SHARDED | DCP),
    "t5_pairs": (2, T5 | PAIRS | {"data.path": "@data/t5_pairs"}),
    "gpt_pairs": (2, PAIRS),
    "best_fit": (2, LLAMA | BEST_FIT),
    "mixture": (2, MIXTURE),
    "raw_text": (2, {"data.path": "@raw/text"}),  # train.py prepares it
    "batch_schedule": (2, {"train.global_batch_size": None, "train.batch_schedule": "[[0, 2], [4, 6], [8, 10]]"}),
    "skip_samples": (2, {"data.skip_samples": "[[10, 20], [40, 50]]"}),
    "ac_full": (2, LLAMA | {"activation_checkpointing.mode": "full"}),
    "ac_selective": (2, DROPOUT | {"activation_checkpointing.mode": "selective"}),
    "hsdp": (4, LLAMA | HSDP),
    "hsdp_muon_mixture": (4, LLAMA | MUON | HSDP | GLOO | MIXTURE),
    "init_from": (2, {"model.init_from": f"@runs/full_dtensor/checkpoints/step-{STEPS:08d}", "optim.lr": 1e-4}),
}
NEEDS = {"init_from": "full_dtensor"}  # a run that begins with another's checkpoint


class FailedError(Exception):
    """A process of one of the two checkouts has failed."""


class Checkout:
    """One of the two: its code, and the folder of what it makes."""

    def __init__(self, runner: Server, folder: Path, work: Path) -> None:
        self.server, self.folder, self.work = runner, folder, work
        self.data, self.runs = folder / "data", folder / "runs"

    def _call(self, n: int, entry: str, words: list[str], data: Path) -> str:
        """What it says, as one text."""
        env = {"XDG_CACHE_HOME": str(self.folder / "cache")}
        places = {"@raw": self.work / "raw", "@data": data, "@runs": self.work / "older/runs"}
        for mark, place in places.items():
            words = [word.replace(mark, str(place)) for word in words]
        result = self.server.run(n, words, env, entry, "", HANGS_S)
        if result.returncode:
            said = (result.stderr.strip() or result.stdout.strip()).splitlines()
            raise FailedError(" | ".join(said[-3:])[-600:])
        return result.stdout

    def prepare(self, name: str) -> Path:
        """Make the prepared folder of that name."""
        out = self.data / name
        arguments = [*PREPARE[name], "--workers", "1", "--out", str(out)]
        self._call(1, "-m torchtitan_lite.data.prepare", arguments, self.data)
        return out

    def train(self, name: str, out_dir: Path, data: Path) -> str:
        """Make or resume a run in `out_dir`, on the folders prepared in `data`."""
        n, more = RUNS[name]
        values = {key: value for key, value in (BASE | more).items() if value is not None}
        said = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
        return self._call(n, "train", options(said | {"run.name": name, "run.out_dir": out_dir}), data)


def write_texts(folder: Path) -> None:
    """Sources of Python's modules: as text, as one document per line, and as pairs of a line and the next."""
    for name, modules in (("text", ("argparse", "typing")), ("second", ("tarfile",))):
        (folder / name).mkdir(parents=True)
        for module in modules:
            (folder / name / f"{module}.txt").write_text(inspect.getsource(importlib.import_module(module)))
    lines = (folder / "second/tarfile.txt").read_text().splitlines()
    paragraphs = ["def " + " ".join(lines[i : i + 1 + i % 7]) for i in range(0, len(lines), 7)]
    (folder / "lines.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in paragraphs))
    words = [re.sub(r"[^a-z ]+", " ", line.lower()).strip()[:40] for line in lines]
    pairs = [f"{q},{a[:16]}\n" for q, a in itertools.pairwise(words) if q and a]
    (folder / "pairs.csv").write_text("q,a\n" + "".join(pairs))


def different_files(mine: Path, theirs: Path) -> list[str]:
    """The files of two folders that are not the same bytes."""
    inside = ({f.relative_to(d) for f in d.rglob("*") if f.is_file() and f.suffix != ".lock"} for d in (mine, theirs))
    both = set.intersection(*(sets := [*inside]))
    same = {name for name in both if (mine / name).read_bytes() == (theirs / name).read_bytes()}
    return sorted(map(str, set.union(*sets) - same))


def repeatable(run: Path) -> list[dict[str, str]]:
    """The records without what is measured, and without saves: those beside training are logged at any time.

    As text: every bit of a float counts, 1 is not 1.0, and NaN equals itself.
    """
    kept = [record for record in records(run) if "save_s" not in record]
    texts = ({key: json.dumps(value) for key, value in r.items() if not MEASURED.fullmatch(key)} for r in kept)
    placed = re.compile(r"/[^\"]*/data/")  # sources are named by their folders
    return [{placed.sub("@data/", key): placed.sub("@data/", text) for key, text in r.items()} for r in texts]


def different_tensors(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of tensors that only one has, or that differ in dtype, shape or a bit."""

    def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return sorted(
        (mine.keys() ^ theirs.keys()) | {k for k in mine.keys() & theirs.keys() if bits(mine[k]) != bits(theirs[k])}
    )


def different_runs(mine: Path, theirs: Path) -> str:
    """What is not the same in two runs: the first record, and tensors of the last checkpoint."""
    found = []
    for one, other in itertools.zip_longest(repeatable(mine), repeatable(theirs), fillvalue=dict[str, str]()):
        if one != other:
            key = min(k for k in one | other if one.get(k) != other.get(k))
            found = [f"step {(other or one).get('step')}: {key} {one.get(key)}, {other.get(key)} before"]
            break
    wrong = different_tensors(*(tensors(checkpoint(run, STEPS)) for run in (mine, theirs)))
    if wrong:
        found.append(f"{len(wrong)} tensors, the first {wrong[0]}")
    return "; ".join(found)


def halve(run: Path) -> None:
    """Take away what came after half of the steps."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > STEPS // 2:
            shutil.rmtree(folder)
    kept = [line for line in (run / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= STEPS // 2]
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in kept))


def compare(name: str, way: str, older: Checkout, newer: Checkout) -> str:
    """What differs; "" when nothing does.

    Args:
        way: "prepared"; "resumed" by the newer code; or "fresh": trained by it, on what it prepared.
    """
    try:
        if way == "prepared":
            return ", ".join(different_files(newer.prepare(name), older.data / name))
        out_dir = newer.folder / way
        if way == "fresh":
            newer.train(name, out_dir, newer.data)
        else:
            shutil.copytree(older.runs / name, out_dir / name)
            halve(out_dir / name)
            if f"resumed after step {STEPS // 2}" not in newer.train(name, out_dir, older.data):
                return f"began again instead of resuming after step {STEPS // 2}"
        return different_runs(out_dir / name, older.runs / name)
    except FailedError as error:
        return f"failed: {error}"


def compare_all(names: list[str], older: Checkout, newer: Checkout, fresh: bool) -> int:
    """A line for each. Returns the exit code."""
    counts = {"equal": 0, "different": 0, "not compared": 0}
    ways = {name: ("resumed", "fresh") if fresh and name != "defaults" else ("resumed",) for name in names}
    for name, compared in (*((name, ("prepared",)) for name in PREPARE), *ways.items()):
        try:
            if "prepared" in compared:
                older.prepare(name)
            else:
                older.train(name, older.runs, older.data)
        except FailedError as error:
            print(f"{name:<20} not compared: the older code failed: {error}", flush=True)
            counts["not compared"] += 1
            continue
        for way in compared:
            wrong = compare(name, way, older, newer)
            print(f"{name:<20} {way:<9} {'DIFFERS: ' + wrong if wrong else 'equal'}", flush=True)
            counts["different" if wrong else "equal"] += 1
    print(", ".join(f"{count} {what}" for what, count in counts.items() if count))
    return int(counts["different"] > 0 or not counts["equal"])


def main(argv: list[str]) -> int:
    """The command. Returns 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.older", description=__doc__)
    parser.add_argument("checkout", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("names", nargs="*", help=f"of runs, * for any letters: {' '.join(RUNS)} (default: all)")
    parser.add_argument("--fresh", action="store_true", help="also make each run from its first step")
    given = parser.parse_intermixed_args(argv)
    if not (given.checkout / "train.py").is_file():
        parser.error(f"{given.checkout} has no train.py: make it with git worktree add {given.checkout} COMMIT")
    chosen = {name for name in RUNS if any(fnmatch.fnmatchcase(name, given_name) for given_name in given.names or "*")}
    if not chosen:
        parser.error(f"no run is called {' or '.join(given.names)}; there are {' '.join(RUNS)}")
    names = [name for name in RUNS if name in chosen | {NEEDS.get(other) for other in chosen}]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        write_texts(work / "raw")
        code = work / "code"  # without its tests/: this forkserver serves both
        code.mkdir()
        for part in ("train.py", "checkpoint.py", "torchtitan_lite"):
            (code / part).symlink_to(given.checkout.resolve() / part)
        begun = Server(root=code)
        try:
            older, newer = Checkout(begun, work / "older", work), Checkout(server(), work / "newer", work)
            return compare_all(names, older, newer, given.fresh)
        finally:
            begun.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
