"""Encoder-decoders in runs: the commands of docs/seq2seq.md, exact resume, and batches of any world size."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks, obeyed
from tests.helpers import ROOT, forget_after, losses, ranks, records, succeeded, tiny
from torchtitan_lite.data.prepare.__main__ import main

PAGE = (ROOT / "docs/seq2seq.md").read_text()


def news(file: Path) -> Path:
    with file.open("w", newline="", encoding="utf-8") as stream:
        rows = (
            (f"In town {i}, {'much ' * (i % 7)}happened on day {i * 7919}.", f"Day {i * 7919}") for i in range(1500)
        )
        csv.writer(stream).writerows([("text", "headline"), *rows])
    return file


def make(kind: str, text: Path, tmp_path: Path, **more: Any) -> list[str]:
    values: dict[str, Any] = {"model__family": "t5", "data__objective": kind, "optim__schedule": "constant"}
    values["optim__warmup_steps"] = 1
    if kind == "pairs":
        text = tmp_path / "pairs"
        if not text.exists():
            file = news(tmp_path / "news.csv")
            keys = "--source-key", "text", "--target-key", "headline"
            assert main([str(file), *keys, "--tokenizer", "bytes", "--out", str(text)]) == 0
        values["data__target_len"] = 12
    return tiny(text, tmp_path, **{**values, **more})


@pytest.mark.parametrize("kind", [pytest.param("span_corruption", marks=pytest.mark.extended), "pairs"])
def test_a_resume_is_bitwise_and_the_world_size_changes_no_batch(kind: str, text: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"train__steps": 4, "train__z_loss": 1e-3, "checkpoint__every": 2}
    succeeded(ranks(2, *make(kind, text, tmp_path, run__name="through", **more)))
    forget_after(shutil.copytree(tmp_path / "through", tmp_path / "twice"), 2)
    assert "resumed after step 2" in succeeded(ranks(2, *make(kind, text, tmp_path, run__name="twice", **more)))
    succeeded(ranks(1, *make(kind, text, tmp_path, run__name="alone", **more)))
    through, twice, alone = (losses(tmp_path / name) for name in ("through", "twice", "alone"))
    assert through == twice
    for step, values in through.items():
        assert values == pytest.approx(alone[step], rel=1e-4)
    tokens = [[r["tokens"] for r in records(tmp_path / name) if "loss" in r] for name in ("through", "alone")]
    assert tokens[0] == tokens[1]


@pytest.mark.extended
def test_from_a_csv_to_summaries_in_five_commands(text: Path, tmp_path: Path) -> None:
    news(tmp_path / "news.csv")
    places: dict[str, object] = {name: tmp_path / name for name in ("news.csv", "data/news")}
    places |= {"runs/news": tmp_path / "news", " 4096": " 600"}
    kept = ("run.out_dir", "train.micro_batch", "train.global_batch", "optim.warmup", "eval.samples", "log.", "run.")
    ours = [o for o in tiny(text, tmp_path, train__steps=4) if o.removeprefix("--").startswith((*kept, "train.steps"))]
    _, _, said, _, _ = (obeyed(command, places, last=ours) for command in blocks(PAGE)[0].splitlines())
    assert "0 sources cut to 256 tokens and 0 targets cut to 32 tokens" in said
    assert len(losses(tmp_path / "news")) == 4
    assert (tmp_path / "news/report.html").is_file()
