"""What one flipped bit does to a run, and which guard finds it: `python -m benchmarks.flips [STAGE] [--only WORD]`.

    matrix    one flip for each bit, place, dtype, guard and mesh; what is stored already is not run again
    price     what each guard costs, in per cent of the processor time of a step
    table     print what is stored in benchmarks/flips.jsonl, as docs/incidents.md has it

A tiny model with the default's optimizers trains on 2 ranks, and on 2 copies of 2 shards (HSDP). Each flip starts from
the same checkpoint, after BASE steps. In the step after it, one bit of one element flips on rank 0, and the run goes on
for STEPS steps, with a save after each SAVES of them. The guards:

    default   what a run has without [spike]
    spike     spike.action = "skip" and spike.recheck
    memory    spike.memory_check_every = 1

A flip that nothing finds is "harmless" if the validation loss at the end is as near to that of the run without a flip
as 2 standard deviations of runs that see other samples. Otherwise it is "missed".
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import cpu

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "flips.jsonl"
BASE, STEPS, SAVES = 140, 200, 50
OPTIONS: dict[str, Any] = {
    **{"model.dim": 64, "model.n_layers": 2, "model.n_heads": 2, "model.n_kv_heads": 2, "model.hidden_dim": 128},
    **{"tokenizer.vocab_size": 512, "train.seq_len": 64, "train.micro_batch_size": 4, "train.global_batch_size": 8},
    **{"optim.schedule": "constant", "optim.warmup_steps": 10, "sample.every": 0, "log.every": 50, "run.threads": 1},
    **{"run.device": "cpu", "checkpoint.keep_latest": 0, "eval.samples": 64, "train.steps": BASE + STEPS},
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "HSDP": (4, {"fsdp.dp_replicate": 2, "fsdp.dp_shard": 2, "train.micro_batch_size": 2}),
}
GUARDS: dict[str, dict[str, Any]] = {
    "default": {},
    "spike": {"spike.action": "skip", "spike.recheck": True},
    "memory": {"spike.memory_check_every": 1},
}
DTYPES = "float32", "bfloat16"
BITS: dict[str, dict[str, int]] = {
    "float32": {"sign": 31, "exponent high": 30, "exponent low": 23, "mantissa high": 22, "mantissa low": 0},
    "bfloat16": {"sign": 15, "exponent high": 14, "exponent low": 7, "mantissa high": 6, "mantissa low": 0},
    "token": {"0": 0, "6": 6, "12": 12, "62": 62},  # of int64; ids end at 512
    "byte": {"middle": 3},
}
# the places whose values have the dtype of the computation; the others are float32 in all runs
COMPUTED = "activation", "gradient before the reduction", "gathered weight", "shared memory"
STORED = "gradient after the reduction", "weight", "momentum of Muon", "second moment of AdamW"
FILES = {
    "model's values": "model.safetensors",
    "optimizer's values": "optimizer.safetensors",
    "manifest": "manifest.json",
}
KEYS = "mesh", "guard", "dtype", "place", "bit"
MATRIX = "layers.0.feed_forward.w1.weight"


def cells() -> list[dict[str, str]]:
    """The cells that are tried: mesh, guard, dtype, place, bit. In the others nothing else can happen."""
    everywhere = [(place, bit) for place in COMPUTED for bit in BITS["float32"]]
    stored = [(place, bit) for place in STORED for bit in BITS["float32"]]
    more = [("token", bit) for bit in BITS["token"]] + [(f"checkpoint: {what}", "middle") for what in FILES]
    others = [("other samples", str(i)) for i in range(1, 6)]
    tried = {
        ("2 ranks", "default", "float32"): [*everywhere, *stored, *more, *others],
        ("2 ranks", "spike", "float32"): [*everywhere, *stored],
        ("2 ranks", "memory", "float32"): stored,
        ("2 ranks", "default", "bfloat16"): [*everywhere, *others],
        ("HSDP", "default", "float32"): [*stored, *others],
        ("HSDP", "memory", "float32"): stored,
    }
    return [
        dict(zip(KEYS, (*where, *cell), strict=True))
        for where, chosen in tried.items()
        for cell in (("nothing", ""), *chosen)
    ]


# --- in a rank ------------------------------------------------------------------------------------------------------


def flip(values: Tensor, bit: int, index: int) -> None:
    """Flip a bit of the element `index` of a tensor, in place."""
    bits = values.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    mask = 1 << bit
    limit = 1 << (8 * bits.element_size() - 1)
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index % bits.numel()), bits.shape))
    bits[place] ^= mask - 2 * limit if mask >= limit else mask


def rank_main(folder: Path, cells_file: Path) -> None:
    """Run cells, one after another, in one process group. Appends each result to a file of the folder."""
    sys.path.insert(0, str(ROOT))
    import train
    from torchtitan_lite.checkpointing.select import saved_config
    from torchtitan_lite.config import cli
    from torchtitan_lite.distributed.process_group import exit_process, process_group
    from torchtitan_lite.errors import UserError
    from torchtitan_lite.monitoring.metrics import Log
    from torchtitan_lite.training import start

    jobs = json.loads(cells_file.read_text(encoding="utf-8"))
    lines: list[str] = []
    write = Log.info

    def info(log: Any, text: str, fit: Any = None) -> None:
        lines.append(text)
        write(log, text, fit)

    setattr(Log, "info", info)  # noqa: B010
    honest = train.train_step

    def parse(options: dict[str, Any]) -> Any:
        ranks = int(os.environ["WORLD_SIZE"])
        argv = ["--resume-with-changes", *(f"--{key}={value}" for key, value in options.items())]
        return cli.parse(argv, world_size=ranks, local_world_size=ranks, n_gpus=0, saved=saved_config).loaded

    with process_group(parse(jobs[0]["options"]).config.run) as world:
        for number, job in enumerate(jobs):
            cell, loaded = job["cell"], parse(job["options"])
            config = loaded.config
            if world.rank == 0:
                with (folder / "begun").open("w") as file:
                    json.dump(number, file)
                if cell["place"].startswith("checkpoint: "):
                    flip_in_file(config.folder, FILES[cell["place"].removeprefix("checkpoint: ")])
            torch.distributed.barrier()

            def train_step(s: Any, step: int, cell: dict[str, str] = cell) -> Any:
                if step != BASE + 1 or cell["place"] in ("nothing", "other samples", "made"):
                    return honest(s, step)
                with injected(s, cell) as done:
                    result = honest(s, step)
                if s.world.rank == 0 and not cell["place"].startswith("checkpoint") and not done:
                    raise RuntimeError(f"no bit was flipped: {cell}")
                return result

            train.train_step = train_step
            lines.clear()
            config.folder.mkdir(parents=True, exist_ok=True)
            error, step, loss, s = "", 0, None, None
            log = Log(config.folder, speaks=world.rank == 0)
            loaded, data = start.prepared(loaded)
            try:
                attempt = start.begin(config, data, world, log)
                s = train.build(config, data, world, log, attempt.resume)
                start.take_over(attempt, loaded, data, s)
                with contextlib.redirect_stdout(None):
                    train.train(s)
                loss = s.state.val_loss
            except UserError as caught:
                error = f"{type(caught).__name__}: {caught}"
            if s is not None:
                step = s.state.step
                s.close()
            if world.rank == 0:
                told = [line for line in lines if re.match("SPIKE|SKIPPED|note", line)]
                with (folder / "results").open("a") as file:
                    file.write(json.dumps(cell | {"error": error, "step": step, "loss": loss, "lines": told}) + "\n")
    exit_process(0)


def flip_in_file(run: Path, name: str) -> None:
    """Flip a bit in the middle of a file of the newest checkpoint."""
    from torchtitan_lite.checkpointing import storage

    path = storage.step_folder(run / "checkpoints", BASE) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << 3
    path.write_bytes(data)


@contextlib.contextmanager
def injected(s: Any, cell: dict[str, str]) -> Iterator[list[bool]]:
    """Flip one bit on rank 0 in the step within the context. Yields a list that is not empty once it has flipped."""
    place, done = cell["place"], list[bool]()
    kind = "token" if place == "token" else "float32" if place in STORED else cell["dtype"]
    if s.world.rank != 0 or place.startswith("checkpoint"):
        yield done
        return
    bit, index = BITS[kind][cell["bit"]], 1237

    def hit(values: Tensor) -> None:
        if not done:
            flip(values, bit, index)
            done.append(True)

    with contextlib.ExitStack() as stack:
        HOOKS[place](s, stack, hit)
        yield done


Hit = Callable[[Tensor], None]


def _activation(s: Any, stack: contextlib.ExitStack, hit: Hit) -> None:
    hook = s.model.layers[0].feed_forward.register_forward_hook(lambda _module, _inputs, output: hit(output))
    stack.callback(hook.remove)


def _gathered(s: Any, stack: contextlib.ExitStack, hit: Hit) -> None:
    module = s.model.layers[0].feed_forward
    stack.callback(module.register_forward_pre_hook(lambda *_: hit(module.w1.weight)).remove)


def _replaced(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _before_reduction(_s: Any, stack: contextlib.ExitStack, hit: Hit) -> None:
    group = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    reduce = group.foreach_reduce

    def foreach_reduce(parameters: Any, gradients: Any, *more: Any, **named: Any) -> Any:
        hit(gradients[0])
        return reduce(parameters, gradients, *more, **named)

    _replaced(stack, group, "foreach_reduce", foreach_reduce)


def _after_reduction(_s: Any, stack: contextlib.ExitStack, hit: Hit) -> None:
    from torchtitan_lite.optim import optimizer

    norm = optimizer.squared_norm

    def squared_norm(model: Any, copies: int) -> Tensor:
        hit(model.get_parameter(MATRIX).grad.to_local())
        return norm(model, copies)

    _replaced(stack, optimizer, "squared_norm", squared_norm)


def _shared_memory(s: Any, stack: contextlib.ExitStack, hit: Hit) -> None:
    from torchtitan_lite.cpu.shared_memory import SharedMemory

    barrier, dtype = SharedMemory.barrier, s.config.fsdp.param_dtype

    def wait(shared: Any) -> None:
        barrier(shared)
        half = shared._memory.view(getattr(torch, dtype)).view(2, shared.size, -1)[shared._turn]
        hit(half[1, :4096])  # what rank 1 wrote, before rank 0 reads it: the first is an all-gather

    _replaced(stack, SharedMemory, "barrier", wait)


def _state(key: str, name: str) -> Callable[[Any, contextlib.ExitStack, Hit], None]:
    def now(s: Any, _stack: contextlib.ExitStack, hit: Hit) -> None:
        parameter = s.model.get_parameter(name)
        values = s.optimizer.state[parameter][key] if key else parameter
        hit(values.to_local())

    return now


def _token(s: Any, stack: contextlib.ExitStack, hit: Hit) -> None:
    batch = s.loader.batch

    def changed(*given: Any, **named: Any) -> Any:
        found = batch(*given, **named)
        hit(found.micro_batches[0].tokens)
        return found

    stack.callback(delattr, s.loader, "batch")
    s.loader.batch = changed


HOOKS: dict[str, Callable[[Any, contextlib.ExitStack, Hit], None]] = {
    "activation": _activation,
    "gathered weight": _gathered,
    "gradient before the reduction": _before_reduction,
    "gradient after the reduction": _after_reduction,
    "shared memory": _shared_memory,
    "weight": _state("", MATRIX),
    "momentum of Muon": _state("momentum_buffer", MATRIX),
    "second moment of AdamW": _state("exp_avg_sq", "output.weight"),
    "token": _token,
}


# --- the matrix -----------------------------------------------------------------------------------------------------


def options_of(cell: dict[str, str], text: str, out: Path, name: str) -> dict[str, Any]:
    """The options of a cell's run."""
    keys = OPTIONS | MESHES[cell["mesh"]][1] | {"fsdp.param_dtype": cell["dtype"], "run.out_dir": str(out)}
    keys |= {"run.name": name, "data.path": text, "eval.every": BASE + STEPS, "checkpoint.every": SAVES}
    if cell["place"] == "other samples":
        start = BASE * OPTIONS["train.global_batch_size"]
        keys["data.skip_samples"] = [[start, start + 800 * int(cell["bit"])]]
    return keys | GUARDS[cell["guard"]]


def launched(ranks: int, folder: Path, jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Run jobs under torchrun, and yield their results. If a cell ends the processes, its result is their error."""
    while jobs:
        for name in ("begun", "results"):
            (folder / name).unlink(missing_ok=True)
        (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "benchmarks.flips", "--rank", str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        path = folder / "results"
        done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        yield from done
        jobs = jobs[len(done) :]
        if not jobs:
            return
        errors = re.findall(r"^(?:\[rank\d+\]: )?(\w+Error: .*)$", ended.stderr, re.MULTILINE)
        if not (folder / "begun").exists() or not errors or not errors[0].startswith("IndexError"):
            sys.exit(ended.stderr[-4000:])
        yield jobs[0]["cell"] | {"error": f"the rank ends: {errors[0]}", "step": BASE, "loss": None, "lines": []}
        jobs = jobs[1:]


def matrix(text: str, results: Path, only: str, out: Path) -> None:
    """Run every cell that has no result."""
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    have = {tuple(one[key] for key in KEYS) for one in known}
    todo = [cell for cell in cells() if tuple(cell.values()) not in have and only in " | ".join(cell.values())]
    for mesh, (ranks, _) in MESHES.items():
        for dtype in DTYPES:
            mine = [cell for cell in todo if (cell["mesh"], cell["dtype"]) == (mesh, dtype)]
            if not mine:
                continue
            base = out / f"base-{mesh}-{dtype}".replace(" ", "-")
            made = {"mesh": mesh, "guard": "spike", "dtype": dtype, "place": "made", "bit": ""}
            folder = Path(tempfile.mkdtemp(dir=out))
            options = options_of(made, text, out, base.name) | {"train.steps": BASE, "checkpoint.every": BASE // 2}
            for row in launched(ranks, folder, [{"cell": made, "options": options | {"eval.every": 0}}]):
                if row["error"]:
                    sys.exit(row["error"])
            jobs = []
            for number, cell in enumerate(mine):
                name = f"{base.name}-{number}"
                shutil.copytree(base, out / name)
                jobs.append({"cell": cell, "options": options_of(cell, text, out, name)})
            for row in launched(ranks, folder, jobs):
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row | {"cpu": cpu()}) + "\n")
                print(*(row[key] for key in KEYS), row["error"][:100] or row["loss"], row["lines"][:1], flush=True)


# --- the tables -----------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Each place and bit, with what each guard makes of it, for each mesh and dtype."""
    for mesh in MESHES:
        for dtype in DTYPES:
            here = [row for row in rows if (row["mesh"], row["dtype"]) == (mesh, dtype)]
            clean = {row["guard"]: row["loss"] for row in here if row["place"] == "nothing"}
            others = [row["loss"] for row in here if row["place"] == "other samples"]
            guards = [guard for guard in GUARDS if guard in clean]
            if len(others) < 2 or not guards:
                continue
            noise = 2 * statistics.stdev(others)
            yield f"{mesh}, {dtype}: loss without a flip {clean['default']:.3f}; noise {noise:.3f}"
            yield ""
            yield f"| place | bit | {' | '.join(guards)} |"
            yield "|---|---|" + "---|" * len(guards)
            places = dict.fromkeys((row["place"], row["bit"]) for row in here if row["place"] in (*HOOKS,))
            places |= dict.fromkeys((r["place"], r["bit"]) for r in here if r["place"].startswith("checkpoint"))
            for place, bit in places:
                found = {row["guard"]: row for row in here if (row["place"], row["bit"]) == (place, bit)}
                outcomes = [outcome(found[g], clean[g], noise) if g in found else "" for g in guards]
                yield f"| {place} | {bit} | {' | '.join(outcomes)} |"
            yield ""


def outcome(row: dict[str, Any], clean: float, noise: float) -> str:
    """What became of a flip, in a few words."""
    text = f"{row['error']} {' '.join(row['lines'])}"
    patterns = {
        "the rank ends": "the rank ends",
        "memory check": "memory changed by itself",
        "copies differ": "copies of the model differ",
        "at the load": "does not match the manifest|is damaged|manifest",
        "not finite": "not finite",
        "spike": "SPIKE",
    }
    by = next((name for name, pattern in patterns.items() if re.search(pattern, text)), "")
    if not by:
        change = row["loss"] - clean
        return f"{'harmless' if abs(change) <= noise else '**missed**'} ({change:+.3f})"
    if by in ("copies differ", "not finite"):
        step = int(re.search(r"step (\d+)", text)[1])  # type: ignore[index]
        by += f", {step - BASE} steps" if step > BASE + 1 else ", at once"
    if named := re.search(r"it differs.*?rank (\d+)|it differs.*?(gradient norm)", text):
        by += f"; names rank {named[1]}" if named[1] else "; computed again, it differs"
    elif "it is equal" in text:
        by += "; computed again, it is equal"
    return by


def price(ranks: int = 2, steps: int = 40) -> Iterator[str]:
    """Processor time of the guards in a step of two models, on rank 0, in per cent of the rest of the step."""
    sizes = {"1.5 M parameters": "default", "5.5 M": "larger"}
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size, config in sizes.items():
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command += [
                "-m",
                "benchmarks.flips",
                "--price",
                f"{folder}/{config}.json",
                "--config",
                f"configs/{config}.toml",
            ]
            command += [f"--train.steps={steps}", f"--run.out_dir={folder}"]
            command += ["--eval.every=0", "--sample.every=0", "--checkpoint.every=0", "--run.threads=1"]
            command += ["--spike.action=skip", "--spike.recheck=true", "--spike.memory_check_every=1"]
            subprocess.run(
                command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True
            )
            found[size] = json.loads(Path(f"{folder}/{config}.json").read_text())
    yield f"| guard | {' | '.join(sizes)} |"
    yield "|---|" + "---:|" * len(sizes)
    for guard, parts in PARTS.items():
        shares = []
        for one in found.values():
            rest = one["train_step"] - sum(one[part] for part in one if part not in ("train_step", "take"))
            shares.append(f"{100 * sum(one[part] for part in parts) / rest:.2g} %")
        yield f"| {guard} | {' | '.join(shares)} |"


PARTS = {"spike": ("suspect", "check"), "memory": ("take", "_before_update")}  # all but `take` are within a step


def price_main(report: Path, argv: list[str]) -> None:
    """train.py, which writes down the median processor time of a step, and of the guards in it."""
    sys.path.insert(0, str(ROOT))
    import train
    from torchtitan_lite.distributed.process_group import exit_process
    from torchtitan_lite.training import intact
    from torchtitan_lite.training.spikes import watch

    spent: dict[str, list[float]] = {}

    def timed(owner: Any, name: str) -> None:
        honest, times = getattr(owner, name), spent.setdefault(name, [])

        def call(*given: Any, **named: Any) -> Any:
            before = time.process_time()
            result = honest(*given, **named)
            times.append(time.process_time() - before)
            return result

        setattr(owner, name, call)

    owners = intact.MemoryCheck, watch.Spikes
    for owner, names in zip(owners, (PARTS["memory"], PARTS["spike"]), strict=True):
        for name in names:
            timed(owner, name)
    timed(train, "train_step")
    code = train.main(argv)
    if os.environ["RANK"] == "0":
        medians = {name: statistics.median(times) for name, times in spent.items()}
        report.write_text(json.dumps(medians), encoding="utf-8")
    exit_process(code)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", default="table", choices=("matrix", "price", "table"))
    parser.add_argument(
        "--only", default="", help="of the cells, those with this in 'mesh | guard | dtype | place | bit'"
    )
    parser.add_argument("--text", default="", help="data.path")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    if sys.argv[1:2] == ["--price"]:
        price_main(Path(sys.argv[2]), sys.argv[3:])
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank, given.rank / "jobs.json")
    if given.stage == "matrix":
        with tempfile.TemporaryDirectory() as out:
            matrix(given.text, given.results, given.only, Path(out))
    if given.stage == "price":
        print("\n".join([cpu(), "", *price()]))
    if given.results.exists():
        print("\n".join(table([json.loads(line) for line in given.results.read_text().splitlines()])))


if __name__ == "__main__":
    main()
