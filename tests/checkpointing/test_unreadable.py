"""A checkpoint that is temporarily unreadable is not damaged; what a save says, and what retention keeps."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import checkpoint, ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing import find, storage
from torchtitan_lite.checkpointing.safetensors_file import write_text
from torchtitan_lite.checkpointing.save import Saved, to_keep
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import CheckpointError, SaveError
from torchtitan_lite.run.between_steps import report_save
from torchtitan_lite.run.metrics import Log

FILES = ("manifest.json", "state.json")


def small(checkpoints: Path, step: int = 4) -> Path:
    """A checkpoint without tensors."""
    return storage.commit(storage.new_folder(checkpoints, step), TrainState(step=step), "full", 1, {})


def failing(monkeypatch: pytest.MonkeyPatch, file: Path, number: int) -> None:
    """Have every way of opening or looking at a file fail."""
    honest: dict[str, Any] = {name: getattr(Path, name) for name in ("open", "stat", "read_text", "read_bytes")}

    def fails(name: str) -> Any:
        def call(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self == file:
                raise OSError(number, os.strerror(number), str(self))
            return honest[name](self, *args, **kwargs)

        return call

    for name in honest:
        monkeypatch.setattr(Path, name, fails(name))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", FILES)
def test_a_disk_error_is_not_damage(name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small(tmp_path)
    failing(monkeypatch, folder / name, number)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        storage.verify(folder)
    assert str(folder / name) in str(caught.value)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize(("kind", "shares"), [("full", [3, 2, 0, 0]), ("sharded", [2, 1, 1, 1])])
def test_the_ranks_share_a_verification(
    kind: str, shares: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four on two machines. Only the first machine may have the disk of a full state."""
    monkeypatch.setattr(find, "on_all", lambda action, _: [action()])
    new = storage.new_folder(tmp_path, 1)
    folder = storage.commit(new, TrainState(step=1), kind, 1, {x: write_text(new / x, x) for x in "abcd"})
    for file in (*"abcd", "state.json"):
        (folder / file).write_text("damaged")
    found = [find.verify_together(folder, "size", Process(n, 4, torch.device("cpu"), 1, 2)) for n in range(4)]
    assert [len(problems) for problems in found] == shares
    assert sorted(problem for problems in found for problem in problems) == sorted(storage.verify(folder, "size"))


KEPT: list[tuple[list[int], int, int, list[int], set[int]]] = [
    ([1, 2, 3, 4], 0, 0, [], {1, 2, 3, 4}),
    ([1, 2, 3, 4], 2, 0, [], {3, 4}),
    ([1, 2, 3, 4, 6], 1, 2, [], {2, 4, 6}),
    ([1, 2, 3, 4], 1, 0, [1, 9], {1, 4, 9}),
    ([1, 2], 5, 3, [], {1, 2}),
]


@pytest.mark.parametrize(("steps", "latest", "every", "also", "expected"), KEPT)
def test_which_checkpoints_are_kept(
    steps: list[int], latest: int, every: int, also: list[int], expected: set[int]
) -> None:
    assert to_keep(steps, latest, every, also) == expected


@pytest.mark.parametrize(("saved", "ends", "background", "said", "recorded"), [
    (Saved(5, Path("c/step-5"), 3 << 19, 2.25, 0.5), False, False, "saved   c/step-5  (1.5 MiB, 2.2 s)", 2.25),
    (Saved(5, Path("c/step-5"), 3 << 19, 2.25, 0.5, note="disk"), False, True, "saved   c/step-5  (1.5 MiB, 2.2 s, "
     "training paused for 0.5 s)\nnote    older checkpoints were not deleted: disk", 0.5),
    (Saved(5, Path("c"), error="disk"), False, True,
     "NOT SAVED  step 5: disk; older checkpoints are untouched, training continues", None),
    (Saved(5, Path("c"), error="disk"), True, False, "NOT SAVED  step 5: disk; older checkpoints are untouched", None),
])  # fmt: skip
def test_the_outcome_of_a_save_is_a_line_and_a_record(
    saved: Saved, ends: bool, background: bool, said: str, recorded: float | None, tmp_path: Path
) -> None:
    config, log = SimpleNamespace(async_save=background), Log(tmp_path, enabled=True)
    for done, wait in ((False, False), (False, True), (True, False)):
        saver: Any = SimpleNamespace(config=config, finished=lambda done=done: done, wait=lambda: saved)
        assert report_save(saver, log, wait=wait, ends=ends) == (saved.error if done or wait else "")
    assert (tmp_path / "train.log").read_text() == f"{said}\n" * 2
    if recorded is None:
        assert not (tmp_path / "metrics.jsonl").exists()
    else:
        record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
        assert {"step": 5, "save_s": recorded, "bytes": 3 << 19, "attempt": 0}.items() <= record.items()


def test_a_disk_without_room_is_named_with_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=1 << 20, f_bfree=99, f_bsize=7))
    storage.require_space(tmp_path / "none/checkpoints", 3 << 20)
    with pytest.raises(SaveError) as caught:
        storage.require_space(tmp_path / "none/checkpoints", (3 << 20) + 1)
    assert str(caught.value) == (
        f"a checkpoint takes 3.00 MiB, but {tmp_path} has only 3.00 MiB free: free some space, for example by deleting "
        "an old checkpoint"
    )


@pytest.mark.extended
def test_a_run_stops_on_every_rank_and_moves_nothing(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", train__steps=4, checkpoint__every=2, eval__every=0)
    succeeded(ranks(2, *command))
    result = ranks(2, *command, "--train.steps=6", fault="eio:1:0:hash")
    assert result.returncode != 0
    assert f"{checkpoint(tmp_path / 'run', 4)}" in result.stderr
    assert "can't be read: Input/output error" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["step-00000002", "step-00000004"]
    assert "resumed after step 4" in succeeded(ranks(2, *command, "--train.steps=6"))


def test_a_committed_save_is_reported_as_saved_though_retention_fails(text: Path, tmp_path: Path) -> None:
    """All ranks agree on it: otherwise rank 0 alone would stop after the last one."""
    more = {"train__steps": 4, "checkpoint__every": 2, "eval__every": 0, "checkpoint__keep_latest": 1}
    command = tiny(text, tmp_path, run__name="run", **more)
    output = succeeded(ranks(2, *command, fault="error:0:2:after rename:2"))
    assert "NOT SAVED" not in output
    assert "step-00000004  (" in output
    said = [line for line in output.splitlines() if line.startswith("note    older")]
    assert len(said) == 2
    assert all("No space left on device" in line for line in said)
    assert [r["step"] for r in records(tmp_path / "run") if "save_s" in r] == [2, 4]
    assert storage.find_steps(tmp_path / "run/checkpoints") == [2, 4]
