"""Builds the trainings of knob_table.py on the ranks of a process group, and measures their first steps.

The real train_step runs; only the text is made up.
"""

import gc
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import train
from benchmarks.bare_session import bare_session
from tests.distributed.knob_table import CASES, STEPS, VOCABULARY, FixedSamples
from torchtitan_lite import cpu
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.optim import muon
from torchtitan_lite.run.session import Session, check_previous_step


def training(config: Config, process: Process) -> Session:
    """What train.run builds, without files."""
    widen = cpu.widens(config, process)
    model = train.sharded_model(config, VOCABULARY, build_mesh(config.fsdp, process.device), widen=widen)
    materialize(model, process.device, seed=7, offload=config.fsdp.cpu_offload)
    samples = Mixture([FixedSamples(config.train.seq_len)], [1.0], ["fixed"])
    loader = Loader(
        samples,
        micro_batch_size=config.train.micro_batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=None,
    )
    return bare_session(config, process, model, loader)


def muon_as_on_gpu() -> AbstractContextManager[Any]:
    """Within it, Muon iterates in bfloat16."""
    return patch.object(muon, "dtype_of_iteration", return_value=torch.bfloat16)


def digest(parameter: torch.Tensor) -> str:
    """Of the whole parameter."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return hashlib.sha256(whole.detach().cpu().numpy().tobytes()).hexdigest()


def measure(t: Session, steps: int = STEPS) -> dict[str, Any]:
    """Losses and norms of some steps, also by block, names, and the frozen parameters before and after.

    And how many descriptors, threads, shared mappings, process groups and hooks there are after each step.
    """
    frozen = {name: p for name, p in t.model.named_parameters() if not p.requires_grad}
    before = {name: digest(p) for name, p in frozen.items()}
    curve, held = [], list[list[int]]()
    for step in range(1, steps + 1):
        record = train.train_step(t, step)
        check_previous_step(t)
        held.append(
            [
                *(len([*Path(f"/proc/self/{kind}").iterdir()]) for kind in ("fd", "task")),
                Path("/proc/self/maps").read_text().count("memfd:"),
                len(torch.distributed.distributed_c10d._world.pg_map),
                sum(
                    len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
                    for m in t.model.modules()
                ),
            ]
        )
        curve.append((record.numbers.loss, record.numbers.grad_norm, record.norms_of_blocks()))
    states = t.optimizer.state.values()
    moments = [value for state in states for key, value in state.items() if key != "step"]
    return {
        "curve": curve,
        "held": held,
        "names": list(t.model.state_dict()),
        "frozen": [before, {name: digest(p) for name, p in frozen.items()}],
        "skipped": t.scaler.skipped_steps,
        "devices": sorted({own_part(p)[0].device.type for p in (*t.model.parameters(), *moments)}),
    }


def rows(process: Process, names: Sequence[str]) -> dict[str, Any]:
    """What these rows of the table measure."""
    # a micro-batch of 16 tokens, in several pieces, the last ones not full; and several exchanges of Muon
    cpu.attention.BLOCK, cpu.loss.CHUNK, muon.OWNED_BYTES = dict.fromkeys((2, 4, 8), 6), 7, 1
    gc.disable()  # as training does: what only the garbage collector frees counts as held
    found = {}
    for name in names:
        with muon_as_on_gpu() if CASES[name].muon_as_on_gpu else nullcontext():
            found[name] = measure(training(CASES[name].config(), process))
    return found
