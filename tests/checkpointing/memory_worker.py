"""How much memory saving, loading and importing take on each rank, above the state itself: `FOLDER HF_FOLDER`."""

import ctypes
import gc
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import train
from checkpoint import Checkpointer
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config import load
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import CheckpointConfig, Config, ModelConfig
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.process_group import World, build_mesh, process_group
from torchtitan_lite.huggingface import weights
from torchtitan_lite.optim.optimizer import build_optimizer, make_state

MODEL = {"model.dim": 512, "model.n_layers": 6, "model.n_heads": 8, "model.hidden_dim": 1408}
VOCABULARY = 4096
MIB = 2**20


def model_config() -> ModelConfig:
    return load.load(None, {key: load.ConfigValue(value, "") for key, value in MODEL.items()}).config.model


def anonymous() -> int:
    """Bytes of this process that no file backs: what the kernel can't drop."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


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


def measure(folder: Path, hf_folder: Path, world: World) -> dict[str, float]:
    # AdamW has two moments of everything, and a load makes its state without a step's products
    given = {key: load.ConfigValue(value, "") for key, value in (MODEL | {"optim.name": "adamw"}).items()}
    config: Config = load.load(None, given, world_size=world.world_size).config
    model = train.sharded_model(config, VOCABULARY, build_mesh(derive(config, world.world_size), world.device))
    materialise(model, world.device, 0)
    optimizer = build_optimizer(model, config.optim)
    make_state(optimizer)
    found = {}

    def checkpointer(kind: str, api: str) -> Checkpointer:
        way = CheckpointConfig.model_validate({"state_dict": kind, "api": api})
        return Checkpointer(folder / f"{kind} {api}", model, optimizer, way, world)

    def save(kind: str, api: str, step: int) -> None:
        saver = checkpointer(kind, api)
        saver.save(TrainState(step=step))
        saved = saver.wait()
        assert saved is not None
        assert not saved.error, saved.error

    for kind in ("full", "sharded"):
        for api in ("dtensor", "dcp"):
            save(kind, api, 1)  # buffers that every later save finds
            found[f"save {kind} {api}"] = peak_of(lambda kind=kind, api=api: save(kind, api, 2))  # type: ignore[misc]
            found[f"load {kind} {api}"] = peak_of(lambda kind=kind, api=api: checkpointer(kind, api).load({}))  # type: ignore[misc]
    importer = checkpointer("full", "dtensor")
    found["import"] = peak_of(lambda: importer.load_weights(lambda v: weights.open_weights(hf_folder, config.model, v)))
    found["gradients"] = sum(p.to_local().numel() for p in model.parameters()) * 4 / MIB  # type: ignore[attr-defined]
    return found


def main(argv: Sequence[str]) -> int:
    torch.set_num_threads(1)
    with process_group(Config.model_validate({"run": {"device": "cpu", "threads": 1}}).run) as world:
        found = measure(Path(argv[0]), Path(argv[1]), world)
        everyone: list[dict[str, float] | None] = [None] * world.world_size
        dist.all_gather_object(everyone, found)
        if world.rank == 0:
            (Path(argv[0]) / "found.json").write_text(json.dumps(everyone, indent=1))
    return 0
