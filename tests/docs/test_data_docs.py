"""Runs the commands of docs/data.md, from a folder of text to a training run."""

import shutil
from pathlib import Path

import pytest

from tests.docs.pages import blocks, obeyed
from tests.helpers import ROOT, losses, tiny
from torchtitan_lite.data.token_files import read_meta

PAGE = (ROOT / "docs/data.md").read_text()


@pytest.mark.extended
def test_from_a_folder_of_text_to_a_run_in_three_commands(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "my_text")
    places = {name: tmp_path / name for name in ("my_text", "data/mine")}
    ours = [o for o in tiny(text, tmp_path, train__steps=4) if "data.path" not in o and "tokenizer" not in o]
    *_, said = (obeyed(command, places, last=ours) for command in blocks(PAGE)[0].splitlines())
    assert "vocabulary 4096" in said
    assert read_meta(tmp_path / "data/mine").vocab_size == 4096
    assert len(losses(tmp_path / "mine")) == 4


def test_the_page_names_the_limits_that_hold() -> None:
    from torchtitan_lite.data import mixture
    from torchtitan_lite.data.prepare import documents, tokenizer

    assert f"{documents.LONGEST >> 20} MiB" in PAGE
    assert f"{mixture.LONGEST:,} entries" in PAGE
    assert f"about {tokenizer.TRAINED_ON_BYTES >> 20} MB" in PAGE
