"""Problems of a checkpoint are reported before anything is overwritten."""

import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import checkpoint, ranks, refused, succeeded, tiny
from torchtitan_lite import progress
from torchtitan_lite.checkpointing import safetensors_file, storage
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, TensorWriter, specs_of, write_tensors
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.tools import checkpoints


def flip_a_bit(path: Path, bit: int = 12_345) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def test_verification_can_be_cheaper(finished: Path, text: Path, tmp_path: Path) -> None:
    """Hashes find a changed byte; sizes find a missing one."""
    shutil.copytree(finished, tmp_path / "run")
    folder = checkpoint(tmp_path / "run", 4)
    record = storage.read_manifest(folder).files["model.safetensors"]
    flip_a_bit(folder / "model.safetensors")
    assert storage.verify_file(folder, "model.safetensors", record, "full") == (
        f"{folder}/model.safetensors: its SHA-256 does not match the manifest: the file is damaged"
    )
    assert not storage.verify_file(folder, "model.safetensors", record, "size")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b" ")
    assert storage.verify_file(folder, "model.safetensors", record, "size") == (
        f"{folder}/model.safetensors: {record.bytes + 1:,} bytes; the manifest says {record.bytes:,}"
    )
    assert not storage.verify_file(folder, "model.safetensors", record, "off")


def test_100_flipped_bits_and_100_cuts_are_all_found_and_named(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint(finished, 4), tmp_path / "step-00000004")
    folder = tmp_path / "step-00000004"
    random = Random(1)
    files = sorted(folder.glob("*.*"))
    weights = [file.stat().st_size for file in files]
    for number in range(200):
        file = random.choices(files, weights)[0] if number % 4 else random.choice(files)
        honest = file.read_bytes()
        if number < 100:
            flip_a_bit(file, random.randrange(8 * len(honest)))
        else:
            file.write_bytes(honest[: random.randrange(len(honest))])
        only_the_line_end = file.name == "manifest.json" and file.read_bytes() == honest[:-1]
        named = any(file.name in problem for problem in storage.verify(folder))
        assert named or only_the_line_end, (number, file)
        file.write_bytes(honest)
    assert storage.verify(folder) == []


def edit(file: Path, change: Callable[[Any], None]) -> None:
    """Change a file as an attacker would, with a matching manifest."""
    content = json.loads(file.read_text())
    del content["sha256"]
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(content))


def test_a_checkpoint_of_another_version_is_refused_with_one_sentence(
    finished: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not damaged, and no earlier one is used."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for step in (2, 4):
        edit(checkpoint(run, step) / "manifest.json", lambda m: m.update(format_version=2))
    sentence = (
        f"{checkpoint(run, 4)} has format 2, but this version reads 6 and {storage.FORMAT_VERSION}: with the version "
        "that wrote it (format 2: commit 6b3ed8e, the last of 0.4), finish the run, or export the checkpoint (python "
        "checkpoint.py export) and start here from the export with model.init_from\n"
    )
    for keys in ({"run__name": "run"}, {"checkpoint__resume": run}, {"model__init_from": run}):
        assert sentence in refused(ranks(1, *tiny(text, tmp_path, **keys, train__steps=6)))
    assert checkpoints.main(["verify", str(run)]) == 1
    assert re.findall(r"UNREADABLE \S+0000000(\d) has format 2, .*\n", capsys.readouterr().out) == ["2", "4"]


def test_the_order_of_writes_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are synced before the manifest, manifest and folder before the rename, and the parent folder last."""
    happened: list[str] = []
    sync, rename = os.fsync, Path.rename

    def recorded_sync(descriptor: int) -> None:
        path = re.sub(r"\.tmp-(step-\d+).*?(?=/|$)|\.\w+\.new$", r"\1", os.readlink(f"/proc/self/fd/{descriptor}"))
        happened.append(f"sync {path}")
        sync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        happened.append(f"rename to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    folder = storage.new_folder(tmp_path, 1)
    weight = torch.ones(3)
    record = write_tensors(folder / "model.safetensors", specs_of({"w": weight}), lambda _: weight)
    storage.commit(folder, TrainState(step=1), "full", 1, {"model.safetensors": record})
    step = f"{tmp_path}/step-00000001"
    assert happened == [
        f"sync {step}/model.safetensors",
        f"sync {step}/state.json",
        f"sync {step}/manifest.json",
        f"sync {step}",
        "rename to step-00000001",
        f"sync {tmp_path}",
    ]


def test_only_folders_with_a_name_and_a_manifest_are_checkpoints(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "checkpoints", tmp_path / "c")
    for name in ("step-7", "step-00000009.bak", ".tmp-step-00000011", "step-100000000", "step-99999999"):
        shutil.copytree(checkpoint(finished, 4), tmp_path / "c" / name)
    with pytest.raises(FileNotFoundError):
        storage.new_folder(tmp_path / "unmounted/c", 6)
    new = storage.new_folder(tmp_path / "c", 6)
    with pytest.raises(CheckpointError, match=r"is the folder on a file system that all ranks share\?"):
        storage.commit(new, TrainState(step=6), "sharded", 2, {"of rank 1": FileRecord(1, "")})
    assert storage.find_steps(tmp_path / "c") == [2, 4, 99_999_999, 100_000_000]


def test_a_full_disk_fails_only_the_last_save(finished: Path, text: Path, tmp_path: Path) -> None:
    """The run continues, and fails at its end."""
    shutil.copytree(finished, tmp_path / "run")
    arguments = tiny(text, tmp_path, run__name="run", train__steps=8, checkpoint__every=2, log__every=1)
    result = ranks(1, *arguments, fault="error:0:5:write:9")
    refused(result, "the last checkpoint was not saved: ", code=1)
    assert re.search(
        r"NOT SAVED  step 6: .*No space left on device.*; older checkpoints are untouched, training continues",
        result.stdout,
    )
    assert "step    8/8" in result.stdout
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert "resumed after step 4" in succeeded(ranks(1, *arguments)), "and with space again it saves"
    assert storage.find_steps(tmp_path / "run/checkpoints")[-1] == 8


@pytest.mark.parametrize("chunk", [1, 7, 48, 8 << 20])
def test_tensor_files_equal_those_of_the_safetensors_library(chunk: int, tmp_path: Path) -> None:
    """Also in chunks that end within a tensor, synced several times on the way, if hashing is slow, and in one buffer.

    As full tensors are gathered: the memory of one is used for the next.
    """
    tensors = {
        "matrix": torch.randn(7, 5),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "bf16": torch.randn(3).bfloat16(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "int64": torch.tensor([1 << 40]),
    }
    syncs, before, buffer = list[int](), progress._bytes, torch.empty(7 * 5 * 4, dtype=torch.uint8)
    digest, delays = TensorWriter._digest, itertools.chain([0.01, 0.0] * 4, itertools.repeat(0.0))

    def gathered(name: str) -> torch.Tensor:
        one = tensors[name]
        return buffer[: one.nbytes].copy_(one.reshape(-1).view(torch.uint8)).view(one.dtype).reshape(one.shape)

    def slowly(writer: TensorWriter, chunk: memoryview) -> None:
        time.sleep(next(delays))
        digest(writer, chunk)

    with (
        patch.object(TensorWriter, "_digest", slowly),
        patch.multiple(
            safetensors_file, _CHUNK=chunk, _SYNC_EVERY=100, flush_to_disk=lambda file: syncs.append(file.tell())
        ),
    ):
        record = write_tensors(tmp_path / "x", specs_of(tensors), gathered)
    content = (tmp_path / "x").read_bytes()
    assert record == FileRecord(len(content), hashlib.sha256(content).hexdigest())
    assert progress._bytes == before + 2 * len(content), "written and hashed: the watchdog sees both"
    assert safetensors_file.sha256_of(tmp_path / "x") == record.sha256
    assert (progress._bytes - before, syncs[-1], 2 < len(syncs) <= 1 + len(content) // 100) == (
        3 * len(content),
        len(content),
        True,
    )
    torch.testing.assert_close(load_file(tmp_path / "x"), tensors, rtol=0, atol=0)
