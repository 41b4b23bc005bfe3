"""Runs the commands of the pages about sweeps and about data."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.docs.pages import blocks, obeyed
from tests.helpers import ROOT, losses, ranks, succeeded, tiny
from torchtitan_lite.data import mixture
from torchtitan_lite.data.prepare import documents, tokenizer
from torchtitan_lite.data.token_files import read_meta

DATA = (ROOT / "docs/data.md").read_text()


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


@pytest.mark.extended
def test_from_a_folder_of_text_to_a_run_in_three_commands(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "my_text")
    places = {name: tmp_path / name for name in ("my_text", "data/mine")}
    ours = [o for o in tiny(text, tmp_path, train__steps=4) if "data.path" not in o and "tokenizer" not in o]
    *_, said = (obeyed(command, places, last=ours) for command in blocks(DATA)[0].splitlines())
    assert "vocabulary 4096" in said
    assert read_meta(tmp_path / "data/mine").vocab_size == 4096
    assert len(losses(tmp_path / "mine")) == 4


def test_the_page_names_the_limits_that_hold() -> None:
    assert f"{documents.LONGEST >> 20} MiB" in DATA
    assert f"{mixture.LONGEST:,} entries" in DATA
    assert f"about {tokenizer.TRAINED_ON_BYTES >> 20} MB" in DATA
