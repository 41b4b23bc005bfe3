"""docs/checkpoints.md: what a run wrote, read in a few lines without this package."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import torchtitan_lite as ttl
from tests.docs.pages import blocks
from tests.helpers import ROOT, checkpoint, ranks, succeeded, tensors, tiny

BLOCKS = blocks((ROOT / "docs/checkpoints.md").read_text(), "python")
FULL, BY_TORCH, INTO_STATES, SHARDED, _ = BLOCKS


def run(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **names: Any) -> dict[str, Any]:
    """The names after these lines."""
    assert "torchtitan_lite" not in block
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        exec(compile(block, "docs/checkpoints.md", "exec"), names)
    return names


def copied(source: Path, run: Path) -> Path:
    """The last checkpoint of a copy of a run. A link has the name of the page."""
    last = checkpoint(shutil.copytree(source, run), 4)
    last.with_name("step-00000750").symlink_to(last)
    return last


def test_a_checkpoint(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(finished, tmp_path / "runs/default")
    names = run(FULL, tmp_path, monkeypatch)
    model, _ = ttl.load_model(folder)
    assert names["weights"].keys() == dict(model.named_parameters()).keys()
    model.load_state_dict(names["weights"])
    assert names["weights"].keys() | names["optimizer"].keys() == tensors(folder).keys()
    assert names["state"]["step"] == 4


@pytest.mark.parametrize("columns", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_sharded_checkpoint(
    columns: bool, sharded: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns:
        more = {"checkpoint__state_dict": "sharded", "fsdp__shard_columns": ["*.wk.weight"], "optim__warmup_steps": 1}
        succeeded(ranks(2, *tiny(text, tmp_path, run__name="columns", train__steps=4, checkpoint__every=4, **more)))
    folder = copied(tmp_path / "columns" if columns else sharded, tmp_path / "runs/sharded")
    saved, model = tensors(folder), ttl.load_model(folder)[0]
    for block in (SHARDED, BY_TORCH):
        weights = run(block, tmp_path, monkeypatch)["weights"]
        assert weights.keys() == dict(model.named_parameters()).keys()
        assert all(weights[name].equal(saved[name]) for name in weights)
    joined = tmp_path / "joined"  # only the model: torch 2.13 leaves tensors without dims, such as step counts, at zero
    joined.mkdir()
    consolidate_safetensors_files(
        str(folder), str(joined), fqn_to_index_mapping={f"model.{name}": 1 for name in weights}
    )
    tensors_of_model = load_file(next(joined.glob("*.safetensors")))
    assert all(tensors_of_model[f"model.{name}"].equal(weights[name]) for name in weights)

    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    run(INTO_STATES, tmp_path, monkeypatch, model=model, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        assert parameter.equal(saved[name])
        for key, value in optimizer.state[parameter].items():
            assert value.equal(saved[f"state.{name}.{key}"])


def test_shards_of_another_save_are_not_read(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that merges two saves of a step, on 2 ranks and on 3."""
    folder = copied(sharded, tmp_path / "runs/sharded")
    old = checkpoint(sharded, 2) / "shard-00000-of-00002.safetensors"
    shutil.copy(old, folder / "shard-00000-of-00003.safetensors")
    weights, saved = run(SHARDED, tmp_path, monkeypatch)["weights"], tensors(folder)
    assert all(weights[name].equal(saved[name]) for name in weights)
    (folder / "shard-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        run(SHARDED, tmp_path, monkeypatch)
