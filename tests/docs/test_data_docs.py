"""Runs the commands of docs/data.md, from a folder of text to a training run."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.helpers import ROOT, losses, ranks, run_python, succeeded, tiny
from torchtitan_lite.data.token_files import read_meta

PAGE = (ROOT / "docs/data.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)[0].splitlines()]


@pytest.mark.extended
def test_from_a_folder_of_text_to_a_run_in_three_commands(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "my_text")
    assert len(COMMANDS) == 3
    paths = {"my_text": str(tmp_path / "my_text"), "data/mine": str(tmp_path / "data/mine")}
    for words in COMMANDS:
        command = [paths.get(word, word) for word in words]
        if command[0] == "torchrun":
            command = [re.sub(r"data/mine$", paths["data/mine"], word) for word in command]
            ours = [o for o in tiny(text, tmp_path, train__steps=4) if "data.path" not in o and "tokenizer" not in o]
            assert command[:4] == ["torchrun", "--nproc-per-node", "2", "train.py"]
            said = succeeded(ranks(2, *command[4:], *ours))
            assert "vocabulary 4096" in said
        else:
            assert command[0] == "python"
            said = succeeded(run_python(command[1:]))
    assert read_meta(tmp_path / "data/mine").vocab_size == 4096
    assert len(losses(tmp_path / "mine")) == 4


def test_the_page_names_the_limits_that_hold() -> None:
    from torchtitan_lite.data import mixture
    from torchtitan_lite.data.prepare import encode, plan, split

    assert f"{plan.MAX_DOCUMENT_BYTES >> 20} MiB" in PAGE
    assert f"{mixture.LONGEST:,} entries" in PAGE
    assert f"{encode._LISTED:,}" in PAGE
    assert f"about {split.TRAINED_ON_BYTES >> 20} MB" in PAGE
