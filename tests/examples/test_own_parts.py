"""examples/own_*.py: a family, a loss term, an optimizer, a text reader, a tracker and a task of a user's own."""

import csv
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.own_model import PARALLEL
from examples.own_optimizer import Lion
from tests.config.parsing import mistakes, parse
from tests.docs.pages import blocks
from tests.helpers import ROOT, checkpoint, forget_after, losses, python, ranks, records, succeeded, tensors, tiny
from tests.models.test_model import make
from tests.run.test_trackers import scalars_of
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import DataConfig, OptimConfig, TokenizerConfig
from torchtitan_lite.config.sections import log, outputs
from torchtitan_lite.config.sections.data import READERS
from torchtitan_lite.config.sections.optim import OPTIMIZERS
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.errors import DataError
from torchtitan_lite.optim.groups import parameter_groups

FAMILY, OPTIMIZER = "examples.own_model:PARALLEL", "examples.own_optimizer:LION"
READER = "examples.own_reader:NOTEBOOK"


def options_of(page: str, key: str) -> list[str]:
    """The options of the first command of a page that has this key."""
    commands = "\n".join(blocks((ROOT / page).read_text())).splitlines()
    command = next(line for line in commands if "train.py" in line and key in line)
    return [word for word in command.split() if word.startswith(("--optim", "--log", "--eval", "--model"))]


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of 6 steps with all parts, on two ranks, and its command.

    Each line of the text occurs twice: `recall` asks for words that were there before.
    """
    folder = tmp_path_factory.mktemp("own")
    doubled = folder / "text"
    doubled.mkdir()
    for file in text.iterdir():
        (doubled / file.name).write_text("".join(2 * line for line in file.read_text().splitlines(keepends=True)))
    given = [*options_of("docs/extending.md", "--optim.name"), *options_of("docs/own_model.md", "--model.family")]
    given = [option.replace("lr=1e-4", "lr=3e-3").replace(":TABLE", ":TABLE,tensorboard") for option in given]
    keys = {option.split("=")[0] for option in given}
    plain = tiny(doubled, folder, run__name="mine", train__steps=6, checkpoint__every=3, eval__every=3)
    command = [*(word for word in plain if word.split("=")[0] not in keys), *given, "--optim.max_norm=0.1"]
    succeeded(ranks(2, *command))
    return folder / "mine", command


def test_the_parts_of_the_pages_work_in_one_run(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    first, command = trained
    run = shutil.copytree(first, tmp_path / "mine")
    command = [*command, f"--run.out_dir={tmp_path}"]
    straight, state = losses(run), tensors(checkpoint(run, 6))
    assert straight[6][0] < straight[1][0]
    assert {"pos_embeddings.weight", "layers.0.norm.weight"} <= state.keys(), "parallel blocks"
    assert state["state.layers.0.attention.wq.weight.exp_avg"].shape == (32, 32), "not a DTensor: the rows of one rank"

    # a resume has the same bits, so the optimizer's state is saved and loaded; the tracker drops the later rows
    shutil.rmtree(checkpoint(run, 6))
    said = succeeded(ranks(2, *command))
    assert "resumed after step 3" in said
    assert f"-m torchtitan_lite.generate {run} --model.family={FAMILY} --" in said
    assert losses(run) == straight
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors(checkpoint(run, 6)).items())
    with (run / "metrics.csv").open() as stream:
        rows = [(int(row["step"]), float(row["value"])) for row in csv.DictReader(stream) if row["name"] == "loss"]
    assert rows == [(step, loss) for step, (loss, _) in straight.items()]
    assert any("task_recall" in record or "task/recall" in record for record in records(run))


def test_a_metric_is_logged_sent_to_trackers_and_the_same_after_a_resume(
    trained: tuple[Path, list[str]], tmp_path: Path
) -> None:
    first, command = trained
    run = shutil.copytree(first, tmp_path / "mine")
    names = [f"grad_norm_of/{kind}" for kind in ("attention", "feed_forward")]

    def logged() -> dict[int, list[float]]:
        return {record["step"]: [record[name] for name in names] for record in records(run) if names[0] in record}

    straight = logged()
    assert [*straight] == [*range(1, 7)]
    for record in records(run):
        if names[0] in record:  # the rest of the blocks: their norms
            of_blocks = sum(record[f"grad_norm/layers.{i}"] ** 2 for i in range(2))
            assert 0.9 * of_blocks < sum(record[name] ** 2 for name in names) < of_blocks < record["grad_norm"] ** 2
    for i, name in enumerate(names):
        shown = dict(scalars_of(run / "tensorboard", name))
        assert shown == pytest.approx({step: values[i] for step, values in straight.items()})
    shutil.rmtree(checkpoint(run, 6))
    succeeded(ranks(2, *command, f"--run.out_dir={tmp_path}"))
    assert logged() == straight
    succeeded(ranks(2, *command, f"--run.out_dir={tmp_path}", "--run.name=replicas", "--fsdp.dp_replicate=2"))
    run = tmp_path / "replicas"
    assert logged()[1] == pytest.approx(straight[1], rel=1e-4)


def test_a_loss_term_has_gradients_and_leaves_the_losses_comparable(text: Path, tmp_path: Path) -> None:
    """On any number of ranks, and after a resume."""
    (own,) = options_of("docs/extending.md", "--model.family=examples.own_loss")

    def run(name: str, n: int, family: str = own) -> dict[int, tuple[float, float]]:
        succeeded(
            ranks(
                n,
                *tiny(text, tmp_path, run__name=name, model__hidden_dim=48, train__steps=4, checkpoint__every=2),
                family,
            )
        )
        return losses(tmp_path / name)

    plain, one, two = run("plain", 2, "--model.family=llama"), run("one", 1), run("two", 2)
    assert two[1][0] == plain[1][0]
    assert abs(two[4][1] / plain[4][1] - 1) > 1e-3
    assert one == {step: pytest.approx(values, rel=2e-6) for step, values in two.items()}
    forget_after(tmp_path / "two", 2)
    assert run("two", 2) == two


def test_a_name_in_a_checkpoint_is_not_imported(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    """A resume, and a command that reads the model, have to repeat it."""
    run, command = trained
    resumed = ranks(2, *(word for word in command if not word.startswith(("--model.family", "--optim.name"))))
    assert resumed.returncode in (1, 2)
    for option in (f"--model.family={FAMILY}", f"--optim.name={OPTIMIZER}"):
        assert f"imported only if the command or its file names it: {option}" in resumed.stderr
    given = f"--model.family={FAMILY}"
    commands = {
        "-m torchtitan_lite.generate": (str(run), "--prompt=a", "--max-tokens=1"),
        "-m torchtitan_lite.which": (str(run), "--step=1"),
        "-m torchtitan_lite.evaluate": (str(run), "--tasks", "examples.own_task:recall"),
    }
    for script, words in commands.items():
        refused = python(*words, script=script)
        assert refused.returncode == 2
        assert refused.stderr.strip().endswith(f"imported only if the command or its file names it: {given}")
        succeeded(python(*words, given, script=script))
    refused = python("export", str(run), str(tmp_path / "out"), script="checkpoint.py")
    assert refused.returncode == 2
    assert f"there is no Hugging Face format for a family of your own, {FAMILY}" in refused.stderr
    # its config file is the user's, if the command gives it
    succeeded(ranks(2, f"--config={run / 'config.toml'}", "--check-config"))


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries as at the start of a process."""
    for registry, name in ((FAMILIES, FAMILY), (OPTIMIZERS, OPTIMIZER), (READERS, READER)):
        monkeypatch.setitem(registry, name, None)
        monkeypatch.delitem(registry, name)


def test_an_own_family_is_scaled_by_mup_if_it_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = f"--model.family={FAMILY}", "--model.mup_base_dim=32", "--model.dim=64", "--optim.name=adamw"
    assert [note for note in parse(*scaled).notes if "model.mup_base_dim" in note and "without effect" in note]
    # a key of a size is read, too; and no size need be 1M
    monkeypatch.setitem(FAMILIES, FAMILY, replace(PARALLEL, sizes={"9M": {"mup_base_dim": 8}}))
    config = parse(*scaled).config
    model = make(config.model, vocab_size=300)
    assert {group["lr_factor"] for group in parameter_groups(model, config.optim)} == {0.5, 1.0}


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--model.family=examples.nosuch:X", "model.family: examples.nosuch:X: No module named 'examples.nosuch'"),
        ("--model.family=examples.own_model:X", "has no attribute 'X'"),
        ("--optim.name=examples.own_model:PARALLEL", "should be a Optimizer, not a Family; docs/extending.md has"),
        ("--data.text_suffixes=.md,examples.own_task:recall", "should be a Reader, not a function; docs/extending.md"),
        (
            "--log.trackers=wandb, examples.own_tracker:table",
            "should be a Tracker, not a function; docs/extending.md has",
        ),
    ],
)
def test_a_name_that_is_no_entry_is_a_mistake(option: str, expected: str) -> None:
    text = mistakes(option)
    assert expected in text
    assert "1 problem" in text


# --- the text reader --------------------------------------------------------------------------------------------


@pytest.fixture
def books(text: Path, tmp_path: Path) -> Path:
    """Notebooks with the text."""
    folder = tmp_path / "books"
    folder.mkdir()
    lines = (text / "typing.txt").read_text().splitlines(keepends=True)
    for i in range(12):
        cells = [{"source": lines[i::12]}, {"source": "the last cell\n"}]
        (folder / f"{i}.ipynb").write_text(json.dumps({"cells": cells}))
    return folder


def test_the_reader_of_the_page_reads_notebooks(books: Path, tmp_path: Path) -> None:
    page = blocks((ROOT / "docs/extending.md").read_text())
    trains, prepares = next(block for block in page if READER in block).splitlines()
    (option,) = (word for word in trains.split() if "text_suffixes" in word)
    command = [*tiny(books, tmp_path, run__name="run", train__steps=2, optim__warmup_steps=1), option]
    succeeded(ranks(1, *command))
    resumed = ranks(1, *command[:-1], "--train.steps=3")
    assert resumed.returncode == 2
    assert f"imported only if the command or its file names it: --data.text_suffixes={READER}" in resumed.stderr
    succeeded(ranks(1, *command, "--train.steps=3"))
    assert losses(tmp_path / "run").keys() == {1, 2, 3}

    # the other commands read it, too
    out = tmp_path / "prepared"
    words = prepares.replace("books --", f"{books} --").replace("data/books", f"{out} --tokenizer bytes").split()
    assert "12 documents" in succeeded(python(*words[3:], script="-m torchtitan_lite.data.prepare"))
    scored = [str(tmp_path / "run"), "--data", str(books), "--text-suffixes", READER, "--documents=1"]
    assert "books" in succeeded(python(*scored, script="-m torchtitan_lite.evaluate"))


@pytest.mark.usefixtures("forgotten")
def test_a_changed_reader_prepares_the_text_again(books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text((ROOT / "examples/own_reader.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    data = DataConfig(path=str(books), text_suffixes=["mine:NOTEBOOK"], cache_dir=str(tmp_path / "cache"))

    def folder() -> Path:
        return prepare_all(data, TokenizerConfig(path="bytes"), lambda _: None).folder

    with pytest.raises(DataError, match="imported only if the command"):
        folder()
    READERS.add("mine:NOTEBOOK")
    first = folder()
    assert folder() == first
    os.utime(tmp_path / "mine.py", ns=(0, 0))
    assert folder() != first


def test_the_optimizer_obeys_the_guard_and_the_clipping() -> None:
    """On plain tensors: an update that is withheld changes nothing, and gradients are divided by grad_scale."""
    torch.manual_seed(0)
    start, gradients = torch.randn(7, 3), [torch.randn(7, 3) for _ in range(3)]

    def trained(scale: float, withheld: int) -> Sequence[torch.Tensor]:
        parameter = torch.nn.Parameter(start.clone())
        groups: list[dict[str, Any]] = [{"params": [parameter], "weight_decay": 0.1, "lr_factor": 1.0}]
        optimizer = Lion(groups, OptimConfig(name="muon", lr=0.01))
        optimizer.grad_scale = torch.tensor(scale)
        for gradient in [*gradients[:withheld], None, *gradients[withheld:]]:
            parameter.grad = torch.full((7, 3), torch.nan) if gradient is None else gradient * scale
            optimizer.found_inf = torch.tensor(float(gradient is None))
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]["exp_avg"]

    expected = trained(1.0, withheld=3)
    assert not torch.equal(expected[0], start)
    for scale, withheld in ((1.0, 0), (1.0, 1), (4.0, 2)):
        assert all(map(torch.equal, trained(scale, withheld), expected))


def test_a_tracker_of_version_1_0_finds_its_class() -> None:
    assert (outputs.Tracker, outputs.TRACKERS) == (log.Tracker, log.TRACKERS)
