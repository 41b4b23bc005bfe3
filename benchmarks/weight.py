"""How heavy the code is: `python -m benchmarks.weight [CHECKOUT ...]`, of this checkout or of the ones that are given.

Statements (of the syntax tree, without docstrings), lines, modules and public functions by area, and by room of the
package; config keys; words of the docs; and how many of the lines that a step and a save execute are in the files of
README's tables.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Records the lines of ours that this process executes: in one step, and after it. NAMES has the names of both, by step.
_TRACE = """
import json, os, sys, threading
from pathlib import Path
sys.path.insert(0, str(Path.cwd()))
start = len(str(Path.cwd())) + 1
ours = tuple(str(Path.cwd() / name) for name in ("torchtitan_lite/", "train.py", "checkpoint.py"))
calls, recording, found = 0, "", {}

def trace(frame, event, argument):
    file = frame.f_code.co_filename
    if not recording or not file.startswith(ours) or threading.current_thread().name in ("watchdog", "signals"):
        return None
    if event == "line":
        found.setdefault(recording, set()).add((file[start:], frame.f_lineno))
    return trace

def step(*args, **kwargs):
    global calls, recording
    for thread in threading.enumerate():
        thread.name == "save" and thread.join()
    calls += 1
    recording, after = NAMES.get(calls, ("", ""))
    result = plain(*args, **kwargs)
    recording = after
    sys._getframe(1).f_trace = trace
    return result

def report():
    sys.settrace(None)
    print("EXECUTED " + json.dumps({name: sorted(lines) for name, lines in found.items()}), flush=True)

threading.settrace(trace)  # of the threads that load batches and save
"""
_ON_CPU = f"""{_TRACE}
import train
NAMES, plain, train.train_step = {{3: ("step", "log"), 4: ("", "save")}}, train.train_step, step
sys.settrace(trace)
code = train.main(sys.argv[1:])
if os.environ["RANK"] == "0":
    report()
train.exit_process(code)
"""
_ON_GPU = f"""{_TRACE}
from tests.fake_cuda import library
library.load()
from tests.fake_cuda import stand_ins
stand_ins.install()
import torch, train
from tests.fake_cuda.step import config_of, logged_step
NAMES, plain, train.train_step = {{2: ("step", "")}}, train.train_step, step
torch.autograd.set_multithreading_enabled(False)  # backward stays in this thread, which is traced
sys.settrace(trace)
logged_step(config_of(json.loads(sys.argv[1]), 2), 2, 512)
report()
os._exit(0)
"""
_SMALL = {
    **{"train.seq_len": 64, "train.micro_batch_size": 2, "train.global_batch_size": 8, "model.max_seq_len": 64},
    **{"tokenizer.vocab_size": 512, "optim.warmup_steps": 1, "train.steps": 5},
}
Lines = set[tuple[str, int]]  # file and number
GPU, CPU, SAVE = "a logged step on a GPU", "a logged step on a CPU", "a save"


def executed(checkout: Path) -> dict[str, Lines]:
    """Return the lines that rank 0 of 2 executes in a small run of the defaults, and those that only a save does.

    The step on a GPU, in bfloat16, is that of tests/fake_cuda: no kernel runs there. Loading and logging are the CPU's.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(p.read_text(encoding="utf-8") for p in sorted((checkout / "docs").glob("*.md"))) * 3)
        options = _SMALL | {
            **{"data.path": text, "run.out_dir": folder, "run.device": "cpu", "run.threads": 1},
            **{"log.every": 3, "checkpoint.every": 4, "eval.every": 0, "sample.every": 0},
        }
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable]
        words = [f"--{key}={value}" for key, value in options.items()]
        on_cpu = _run(checkout, [*torchrun, "-c", _ON_CPU, *words], {"XDG_CACHE_HOME": folder})
    values = _SMALL | {"run.device": "cuda", "fsdp.param_dtype": "bfloat16"}
    on_gpu = _run(checkout, ["-c", _ON_GPU, json.dumps(values)], {})
    loading = {line for line in on_cpu["step"] if line[0].startswith("torchtitan_lite/data/")}
    logged = on_cpu["step"] | on_cpu["log"]
    return {GPU: on_gpu["step"] | loading | on_cpu["log"], CPU: logged, SAVE: on_cpu["save"] - logged}


def _run(checkout: Path, words: list[str], environment: dict[str, str]) -> dict[str, Lines]:
    result = subprocess.run(
        [sys.executable, *words],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)} | environment,
        capture_output=True,
        text=True,
    )
    printed = re.search(r"^EXECUTED (.*)$", result.stdout, re.M)
    if not printed:
        raise SystemExit(f"the step of {checkout} did not run:\n{result.stdout}{result.stderr}")
    return {name: {(file, line) for file, line in lines} for name, lines in json.loads(printed[1]).items()}


def recipe(checkout: Path) -> tuple[list[str], list[str]]:
    """Return the files of both tables in README's section on the recipe: a step's, and a save's.

    The first name of a row has the folder of the others.
    """
    section = (checkout / "README.md").read_text(encoding="utf-8").split("\n## The recipe\n")[1].split("\n## ")[0]
    _, *tables = section.split("\n|---|---|\n")
    files: list[list[str]] = []
    for table in tables:
        files.append([])
        for row in re.findall(r"^\| (`.+?) \|", table, re.M):
            folder = Path()
            for name in re.findall(r"`(.+?)`", row):
                folder = Path("torchtitan_lite", name).parent if "/" in name else folder
                files[-1].append(name if name.endswith(".py") else f"{folder / Path(name).name}.py")
    of_step, of_save = files
    return of_step, of_save


def n_lines(checkout: Path, files: Iterable[str]) -> int:
    return sum(len((checkout / file).read_text(encoding="utf-8").splitlines()) for file in files)


def shares(checkout: Path, lines: dict[str, Lines]) -> dict[str, float]:
    """Return the share of a step's lines that the recipe's first table has, and of a save's that both tables have."""
    of_step, of_save = recipe(checkout)
    files = {GPU: of_step, CPU: of_step, SAVE: of_step + of_save}
    return {what: sum(file in files[what] for file, _ in found) / len(found) for what, found in lines.items()}


class Weight(NamedTuple):
    """Sums over files."""

    statements: int
    lines: int
    modules: int
    functions: int  # public ones, and public methods

    def __str__(self) -> str:
        return f"{self.statements:>10} {self.lines:>7} {self.modules:>8} {self.functions:>10}"


def weigh(files: Iterable[Path]) -> Weight:
    """Count statements without docstrings, lines, modules and public functions."""
    nodes, lines, modules = list[ast.AST](), 0, 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        nodes += ast.walk(ast.parse(text))
        lines += len(text.splitlines())
        modules += 1
    is_text = (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in nodes)
    statements = sum(isinstance(node, ast.stmt) and not text for node, text in zip(nodes, is_text, strict=True))
    functions = sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name[0] != "_" for n in nodes)
    return Weight(statements, lines, modules, functions)


def n_keys(checkout: Path) -> int:
    """The number of config keys."""
    printed = subprocess.run(
        [sys.executable, "train.py", "--print-config"], cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sum(len(section) for section in tomllib.loads(printed.stdout).values())


def report(checkout: Path) -> None:
    """Print the figures of one checkout."""
    package, doors = checkout / "torchtitan_lite", [checkout / "train.py", checkout / "checkpoint.py"]
    print(f"{'':<20} statements   lines  modules  functions")
    print(f"{'package':<20} {weigh([*package.rglob('*.py'), *doors])}")
    for area in ("examples", "tests", "benchmarks"):
        print(f"{area:<20} {weigh((checkout / area).rglob('*.py'))}")
    rooms = {room.name: weigh(room.rglob("*.py")) for room in package.iterdir() if (room / "__init__.py").is_file()}
    rooms["(top level)"] = weigh([*package.glob("*.py"), *doors])
    for name, weight in sorted(rooms.items(), key=lambda item: -item[1].statements):
        print(f"    {name:<16} {weight}")
    pages = [*(checkout / "docs").glob("*.md"), *checkout.glob("*.md")]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    print(f"{n_keys(checkout)} config keys; {words:,} words in README, docs without docs/lab, and other pages")
    for name, files in zip(("a step", "a save"), recipe(checkout), strict=True):
        print(f"the recipe of {name} is {len(files)} files with {n_lines(checkout, files):,} lines")
    lines = executed(checkout)
    for what, share in shares(checkout, lines).items():
        print(f"of the {len(lines[what])} lines that {what} executes, {share:.0%} are in the recipe; the others:")
        inside = {file for files in recipe(checkout)[: 1 + (what == SAVE)] for file in files}
        for file, n in Counter(file for file, _ in lines[what]).most_common():
            if file not in inside:
                print(f"    {n:>4}  {file}")


if __name__ == "__main__":
    for given in sys.argv[1:] or ["."]:
        report(Path(given).resolve())
