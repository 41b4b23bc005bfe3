"""Runs the commands of the sections of docs/incidents.md from "A lost machine" on, and compares what is said."""

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT, losses, ranks, records, run_python, succeeded, tiny
from tests.tools.elastic_machines import Machines, until
from torchtitan_lite.checkpointing import storage

PAGE = (ROOT / "docs/incidents.md").read_text()
LAUNCH = "torchrun --nproc-per-node 2 train.py "
JOIN = "python -m torchtitan_lite.tools.elastic join --secret-file elastic.key --nproc-per-node 8 node0:29400 "


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands(title: str) -> list[str]:
    """The commands of a section, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```", section(title), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def quoted(title: str) -> list[str]:
    """What the section says is seen, without numbers and paths."""
    lines = "".join(re.findall(r"^```text\n(.*?)^```", section(title), re.M | re.S)).splitlines()
    return [general(line) for line in lines]


def general(line: str) -> str:
    return re.sub(r"[\w./-]*runs?/[\w./-]*|[\d.:]*\d", "*", line)


def obeyed(line: str, plain: list[str], folder: Path) -> str:
    """What a command says, with a tiny run in place of runs/mine."""
    line = line.replace("runs/mine", str(folder / "mine"))
    if line.startswith(LAUNCH):
        return succeeded(ranks(2, *plain, *shlex.split(line.removeprefix(LAUNCH))))
    if line.startswith("python "):
        return succeeded(run_python(shlex.split(line)[1:]))
    return succeeded(subprocess.run(["sh", "-c", line], capture_output=True, text=True))


def a_run(text: Path, folder: Path) -> list[str]:
    return tiny(text, folder, train__steps=8, checkpoint__every=2, eval__every=0)


@pytest.mark.extended
def test_a_hang(text: Path, tmp_path: Path) -> None:
    plain = a_run(text, tmp_path)
    result = ranks(2, *plain, "--run.name=mine", "--run.timeout_minutes=0.15", fault="hang:1:4")
    (seen,) = quoted("A hang")
    assert result.returncode != 0
    said = general(result.stderr.replace(str(tmp_path / "mine"), "runs/mine"))
    what, behind, stopped = seen.removeprefix("train.py: ").split("; ")
    slower = (
        "rank *, step *: waited for the other ranks for run.timeout_minutes = *"  # gloo was first, on a busy machine
    )
    assert what in said or slower in said, said
    assert f"{behind}; {stopped}" in said
    run, stacks, again = (obeyed(line, plain, tmp_path) for line in commands("A hang"))
    assert "fetching its batch" in json.loads(run)["reason"]
    assert "worker.py" in stacks
    assert "resumed after step 2" in again


@pytest.mark.extended
def test_a_killed_process(text: Path, tmp_path: Path) -> None:
    plain = a_run(text, tmp_path)
    result = ranks(2, *plain, "--run.name=mine", fault="kill:1:4:forward")
    (seen,) = quoted("A killed process")
    assert general(seen).split(" (Remote")[0] in general(result.stderr)
    run, again = (obeyed(line, plain, tmp_path) for line in commands("A killed process"))
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
    *look, again = commands("A full disk")
    _, sizes, verified = (obeyed(line, plain, tmp_path) for line in look)
    assert "step-00000008" in sizes
    assert verified.count("step-0000000") == 3, verified
    others = [option for option in plain if not option.startswith("--train.steps")]
    obeyed(f"{again} --train.steps=10", others, tmp_path)
    assert len(storage.find_steps(tmp_path / "mine/checkpoints")) <= 2, "the new one, and the one that was loaded"


@pytest.mark.extended
def test_a_lost_machine(text: Path, tmp_path: Path) -> None:
    join, again = commands("A lost machine")
    plain = tiny(text, tmp_path, train__steps=100_000, optim__schedule="constant", checkpoint__every=2)
    program = shlex.split(join.removeprefix(JOIN))
    machines = Machines(tmp_path, [*program, *plain], "--settle", "1")
    run = tmp_path / "mine"

    def trained(steps: int) -> bool:
        return (run / "metrics.jsonl").exists() and len(records(run)) >= steps

    try:
        for name in ("node0", "node1"):
            machines.join(name)
        until(lambda: "2 machines: " in machines.said() and trained(4), "steps of both")
        machines.kill("node1")
        until(lambda: "1 rank on 1 machine" in machines.said(), "the next world")
        lines = [line for line in machines.said().splitlines() if "lost" in line]
        seen = quoted("A lost machine")
        assert [re.sub(r"node\*", "node", general(line)) for line in lines] == [
            re.sub(r"node\*", "node", line) for line in seen[:2]
        ]
        worlds = machines.worlds()
        machines.join("node1")
        until(lambda: machines.worlds() > worlds, "it is back")
        machines.alive["node1"].send_signal(signal.SIGTERM)
        assert machines.alive.pop("node1").wait() == 75
        machines.coordinator.send_signal(signal.SIGTERM)
        assert set(machines.codes().values()) == {0}
    finally:
        machines.close()
    others = [option for option in plain if not option.startswith("--train.steps")]
    step = storage.find_steps(run / "checkpoints")[-1]
    assert f"resumed after step {step}" in obeyed(f"{again} --train.steps={step + 2}", others, tmp_path)
    assert [record["step"] for record in records(run) if "loss" in record] == list(range(1, step + 3))


@pytest.mark.extended
def test_a_flipped_bit(text: Path, tmp_path: Path) -> None:
    plain = a_run(text, tmp_path)
    succeeded(ranks(2, *plain, "--run.name=mine", fault="flip_after:1:5"))  # of a parameter, by the update of step 5
    verify, replay, back = (line.replace("120", "6").replace("100", "4") for line in commands("A flipped bit"))
    assert obeyed(verify, plain, tmp_path).count("complete") == 4  # it was saved with the wrong bit
    command = [*plain, *shlex.split(replay.removeprefix(LAUNCH))]
    result = ranks(2, *command)
    assert result.returncode == 1
    assert "step 6 differs: " in result.stderr
    assert "so the parameters had differed before: the update of step 5" in result.stderr
    assert "resumed after step 4" in obeyed(back, plain, tmp_path)
    succeeded(ranks(2, *plain, "--run.name=whole"))
    assert losses(tmp_path / "mine") == losses(tmp_path / "whole")
    aside = sorted(path.name for path in (tmp_path / "mine/checkpoints").glob(".old-*"))
    assert aside == [".old-step-00000006", ".old-step-00000008"]


def test_the_page_quotes_what_is_said_of_damage() -> None:
    package = ROOT / "torchtitan_lite"
    for file, said in (
        ("checkpointing/storage.py", "its SHA-256 does not match the manifest"),
        ("checkpointing/save.py", "copies of the model differ"),
        ("data/token_files.py", "has changed since it was made"),
        ("training/spikes/recheck.py", "Computed again, it differs"),
    ):
        assert said in (package / file).read_text()
        assert f"`{said}`" in section("A flipped bit")
