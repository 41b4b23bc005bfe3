"""train.batch_schedule and train.seq_len_schedule: batches change from some steps on, exactly, also under a resume."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import assert_same_end, forget_after, losses, ranks, records, succeeded, tiny
from torchtitan_lite import plan
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import TrainConfig
from torchtitan_lite.errors import ConfigError

SCHEDULE = "--train.batch_schedule=[[3, 4], [5, 9]]"
PLAIN: dict[str, Any] = {"train__steps": 8, "checkpoint__every": 4, "eval__every": 0, "optim__schedule": "constant"}


def test_a_step_has_the_size_of_the_last_entry_before_it() -> None:
    config = TrainConfig(steps=8, global_batch_size=6, batch_schedule=[[3, 4], [5, 9]])
    sizes = [config.batch_size(step) for step in range(1, 9)]
    assert sizes == [6, 6, 6, 4, 4, 9, 9, 9]
    assert config.samples == sum(sizes)
    assert TrainConfig(steps=4, global_batch_size=6, batch_schedule=[[3, 4], [5, 9]]).samples == 6 * 3 + 4
    assert TrainConfig(steps=2, batch_schedule=[[0, 5]]).samples == 10
    assert TrainConfig(steps=2, global_batch_size=7).samples == 14


def test_a_length_begins_where_its_share_says() -> None:
    """0.7 of 350 steps are 245, although the binary fraction is a little less than 0.7."""
    config = TrainConfig(steps=350, seq_len_schedule=[[0, 64], [0.7, 128]])
    assert [config.parts(step) for step in (1, 245, 246, 350)] == [4, 4, 2, 2]
    assert TrainConfig(steps=350, seq_len_schedule=[[0.5, 32]]).parts(1) == 1


@pytest.mark.extended
def test_compiled_blocks_resume_bitwise_among_lengths(text: Path, tmp_path: Path) -> None:
    """A process that begins after a change of length compiles the same kernels as one that saw it."""
    more = {"compile__enabled": True, "train__micro_batch_size": 1, "model__family": "llama"}
    schedule = "--train.seq_len_schedule=[[0, 8], [0.375, 16], [0.75, 32]]"
    command = [*tiny(text, tmp_path, run__name="run", **(PLAIN | more)), schedule]
    succeeded(ranks(1, *command))
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    forget_after(tmp_path / "run", 4)
    succeeded(ranks(1, *command))
    assert_same_end(tmp_path / "run", tmp_path / "straight", 8)


def test_samples_stay_in_order_and_a_resume_is_bitwise(text: Path, tmp_path: Path) -> None:
    """The same losses as a run whose batch size is changed by hand, on one rank and on two, and across a stop."""
    by_hand = tiny(text, tmp_path, run__name="by_hand", **PLAIN)
    for steps, size in ((3, 6), (5, 4), (8, 9)):
        more = [f"--train.steps={steps}", f"--train.global_batch_size={size}", "--resume-with-changes"]
        succeeded(ranks(2, *by_hand, *more))
    run = tmp_path / "run"
    command = [*tiny(text, tmp_path, run__name="run", **PLAIN), SCHEDULE]
    succeeded(ranks(2, *command))
    assert losses(run) == losses(tmp_path / "by_hand")
    tokens = [record["tokens"] for record in records(run) if "loss" in record]
    assert [b - a for a, b in zip([0, *tokens], tokens, strict=False)] == [32 * n for n in (6, 6, 6, 4, 4, 9, 9, 9)]
    shutil.copytree(run, tmp_path / "straight")
    forget_after(run, 4)
    assert "resumed after step 4" in succeeded(ranks(2, *command))
    assert_same_end(run, tmp_path / "straight", 8)
    succeeded(ranks(1, *command, "--run.name=one"))
    for step, (loss, _) in losses(tmp_path / "one").items():
        assert loss == pytest.approx(losses(run)[step][0], rel=1e-4)
    refused = ranks(1, *command, "--train.steps=9", "--train.batch_schedule=[[3, 4]]")
    assert refused.returncode == 2
    assert "train.batch_schedule" in refused.stderr


def test_shorter_sequences_come_first(text: Path, tmp_path: Path) -> None:
    """Quarters, then halves, then full length: the same on one rank and on two, and across a stop."""
    plain = {**PLAIN, "train__global_batch_size": 3, "train__seq_len": 32, "train__micro_batch_size": 1}
    run = tmp_path / "run"
    command = [
        *tiny(text, tmp_path, run__name="run", **plain),
        "--train.seq_len_schedule=[[0, 8], [0.375, 16], [0.75, 32]]",
    ]
    assert "shorter ones at first" in succeeded(ranks(2, *command))
    succeeded(ranks(1, *command, "--run.name=one"))
    alone, both = ({step: loss for step, (loss, _) in losses(tmp_path / name).items()} for name in ("one", "run"))
    assert len(both) == 8
    assert alone == pytest.approx(both, rel=1e-4)
    tokens = [record["tokens"] for record in records(run) if "loss" in record]
    assert tokens == [96 * step for step in range(1, 9)], "a step has as many tokens as ever"
    shutil.copytree(run, tmp_path / "straight")
    forget_after(run, 4)
    assert "resumed after step 4" in succeeded(ranks(2, *command))
    assert_same_end(run, tmp_path / "straight", 8)
    refused = ranks(1, *command, "--train.steps=9", "--train.seq_len_schedule=[[0.3, 16]]")
    assert refused.returncode == 2
    assert "train.seq_len_schedule" in refused.stderr


@pytest.mark.parametrize("value", ["[[0]]", "[[0, 0]]", "[[-1, 4]]", "[[5, 4], [5, 8]]", "[[9, 4], [5, 8]]", "[3, 4]"])
def test_a_wrong_schedule_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.batch_schedule"):
        loaded(value)


def test_what_does_not_go_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    for key, value, works in (
        ("train.epochs", 1.0, r"train\.steps works"),
        ("checkpoint.every", "epoch", r"checkpoint\.every = 100 works"),
        ("optim.schedule", "step", r"optim\.step_every = 100 works"),  # "epoch" is its default
    ):
        with pytest.raises(ConfigError, match=works):
            loaded("[[3, 9]]", **{key: value})
    with pytest.raises(ConfigError, match=r"train\.global_batch_size.*begins after step 0"):
        loaded("[[0, 8]]", **{"train.global_batch_size": 32})
    assert loaded("[[0, 8]]").train.batch_size(1) == 8
    options = ["--world-size=2", "--train.steps=100", "--train.batch_schedule=[[50, 64]]"]
    assert plan.main(options) == 0
    assert f"100 steps, {(50 * 8 + 50 * 64) * 256:,} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "more", "says"),
    [
        ([[0, 48]], {}, "48 tokens do not divide train.seq_len = 256; 32 works"),
        ([[0, 512]], {}, "512 tokens do not divide train.seq_len = 256; 256 works"),
        ([[0, 64]], {"data.packing": "best_fit"}, 'data.packing = "best_fit" has sequences of one length'),
        ([[0.5, 64], [0.5, 32]], {}, "with increasing shares"),
        ([[0, 64], [300, 256]], {}, "pairs of a share of the steps, from 0 to 1"),
        ([[0, 6.5]], {}, "and a length"),
    ],
)
def test_lengths_that_do_not_fit(value: list[list[int]], more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        loaded("[]", **{"train.seq_len_schedule": value}, **more)


def loaded(schedule: str, **more: Any) -> Any:
    values = {"train.batch_schedule": load.parse_value("train.batch_schedule", schedule)} | more
    given = {key: load.ConfigValue(value, "test") for key, value in values.items()}
    return load.load(None, given, world_size=1, n_gpus=0).config
