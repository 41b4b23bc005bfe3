"""Follows docs/own_model.md."""

import re
import shutil
from pathlib import Path

from tests.docs.pages import blocks
from tests.docs.sources import Copy
from tests.helpers import ROOT, losses, tiny


def test_the_model_of_the_page_trains_resumes_and_writes(text: Path, tmp_path: Path) -> None:
    """In a copy of the sources: `git apply` reads the page's diff there, as a reader would."""
    page = (ROOT / "docs/own_model.md").read_text()
    ((code,), (edits,)) = (blocks(page, language) for language in ("python", "diff"))
    (family,) = re.findall(r"`train.py (--model.family=\w+)`", page)
    assert len(code.splitlines()) + edits.count("\n+") < 60
    copy = Copy(tmp_path / "copy", {"torchtitan_lite/models/parallel.py": code}, [edits])
    more = {"activation_checkpointing__mode": "full", "train__steps": 6, "eval__every": 0}
    command = [*tiny(text, tmp_path, run__name="mine", checkpoint__every=3, **more), family]
    copy.run(2, "train", *command)
    straight = losses(tmp_path / "mine")
    assert straight[6][0] < straight[1][0] - 0.02
    shutil.rmtree(tmp_path / "mine/checkpoints/step-00000006")
    assert "resumed after step 3" in copy.run(2, "train", *command)
    assert losses(tmp_path / "mine") == straight
    asked = [str(tmp_path / "mine"), "--prompt", "the", "--max-tokens", "5"]
    assert "the" in copy.run(1, "-m torchtitan_lite.generate", *asked)
    copy.close()
