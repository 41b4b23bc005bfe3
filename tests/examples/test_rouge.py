"""The fine-tuning job of configs/t5_wikihow.toml from a CSV to ROUGE: samples with targets, prefix, figures."""

import csv
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import torchtitan_lite as ttl
from tests.data.test_data import decoded
from tests.helpers import ROOT, checkpoint, ranks, records, succeeded, tiny
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.models.generation import Sampler, beam_search, new_tokens
from torchtitan_lite.run.session import forward_seed
from torchtitan_lite.tools import generate, load_model

SHRUNK = {
    **{"model.size": "1M", "model.vocab_size": 0, "tokenizer.vocab_size": 400, "run.threads": 1, "run.device": "cpu"},
    **{"train.micro_batch_size": 3, "train.global_batch_size": 6, "fsdp.param_dtype": "float32", "eval.samples": 5},
    **{"optim.warmup_steps": 1, "log.every": 1, "sample.max_tokens": 6, "checkpoint.keep_latest": 1},
}


@pytest.fixture(scope="module")
def rouge() -> ModuleType:
    """Imported when it is needed: its scipy takes 2 s, which each worker would spend to collect the tests."""
    from examples import rouge

    return rouge


def wikihow(file: Path, n: int = 60) -> Path:
    """A CSV with the columns of wikihowAll.csv."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("headline", "title", "text"))
        for i in range(n):
            steps = f"Open door {i}. Then walk {i * 7919 % 101} steps, and {'slowly ' * (i % 5)}close it again."
            writer.writerow((f"\nOpen door {i}.,\nWalk {i * 7919 % 101} steps.", f"How to use door {i}", steps))
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps on pairs with a prefix, which samples."""
    folder = tmp_path_factory.mktemp("rouge")
    words = [str(wikihow(folder / "w.csv")), "--source-key=text", "--target-key=headline", "--tokenizer=bytes"]
    words += ["--source-prefix=summarize: ", "--val-fraction=0.2", f"--out={folder / 'pairs'}"]
    assert prepare(words) == 0
    values: dict[str, Any] = {"model__family": "t5", "data__objective": "pairs", "data__target_len": 30}
    values |= {"train__steps": 2, "sample__every": 1, "sample__max_tokens": 5, "sample__temperature": 0.9}
    values |= {"model__max_seq_len": 200, "train__seq_len": 200, "optim__warmup_steps": 1}
    succeeded(ranks(2, *tiny(folder / "pairs", folder, run__name="run", **values)))
    return folder / "run"


def test_samples_are_held_out_sources_with_their_targets(run: Path) -> None:
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [1, 1, 1, 2, 2, 2]
    rows = {row["text"]: row["headline"] for row in csv.DictReader((run.parent / "w.csv").open(newline=""))}
    trained = decoded(run.parent / "pairs", "train")[::2]
    for s in samples:
        assert s["prompt"].startswith("summarize: Open door ")
        assert rows[s["prompt"].removeprefix("summarize: ")] == s["reference"]
        assert s["prompt"] not in trained
    assert [s["prompt"] for s in samples[:3]] == [s["prompt"] for s in samples[3:]]
    # what the model of the checkpoint says, with the seed of the step and of the prompt
    opened = load_model.open_model(run, torch.device("cpu"), torch.float32)
    assert opened.config is not None
    seed, lines = forward_seed(opened.config.run.seed, 2, 0, 0), []
    for i, s in enumerate(samples[3:]):
        ids, sampler = generate.encode(opened, s["prompt"]), Sampler(0.9, seed=seed + i)
        assert s["text"] == opened.tokenizer.decode(list(new_tokens(opened.model, ids, 5, sampler, opened.ends)))
        prompt, text, target = (json.dumps(s[key], ensure_ascii=False) for key in ("prompt", "text", "reference"))
        lines.append(f"sample  step 2  {prompt} -> {text}  (target: {target})")
    said = (run / "train.log").read_text()
    assert [line for line in said.splitlines() if line.startswith("sample  step 2")] == lines


def test_generate_adds_the_prefix_of_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for source in ("Open door 5.", "summarize: Open door 5."):
        assert generate.main([str(run), "--source", source, "--temperature=0", "--max-tokens=9"]) == 0
        found = capsys.readouterr()
        assert "each source begins with 'summarize: ', as in training" in found.err
        said.append(found.out)
    assert said[0] == said[1]
    with pytest.warns(UserWarning, match="as in training"):
        model, tokenizer = ttl.load_model(run)
    assert ttl.generate(model, tokenizer, "Open door 5.", temperature=0, max_tokens=9) == said[0].removesuffix("\n")
    assert tokenizer.config
    assert ttl.open_data(tokenizer.config).tokenizer.source_prefix == "summarize: "
    opened = load_model.open_model(run, torch.device("cpu"), torch.float32)
    ids = generate.encode(opened, "summarize: a")
    assert generate.main([str(run), "--source=a", "--max-tokens=6", "--beams=3", "--length-penalty=-2"]) == 0
    answer = opened.tokenizer.decode(list(beam_search(opened.model, ids, 6, 3, opened.ends, -2.0)))
    assert capsys.readouterr().out == f"{answer}\n"


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        # the stems of 5 of 6 words agree (ran is no form of run to Porter's stemmer), and of the 5 pairs of words 4
        ("The cats sat down. It ran", "The cat sat down. It runs", (5 / 6, 4 / 5, 5 / 6)),
        # the order of sentences matters to ROUGE-L of the whole, and not to ROUGE-Lsum
        ("One two. Three four.", "Three four. One two.", (1.0, 2 / 3, 1.0)),
    ],
)
def test_scores_are_those_of_the_definition(
    reference: str,
    answer: str,
    expected: tuple[float, ...],
    run: Path,
    rouge: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Tokenizer.from_file(str(run / "tokenizer.json")).encode
    monkeypatch.setattr(rouge, "questions", lambda *_: [([1], encode(reference).ids)])
    monkeypatch.setattr(rouge, "tokens_of", lambda *_: encode(answer).ids)
    (row,) = rouge.scores_of_pairs(run, 1, 1, 0)
    assert tuple(row[kind] for kind in rouge.KINDS) == pytest.approx(expected)


@pytest.mark.extended
def test_the_wikihow_job_runs_from_its_csv_to_rouge(
    tmp_path: Path, rouge: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    file = wikihow(tmp_path / "wikihowAll.csv")
    values = SHRUNK | {"data.path": file, "data.cache_dir": tmp_path / "cache", "run.out_dir": tmp_path}
    command = [
        "--config",
        str(ROOT / "configs/t5_wikihow.toml"),
        *(f"--{key}={value}" for key, value in values.items()),
    ]
    said = succeeded(ranks(2, *command))
    run = tmp_path / "t5_wikihow"
    found = re.search(r"3\.\d+ epochs in (\d+) steps", said)
    assert found
    last = int(found[1])
    epoch = last // 3
    assert [r["step"] for r in records(run) if "val_loss" in r] == [epoch, 2 * epoch, last]
    assert [r["step"] for r in records(run) if "save_s" in r] == [epoch, 2 * epoch, last]
    assert checkpoint(run, last).is_dir()
    rates = {r["step"]: r["lr"] for r in records(run) if "lr" in r}
    assert [rates[s] for s in (epoch, 2 * epoch, last)] == pytest.approx([3e-4, 3e-4 * 0.85, 3e-4 * 0.85**2])
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {epoch, 2 * epoch, last}
    assert all(s["prompt"].startswith("summarize: ") and "Open door" in s["reference"] for s in samples)
    assert rouge.main([str(run), "--samples=2"]) == 0
    assert "(2 held-out pairs)" in capsys.readouterr().out
    assert "resumed after" in succeeded(ranks(2, *command, "--train.epochs=4"))
