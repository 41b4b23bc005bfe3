"""Runs the rows of knob_table.py and the cases of knob_effects.py that belong to this world size, in one process group.

    torchrun --nproc-per-node 2 tests/distributed/knob_worker.py RESULTS [ROWS AND EFFECTS]
    torchrun --nproc-per-node 1 tests/distributed/knob_worker.py RESULTS cuda

The real train_step runs; only the text is made up. RESULTS gets losses, norms and hashes of each row, and "passed" or a
traceback for each effect, as JSON.
"""

import dataclasses
import hashlib
import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import train
from benchmarks.bare_session import bare_session
from tests.distributed import knob_effects
from tests.distributed.knob_table import CASES, ON_CUDA, STEPS, VOCABULARY, FixedSamples
from torchtitan_lite import cpu
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh, exit_process, process_group
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.run.session import Session, check_pending


def training(config: Config, process: Process) -> Session:
    """What train.run builds, without files."""
    widen = cpu.widens(config, process)
    model = train.sharded_model(config, VOCABULARY, build_mesh(config.fsdp, process.device), widen=widen)
    materialize(model, process.device, seed=7, offload=config.fsdp.cpu_offload)
    samples = FixedSamples(config.train.seq_len)
    loader = Loader(
        samples,
        micro_batch_size=config.train.micro_batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=None,
    )
    return bare_session(config, process, model, loader)


def digest(parameter: torch.Tensor) -> str:
    """Of the whole parameter."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return hashlib.sha256(whole.detach().cpu().numpy().tobytes()).hexdigest()


def measure(t: Session) -> dict[str, Any]:
    """Losses and norms of some steps, names, and the frozen parameters before and after."""
    frozen = {name: p for name, p in t.trained.model.named_parameters() if not p.requires_grad}
    before = {name: digest(p) for name, p in frozen.items()}
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        numbers = train.train_step(t, step).numbers
        check_pending(t)
        losses.append(numbers.loss)
        norms.append(numbers.grad_norm)
    return {
        "losses": losses,
        "norms": norms,
        "names": list(t.trained.model.state_dict()),
        "frozen": [before, {name: digest(p) for name, p in frozen.items()}],
        "skipped": t.trained.scaler.skipped_steps,
        "devices": sorted({own_part(p)[0].device.type for p in (*t.trained.model.parameters(), *_state(t))}),
    }


def _state(t: Session) -> list[torch.Tensor]:
    return [value for state in t.trained.optimizer.state.values() for key, value in state.items() if key != "step"]


def main(argv: Sequence[str]) -> int:
    results: dict[str, Any] = {}
    file = Path(argv[0])
    device: Literal["cpu", "cuda"] = "cuda" if argv[1:] == ["cuda"] else "cpu"
    wanted = set(argv[1:]) or {*CASES, *knob_effects.EFFECTS}  # all
    # a micro-batch of 16 tokens, in several pieces, the last ones not full
    cpu.attention.BLOCK, cpu.loss.CHUNK = dict.fromkeys((2, 4, 8), 6), 7
    with process_group(RunConfig(device=device, threads=1)) as process:
        rows = {name: case for name, case in CASES.items() if case.ranks == process.world_size and name in wanted}
        for name, case in (ON_CUDA if device == "cuda" else rows).items():
            with knob_effects.muon_as_on_gpu() if case.muon_as_on_gpu else nullcontext():
                results[name] = measure(training(case.config(device), process))
            if process.rank == 0:
                file.write_text(json.dumps(results))
        for name, effect in knob_effects.EFFECTS.items():
            if effect.ranks != process.world_size or name not in wanted:
                continue
            try:
                effect.run(lambda **more: training(_config(process, more), process))
                results[name] = "passed"
            except Exception:
                # the others may wait in a collective: this ends the run, and the tests of later effects fail with it
                print(f"{name} failed on rank {process.rank}:\n{traceback.format_exc()}", file=sys.stderr)
                exit_process(1)
            dist.barrier()
            if process.rank == 0:
                file.write_text(json.dumps(results))
    return 0


def _config(process: Process, more: dict[str, Any]) -> Config:
    base = dataclasses.replace(CASES["llama"], ranks=process.world_size)
    values = {key.replace("__", "."): value for key, value in more.items()}
    return dataclasses.replace(base, set=values).config()


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
