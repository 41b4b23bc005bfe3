"""The project's files, and the commands of the pages about sweeps and about watching a run."""

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import blocks, commands, obeyed
from tests.helpers import ROOT, ranks, succeeded, tiny

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_types_and_data_are_installed_with_the_package() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    installed = {ROOT / package.replace(".", "/") / name for package, names in data.items() for name in names}
    assert installed == {p for p in (ROOT / "torchtitan_lite").rglob("*.*") if p.suffix not in (".py", ".pyc")}
    assert ROOT / "torchtitan_lite/py.typed" in installed
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_what_pip_install_gives_is_said() -> None:
    """The package alone: train.py and checkpoint.py are modules of too general a name."""
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["torchtitan_lite*"]
    assert "py-modules" not in PROJECT["tool"]["setuptools"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        "`pip install .` gives the commands `python -m torchtitan_lite.*` and the package, without train.py" in readme
    )


def test_what_a_build_leaves_is_ignored() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"build/", "dist/", "*.egg-info/", "runs/"} <= set(ignored)


def test_the_readme_leads_to_scope_glossary_and_contributing() -> None:
    readme = (ROOT / "README.md").read_text()
    for target in ("docs/glossary.md", "docs/sweeps.md", "CONTRIBUTING.md"):
        assert f"]({target})" in readme
    scope = readme.split("## Scope\n")[1].split("\n## ")[0]
    for word in ("tensor", "context", "pipeline", "LoRA", "reinforcement learning", "torchtitan", "TRL"):
        assert word in scope
    assert (ROOT / "CONTRIBUTING.md").is_file()


def test_the_glossary_has_the_words_of_the_log() -> None:
    page = (ROOT / "docs/glossary.md").read_text()
    words = {word.strip().lower() for row in re.findall(r"^\| (.+?) \|", page, re.M) for word in row.split(",")}
    assert {"token", "unigram", "bits per byte", "loss", "rank", "shard", "checkpoint", "epoch", "mfu"} <= words


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


@pytest.mark.extended
def test_the_commands_about_watching_a_run(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="default", train__steps=2, optim__warmup_steps=1)))
    shutil.copytree(tmp_path / "default", tmp_path / "mine")
    reports = [line for line in commands((ROOT / "docs/watching.md").read_text()) if "torchtitan_lite.report" in line]
    assert len(reports) == 3
    for command in reports:
        output = obeyed(command, {"runs/": f"{tmp_path}/"})
        assert "report  " in output or "best val_loss" in output
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "default/report.html").is_file()
