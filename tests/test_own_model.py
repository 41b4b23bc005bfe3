"""docs/own_model.md, done as it stands there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers import HANGS_S, ROOT, losses, tiny


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

    def run(*words: str) -> str:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
        result = subprocess.run(
            [sys.executable, *words], cwd=copy, env=env, capture_output=True, text=True, timeout=HANGS_S
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    more = {"model__family": "parallel", "activation_checkpointing__mode": "full", "train__steps": 10}
    command = [*launcher, *tiny(text, tmp_path, run__name="mine", checkpoint__every=5, **more)]
    run(*command)
    assert losses(tmp_path / "mine")[10][0] < losses(tmp_path / "mine")[1][0] - 0.05
    straight = losses(tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine/checkpoints/step-00000010")
    assert "resumed after step 5" in run(*command)
    assert losses(tmp_path / "mine") == straight
    assert "the" in run(
        "-m", "torchtitan_lite.generate", str(tmp_path / "mine"), "--prompt", "the", "--max-tokens", "5"
    )
