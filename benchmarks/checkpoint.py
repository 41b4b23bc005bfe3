"""Saving and loading a state of about 1 GB: `python -m benchmarks.checkpoint [rounds [processes [full | sharded]]]`.

Compares each way of saving with a plain write and fsync of the same bytes, and with a bare `dcp.save`, which syncs but
neither hashes nor commits. For background saves it compares training's pause with one in-memory copy of this rank's
shards, and measures how much memory the first one takes on each rank. tests/checkpointing/test_checkpoint_memory.py
measures the memory of other saves.

`python -m benchmarks.checkpoint bytes` prints how much memory rank 1 allocates to load a full checkpoint, compared with
sending each tensor by distribute_tensor.
"""

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

import train
from checkpoint import WAYS as SAVE_WAYS
from tests.checkpointing.test_checkpoint_memory import peak_of
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import by_file, by_name, model_tensors, optimizer_tensors
from torchtitan_lite.config import load as settings
from torchtitan_lite.config.schema import CheckpointConfig, Config, RunConfig
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh, exit_process, process_group
from torchtitan_lite.optim.optimizer import build_optimizer, make_state

ROOT = Path(__file__).parent.parent
SIZE = {
    "model.dim": 768,
    "model.n_layers": 12,
    "model.n_heads": 12,
    "model.n_kv_heads": 12,
    "model.hidden_dim": 2048,
    "model.vocab_size": 8192,
    "run.device": "cpu",
    "optim.name": "adamw",
}
WAYS = [(kind, api) for kind in (sys.argv[3:4] or ["full", "sharded"]) for api in ("dtensor", "dcp")]


def config_of(process: Process) -> Config:
    """Return the config of a 97 M parameter Llama: 1.2 GB with AdamW's moments."""
    return settings.load(None, SIZE, world_size=process.world_size).config


class Bench:
    """One rank's part of the measurements."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process, self.folder = process, folder
        config = config_of(process)
        self.model = train.sharded_model(config, 8192, build_mesh(config.fsdp, process.device))
        materialize(self.model, process.device, 0)
        self.optimizer = build_optimizer(self.model, config.optim)
        make_state(self.optimizer)
        self.checkpointers = {
            (kind, api, background): Checkpointer(
                folder / f"{kind}-{api}-{background}", self.model, self.optimizer, way, process, SAVE_WAYS
            )
            for kind, api in WAYS
            for background in (False, True)
            for way in [CheckpointConfig.model_validate({"state_dict": kind, "api": api, "async_save": background})]
        }
        self.step = 0

    def state(self) -> dict[str, Tensor]:
        return by_name(model_tensors(self.model), optimizer_tensors(self.model, self.optimizer))

    def parts(self) -> list[Tensor]:
        return [t.to_local() if isinstance(t, DTensor) else t for t in self.state().values()]

    def plain(self) -> None:
        """Write and sync this rank's bytes."""
        with (self.folder / "plain" / f"rank-{self.process.rank}").open("wb") as stream:
            for part in self.parts():
                stream.write(memoryview(part.detach().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())

    def bare_dcp(self) -> None:
        """Save with plain torch: no hashes, no commit."""
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(self.folder / "dcp"))

    def save(self, kind: str, api: str, background: bool) -> float:
        """Save, and return training's pause in seconds."""
        checkpointer = self.checkpointers[kind, api, background]
        self.step += 1
        checkpointer.save(TrainState(step=self.step))
        saved = checkpointer.wait()
        assert saved is not None
        assert not saved.error, saved.error
        return saved.blocked_s

    def load(self, kind: str, api: str) -> None:
        assert self.checkpointers[kind, api, False].load({}) is not None

    def copy(self) -> None:
        """Copy this rank's shards into existing buffers."""
        for buffer, part in zip(self.buffers, self.parts(), strict=True):
            buffer.copy_(part)

    def make_room(self) -> None:
        """Delete earlier files, outside the timed section."""
        for name in ("plain", "dcp", *(c.folder.name for c in self.checkpointers.values())):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "plain").mkdir()

    def timed(self, action: Callable[[], object], *, writes: bool = True) -> float:
        """Return the slowest rank's seconds."""
        if writes and self.process.rank == 0:
            self.make_room()
        dist.barrier()
        before = time.perf_counter()
        action()
        seconds = torch.tensor(time.perf_counter() - before)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def run(self, rounds: int) -> None:
        """Measure and print."""
        self.buffers = [torch.empty_like(part) for part in self.parts()]
        times: dict[str, list[float]] = {}
        memory: dict[tuple[str, str], str] = {}

        def note(name: str, seconds: float) -> None:
            times.setdefault(name, []).append(seconds)

        def stands_still(kind: str, api: str) -> float:
            dist.barrier()
            stopped = torch.tensor(self.save(kind, api, True))
            dist.all_reduce(stopped, op=dist.ReduceOp.MAX)
            return float(stopped)

        for number in range(-1, rounds):  # the first round allocates pages and buffers
            for kind, api in WAYS:  # compared saves run back to back: the disk's speed changes by the minute
                found = {
                    "plain write": self.timed(self.plain),
                    "bare dcp.save": self.timed(self.bare_dcp),
                    "save": self.timed(lambda kind=kind, api=api: self.save(kind, api, False)),  # type: ignore[misc]
                }
                for name, seconds in found.items() if number >= 0 else ():
                    note(f"{kind} {api}: {name}", seconds)
        for kind, api in WAYS:
            peak = torch.zeros(self.process.world_size)
            peak[self.process.rank] = peak_of(lambda kind=kind, api=api: self.save(kind, api, True))  # type: ignore[misc]
            dist.all_reduce(peak)
            memory[kind, api] = ", ".join(f"{n_mib:,.0f}" for n_mib in peak.tolist())
        for number in range(-1, rounds):
            for kind, api in WAYS:
                found = {
                    "memory copy": self.timed(self.copy, writes=False),
                    "stands still": stands_still(kind, api),
                    "save": self.timed(lambda kind=kind, api=api: self.save(kind, api, False)),  # type: ignore[misc]
                    "load": self.timed(lambda kind=kind, api=api: self.load(kind, api), writes=False),  # type: ignore[misc]
                }
                for name in ("memory copy", "stands still", "load") if number >= 0 else ():
                    note(f"{kind} {api}: {name}", found[name])
        if self.process.rank == 0:
            self._print(times, rounds, memory)

    @torch.no_grad()
    def by_distribute_tensor(self) -> None:
        """Load the former way: every rank allocates the whole tensor, and rank 0 scatters its own."""
        folder = storage.step_folder(self.checkpointers["full", "dtensor", False].folder, self.step)
        for file, targets in by_file(self.checkpointers["full", "dtensor", False].tensors()).items():
            read = storage.open_tensors(folder / file).get_tensor
            for name, target in targets.items():
                whole = read(name) if self.process.rank == 0 else torch.empty(target.shape, dtype=target.dtype)
                if isinstance(target, DTensor):
                    target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))

    def count(self) -> None:
        """Print how much memory loading allocates."""
        self.save("full", "dtensor", False)
        checkpointer = self.checkpointers["full", "dtensor", False]
        folder = storage.step_folder(checkpointer.folder, self.step)
        manifest = storage.read_manifest(folder)
        found = {
            "distribute_tensor": allocated(self.by_distribute_tensor),
            "its rows": allocated(lambda: checkpointer.load_tensors(folder)),
        }
        if self.process.rank == 1:
            print(f"a state of {manifest.bytes / 2**20:,.0f} MiB; MiB that torch allocates on rank 1 to load it")
            for name, (total, peak) in found.items():
                print(f"{name}: {total / 2**20:,.1f} in all, {peak / 2**20:,.1f} at once", flush=True)

    def _print(self, times: dict[str, list[float]], rounds: int, memory: dict[tuple[str, str], str]) -> None:
        n_bytes = sum(t.numel() * t.element_size() for t in self.state().values())
        print(f"{n_bytes / 1e9:.2f} GB on {self.process.world_size} ranks, torch {torch.__version__}, {rounds} rounds")
        print("median (lowest to highest) of the ratios; median seconds; MiB of each rank for a background save")
        columns = "plain write / save | save / bare dcp.save | stands still / memory copy"
        print(f"| | {columns} | stands still, s | save, s | load, s | MiB |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
        for kind, api in WAYS:
            of = {name.split(": ")[1]: seconds for name, seconds in times.items() if name.startswith(f"{kind} {api}:")}
            pairs = ("plain write", "save"), ("save", "bare dcp.save"), ("stands still", "memory copy")
            cells = [_spread([a / b for a, b in zip(of[x], of[y], strict=True)]) for x, y in pairs]
            cells += [f"{statistics.median(of[name]):.2f}" for name in ("stands still", "save", "load")]
            cells.append(memory[kind, api])
            print(f"| `{kind}`, `{api}` | {' | '.join(cells)} |")


def allocated(action: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that an action allocates, in total and at its peak."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
        action()
    assert trace.profiler is not None
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return sum(n for n in changes if n > 0), max(itertools.accumulate(changes))


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    """Start the ranks, or run as one of them."""
    count = sys.argv[1:2] == ["bytes"]
    rounds = int(sys.argv[1]) if sys.argv[1:] and not count else 7
    ranks = sys.argv[2] if sys.argv[2:] else "2"
    if dist.is_torchelastic_launched():
        with process_group(RunConfig(device="cpu", threads=1)) as process:
            bench = Bench(process, Path(os.environ["BENCHMARK_FOLDER"]))
            bench.count() if count else bench.run(rounds)
        exit_process()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BENCHMARK_FOLDER"] = folder
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        subprocess.run(
            [*launcher, "-m", "benchmarks.checkpoint", "bytes" if count else str(rounds), ranks, *sys.argv[3:4]],
            cwd=ROOT,
            check=True,
        )


if __name__ == "__main__":
    main()
