"""Attacks on other tools' checkpoints and on ours: `python -m benchmarks.defects [ROW ...]`.

Each row attacks a plain tool's checkpoint and one of this project, with the same tensors, and prints both outcomes. The
tools: torch.distributed.checkpoint (DCP) with its own files, the safetensors library, transformers' distributed
`save_pretrained`, and the Checkpointer in its four ways. docs/lab/defects.md explains the rows.
"""

import argparse
import errno
import hashlib
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from benchmarks import contenders, oracle
from benchmarks.machine import cpu as cpu_name
from benchmarks.train import versions
from tests.checkpointing.reload_worker import WAYS, State
from tests.checkpointing.test_checkpoint import edit, flip_a_bit
from tests.helpers import ROOT, ranks, run_distributed
from torchtitan_lite.checkpointing import safetensors_file, shards, storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.errors import CheckpointError

Results = dict[str, str]  # by tool
DCP, SAFETENSORS, TRANSFORMERS = "DCP", "safetensors", "transformers"
OURS = [" ".join(way) for way in WAYS]
SHARDED = OURS[2:]
N_FLIPS = 150
DIES = "this rank dies now"


class Bomb:
    """A pickle that executes code when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def replace_by(content: bytes, folder: Path, name: str) -> None:
    """Replace a file of a checkpoint and update the manifest."""
    (folder / name).write_bytes(content)
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit(folder / "manifest.json", lambda m: m["files"].update({name: record}))


class Tool(NamedTuple):
    """Live tensors, and functions that save and load them, or raise the tool's error."""

    tensors: Callable[[], Mapping[str, Tensor]]
    save: Callable[[], object]
    load: Callable[[], object]


def tool(name: str, process: Process, folder: Path, *, threads: bool = False) -> Tool:
    """Set up a tool on this mesh of 1 or 2 ranks, to save into this folder. `threads`: write in a second thread."""
    if name == TRANSFORMERS:
        return transformers(process, folder)
    state = State(str(process.world_size), 1, "llama", process)
    state.step()
    kind, api = name.split() if name in OURS else WAYS[0]
    ours = state.checkpointer(folder, kind, api, async_save=threads)

    def live() -> dict[str, Tensor]:  # a load may replace the optimizer's
        return ours.tensors()

    if name == DCP:
        writer, reader = dcp.FileSystemWriter(folder, thread_count=1 + threads), dcp.FileSystemReader(folder)
        save: Callable[[], object] = lambda: dcp.save(live(), storage_writer=writer)  # noqa: E731
        return Tool(live, save, lambda: dcp.load(live(), storage_reader=reader))
    if name == SAFETENSORS:
        folder.mkdir()
        file, rows = folder / "model.safetensors", {key: own_part(t)[0] for key, t in live().items()}
        return Tool(live, lambda: save_file(rows, file), lambda: [rows[n].copy_(t) for n, t in load_file(file).items()])

    def save_ours() -> None:
        ours.save(TrainState(step=1))
        saved = ours.wait()
        if saved is None or saved.error:
            raise CheckpointError(saved.error if saved else "no outcome")

    def load_ours() -> None:
        if ours.load({}) is None:
            raise CheckpointError("there is no checkpoint")

    return Tool(live, save_ours, load_ours)


def transformers(process: Process, folder: Path) -> Tool:
    """Set up transformers' FSDP2 on 2 ranks; on one, the unsharded model."""
    from transformers import AutoModelForCausalLM

    model: Any = contenders.hugging_face_llama(oracle.SHAPE)
    if process.world_size > 1:
        contenders.shard_with_transformers(model, process.world_size, dtype="float32")
    tensors = dict(model.named_parameters())

    def load() -> None:
        for key, value in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
            tensors[key].data.copy_(value)

    return Tool(lambda: tensors, lambda: model.save_pretrained(folder, distributed_checkpoint=True), load)


def answer(action: Callable[[], object]) -> str:
    """Return an action's error, shortened; "" if it succeeds."""
    try:
        action()
    except CheckpointException as error:
        return textwrap.shorten("; ".join(repr(failure[0]) for failure in error.failures.values()), 120)
    except Exception as error:
        return textwrap.shorten(str(error) or repr(error), 120)
    return ""


def parts(of: Tool) -> list[Tensor]:
    return [own_part(tensor.detach())[0] for tensor in of.tensors().values()]


# --- a death during a save --------------------------------------------------------------------------------------


@contextmanager
def rank_dies(who: int) -> Iterator[None]:
    """Kill a rank by SIGKILL when it is about to write, after the other rank has written its part."""

    def dying(write_data: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **options: Any) -> Any:
            if dist.get_rank() == who:
                dist.barrier()
                print(DIES, flush=True)
                os.kill(os.getpid(), 9)
            written = write_data(*args, **options)
            dist.barrier()
            return written

        return write

    with ExitStack() as stack:
        for writer in (dcp.FileSystemWriter, HuggingFaceStorageWriter):
            stack.enter_context(mock.patch.object(writer, "write_data", dying(writer.write_data)))
        stack.enter_context(mock.patch.object(shards, "write_tensors", dying(safetensors_file.write_tensors)))
        yield


def save_values(process: Process, name: str, folder: Path, values: list[float], who: int) -> None:
    """Fill all tensors with each value in turn, and save. In the last save a rank dies."""
    saver = tool(name, process, folder)
    for value in values:
        for part in parts(saver):
            part.fill_(value)
        with rank_dies(who) if value == values[-1] else ExitStack():
            saver.save()


def load_values(process: Process, name: str, folder: Path) -> str:
    """Load on one rank, and describe the tensors' values."""
    loader = tool(name, process, folder)
    for part in parts(loader):
        part.fill_(9)
    if error := answer(loader.load):
        return error
    values = {1.0: "the first save", 2.0: "the second", 9.0: "what they held before"}
    found = [
        {values.get(value, "values that nobody saved") for value in part.unique().tolist()} for part in parts(loader)
    ]
    held = Counter(" and ".join(sorted(of_tensor)) for of_tensor in found)
    return "loads; " + ", ".join(f"{n} tensors hold {sources}" for sources, n in held.items())


def dies_in(values: list[float], who: int, names: list[str]) -> Callable[[Path], Results]:
    """Build a row: save these values, interrupt the last save, then load."""

    def attack(folder: Path) -> Results:
        found = {}
        for name in names:
            if name == TRANSFORMERS and not importlib.util.find_spec(name):
                found[name] = "not run: it is not installed"
                continue
            run, called = folder / name / "run", folder / name / "called"
            called.mkdir(parents=True)
            (called / "call").write_bytes(pickle.dumps(((name, run, values, who), {})))
            saved = ranks(2, str(called), save_values.__module__, save_values.__name__, entry="tests.called")
            assert DIES in saved.stdout, saved.stdout + saved.stderr
            found[name] = run_distributed(load_values, 1, name, run)[0]
        return found

    return attack


# --- attacks on one rank ----------------------------------------------------------------------------------------


def bits(process: Process, folder: Path) -> Results:
    """Flip single bits in the files with tensors, one at a time, and load."""

    def content(of: Tool) -> list[bytes]:
        return [part.contiguous().view(-1).numpy().tobytes() for part in parts(of)]

    found = {}
    for name in (DCP, SAFETENSORS, *OURS):
        of = tool(name, process, folder / name)
        of.save()
        expected, random, outcomes = content(of), Random(1), Counter[str]()
        files = sorted(file for file in (folder / name).rglob("*") if file.suffix in (".distcp", ".safetensors"))
        for _ in range(N_FLIPS):
            file = random.choices(files, [file.stat().st_size for file in files])[0]
            honest = file.read_bytes()
            flip_a_bit(file, random.randrange(8 * len(honest)))
            loaded = not answer(of.load)
            outcomes[f"load {'the same' if content(of) == expected else 'other'} values" if loaded else "refused"] += 1
            file.write_bytes(honest)
        of.load()
        assert content(of) == expected
        found[name] = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
    return found


def pickles(process: Process, folder: Path) -> Results:
    """Replace a file by a pickle that runs a command, and load."""
    canary = folder / "canary"
    bomb = pickle.dumps(Bomb(canary))

    def outcome(load: Callable[[], object]) -> str:
        canary.unlink(missing_ok=True)
        error = answer(load)
        return "the command ran" if canary.exists() else error and "refused"

    plain = tool(DCP, process, folder / DCP)
    plain.save()
    (folder / DCP / ".metadata").write_bytes(bomb)
    dcp.save({"extra": Bomb(canary)}, checkpoint_id=folder / "value")
    torch.save(Bomb(canary), folder / "file.pt")
    found = {
        "DCP's `.metadata`": outcome(plain.load),
        "a value in DCP that is no tensor": outcome(lambda: dcp.load({"extra": None}, checkpoint_id=folder / "value")),
        "`torch.load(weights_only=False)`": outcome(lambda: torch.load(folder / "file.pt", weights_only=False)),
        "`torch.load`": outcome(lambda: torch.load(folder / "file.pt")),
    }
    for name in OURS:
        attacked, outcomes = tool(name, process, folder / name), Counter[str]()
        attacked.save()
        checkpoint = storage.step_folder(folder / name, 1)
        honest = {file: file.read_bytes() for file in checkpoint.iterdir()}
        for file in honest:
            if file.name == storage.MANIFEST:
                file.write_bytes(bomb)
            else:
                replace_by(bomb, checkpoint, file.name)  # with its hash in the manifest
            outcomes[outcome(attacked.load)] += 1
            for other, saved in honest.items():
                other.write_bytes(saved)
        (checkpoint / ".metadata").write_bytes(bomb)
        outcomes[outcome(attacked.load) or "additional `.metadata` not read"] += 1
        found[name] = ", ".join(f"{n} {text}" for text, n in outcomes.most_common())
    return found


def threads(process: Process, folder: Path) -> Results:
    """Save to a disk that is full for every thread but the main one, and with a hash that fails."""
    failed, honest, full = threading.Event(), FileSystem.create_stream, OSError(errno.ENOSPC, "No space left on device")

    def create_stream(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise full
        failed.wait()  # makes each thread take one of the two files
        return honest(*args)

    def outcome(name: str, owner: Any, attribute: str, broken: Any, *, threads: bool = True) -> str:
        attacked = tool(name, process, folder / f"{name} {attribute}", threads=threads)
        with mock.patch.object(owner, attribute, broken):
            if error := answer(attacked.save):
                return f"the save fails: {error}"
        return f"the save succeeds; {f'the load fails: {error}' if (error := answer(attacked.load)) else 'it loads'}"

    found = {f"{DCP}, `thread_count=2`": outcome(DCP, FileSystem, "create_stream", create_stream)}
    sha256 = mock.Mock(update=mock.Mock(side_effect=MemoryError("no memory left")), hexdigest=lambda: "0" * 64)
    broken_hash, write = mock.Mock(sha256=lambda: sha256), mock.Mock(side_effect=full)
    for name in OURS:
        in_background = outcome(name, safetensors_file.TensorWriter, "write", write)
        hashing = outcome(name, safetensors_file, "hashlib", broken_hash, threads=False)
        found[name] = f"in the background, {in_background}; in the hashing thread, {hashing}"
    return found


def on_one_rank(attack: Callable[[Process, Path], Results]) -> Callable[[Path], Results]:
    return lambda folder: run_distributed(attack, 1, folder)[0]


# --- a different version of torch -------------------------------------------------------------------------------


def save_each(process: Process, folder: Path) -> str:
    for name in (DCP, *OURS):
        tool(name, process, folder / name).save()
    return torch.__version__


def load_each(process: Process, folder: Path) -> Results:
    return {name: answer(tool(name, process, folder / name).load) or "loads" for name in (DCP, *OURS)}


def newer_torch(python: Path) -> Callable[[Path], Results]:
    """Build a row: `python` saves with its torch, and this interpreter loads."""

    def attack(folder: Path) -> Results:
        if not python.exists():
            return {DCP: "not run: see --newer-torch"}
        (folder / "called").mkdir()
        (folder / "called/call").write_bytes(pickle.dumps(((folder,), {})))
        code = "import sys; from tests.called import main; sys.exit(main(sys.argv[1:]))"
        words = [str(python), "-c", code, str(folder / "called"), save_each.__module__, save_each.__name__]
        subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        version = pickle.loads((folder / "called/0").read_bytes())
        return {name: f"from {version}: {text}" for name, text in run_distributed(load_each, 1, folder)[0].items()}

    return attack


# --- the table --------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the table. `holds`: a pattern that each of this project's answers must match."""

    defect: str
    attack: Callable[[Path], Results]
    holds: str


def rows_of(python: Path) -> dict[str, Row]:
    """Return all rows by name."""
    names = [DCP, TRANSFORMERS, *SHARDED]
    only_first = r"loads; \d+ tensors hold the first save"
    return {
        "over": Row("rank 1 dies in a save over an older one", dies_in([1, 2], 1, names), only_first),
        "first0": Row("rank 0 dies in the first save", dies_in([1], 0, names), "there is no checkpoint"),
        "first1": Row("rank 1 dies in the first save", dies_in([1], 1, names), "there is no checkpoint"),
        "bits": Row(f"{N_FLIPS} single bits of tensor files flip", on_one_rank(bits), f"{N_FLIPS} refused"),
        "pickles": Row("a file is a pickle that runs a command", on_one_rank(pickles), "[34] refused, 1 .* not read"),
        "threads": Row(
            "a thread of the writer fails", on_one_rank(threads), "in .*, the save fails: .*; in .* fails: .*"
        ),
        "torch": Row(f"saved by a newer torch, loaded by {torch.__version__}", newer_torch(python), "from .*: loads"),
    }


def line(defect: str, found: Results) -> str:
    """Format a row: the answers of others, and this project's; equal answers once."""
    sides: tuple[dict[str, list[str]], dict[str, list[str]]] = {}, {}
    for name, text in found.items():
        sides[name in OURS].setdefault(text, []).append(name)
    cells = ["<br>".join(f"{', '.join(names)}: {text}" for text, names in side.items()) for side in sides]
    return f"| {' | '.join([defect, *cells])} |".replace(", ".join(OURS), "all four ways")


def main(argv: list[str]) -> int:
    """Print the table. Exit code 1: an attack on this project succeeded."""
    from benchmarks import defects  # not __main__, because the ranks import it

    parser = argparse.ArgumentParser(prog="python -m benchmarks.defects", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(rows_of(Path()))}; default: all")
    newer = ROOT / ".compat/2.15.0/bin/python"  # see tests/compat.py
    parser.add_argument("--newer-torch", metavar="PYTHON", type=Path, default=newer, help="one with torch 2.15")
    given, fallen = parser.parse_args(argv), []
    rows = defects.rows_of(given.newer_torch)
    if unknown := set(given.rows) - rows.keys():
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    print(f"{cpu_name()}; {versions()}\n\n| defect | plain tool | this project |\n|---|---|---|")
    for name in given.rows or rows:
        with tempfile.TemporaryDirectory() as folder:
            found = rows[name].attack(Path(folder))
        fallen += [
            f"{name}, {way}" for way, text in found.items() if way in OURS and not re.fullmatch(rows[name].holds, text)
        ]
        print(line(rows[name].defect, found).replace(folder, ""), flush=True)
    print(
        f"\nattacks on this project that succeeded: {'; '.join(fallen)}"
        if fallen
        else "\nevery attack on this project failed"
    )
    return int(bool(fallen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
