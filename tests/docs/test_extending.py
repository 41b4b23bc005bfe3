"""Follows docs/extending.md: its reader of notebooks prepares a text, which trains. tests/examples has the rest."""

import json
from pathlib import Path

from tests.docs.pages import blocks
from tests.docs.sources import Copy
from tests.helpers import ROOT, losses, tiny


def test_the_reader_of_the_page_reads_notebooks(text: Path, tmp_path: Path) -> None:
    (diff,) = blocks((ROOT / "docs/extending.md").read_text(), "diff")
    (tmp_path / "books").mkdir()
    for file in text.glob("*.txt"):
        lines = file.read_text().splitlines(keepends=True)
        for i in range(4):
            part = lines[len(lines) * i // 4 : len(lines) * (i + 1) // 4]
            cells = [{"source": part}, {"source": "the last cell\n"}]
            (tmp_path / f"books/{file.stem}{i}.ipynb").write_text(json.dumps({"cells": cells}))
    copy = Copy(tmp_path / "copy", {}, [diff])
    copy.run(1, "train", *tiny(tmp_path / "books", tmp_path, run__name="mine", train__steps=2, optim__warmup_steps=1))
    copy.close()
    assert losses(tmp_path / "mine").keys() == {1, 2}
