"""A small model on any mesh, its checkpoints in all four ways, and what loads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import train
from checkpoint import WAYS as SAVE_WAYS
from torchtitan_lite import progress
from torchtitan_lite.checkpointing import shards, storage, tensor_names
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import model_tensors, optimizer_tensors
from torchtitan_lite.config.schema import CheckpointConfig, Config
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh
from torchtitan_lite.optim.guarded import set_learning_rate
from torchtitan_lite.optim.optimizer import build_optimizer

WAYS = [(kind, api) for kind in ("full", "sharded") for api in ("dtensor", "dcp")]
# mesh -> number of ranks and of copies; no number of rows below divides evenly. "c": COLUMNS are split by columns
MESHES = {
    "1": (1, 1),
    "2": (2, 1),
    "2x1": (2, 2),
    "3": (3, 1),
    "3c": (3, 1),
    "4": (4, 1),
    "2x2": (4, 2),
    "2x2c": (4, 2),
}
COLUMNS = ["tok_embeddings.*", "*.w[kq1].weight"]
SHAPE = {"dim": 36, "n_heads": 6, "hidden_dim": 50, "n_layers": 1, "max_seq_len": 8, "tie_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"family": "llama", "n_kv_heads": 2},
    "tiny": SHAPE | {"family": "llama", "dim": 8, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 8},  # of format6.zip
    "wide": {"family": "llama", "dim": 512, "n_layers": 6, "n_heads": 8, "hidden_dim": 1408},
    "t5": SHAPE | {"family": "t5", "scale_output": True},
}


def fsdp(mesh: str) -> dict[str, Any]:
    """The section [fsdp] of a mesh."""
    return {"dp_replicate": MESHES[mesh][1], "shard_columns": COLUMNS if mesh.endswith("c") else []}


class State:
    """A model and its optimizer on this mesh."""

    def __init__(self, mesh: str, seed: int, family: str, process: Process) -> None:
        optim = {"name": "adamw"} if family == "wide" else {}  # two moments of everything
        sections = {"model": MODELS[family], "fsdp": fsdp(mesh), "run": {"device": "cpu"}, "optim": optim}
        config = Config.model_validate(sections)
        self.process = process
        self.model = train.sharded_model(config, 517, build_mesh(config.fsdp, process.device))
        materialize(self.model, process.device, seed)
        self.optimizer = build_optimizer(self.model, config.optim)

    def step(self) -> None:
        tokens = torch.arange(8).reshape(2, 4) + 100 * self.process.rank
        self.model(tokens, tokens).backward()
        set_learning_rate(self.optimizer, 0.01)
        self.optimizer.step()

    def whole(self) -> dict[str, Tensor]:
        """A copy of every tensor, gathered."""
        content = tensor_names.by_name(model_tensors(self.model), optimizer_tensors(self.model, self.optimizer))
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in content.items()}

    def checkpointer(self, folder: Path, kind: str, api: str, **more: Any) -> Checkpointer:
        way = CheckpointConfig.model_validate({"state_dict": kind, "api": api} | more)
        return Checkpointer(folder, self.model, self.optimizer, way, self.process, SAVE_WAYS)


def save_now(checkpointer: Checkpointer, step: int = 1) -> Path:
    """The folder of a save that must succeed."""
    checkpointer.save(TrainState(step=step))
    return saved_folder(checkpointer)


def saved_folder(checkpointer: Checkpointer) -> Path:
    """The folder of the save in progress, which must succeed."""
    saved = checkpointer.wait()
    assert saved is not None
    assert not saved.error, saved.error
    assert (saved.blocked_s < saved.seconds) == checkpointer.config.async_save
    return saved.folder


def save(process: Process, folder: Path, mesh: str, family: str) -> None:
    """Save in all four ways, by both APIs the same bytes, and the whole tensors as `mesh`.safetensors."""
    tensor_names.GROUP_BYTES = 9000  # a few tensors
    state = State(mesh, 1, family, process)
    state.step()
    written = {(k, api): save_now(state.checkpointer(folder / f"{mesh} {k} {api}", k, api)) for k, api in WAYS}
    expected, own = state.whole(), model_tensors(state.model)
    groups = (tensor_names.in_groups(of) for of in (own, {name: expected[f"model.{name}"] for name in own}))
    assert all(
        mine.keys() == whole.keys() and (len(mine) == 1 or sum(t.nbytes for t in whole.values()) <= 9000)
        for mine, whole in zip(*groups, strict=True)
    ), "ranks would not agree"
    if process.rank == 0:
        for kind in ("full", "sharded"):
            by = [storage.read_manifest(written[kind, api]).files for api in ("dtensor", "dcp")]
            assert by[0] == by[1], kind
        save_file({name: t.contiguous() for name, t in expected.items()}, folder / f"{mesh}.safetensors")
        with mock.patch.object(shards, "open_tensors", wraps=storage.open_tensors) as opened:
            read = {
                start + name: tensor
                for start in "mo"  # a letter that occurs again in names
                for name, tensor in shards.read_tensors(written["sharded", "dcp"], start).items()
            }
            assert all(read[name].equal(tensor) for name, tensor in expected.items()), "tools read other values"
        assert opened.call_count == 2 * (len(by[0]) - 1), "each shard's header is read once"  # a file is state.json


def load_format_6(process: Process, folder: Path) -> None:
    """Both kinds by both APIs, and as tools read them."""
    for kind, api in WAYS:
        state = State(str(process.world_size), 2, "tiny", process)
        assert state.checkpointer(folder / kind, kind, api).load({}) == TrainState(step=1)
        whole = state.whole()
        file = folder / "full/step-00000001/optimizer.safetensors"
        old = {f"model.{key}": t for key, t in load_file(file.with_name(storage.MODEL)).items()}
        for key, tensor in load_file(file).items():
            of, name = key.split(".", 1)
            old[f"optimizer.state.{name}.{of}"] = tensor
        read = shards.read_tensors(folder / kind / "step-00000001")
        assert whole.keys() == old.keys() == read.keys()
        wrong = [name for name in old if not (whole[name].equal(old[name]) and read[name].equal(old[name]))]
        assert not wrong, f"{kind} by {api}: {wrong}"


def load(process: Process, folder: Path, mesh: str, family: str, sources: Sequence[str]) -> None:
    """From these meshes, every way, by the other API than the one that saved it."""
    tensor_names.GROUP_BYTES = 9000
    for source in sources:
        expected = load_file(folder / f"{source}.safetensors")
        for kind, api in WAYS:
            state = State(mesh, 2, family, process)
            by = "dcp" if api == "dtensor" else "dtensor"
            loader, before = (
                state.checkpointer(folder / f"{source} {kind} {api}", kind, by, verify="off"),
                progress._bytes,
            )
            assert loader.load({}) == TrainState(step=1)
            rows = [t.to_local() if isinstance(t, DTensor) else t for t in loader.tensors().values()]
            # the watchdog sees what is read or received, but for torch's own broadcasts
            assert (progress._bytes - before >= sum(t.nbytes for t in rows)) == ((kind, by) != ("full", "dcp"))
            loaded = state.whole()
            wrong = [name for name, tensor in expected.items() if not loaded[name].equal(tensor)]
            assert not {*wrong, *loaded.keys() - expected.keys()}, (
                f"{source} {kind} {api}, loaded on {mesh} by {by}: {wrong} differ"
            )
