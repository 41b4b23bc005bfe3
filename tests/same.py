"""Does this code train as an older commit does, bit for bit? `python -m tests.same OLD_CHECKOUT [names]`.

OLD_CHECKOUT is a worktree of the older commit: `git worktree add ../old COMMIT`. Each of the two prepares small texts,
trains from scratch to half of the steps, and resumes to the end, in a folder of its own. The older one prints each
config with all values, and both train with these: what a key's default is does not matter. Compared are the model's
inputs, the records of each step, and the last checkpoint's tensors.
"""

import argparse
import fnmatch
import importlib
import inspect
import itertools
import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli_w
import torch

from tests.forkserver import Server
from tests.helpers import HANGS_S, TINY, checkpoint, options, records, server, tensors
from torchtitan_lite.checkpointing import storage

STEPS = 12
COMPARED = "loss", "mean_loss", "grad_norm", "lr", "tokens", "val_loss", "rank_losses", "loss_scale", "load_max"

# Arguments of torchtitan_lite.data.prepare, by the folder's name; later ones use the tokenizer of the first. In all
# values, @raw is the folder of the texts, @data that of the prepared folders, @runs that of the runs.
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
OF_MODEL = dict.fromkeys(k for k in TINY if k.startswith("model."))  # what a size or a family decides
LLAMA = {"model.family": "llama", "model.n_heads": 4, "model.n_kv_heads": 1, "model.hidden_dim": 50}
EXPERTS = {"model.family": "qwen3_moe", "model.n_kv_heads": 2, "model.n_experts": 5, "model.router_bias": True}
SHARDED, DCP = {"checkpoint.state_dict": "sharded"}, {"checkpoint.api": "dcp"}
ASYNC, DROPOUT = {"checkpoint.async_save": True}, {"model.dropout": 0.1}
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
PLAIN = dict.fromkeys(("chunked_loss", "block_attention", "fused_functions"), False)
WINDOWS = {"model.window": 7, "model.layer_pattern": '["window", "full"]'}
HYBRID = {"model.family": "olmo_hybrid", "model.n_layers": 4, "model.n_kv_heads": 2, "model.hidden_dim": 50}

RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and what differs from BASE; None: not given
    "default": (2, OF_MODEL | dict.fromkeys(("optim.name", "train.seq_len", "train.global_batch_size"))),
    "one_rank": (1, LLAMA | MUON),
    "three_ranks": (3, LLAMA),
    "full_dtensor": (2, {}),
    "full_dcp": (2, DCP),
    "sharded_dtensor": (2, SHARDED),
    "sharded_dcp": (2, SHARDED | DCP),
    "async_full_dtensor": (2, DROPOUT | ASYNC),
    "async_sharded_dcp": (2, DROPOUT | SHARDED | DCP | ASYNC),
    "windows": (2, LLAMA | WINDOWS),
    "experts": (2, EXPERTS | MUON),
    "experts_one_rank": (1, EXPERTS | {"train.router_z_loss": 0.001, "train.z_loss": 0.0001}),
    "hybrid": (2, HYBRID | MUON),
    "llama_bf16": (2, LLAMA | BF16),
    "llama_gloo": (2, LLAMA | GLOO),
    "llama_plain": (2, LLAMA | GLOO | {f"speed.{key}": value for key, value in PLAIN.items()}),
    "qwen3": (2, LLAMA | {"model.qk_norm": True, "model.head_dim": 12}),
    "muon_sharded_dcp": (2, LLAMA | MUON | SHARDED | DCP),
    "ema": (2, LLAMA | MUON | {"optim.ema_decay": 0.9}),
    "ema_sharded_dcp": (2, {"optim.ema_decay": 0.9} | SHARDED | DCP),
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
PLACES = "run.name", "run.out_dir", "checkpoint.resume"  # given by each command, or empty


class FailedError(Exception):
    """A command of one of the two checkouts has failed, or the two can't be compared."""


class Checkout:
    """One of the two: its code, and the folder of what it makes."""

    def __init__(self, name: str, runner: Server, work: Path) -> None:
        self.name, self.server, self.raw, self.folder = name, runner, work / "raw", work / name
        self.folder.mkdir()
        self.defaults: dict[str, Any] = {}

    def call(self, n: int, entry: str, words: list[str], **env: str) -> str:
        """Run a module on n ranks. Returns what it prints on stdout."""
        words = [self.placed(word) for word in words]
        result = self.server.run(n, words, {"XDG_CACHE_HOME": str(self.folder)} | env, entry, "", HANGS_S)
        if result.returncode:
            said = (result.stderr.strip() or result.stdout.strip()).splitlines()
            raise FailedError(f"the {self.name} code failed: " + " | ".join(said[-3:])[-600:])
        return result.stdout

    def placed(self, text: str) -> str:
        for mark, place in (("@raw", self.raw), ("@data", self.folder / "data"), ("@runs", self.folder / "runs")):
            text = text.replace(mark, str(place))
        return text

    def prepare(self) -> None:
        for name, arguments in PREPARE.items():
            self.call(1, "-m torchtitan_lite.data.prepare", [*arguments, "--out", f"@data/{name}"])
        self.defaults = self.config(1)

    def config(self, n: int, *words: str) -> dict[str, Any]:
        """All values of a config on n ranks, by "section.key", as `--print-config` has them."""
        world = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        sections = tomllib.loads(self.call(1, "train", [*words, "--print-config"], **world))
        return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}

    def train(self, name: str, n: int, values: dict[str, Any]) -> Path:
        """Train with these values alone, to half of the steps and then to the end. Returns the run's folder."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, inner = key.partition(".")
            sections.setdefault(section, {})[inner] = value
        file = self.folder / f"{name}.toml"
        file.write_text(self.placed(tomli_w.dumps(sections)))
        for steps in (STEPS // 2, STEPS):
            words = ["--config", str(file), f"--train.steps={steps}", f"--run.name={name}", "--run.out_dir=@runs"]
            printed = self.call(n, "tests.same_rank", words, BATCHES=str(self.folder / f"{name}.batches"))
        if f"resumed after step {STEPS // 2}" not in printed:
            raise FailedError(f"the {self.name} code did not resume after step {STEPS // 2}")
        return self.folder / "runs" / name


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


def values_for_both(name: str, older: Checkout, newer: Checkout) -> dict[str, Any]:
    """The values of a run, as the older code resolves them, without keys that the newer one no longer has.

    Raises:
        FailedError: such a key has not its default.
    """
    given = {key: value for key, value in (BASE | RUNS[name][1]).items() if value is not None}
    said = {key: str(value).lower() if isinstance(value, bool) else value for key, value in given.items()}
    resolved = older.config(RUNS[name][0], *options(said))
    gone = resolved.keys() - newer.defaults.keys()
    if used := sorted(key for key in gone if resolved[key] != older.defaults[key]):
        raise FailedError(f"the newer code has no {', '.join(used)}")
    values = {key: value for key, value in resolved.items() if key not in gone and key not in PLACES}
    text = json.dumps(values).replace(str(older.folder / "data"), "@data").replace(str(older.folder / "runs"), "@runs")
    kept: dict[str, Any] = json.loads(text)
    return kept


def compared_records(run: Path) -> list[str]:
    """As text: every bit of a float counts, and NaN equals itself."""
    kept = ({key: r[key] for key in ("step", *COMPARED) if key in r} for r in records(run))
    return [json.dumps(record) for record in kept if len(record) > 1]


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differences(name: str, older: Checkout, newer: Checkout) -> list[str]:
    """Train with both, and return what differs."""
    n = RUNS[name][0]
    values = values_for_both(name, older, newer)
    theirs, mine = (checkout.train(name, n, values) for checkout in (older, newer))
    found = []
    for rank in range(n):
        old, new = ((c.folder / f"{name}.batches.{rank}").read_text().splitlines() for c in (older, newer))
        if old != new:
            at = next(i for i, pair in enumerate(itertools.zip_longest(old, new)) if pair[0] != pair[1])
            found.append(f"rank {rank}: inputs of forward {at} of {len(old)} and {len(new)}")
    old, new = (compared_records(run) for run in (theirs, mine))
    found += [f"record {a}, {b} before" for b, a in itertools.zip_longest(old, new) if a != b][:1]
    manifest = json.loads((checkpoint(theirs, STEPS) / storage.MANIFEST).read_text())
    with patch.object(storage, "FORMAT_VERSION", manifest["format_version"]):
        before = tensors(checkpoint(theirs, STEPS))
    now = tensors(checkpoint(mine, STEPS))
    wrong = before.keys() ^ now.keys() | {k for k in before.keys() & now.keys() if bits(before[k]) != bits(now[k])}
    return found + ([f"{len(wrong)} of {len(before)} tensors, the first {min(wrong)}"] if wrong else [])


def compare(names: list[str], older: Checkout, newer: Checkout) -> int:
    """A line for each run. Returns the exit code."""
    older.prepare()
    newer.prepare()
    unequal = 0
    for name in names:
        try:
            result = "; ".join(differences(name, older, newer))
        except FailedError as error:
            result = str(error)
        unequal += bool(result)
        print(f"{name:<20} {f'DIFFERS: {result}' if result else 'equal'}", flush=True)
    print(f"{len(names) - unequal} of {len(names)} equal")
    return int(unequal > 0)


def main(argv: list[str]) -> int:
    """The command. Returns 1 if anything differs or could not be compared."""
    parser = argparse.ArgumentParser(prog="python -m tests.same", description=__doc__)
    parser.add_argument("checkout", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("names", nargs="*", help=f"of runs, * for any letters: {' '.join(RUNS)} (default: all)")
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
        code = work / "code"  # without its tests/: the same programs serve both
        code.mkdir()
        for part in ("train.py", "checkpoint.py", "torchtitan_lite"):
            (code / part).symlink_to(given.checkout.resolve() / part)
        started = Server(root=code)
        try:
            return compare(names, Checkout("older", started, work), Checkout("newer", server(), work))
        finally:
            started.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
