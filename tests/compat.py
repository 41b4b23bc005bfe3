"""Does this code work with other versions of torch? `python -m tests.compat [VERSION ...]`, or `make compat`.

Each version is installed once, in .compat/ (CUDA builds of several gigabytes, where there is no other); everything else
is that of this interpreter. A part of the tests runs with it. Then each version saves checkpoints in all four ways, and
each other one resumes them: the losses of the next steps must agree. Prints a row for each version.
"""

import argparse
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.helpers import ROOT, forget_after, losses, ranks, succeeded, tiny

VERSIONS = ["2.11.0", "2.13.0", "2.15.0"]
PART = [  # of tests/
    *("distributed", "checkpointing", "optim", "cpu", "models"),
    *("run/test_resume.py", "run/test_world_sizes.py"),
    *("tools/test_plan.py", "gpu/test_imports.py", "docs/test_fsdp_docs.py"),
]
WAYS = [(kind, api) for kind in ("full", "sharded") for api in ("dtensor", "dcp")]
STEPS = 6


def interpreter(version: str) -> Path:
    """A Python with this torch, and this one's packages for the rest."""
    folder = ROOT / ".compat" / version
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", f"torch=={version}", "numpy"], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"])  # after its own, so its torch comes first
    return python


def run_with(version: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of Python with this version."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [str(interpreter(version)), *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def run_of(kind: str, api: str, out_dir: Path) -> list[str]:
    """Options of a run on two ranks that saves after half of the steps."""
    more = {"run__name": f"{kind}_{api}", "train__steps": STEPS, "checkpoint__every": STEPS // 2, "eval__every": 0}
    more |= {"checkpoint__state_dict": kind, "checkpoint__api": api, "optim__schedule": "constant"}
    return tiny(out_dir / "text", out_dir, **more, optim__name="muon" if api == "dcp" else "adamw")


def save(folder: Path) -> None:
    """Make a run in each of the four ways."""
    (folder / "text").mkdir(parents=True)
    for module in ("argparse", "typing"):
        (folder / "text" / f"{module}.txt").write_text(inspect.getsource(importlib.import_module(module)))
    for kind, api in WAYS:
        succeeded(ranks(2, *run_of(kind, api, folder)))


def resume(folder: Path) -> None:
    """Resume copies of these runs after half of the steps, and compare the losses."""
    for kind, api in WAYS:
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary) / "runs"
            shutil.copytree(folder, copy)
            run = forget_after(copy / f"{kind}_{api}", STEPS // 2)
            said = succeeded(ranks(2, *run_of(kind, api, copy)))
            assert f"resumed after step {STEPS // 2}" in said, said
            expected = losses(folder / f"{kind}_{api}")
            for step, (loss, norm) in losses(run).items():
                assert (loss, norm) == pytest.approx(expected[step], rel=1e-4), f"{kind} {api} step {step}"


def main(argv: list[str]) -> int:
    """The command. Returns 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="of torch")
    parser.add_argument("--no-tests", action="store_true", help="only checkpoints")
    parser.add_argument("--workers", default="3", help="for pytest -n")
    for action in ("save", "resume"):  # by one of the interpreters
        parser.add_argument(f"--{action}", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.save or given.resume:
        (save if given.save else resume)(given.save or given.resume)
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        for version in given.versions:
            print(f"saving with torch {version}", flush=True)
            saved = run_with(version, "-m", "tests.compat", "--save", f"{temporary}/{version}")
            print(saved.stderr if saved.returncode else "", end="")
        for version in given.versions:
            row = [version]
            if not given.no_tests:
                paths = [f"tests/{path}" for path in PART]
                chosen = ["-m", "not slow and not extended", "-n", given.workers, "--dist", "loadfile"]
                said = run_with(version, "-m", "pytest", "-q", *chosen, *paths).stdout
                print("\n".join(re.findall(r"^(?:FAILED|ERROR) .*", said, re.M)))
                row.append(re.sub(r", \d+ warnings?| in .*", "", said.strip().splitlines()[-1]))
                wrong += not re.search(r"\d+ passed", row[-1]) or "failed" in row[-1] or "error" in row[-1]
            loaded = []
            for other in given.versions:
                resumed = run_with(version, "-m", "tests.compat", "--resume", f"{temporary}/{other}")
                if resumed.returncode:
                    print(resumed.stderr)
                else:
                    loaded.append(other)
            wrong += loaded != given.versions
            row.append(", ".join(loaded))
            print(f"| {' | '.join(row)} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
