"""A save is committed although the folder can't be listed."""

from pathlib import Path

from tests.helpers import ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing import storage


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
