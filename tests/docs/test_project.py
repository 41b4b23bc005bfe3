"""The project's files, and the commands of the pages about sweeps and about watching a run."""

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.pages import blocks, obeyed
from tests.helpers import ROOT, ranks, succeeded, tiny

# --- the commands of two pages --------------------------------------------------------------------------------------


@pytest.mark.extended
def test_the_recipe_for_sweeps_runs(text: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/sweeps.md").read_text()
    (block,) = blocks(page)
    loop = re.fullmatch(r"for lr in (.+?); do\n  torchrun --nproc-per-node 2 train.py (.+)\ndone\n(.+)\n", block)
    assert loop
    rates = loop[1].split()
    ours = tiny(text, tmp_path, train__steps=2, optim__warmup_steps=1, eval__every=1)
    ours = [option for option in ours if not option.startswith("--optim.lr=")]  # the loop has it
    for rate in rates:
        succeeded(ranks(2, *shlex.split(loop[2].replace("$lr", rate)), *ours))
    runs = sorted(tmp_path.glob("sweep-*"))
    assert [run.name for run in runs] == sorted(f"sweep-{rate}" for rate in rates)
    head, *rows = obeyed(loop[3], {"runs/sweep-*": " ".join(map(str, runs))}).splitlines()
    assert re.split(r"  +", head) == re.split(r"  +", blocks(page, "text")[0].splitlines()[0])
    losses = [float(re.split(r"  +", row)[2].split()[0]) for row in rows]
    assert len(losses) == len(rates)
    assert losses == sorted(losses)
