"""The commands of `checkpoint.py`: which checkpoint they take, and what `verify` reports."""

import hashlib
from pathlib import Path

import pytest

from tests.helpers import checkpoint
from torchtitan_lite.tools import checkpoints


def test_inspect_prints_the_state_of_a_checkpoint(
    finished: Path, sharded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, expected, world in (
        (checkpoint(finished, 2), "step 2, 384 tokens, 12 samples; full state", "1 rank"),
        (checkpoint(sharded, 4), "step 4, 768 tokens, 24 samples; sharded state", "2 ranks"),
    ):
        assert checkpoints.main(["inspect", str(folder)]) == 0
        head, best, saved, *rest = capsys.readouterr().out.splitlines()
        assert head == expected
        assert best == "the run's best checkpoint, by validation loss: step 4"
        files = {file.name: file for file in folder.iterdir() if file.name != "manifest.json"}
        n_bytes = sum(file.stat().st_size for file in files.values())
        assert saved == f"saved by {world}; {n_bytes / 2**20:.2f} MiB in {len(files)} files"
        for line in rest[: len(files)]:
            size, digest, name = line.split()
            content = files[name].read_bytes()
            assert (size, digest) == (f"{len(content):,}", f"{hashlib.sha256(content).hexdigest()[:12]}...")
        for name in ("model.tok_embeddings.weight", "optimizer.exp_avg.tok_embeddings.weight"):
            assert f"  {'[517, 32]':>20}  {name}" in rest
