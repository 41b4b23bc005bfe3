"""What saving, loading and importing take on each rank above the state itself, as docs/checkpoints.md says it."""

import ctypes
import gc
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import train
from checkpoint import WAYS
from tests.checkpointing.reload_worker import save_now
from tests.helpers import run_distributed
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import CheckpointConfig, Config
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh
from torchtitan_lite.huggingface import configs, names, weights
from torchtitan_lite.models import build
from torchtitan_lite.optim.optimizer import build_optimizer, make_state

# AdamW has two moments of everything, and a load makes its state without a step's products
VALUES = {
    "model.dim": 512,
    "model.n_layers": 6,
    "model.n_heads": 8,
    "model.hidden_dim": 1408,
    "optim.name": "adamw",
}
VOCABULARY = 4096
MIB = 2**20
SLACK = 12  # MiB: messages, JSON, the interpreter


def config_of(world_size: int) -> Config:
    return load.load(None, VALUES, world_size=world_size).config


def anonymous() -> int:
    """Bytes of this process that no file backs: what the kernel can't drop."""
    line = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return 1024 * int(line[1])


def peak_of(action: Callable[[], object]) -> float:
    """MiB that an action takes at its highest, above what there was before, looked at every half millisecond."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed blocks that glibc keeps would hide what is allocated from them
    dist.barrier()
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        action()
    finally:
        done.set()
        thread.join()
    return (peak - before) / MIB


def measure(process: Process, folder: Path, hf_folder: Path) -> dict[str, float]:
    config = config_of(process.world_size)
    model = train.sharded_model(config, VOCABULARY, build_mesh(config.fsdp, process.device))
    materialize(model, process.device, 0)
    optimizer = build_optimizer(model, config.optim)
    make_state(optimizer)
    peaks = {}

    def checkpointer(kind: str, api: str) -> Checkpointer:
        way = CheckpointConfig.model_validate({"state_dict": kind, "api": api})
        return Checkpointer(folder / f"{kind} {api}", model, optimizer, way, process, WAYS)

    for kind in ("full", "sharded"):
        for api in ("dtensor", "dcp"):
            save_now(checkpointer(kind, api))  # buffers that every later save finds
            peaks[f"save {kind} {api}"] = peak_of(lambda way=(kind, api): save_now(checkpointer(*way), 2))  # type: ignore[misc]
            peaks[f"load {kind} {api}"] = peak_of(lambda way=(kind, api): checkpointer(*way).load({}))  # type: ignore[misc]
    importer = checkpointer("full", "dtensor")
    peaks["import"] = peak_of(
        lambda: importer.load_weights(
            lambda: weights.find_weights(hf_folder, config.model),
            lambda found: weights.open_weights(found, config.model),
        )
    )
    peaks["gradients"] = sum(p.to_local().numel() for p in model.parameters()) * 4 / MIB  # type: ignore[attr-defined]
    return peaks


@pytest.mark.extended
def test_a_save_a_load_and_an_import_take_what_the_page_says(tmp_path: Path) -> None:
    """On each of two ranks."""
    config = config_of(2).model
    with torch.device("meta"):
        model = build(config, VOCABULARY)
    content = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    parts = names.hf_names(content, config)
    theirs = {name: names.to_hf(ours, content.__getitem__, config.family) for name, ours in parts.items()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(configs.to_hf_config(config, VOCABULARY)))
    save_file(theirs, tmp_path / "hf/model.safetensors")
    measured = run_distributed(measure, 2, tmp_path, tmp_path / "hf")
    whole = 3 * 2 * measured[0]["gradients"]
    for peaks in measured:
        for api in ("dtensor", "dcp"):  # sharded states are written and read in place
            assert peaks[f"save sharded {api}"] < SLACK, peaks
            # making the optimizer's state takes gradients, as training does
            assert peaks[f"load sharded {api}"] < peaks["gradients"] + SLACK, peaks
        # one tensor at a time is gathered, or sent; a collective and the allocator have some of their own
        assert peaks["save full dtensor"] < 0.4 * whole, peaks
        assert peaks["load full dtensor"] < 0.4 * whole, peaks
        assert peaks["import"] < SLACK, peaks  # each rank reads its rows
    assert measured[0]["save full dcp"] > 0.8 * whole, "DCP gathers all of it, as the docs say"
