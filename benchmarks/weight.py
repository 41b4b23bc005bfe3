"""How heavy the code is: `python -m benchmarks.weight [CHECKOUT]`, of this checkout or of another one.

Lines and modules by room, lengths of functions, imports inside functions, modules with one importer, private functions
that are called once, words of the docs, and the lines that one plain training step executes in the main thread.
"""

import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

_STEP = """
import json, sys, threading
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
        sys.settrace(trace)
    if calls == 4:
        sys.settrace(None)
        files = sorted({file for file, _ in executed})
        print("EXECUTED " + json.dumps({file: sum(file == f for f, _ in executed) for file in files}), flush=True)
    return plain(*args, **kwargs)

train.train_step = step
train.exit_process(train.main(sys.argv[1:]))
"""


def of_step(checkout: Path) -> dict[str, int]:
    """Lines that the main thread executes in the third step of a small run on the CPU, by file."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(p.read_text(encoding="utf-8") for p in sorted((checkout / "docs").glob("*.md"))) * 3)
        options = {
            **{"data.path": text, "run.out_dir": folder, "run.device": "cpu", "run.threads": 1, "train.steps": 4},
            **{"train.seq_len": 64, "train.micro_batch_size": 2, "train.global_batch_size": 4, "log.every": 1},
            **{"model.max_seq_len": 64, "tokenizer.vocab_size": 512, "optim.warmup_steps": 1, "eval.every": 0},
            **{"sample.every": 0, "checkpoint.every": 100},
        }
        result = subprocess.run(
            [sys.executable, "-c", _STEP, *(f"--{key}={value}" for key, value in options.items())],
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


def main() -> None:
    """Print the figures."""
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    package = checkout / "torchtitan_lite"
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    sources |= {
        checkout / name: (checkout / name).read_text(encoding="utf-8") for name in ("train.py", "checkpoint.py")
    }
    trees = {path: ast.parse(text) for path, text in sources.items()}

    rooms: dict[str, list[int]] = {}
    for path, text in sources.items():
        inner = path.relative_to(checkout).parts[1:]
        rooms.setdefault(inner[0] if len(inner) > 1 else "", []).append(len(text.splitlines()))
    print("room             lines  modules")
    for room, counts in sorted(rooms.items(), key=lambda item: -sum(item[1])):
        print(f"{room or '(top level)':<15} {sum(counts):>6} {len(counts):>8}")
    print(f"{'all':<15} {sum(map(sum, rooms.values())):>6} {sum(map(len, rooms.values())):>8}")
    tests = [path.read_text(encoding="utf-8") for path in (checkout / "tests").rglob("*.py")]
    print(f"{'tests':<15} {sum(len(text.splitlines()) for text in tests):>6} {len(tests):>8}")

    functions = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {id(node): (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    most, longest = max((lengths[id(node)], node.name) for node in functions)
    print(f"functions: median {statistics.median(lengths.values()):g} lines, longest {most} ({longest})")

    ours = ("torchtitan_lite", "train", "checkpoint")
    inside, importers = 0, Counter[str]()
    for tree in trees.values():
        within = {id(inner) for node in functions for inner in ast.walk(node)}
        used = set[str]()
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ours:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.split(".")[0] in ours]
            inside += bool(names) and id(node) in within
            used.update(names)
        importers.update(used)
    modules = {
        ".".join(path.relative_to(checkout).with_suffix("").parts) for path in sources if path.stem != "__init__"
    }
    print(f"imports of ours inside functions: {inside}")
    print(f"modules with one importer: {sum(importers[module] == 1 for module in modules)}")

    once = 0
    for tree in trees.values():
        mentioned = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        mentioned.update(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        private = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and re.match(r"_[a-z]", node.name)
        }
        once += sum(mentioned[name] == 1 for name in private)
    print(f"private functions named once outside their definition: {once}")

    pages = [*(checkout / "docs").glob("*.md"), *checkout.glob("*.md")]
    print(f"words of README, docs and other pages: {sum(len(page.read_text().split()) for page in pages):,}")

    executed = of_step(checkout)
    print(f"one plain step executes {sum(executed.values())} lines in {len(executed)} files:")
    for file, count in sorted(executed.items(), key=lambda item: -item[1]):
        print(f"    {count:>4}  {file}")


if __name__ == "__main__":
    main()
