"""Processes: torchrun with gloo, plain python, forked ranks, and what they leave behind."""

import atexit
import functools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.forkserver import ADDRESS, Server
from tests.forkserver import HANGS_S as HANGS_S
from torchtitan_lite.checkpointing import shards
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.run import attempts

ROOT = Path(__file__).parent.parent

# No size divides evenly: 517 entries, 37 positions, and 6 sequences in micro-batches of 2 on 2 ranks. Every step is
# logged. Three micro-batches on one rank, two on two: most of a step's time is Python, once for each of them.
TINY = {
    "model.family": "gpt",
    "model.tie_embeddings": False,
    "model.dim": 32,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.max_seq_len": 37,
    "tokenizer.vocab_size": 517,
    "train.seq_len": 32,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 6,
    "train.steps": 20,
    "optim.name": "adamw",
    "optim.lr": 4e-3,
    "optim.warmup_steps": 2,
    "eval.every": 10,
    "eval.samples": 5,
    "sample.every": 0,
    "checkpoint.every": 10,
    "checkpoint.keep_latest": 0,
    "log.every": 1,
    "run.device": "cpu",
    "run.threads": 1,
}


def options(values: dict[str, Any]) -> list[str]:
    """Command-line options for these keys."""
    return [f"--{key}={value}" for key, value in values.items()]


def tiny(text: Path | str, out_dir: Path, **more: Any) -> list[str]:
    """Options of a tiny run in `out_dir`; `section__key=value` adds or replaces one."""
    values = TINY | {"data.path": text, "run.out_dir": out_dir}
    return options(values | {key.replace("__", "."): value for key, value in more.items()})


def start(command: list[str], timeout: float = HANGS_S) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root, with this interpreter's tools, and this process's own packages."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def torchrun(
    n: int, *arguments: str, script: str = "train.py", timeout: float = HANGS_S
) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node n script arguments`, on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return start([*launcher, script, *arguments], timeout)


def python(*arguments: str, script: str = "train.py") -> subprocess.CompletedProcess[str]:
    """`python script arguments`, or with `-m module` as the script: a world of one, without importing torch again."""
    mine = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return server().run(1, arguments, mine | {"OMP_NUM_THREADS": "1"}, script, "", HANGS_S)


def run_python(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command line without its first word, which is python: `-m module arguments`, or `script arguments`."""
    if words[0] == "-m":
        return python(*words[2:], script=f"-m {words[1]}")
    return python(*words[1:], script=words[0])


@functools.cache
def server() -> Server:
    """The process that runs train.py for `ranks`: the one of this test run, or one that is started now."""
    found = Server(os.environ.get(ADDRESS, ""))
    atexit.register(found.close)
    return found


def ranks(
    n: int,
    *arguments: str,
    entry: str = "train",
    fault: str = "",
    env: Mapping[str, str] | None = None,
    timeout: float = HANGS_S,
) -> subprocess.CompletedProcess[str]:
    """What `torchrun(n, *arguments)`, and for n = 1 `python(*arguments)`, would do, without importing torch again.

    Args:
        fault: of tests/faults/worker.py; it must happen.
    """
    given = {key: value for key, value in os.environ.items() if key.startswith(("XDG_", "FAULT_", "AWS_"))} | dict(
        env or {}
    )
    result = server().run(n, arguments, given, entry, fault, timeout)
    for action in (part.split(":")[0] for part in fault.split(",") if part):
        assert f"FAULT {action} fired" in result.stdout, result.stdout + result.stderr
    return result


def run_of(n: int, text: Path | str, folder: Path, **more: Any) -> Path:
    """The run "run" of `tiny` on n ranks, which must succeed."""
    succeeded(ranks(n, *tiny(text, folder, **{"run__name": "run"} | more)))
    return folder / "run"


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Call `fn(world, *args, **kwargs)` on each rank of a gloo process group, and return the results by rank.

    A rank that ends its process in `fn`, with exit code 0, has None as its result.

    Args:
        fn: a function at the top of a module of tests/.
        args, kwargs: and the results: whatever can be pickled. Tensors are copied.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "call").write_bytes(pickle.dumps((args, kwargs)))
        succeeded(ranks(world_size, folder, fn.__module__, fn.__qualname__, entry="tests.called"))
        files = [Path(folder) / str(rank) for rank in range(world_size)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def until(condition: Callable[[], Any], what: str, seconds: float = HANGS_S) -> Any:
    """Wait for a condition. The time limit only ends what hangs."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
    return result


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    """The output of a process that must have exited with 0."""
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def refused(result: subprocess.CompletedProcess[str], *said: str, code: int = 2) -> str:
    """The errors of a process that must have ended with this code and said this, without a traceback."""
    assert result.returncode == code, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr, result.stderr
    assert [text for text in said if text not in result.stderr] == [], result.stderr
    return result.stderr


def records(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl that count."""
    return attempts.records(run)


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records(run) if "loss" in r}


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def damage(folder: Path) -> None:
    """Another last byte of a checkpoint's weights."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def meta_model(*args: Any) -> Transformer:
    """What `models.build` makes of these, without values."""
    with torch.device("meta"):
        return build(*args)


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint of either kind: those of the model, and of the optimizer as state.NAME.exp_avg."""
    return {name.split(".", 1)[1]: tensor for name, tensor in shards.read_tensors(folder).items()}


def forget_after(run: Path, step: int) -> Path:
    """Delete the later checkpoints: what is left of a run that was killed some steps after this one."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return run


def assert_same_end(run: Path, other: Path, step: int) -> None:
    """The same losses and norms of each step, and the same tensors in the checkpoint of `step`, bit for bit."""
    assert losses(run) == losses(other)
    mine, theirs = tensors(checkpoint(run, step)), tensors(checkpoint(other, step))
    assert mine.keys() == theirs.keys()
    assert not [name for name in theirs if not mine[name].equal(theirs[name])]
