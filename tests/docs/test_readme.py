"""Runs the commands of the README and of docs/commands.md, shortened by overrides."""

import functools
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import commands
from tests.helpers import ROOT, losses, ranks, run_python, start, succeeded, tiny

README, PAGE = ((ROOT / name).read_text() for name in ("README.md", "docs/commands.md"))
COMMANDS = list(dict.fromkeys(line.split("#")[0].strip() for line in commands(README + PAGE) if line[:1] != "#"))
NOT_RUN = {"", "make bench", "make test", "make check", "git clone URL torchtitan_lite && cd torchtitan_lite"}
PLAIN = "torchrun --nproc-per-node 2 train.py"


def run(command: str, text: Path, out_dir: Path) -> str:
    """Run a README command with a tiny model on a small text."""
    words = shlex.split(command)
    ours = [option for option in tiny(text, out_dir, train__steps=6) if not option.startswith("--model.family")]
    taken = {word.split("=")[0] for word in words} - {"--data.path", "--train.steps"}
    ours = [option for option in ours if option.split("=")[0] not in taken]
    if command.startswith(PLAIN):  # torchrun itself is started by `make train`
        return succeeded(ranks(2, *words[len(shlex.split(PLAIN)) :], *ours))
    if words[0] == "python":
        return succeeded(run_python([*words[1:], *ours]))
    if words[0] == "make":
        # this interpreter's environment, which has everything installed
        arguments = [word for word in words if not word.startswith("ARGS=")]
        given = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
        options = " ".join([*given, *ours])
        return succeeded(start([*arguments, f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.installed", f"ARGS={options}"]))
    return succeeded(start([*words, *ours]))


@pytest.fixture(scope="module")
def done(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """Output and folder of a command that is run once."""

    @functools.cache
    def once(command: str) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp("readme")
        return run(command, text, folder), folder

    return once


def marks(command: str) -> list[pytest.MarkDecorator]:
    """What takes long, or has tests of its own, is run by `make test-all`."""
    long = re.compile("^make train|\\.plan |\\.evaluate |--dry-run|gpt_debug|data.path=my_text")
    return [pytest.mark.extended] if long.search(command) else []


@pytest.mark.parametrize("command", [pytest.param(c, marks=marks(c)) for c in COMMANDS if c not in NOT_RUN])
def test_each_command_runs(command: str, done: Callable[[str], tuple[str, Path]], text: Path, tmp_path: Path) -> None:
    if any(name in command for name in ("runs/default", ".plan ", "hf_folder")):
        places = {"runs/default": done(PLAIN)[1] / "default", "--data my_text": f"--data {text}"}
        places |= {name: tmp_path / name for name in ("hf_folder", "my_model.toml")}
        if " import " in command:
            succeeded(run_python(["checkpoint.py", "export", str(places["runs/default"]), str(tmp_path / "hf_folder")]))
        for name, place in places.items():
            command = command.replace(name, str(place))
        said = succeeded(run_python(shlex.split(command)[1:]))
        known = "complete|def |report  |a step takes|bits/byte|exported to |starts from these|of documents"
        assert re.search(known, said)
        return
    output, out_dir = done(command)
    if "--help" in command:
        assert "train" in output
        return
    if "--dry-run" in command:
        assert "at the peak" in output
        assert not list(out_dir.iterdir())
        return
    (folder,) = out_dir.iterdir()
    assert f"the run is in {folder}" in output
    assert set(losses(folder)) == set(range(1, 7))
    assert (folder / "checkpoints/step-00000006/model.safetensors").is_file()
    assert (folder / "config.toml").is_file()
    assert (folder / "report.html").is_file() == command.startswith("make")


@pytest.mark.extended
def test_flags_do_not_change_the_losses(done: Callable[[str], tuple[str, Path]]) -> None:
    """Prefetching and the checkpoint API give the same bits, bfloat16 nearly the same."""
    reference = losses(done(PLAIN)[1] / "default")
    for name, flag in (("ahead", "--explicit-prefetching"), ("dcp", "--dcp-api")):
        assert losses(done(f"{PLAIN} --run.name={name} {flag}")[1] / name) == reference
    mixed = losses(done(f"{PLAIN} --run.name=bf16 --mixed-precision")[1] / "bf16")
    assert mixed != reference
    for step, (loss, norm) in reference.items():
        assert mixed[step][0] == pytest.approx(loss, rel=0.01)
        assert mixed[step][1] == pytest.approx(norm, rel=0.1)


@pytest.mark.extended
def test_the_recorded_first_run_has_the_lines_of_a_real_one(done: Callable[[str], tuple[str, Path]]) -> None:
    """docs/first_run.md: the same kinds of lines, and the same fields in a step."""
    recorded, *_ = (ROOT / "docs/first_run.md").read_text().partition("$ .venv/bin/python -m torchtitan_lite.generate")
    output, _ = done("make train")

    def kinds(text: str) -> set[str]:
        found = re.findall(r"^(torchtitan_lite|[a-z]{3,6}) {2,}\S", text, re.MULTILINE)
        return set(found) - {"setup", "sample", "task"}

    def fields(text: str) -> set[tuple[str, ...]]:
        lines = (line for line in text.splitlines() if line.startswith(("step ", "eval ")))
        return {tuple(re.findall(r"  ([a-z_/]+) ", line)) for line in lines}

    assert kinds(output) == kinds(recorded)
    assert fields(output) == fields(recorded)


def test_links_and_files_exist() -> None:
    for page in [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "BENCHMARKS.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"
