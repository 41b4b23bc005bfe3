"""Prompts that nobody has named: the beginnings of held-out documents."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.helpers import ranks, succeeded, tiny
from torchtitan_lite.config.schema import Config, DataConfig, ModelConfig, SampleConfig
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.training.sampling import Prompts, held_out_prompts

LICENCE = (
    "Permission is hereby granted to person {n}, free of charge, to use copy {n} of the software.\n\nSECOND PART\n"
)


def prepared(folder: Path, texts: list[str]) -> tuple[DataSet, Tokenizer]:
    folder.mkdir()
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = folder / "data"
    words = [str(folder / "text.jsonl"), "--out", str(out), "--tokenizer=bytes", "--val-fraction=0.4"]
    assert main(words) == 0
    return DataSet.of({"": (1.0, out)}), Tokenizer.from_file(str(out / "tokenizer.json"))


def config(folder: Path, **model: int) -> Config:
    return Config(data=DataConfig(path=str(folder / "data")), model=ModelConfig(**model))  # type: ignore[arg-type]


def test_the_prompts_are_the_first_words_of_held_out_documents(tmp_path: Path) -> None:
    texts = [LICENCE.format(n=n) for n in range(40)]
    data, tokenizer = prepared(tmp_path / "a", texts)
    found = held_out_prompts(config(tmp_path / "a"), data, tokenizer)
    assert found == held_out_prompts(config(tmp_path / "a"), data, tokenizer), "the same each time"
    assert 1 <= len(found) <= 2
    for prompt in found:
        assert any(text.startswith(prompt) for text in texts)
        assert prompt.startswith("Permission is hereby")
        assert not prompt[-1].isspace()
    prompts = Prompts.of(config(tmp_path / "a"), data)
    assert prompts.texts == found
    assert [tokenizer.decode(ids) for ids in prompts.ids] == found


@pytest.mark.parametrize("texts", [["\u4f60\u597d\u4e16\u754c" * 30] * 9, ["a"] * 9, [" b\n" * 40] * 9])
def test_text_without_words_or_of_one_kind(texts: list[str], tmp_path: Path) -> None:
    data, tokenizer = prepared(tmp_path / "a", [f"{text}{'' if text.isspace() else n}" for n, text in enumerate(texts)])
    for size in (8, 1024):
        found = held_out_prompts(config(tmp_path / "a", max_seq_len=size), data, tokenizer)
        for prompt in found:
            assert prompt == "The " or 0 < len(tokenizer.encode(prompt).ids) < size
            assert "\ufffd" not in prompt


def test_named_prompts_and_the_default_text_keep_theirs(tmp_path: Path) -> None:
    data, tokenizer = prepared(tmp_path / "a", [LICENCE.format(n=n) for n in range(9)])
    assert held_out_prompts(Config(), data, tokenizer) == ["def ", "The "]
    named = config(tmp_path / "a").model_copy(update={"sample": SampleConfig(prompts=["mine"])})
    assert Prompts.of(named, data).texts == ["mine"]
    off = config(tmp_path / "a").model_copy(update={"sample": SampleConfig(every=0)})
    assert Prompts.of(off, data).ids == []


def test_a_mixture_has_one_of_each_source(tmp_path: Path) -> None:

    one, tokenizer = prepared(tmp_path / "a", [f"alpha beta gamma delta epsilon zeta {n}" for n in range(20)])
    two, _ = prepared(tmp_path / "b", [f"one two three four five six {n}" for n in range(20)])
    data = DataSet.of({"a": (1.0, one.folder), "b": (1.0, two.folder)})
    assert held_out_prompts(config(tmp_path / "a"), data, tokenizer) == [
        "alpha beta gamma delta epsilon",
        "one two three four five",
    ]


def test_a_run_samples_from_them_on_two_ranks(text: Path, tmp_path: Path) -> None:
    more = {"train__steps": 2, "optim__warmup_steps": 1, "sample__every": 2, "sample__max_tokens": 2}
    output = succeeded(ranks(2, *tiny(text, tmp_path, run__name="run", **more)))
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert samples
    texts = "".join(file.read_text(errors="replace") for file in text.rglob("*") if file.is_file())
    assert all(sample["prompt"] in texts for sample in samples)
    assert not {"def ", "The "} & {sample["prompt"] for sample in samples}
    assert f"generate {tmp_path / 'run'} --interactive" in output, "there is no prompt that fits every text"
