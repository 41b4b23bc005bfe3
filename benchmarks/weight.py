"""How heavy the code is: `python -m benchmarks.weight [CHECKOUT ...]`, of this checkout or of the ones that are given.

Statements (of the syntax tree, without docstrings), lines, modules and public functions by area, and by room of the
package; config keys; words of the docs; and of the lines that one step with a save executes, those in the recipe.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_STEP = """
import json, os, sys, threading
from pathlib import Path
sys.path.insert(0, str(Path.cwd()))
import train
ours = tuple(str(Path.cwd() / name) for name in ("torchtitan_lite/", "train.py", "checkpoint.py"))
start = len(str(Path.cwd())) + 1
executed, calls, plain = set(), 0, train.train_step

def trace(frame, event, argument):
    if not frame.f_code.co_filename.startswith(ours):
        return None
    if event == "line":
        executed.add((frame.f_code.co_filename[start:], frame.f_lineno))
    return trace

def step(*args, **kwargs):
    global calls
    calls += 1
    if calls == 3:  # from here to the next call: the step, and what the loop does after it
        sys._getframe(1).f_trace = trace
        threading.settrace(trace)  # a save in the background begins a thread
        sys.settrace(trace)
    if calls == 4:
        sys.settrace(None)
        files = sorted({file for file, _ in executed})
        if os.environ["RANK"] == "0":
            print("EXECUTED " + json.dumps({file: sum(file == f for f, _ in executed) for file in files}), flush=True)
    return plain(*args, **kwargs)

train.train_step = step
if "--speed.shared_memory=False" in sys.argv:
    train.cpu.apply = lambda *_, **__: None
train.exit_process(train.main(sys.argv[1:]))
"""


def of_step(checkout: Path, *, replaced: bool) -> dict[str, int]:
    """Lines that rank 0 of 2 executes in a step of a small run of the defaults that is logged and saved, by file.

    Args:
        replaced: with the CPU's replacements. Without them it is what a GPU runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(p.read_text(encoding="utf-8") for p in sorted((checkout / "docs").glob("*.md"))) * 3)
        options = {
            **{"data.path": text, "run.out_dir": folder, "run.device": "cpu", "run.threads": 1, "train.steps": 4},
            **{"train.seq_len": 64, "train.micro_batch_size": 2, "train.global_batch_size": 8, "log.every": 3},
            **{"model.max_seq_len": 64, "tokenizer.vocab_size": 512, "optim.warmup_steps": 1, "eval.every": 0},
            **{"sample.every": 0, "checkpoint.every": 3, "speed.shared_memory": replaced},
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        result = subprocess.run(
            [*torchrun, sys.executable, "-c", _STEP, *(f"--{key}={value}" for key, value in options.items())],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": folder},
            capture_output=True,
            text=True,
        )
    found = re.search(r"^EXECUTED (.*)$", result.stdout, re.M)
    if not found:
        raise SystemExit(f"the step of {checkout} did not run:\n{result.stdout}{result.stderr}")
    counts: dict[str, int] = json.loads(found[1])
    return counts


def recipe(checkout: Path) -> list[str]:
    """The files of the table in README's section on the recipe; the first of a row has the folder of the others."""
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    files = []
    for row in re.findall(r"^\| (`.+?) \|", readme.split("\n## The recipe\n")[1].split("\n## ")[0], re.M):
        folder = Path()
        for name in re.findall(r"`(.+?)`", row):
            folder = Path("torchtitan_lite", name).parent if "/" in name else folder
            files.append(name if name.endswith(".py") else f"{folder / Path(name).name}.py")
    return files


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
    files = recipe(checkout)
    total = sum(len((checkout / file).read_text(encoding="utf-8").splitlines()) for file in files)
    print(f"the recipe is {len(files)} files with {total:,} lines")
    for replaced in (False, True):
        executed = of_step(checkout, replaced=replaced)
        inside = sum(count for file, count in executed.items() if file in files)
        share = f"{inside} of {sum(executed.values())} ({inside / sum(executed.values()):.0%})"
        how = "with the CPU's replacements" if replaced else "as on a GPU"
        print(f"of the lines that a step with a save executes {how}, the recipe has {share}; the others:")
        for file, count in sorted(executed.items(), key=lambda item: -item[1]):
            if file not in files:
                print(f"    {count:>4}  {file}")


if __name__ == "__main__":
    for given in sys.argv[1:] or ["."]:
        report(Path(given).resolve())
