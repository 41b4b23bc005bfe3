"""Runs the commands of docs/incidents.md on a small run."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import commands, obeyed
from tests.helpers import ROOT, checkpoint, ranks, succeeded, tiny
from torchtitan_lite.checkpointing import storage

# the sections after that are tested by test_operator_docs.py
WHOLE = (ROOT / "docs/incidents.md").read_text()
PAGE = WHOLE.split("\n## A lost machine")[0]


@pytest.mark.extended
def test_every_command_of_the_page_runs(text: Path, tmp_path: Path) -> None:
    plain = [o for o in tiny(text, tmp_path, train__steps=8, checkpoint__every=4, eval__every=0) if "model.f" not in o]
    succeeded(ranks(2, *plain))
    places: dict[str, object] = {
        "120": 6,
        "118 --to 122": "5 --to 7",
        "step-00000100": "step-00000004",
        "800, 960": "24, 36",
    }
    places |= {"runs/default": tmp_path / "default", "seen.json": tmp_path / "seen.json"}
    said = (obeyed(command, places, first=plain) for command in commands(PAGE))
    replay, step, several, find, skip, spike, again, by_hand = said
    assert "equal   bit for bit" in replay
    assert "step 6: samples 30 to 35" in step
    assert "steps 5 to 7: samples 24 to 41" in several
    assert {row["step"] for row in json.loads((tmp_path / "seen.json").read_text())["documents"]} == {5, 6, 7}
    assert re.search(r"seen at \d steps of 8", find)
    assert "finished: step 8" in spike
    assert again == step
    assert "after its step 4" in by_hand
    assert storage.read_state(checkpoint(tmp_path / "without", 8)).samples_consumed == 8 * 6 + 12
    assert "finished: step 8" in skip


def test_the_table_at_the_top_has_real_lines_sections_and_commands() -> None:
    """Each line is printed by the source, each section exists, and each command is in a block that a test runs."""
    nodes = (ast.walk(ast.parse(f.read_text())) for f in (ROOT / "train.py", *(ROOT / "torchtitan_lite").rglob("*.py")))
    constants = (node.value for inside in nodes for node in inside if isinstance(node, ast.Constant))
    printed = "\n".join(value for value in constants if isinstance(value, str))
    pages = {name: (ROOT / name).read_text() for name in ("docs/incidents.md", "docs/data.md")}
    pages |= {
        f"docs/{name}.md": (ROOT / f"docs/{name}.md").read_text()
        for name in ("checkpoints", "plan", "commands", "cluster")
    }
    run = {line.split("  #")[0].strip() for page in pages.values() for line in commands(page)}
    rows = re.findall(r"^\| `(.*?)` \| \[.*?\]\((.*?)\) \| `(.*?)` \|$", PAGE.split("\n## ")[0], re.M)
    assert len(rows) == PAGE.split("\n## ")[0].count("\n| `")
    assert len(rows) > 12
    for line, section, command in rows:
        for part in re.split(r"\.\.\.|\bnode\d|\(SIGTERM\)|\d[\d.]*", line):
            assert part.strip(" :,") in printed, f"nothing prints {part!r} of {line!r}"
        page, _, anchor = section.partition("#")
        headings = re.findall(r"^##+ (.*)$", pages[f"docs/{page or 'incidents.md'}"], re.M)
        anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors | {""}, section
        assert command in run, f"no test runs {command!r}"
