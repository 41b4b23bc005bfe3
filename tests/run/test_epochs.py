"""Epochs: as the length of a run, as an interval and as the unit of a step decay; resumes, plans and mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import assert_same_end, python, ranks, records, refused, succeeded, tiny
from torchtitan_lite.checkpointing.storage import find_steps
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config, DataConfig, TrainConfig
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.run import epochs
from torchtitan_lite.tools.report import page
from torchtitan_lite.tools.report.runs import read_run

EPOCH = {"eval__every": "epoch", "checkpoint__every": "epoch", "log__every": 1, "optim__schedule": "step"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text of a few dozen sequences."""
    folder = tmp_path_factory.mktemp("epochs")
    for name, n in (("one", 20), ("two", 30)):
        lines = (json.dumps({"text": f"document {i} is about the number {i * 7919 % 101}"}) for i in range(n))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        words = [str(folder / f"{name}.jsonl"), "--out", str(folder / name)]
        assert prepare([*words, "--tokenizer=bytes", "--val-fraction=0.2"]) == 0
    return folder / "one"


def in_epochs(data: Path, out_dir: Path, **more: Any) -> list[str]:
    """Options of a tiny run without train.steps."""
    return [o for o in tiny(data, out_dir, **more) if "train__steps" in more or not o.startswith("--train.steps")]


def test_a_run_in_epochs_is_the_run_in_steps_and_trains_on(data: Path, tmp_path: Path) -> None:
    """Bit for bit, with a resume in the middle of an epoch."""
    config = Config(train=TrainConfig(seq_len=32), data=DataConfig(path=str(data)))
    samples = open_samples(prepare_all(config.data, config.tokenizer, print), "train", config).n_samples
    assert samples % 6, "an epoch that does not end with a batch"
    n = samples // 6 + 1
    decay = {"optim__step_gamma": 0.5, "checkpoint__keep_best": True, "checkpoint__keep_latest": 1}
    same = dict.fromkeys(("eval__every", "checkpoint__every", "optim__step_every"), n)
    straight = {**EPOCH, **decay, **same, "train__steps": 3 * n}
    succeeded(ranks(1, *in_epochs(data, tmp_path, run__name="steps", **straight)))
    run = tmp_path / "epochs"
    for given in (1.5, 3):
        command = in_epochs(data, tmp_path, run__name="epochs", train__epochs=given, **EPOCH, **decay)
        said = succeeded(ranks(1, *command))
    assert "train.epochs 1.5 -> 3.0" in said
    assert_same_end(run, tmp_path / "steps", 3 * n)
    scores = {r["step"]: r["val_loss"] for r in records(run) if "val_loss" in r and r["step"] % n == 0}
    assert scores.keys() == {n, 2 * n, 3 * n}
    assert {3 * n, min(scores, key=lambda step: scores[step])} <= set(find_steps(run / "checkpoints"))
    rates = {r["step"]: r["lr"] for r in records(run) if "lr" in r}
    assert [rates[step] for step in (n, n + 1, 2 * n, 2 * n + 1)] == [4e-3, 2e-3, 2e-3, 1e-3]
    # config.toml holds what was given, and loads again; the report knows the steps
    written = load.load(run / "config.toml", {}).config
    assert (written.train.epochs, str(written.eval.every)) == (3.0, "epoch")
    assert f"<b>{3 * n}/{3 * n}</b>" in page.page([read_run(run)])


def test_an_epoch_of_a_mixture_has_as_many_samples_as_all_sources(data: Path) -> None:
    """And the default of the warm-up fits."""
    sources = {"data.sources": {str(data): 1.0, str(data.parent / "two"): 3.0}}
    loaded = load.load(None, {"train.seq_len": 32, "train.epochs": 2} | sources)
    found = prepare_all(loaded.config.data, loaded.config.tokenizer, print)
    steps = 2 * -(-open_samples(found, "train", loaded.config).n_samples // 8)
    config = epochs.resolved(loaded, found).config
    assert (config.train.steps, config.optim.warmup_steps) == (steps, steps // 10)


def test_a_part_of_an_epoch_may_be_shorter_than_the_warm_up(data: Path, tmp_path: Path) -> None:
    said = refused(python(*in_epochs(data, tmp_path), "--train.epochs=0.01"))
    assert re.search(
        r"train.epochs = 0.01 is 1 step: an epoch is \d+ samples in batches of 6\n  optim.warmup_steps = 2", said
    ), said
