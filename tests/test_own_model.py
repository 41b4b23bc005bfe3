"""Follows docs/own_model.md."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.forkserver import Server
from tests.helpers import HANGS_S, ROOT, losses, succeeded, tiny


@pytest.mark.extended
def test_the_model_of_the_page_trains_resumes_and_writes(text: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/own_model.md").read_text()
    ((code,), (edits,)) = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S) for kind in ("python", "diff"))
    assert len(code.splitlines()) + edits.count("\n+") < 60
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("torchtitan_lite", "train.py", "checkpoint.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, copy / name)
    (copy / "torchtitan_lite/models/parallel.py").write_text(code)
    subprocess.run(["git", "apply", "-"], cwd=copy, input=edits, text=True, check=True)

    server = Server(root=copy)
    cache = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}

    def run(n: int, entry: str, *words: str) -> str:
        return succeeded(server.run(n, words, cache, entry, "", HANGS_S))

    more = {"model__family": "parallel", "activation_checkpointing__mode": "full", "train__steps": 10}
    command = tiny(text, tmp_path, run__name="mine", checkpoint__every=5, **more)
    run(2, "train", *command)
    assert losses(tmp_path / "mine")[10][0] < losses(tmp_path / "mine")[1][0] - 0.05
    straight = losses(tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine/checkpoints/step-00000010")
    assert "resumed after step 5" in run(2, "train", *command)
    assert losses(tmp_path / "mine") == straight
    asked = [str(tmp_path / "mine"), "--prompt", "the", "--max-tokens", "5"]
    assert "the" in run(1, "-m torchtitan_lite.generate", *asked)
    server.close()
