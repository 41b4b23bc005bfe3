"""Runs the commands of docs/incidents.md on small runs, and compares what is said."""

import ast
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks, commands, obeyed
from tests.helpers import ROOT, checkpoint, losses, ranks, start, succeeded, tiny
from torchtitan_lite.checkpointing import storage

PAGE = (ROOT / "docs/incidents.md").read_text()
FIRST = PAGE.split("\n## A lost machine")[0]  # the sections after that have a test each


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
    said = (obeyed(command, places, first=plain) for command in commands(FIRST))
    replay, step, several, find, skip, spike, by_hand = said
    assert "equal   bit for bit" in replay
    assert "step 6: samples 30 to 35" in step
    assert "steps 5 to 7: samples 24 to 41" in several
    assert {row["step"] for row in json.loads((tmp_path / "seen.json").read_text())["documents"]} == {5, 6, 7}
    assert re.search(r"seen at \d steps of 8", find)
    assert "finished: step 8" in spike
    assert "after its step 4" in by_hand
    assert storage.read_state(checkpoint(tmp_path / "without", 8)).samples_consumed == 8 * 6 + 12
    assert "finished: step 8" in skip


def test_the_table_at_the_top_has_real_lines_and_sections() -> None:
    """Each line is printed by the source, and each section exists."""
    nodes = (ast.walk(ast.parse(f.read_text())) for f in (ROOT / "train.py", *(ROOT / "torchtitan_lite").rglob("*.py")))
    constants = (node.value for inside in nodes for node in inside if isinstance(node, ast.Constant))
    printed = "\n".join(value for value in constants if isinstance(value, str))
    table = FIRST.split("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)` \| \[.*?\]\((.*?)\) \|$", table, re.M)
    assert len(rows) == table.count("\n| `")
    assert len(rows) > 11
    for line, section in rows:
        for part in re.split(r"\.\.\.|`, `|\bnode\d|\(SIGTERM\)|\d[\d.]*", line):
            assert part.strip(" :,") in printed, f"nothing prints {part!r} of {line!r}"
        page, _, anchor = section.partition("#")
        headings = re.findall(r"^##+ (.*)$", (ROOT / "docs" / (page or "incidents.md")).read_text(), re.M)
        anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, section


# --- the sections from "A lost machine" on ---------------------------------------------------------------------------


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def quoted(title: str) -> list[str]:
    """What the section says is seen, without numbers and paths."""
    return [general(line) for line in "".join(blocks(section(title), "text")).splitlines()]


def general(line: str) -> str:
    return re.sub(r"[\w./-]*runs?/[\w./-]*|[\d.:]*\d", "*", line)


def followed(title: str, plain: list[str], folder: Path) -> list[str]:
    """What the commands of a section print, with a tiny run in place of runs/mine."""
    return [obeyed(command, {"runs/mine": folder / "mine"}, plain) for command in commands(section(title))]


def a_run(text: Path, folder: Path) -> list[str]:
    return tiny(text, folder, train__steps=8, checkpoint__every=2, eval__every=0)


@pytest.mark.extended
def test_a_hang(text: Path, tmp_path: Path) -> None:
    plain = a_run(text, tmp_path)
    plain.append("--speed.shared_memory=false")  # its collectives are not in gloo's trace
    result = ranks(2, *plain, "--run.name=mine", "--run.timeout_minutes=0.15", fault="hang:1:4")
    seen, command, *trace = quoted("A run hangs")
    assert result.returncode != 0
    said = general(result.stderr.replace(str(tmp_path / "mine"), "runs/mine"))
    assert seen in said, said
    words = ["torch.distributed.flight_recorder.fr_trace", *shlex.split(command)[2:4], str(tmp_path / "mine/stacks")]
    assert "\n".join(trace) in general(start([sys.executable, "-m", *words]).stderr)
    run, stacks, again = followed("A run hangs", plain, tmp_path)
    assert "fetching its batch" in json.loads(run)["reason"]
    assert "worker.py" in stacks
    assert "resumed after step 2" in again


@pytest.mark.extended
def test_a_killed_process(text: Path, tmp_path: Path) -> None:
    plain = a_run(text, tmp_path)
    result = ranks(2, *plain, "--run.name=mine", fault="kill:1:4:forward")
    (seen,) = quoted("A killed process")
    assert general(seen).split(" (Remote")[0] in general(result.stderr)
    run, again = followed("A killed process", plain, tmp_path)
    assert "a process died: rank 1" in json.loads(run)["reason"]
    assert "resumed after step 2" in again


@pytest.mark.extended
def test_a_full_disk(text: Path, tmp_path: Path) -> None:
    plain = a_run(text, tmp_path)
    result = ranks(2, *plain, "--run.name=mine", fault="error:0:5:space")
    said = succeeded(result).replace(str(tmp_path / "mine"), "runs/mine")
    (seen,) = quoted("A full disk")
    before, after = (seen.split("a checkpoint takes")[0], seen.rpartition(";")[2])
    assert any(before in line and after in line for line in map(general, said.splitlines())), said
    source = (ROOT / "torchtitan_lite/checkpointing/storage.py").read_text()
    assert "a checkpoint takes {size(n_bytes)}, but {where} has only {size(free)} free" in source
    others = [option for option in plain if not option.startswith("--train.steps")]
    _, sizes, verified, _ = followed("A full disk", [*others, "--train.steps=10"], tmp_path)
    assert "step-00000008" in sizes
    assert verified.count("step-0000000") == 3, verified
    assert len(storage.find_steps(tmp_path / "mine/checkpoints")) <= 2, "the new one, and the one that was loaded"


@pytest.mark.extended
def test_a_flipped_bit(text: Path, tmp_path: Path) -> None:
    plain = a_run(text, tmp_path)
    succeeded(ranks(2, *plain, "--run.name=mine", fault="flip_after:1:5"))  # of a parameter, by the update of step 5
    verify, replay, back = commands(section("A flipped bit"))
    places = {"runs/mine": tmp_path / "mine", "step-00000100": "step-00000004"}
    assert obeyed(verify, places).count("complete") == 4  # it was saved with the wrong bit
    result = ranks(
        2, *plain, *shlex.split(replay.replace("120", "6").removeprefix("torchrun --nproc-per-node 2 train.py "))
    )
    assert result.returncode == 1
    assert "step 6 differs: " in result.stderr
    assert "so the parameters had differed before: the update of step 5" in result.stderr
    assert f"a fork of {checkpoint(tmp_path / 'mine', 4)}, after its step 4" in obeyed(back, places, plain)
    succeeded(ranks(2, *plain, "--run.name=whole"))
    assert losses(tmp_path / "again") == {step: of for step, of in losses(tmp_path / "whole").items() if step > 4}
