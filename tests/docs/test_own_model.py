"""Follows docs/own_model.md."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.forkserver import Server
from tests.helpers import HANGS_S, ROOT, losses, succeeded, tiny


def test_the_model_of_the_page_trains_resumes_and_writes(text: Path, tmp_path: Path) -> None:
    """In a copy of the sources: `git apply` reads the page's diff there, as a reader would."""
    page = (ROOT / "docs/own_model.md").read_text()
    ((code,), (edits,)) = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S) for kind in ("python", "diff"))
    (family,) = re.findall(r"`train.py (--model.family=\w+)`", page)
    assert len(code.splitlines()) + edits.count("\n+") < 60
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("train.py", "checkpoint.py"):
        shutil.copyfile(ROOT / name, copy / name)
    shutil.copytree(ROOT / "torchtitan_lite", copy / "torchtitan_lite", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "torchtitan_lite/models/parallel.py").write_text(code)
    subprocess.run(["git", "apply", "-"], cwd=copy, input=edits, text=True, check=True)

    server = Server(root=copy)
    cache = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}

    def run(n: int, entry: str, *words: str) -> str:
        return succeeded(server.run(n, words, cache, entry, "", HANGS_S))

    more = {"activation_checkpointing__mode": "full", "train__steps": 6, "eval__every": 0}
    command = [*tiny(text, tmp_path, run__name="mine", checkpoint__every=3, **more), family]
    run(2, "train", *command)
    straight = losses(tmp_path / "mine")
    assert straight[6][0] < straight[1][0] - 0.02
    shutil.rmtree(tmp_path / "mine/checkpoints/step-00000006")
    assert "resumed after step 3" in run(2, "train", *command)
    assert losses(tmp_path / "mine") == straight
    asked = [str(tmp_path / "mine"), "--prompt", "the", "--max-tokens", "5"]
    assert "the" in run(1, "-m torchtitan_lite.generate", *asked)
    server.close()
