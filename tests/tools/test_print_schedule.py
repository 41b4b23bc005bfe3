"""`plan --print-schedule`: the chart and the figures of a run's learning rate and batch size."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import TINY, losses, options, python, ranks, records, succeeded, tiny
from torchtitan_lite import plan
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.tools.estimate.schedule import COLUMNS, ROWS

Table = dict[int, tuple[float, int, int, str]]


def table(text: str) -> Table:
    """Rate, batch, sequences so far and note, by step."""
    rows = [re.split(r"  +", line.strip()) for line in text.split("sequences so far\n")[1].splitlines()]
    return {int(r[0].replace(",", "")): (float(r[1]), int(r[2]), int(r[3].replace(",", "")), r[4]) for r in rows}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan.main(["--print-schedule", "--device=cpu", *arguments]) == 0
    return capsys.readouterr().out


def test_the_figures_are_those_that_a_run_logs(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more: dict[str, Any] = {"optim__schedule": "wsd", "optim__decay_ratio": 0.5, "eval__every": 0}
    more |= {"train__steps": 10, "train__batch_schedule": "[[0,2],[3,4]]", "run__name": "run"}
    command = tiny(text, tmp_path, **more)
    command = [word for word in command if not word.startswith("--train.global_batch_size")]
    found = table(printed(capsys, *command))
    succeeded(ranks(1, *command))
    logged = {record["step"]: record for record in records(tmp_path / "run") if "loss" in record}
    assert list(found) == [1, 2, 4, 5, 10]
    assert [note for *_, note in found.values()] == [
        *("the first step", "the end of the warm-up", "another batch size"),
        *("the last step before the decay", "the last step"),
    ]
    for step, (rate, size, sequences, _) in found.items():
        assert rate == pytest.approx(logged[step]["lr"], rel=1e-4)
        tokens = logged[step]["tokens"] - (logged[step - 1]["tokens"] if step > 1 else 0)
        assert (size, sequences) == (tokens / 32, logged[step]["tokens"] / 32)
    assert len(losses(tmp_path / "run")) == 10


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"schedule": "cosine"}, [1, 10, 100]),
        ({"schedule": "linear", "warmup_steps": 0}, [1, 100]),
        ({"schedule": "constant"}, [1, 10, 100]),
        ({"schedule": "wsd", "decay_ratio": 0.25}, [1, 10, 75, 100]),
        ({"schedule": "step", "step_every": 40}, [1, 10, 41, 81, 100]),
        ({"schedule": "step", "step_every": 9}, [1, 10, 19, 28, 37, 46, 55, 100]),
    ],
)
def test_every_schedule_has_its_corners(
    values: dict[str, Any], steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"warmup_steps": 10, "lr": 0.02, **values}
    out = printed(capsys, "--train.steps=100", *options({f"optim.{key}": value for key, value in values.items()}))
    config = OptimConfig.model_validate(values)
    found = table(out)
    assert list(found) == steps
    for step, (rate, *_) in found.items():
        assert rate == pytest.approx(learning_rate(config, step, 100), rel=1e-4)
    plotted = [line.split("|")[1].ljust(COLUMNS) for line in out.splitlines() if "|" in line]
    assert len(plotted) == ROWS
    rates = [learning_rate(config, 1 + column * 99 // (COLUMNS - 1), 100) for column in range(COLUMNS)]
    for column, rate in enumerate(rates):
        (row,) = [row for row in range(ROWS) if plotted[row][column] == "*"]
        assert (ROWS - 1 - row) / (ROWS - 1) == pytest.approx(rate / max(rates), abs=0.51 / (ROWS - 1))


def test_only_a_change_of_the_batch_size_is_a_corner(capsys: pytest.CaptureFixture[str]) -> None:
    found = table(printed(capsys, "--train.steps=30", "--train.batch_schedule=[[0,8],[5,8],[20,16],[30,32]]"))
    changes = {step: size for step, (_, size, _, note) in found.items() if "another batch size" in note}
    assert changes == {21: 16}
    assert found[30][1:3] == (16, 20 * 8 + 10 * 16)


def test_epochs_are_steps_once_the_data_is_prepared(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = str(tmp_path / "tokens")
    arguments = str(text), "--out", tokens, "--train-tokenizer", "517"
    succeeded(python(*arguments, script="-m torchtitan_lite.data.prepare"))
    values = {key: value for key, value in TINY.items() if key not in ("train.steps", "tokenizer.vocab_size")}
    values |= {"data.path": tokens, "train.epochs": 2, "optim.schedule": "step"}
    found = table(printed(capsys, *options(values)))
    last = max(found)
    assert last % 2 == 0
    assert found[last // 2 + 1][3] == "times 0.85"
    same_size = {key: value for key, value in values.items() if key != "train.global_batch_size"}
    same_size["train.batch_schedule"] = "[[0,6],[4,6]]"
    assert table(printed(capsys, *options(same_size))) == found, "no step has another batch size"
    unknown = printed(capsys, *options(values | {"data.path": text}))
    assert unknown == "schedule unknown: the length of an epoch needs prepared data in data.path\n"
