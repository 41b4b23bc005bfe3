"""`python -m torchtitan_lite.evaluate`: scores against transformers, on any number of ranks, and against validation."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tests.helpers import python, ranks, records, succeeded, tiny
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import DataError, UserError
from torchtitan_lite.tools.evaluation import evaluate
from torchtitan_lite.tools.evaluation.documents import Texts, documents
from torchtitan_lite.tools.load_model import Opened

ENTRY = "torchtitan_lite.tools.evaluation.evaluate"
TEXTS = ["def f(x):\n    return x\n", "caf\u00e9 \u4f60\u597d", "a", "<|endoftext|> is text", "the cat sat " * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama of transformers."""
    transformers = pytest.importorskip("transformers")
    where = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=1, vocab_size=257, max_position_embeddings=16, eos_token_id=0
    )
    transformers.LlamaForCausalLM(config).save_pretrained(where)
    byte_level().save(str(where / "tokenizer.json"))
    return where


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def given(*arguments: Any) -> argparse.Namespace:
    return evaluate.options_of([str(argument) for argument in arguments])


def scored(n: int, *arguments: Any, out: Path) -> list[dict[str, Any]]:
    """The figures of all models, from n ranks."""
    succeeded(ranks(n, *map(str, arguments), f"--json={out}", entry=ENTRY))
    found: list[dict[str, Any]] = json.loads(out.read_text())["models"]
    return found


def expected(folder: Path, length: int) -> list[float]:
    """The negative log-likelihood of each text by transformers, in windows of `length` tokens."""
    import transformers

    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.eval()
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True
    found = []
    for text in TEXTS:
        stream = [0, *tokenizer.encode(text).ids]
        total = 0.0
        for start in range(0, len(stream) - 1, length):
            window = torch.tensor([stream[start : start + length + 1]])
            with torch.no_grad():
                logits = model(window[:, :-1]).logits.log_softmax(-1)
            total -= float(logits.gather(2, window[:, 1:, None]).sum())
        found.append(total)
    return found


@pytest.mark.parametrize("length", [16, 5])
def test_scores_equal_those_of_transformers(folder: Path, texts: Path, length: int, tmp_path: Path) -> None:
    """Every token is predicted once, also where a text is longer than a window; bytes are those of the text."""
    (model,) = scored(1, folder, "--data", texts, f"--seq-len={length}", out=tmp_path / "scores.json")
    row = model["texts"][str(texts)]
    nats = expected(folder, length)
    n_bytes = [len(text.encode()) for text in TEXTS]
    assert (row["documents"], row["tokens"], row["bytes"]) == (len(TEXTS), sum(n_bytes), sum(n_bytes))
    assert row["loss"] == pytest.approx(sum(nats) / sum(n_bytes), rel=1e-6)
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2), rel=1e-9)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    residuals = [one - row["loss"] * size for one, size in zip(nats, n_bytes, strict=True)]
    stderr = math.sqrt(sum(r * r for r in residuals) * len(TEXTS) / (len(TEXTS) - 1)) / sum(n_bytes)
    assert row["loss_stderr"] == pytest.approx(stderr, rel=1e-4)


def test_any_number_of_ranks_finds_the_same(folder: Path, texts: Path, tmp_path: Path) -> None:
    arguments = (folder, "--data", texts, "--data", texts, "--batch-size=3")
    one, two, three = (scored(n, *arguments, out=tmp_path / f"{n}.json") for n in (1, 2, 3))
    assert one == two == three


def test_bytes_are_those_of_the_raw_text(folder: Path, texts: Path, tmp_path: Path) -> None:
    """With a tokenizer that drops some: decoded tokens would have fewer."""
    words = sorted({word for text in TEXTS for word in text.lower().split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<eos>", *words])}, "<eos>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    (model,) = scored(1, folder, "--data", texts, f"--tokenizer={file}", out=tmp_path / "scores.json")
    row = model["texts"][str(texts)]
    assert row["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert row["tokens"] == sum(len(text.split()) for text in TEXTS)


SHORT = {"train__steps": 2, "eval__every": 0, "checkpoint__every": 2, "optim__warmup_steps": 1}


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `one`, `two` and `pairs`."""
    out = tmp_path_factory.mktemp("runs")
    more = {"train__steps": 4, "eval__every": 4, "eval__samples": 1000, "checkpoint__every": 4}
    for name, rate in (("one", 1e-3), ("two", 1e-2)):
        succeeded(ranks(1, *tiny(text, out, run__name=name, optim__lr=rate, **more)))
    source = out / "pairs.jsonl"
    lines = [{"text": f"number {i} comes before number", "target": str(i + 1)} for i in range(200)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare = [source, "--source-key=text", "--target-key=target", f"--out={out / 'prepared'}", "--train-tokenizer=420"]
    succeeded(ranks(1, *map(str, prepare), entry="torchtitan_lite.data.prepare.__main__"))
    pairs = {"model__family": "t5", "data__objective": "pairs", "data__target_len": 8, "run__name": "pairs"}
    succeeded(ranks(1, *tiny(out / "prepared", out, **pairs, **more)))
    return out


def test_models_are_compared_document_by_document(runs: Path, tmp_path: Path) -> None:
    first, second = scored(2, runs / "one", runs / "two", "--split=train", out=tmp_path / "scores.json")
    (name,) = first["texts"]
    difference = second["minus_first"][name]
    for key in ("loss", "bits_per_byte"):
        assert difference[key] == pytest.approx(second["texts"][name][key] - first["texts"][name][key], rel=1e-6)
        assert 0 < difference[f"{key}_stderr"] < second["texts"][name][f"{key}_stderr"]
    assert "minus_first" not in first


def test_models_with_other_windows_are_scored_in_the_shortest(
    runs: Path, folder: Path, texts: Path, tmp_path: Path
) -> None:
    arguments = ("--data", texts, "--documents=4")
    (alone,) = scored(1, runs / "one", *arguments, "--seq-len=16", out=tmp_path / "alone.json")
    out = tmp_path / "scores.json"
    said = succeeded(ranks(1, *map(str, (runs / "one", folder, *arguments, f"--json={out}")), entry=ENTRY))
    first, second = json.loads(out.read_text())["models"]
    assert first["texts"] == alone["texts"]
    assert [model["texts"][str(texts)]["seq_len"] for model in (first, second)] == [16, 16]
    assert second["minus_first"].keys() == {str(texts)}, "the same documents, as other tokens"
    assert "the tokenizers differ" in said
    # the same weights, whose window would be 37 tokens: see tiny
    export = tmp_path / "export"
    succeeded(python("export", str(runs / "one"), str(export), script="checkpoint.py"))
    run, same = scored(1, runs / "one", export, *arguments, out=out)
    assert same["minus_first"][str(texts)]["bits_per_byte"] == pytest.approx(0, abs=1e-6)
    assert run["texts"][str(texts)]["seq_len"] == same["texts"][str(texts)]["seq_len"] == 32


def test_different_documents_have_no_difference(texts: Path, tmp_path: Path) -> None:
    """Of one file, as many, under one name: only their text tells."""
    file = tmp_path / "mine.jsonl"
    lines = [{"a": f"document {i} of one kind " * 9, "b": f"number {i} of another sort " * 9} for i in range(40)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for key in "ab":
        keys = {"run__name": key, "data__text_key": key, "tokenizer__vocab_size": 270}
        succeeded(ranks(1, *tiny(file, tmp_path, **SHORT, **keys)))
    out = tmp_path / "scores.json"
    models = (tmp_path / "a", tmp_path / "b")
    options = "--split=train", "--documents=20", f"--json={out}"
    said = succeeded(ranks(1, *map(str, models), *options, entry=ENTRY))
    first, second = json.loads(out.read_text())["models"]
    (name,) = first["texts"]
    assert first["texts"][name]["documents"] == second["texts"][name]["documents"]
    assert "minus_first" not in second
    assert f"no difference to {tmp_path / 'a'}, {name}: the two were scored on different documents" in said


def test_text_like_special_tokens_is_text(folder: Path, tmp_path: Path) -> None:
    """It is refused if a vocabulary of whole words produces the end token nevertheless."""
    words = [("<unk>", -1.0), ("</s>", -1.0), *((letter, -1.0) for letter in "ab</s>")]
    usual, of_words = byte_level(), Tokenizer(models.Unigram(words, 0))
    usual.add_special_tokens(["</s>"])
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "a</s>b"}\n')
    end = usual.get_vocab()["</s>"]
    model: Any = torch.nn.Identity()
    (document,) = documents(Opened("", model, usual, (end,), []), str(file), Texts())
    assert len(document.tokens) == document.n_bytes == 6
    with pytest.raises(DataError, match="a document would be encoded with the end token '</s>' inside: 'a</s>b'"):
        list(documents(Opened("", model, of_words, (1,), []), str(file), Texts()))


def test_a_run_whose_text_has_changed_is_refused(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes((text / "typing.txt").read_bytes())
    succeeded(ranks(1, *tiny(file, tmp_path, run__name="run", **SHORT)))
    file.write_bytes((text / "tarfile.txt").read_bytes())
    result = ranks(1, str(tmp_path / "run"), entry=ENTRY)
    assert result.returncode == 2
    assert "); restore that text (evaluate can score other text: --data TEXT)" in result.stderr


def test_an_encoder_decoder_scores_as_in_its_validation(runs: Path, tmp_path: Path) -> None:
    (model,) = scored(2, runs / "pairs", out=tmp_path / "scores.json")
    (row,) = model["texts"].values()
    validation = next(record for record in records(runs / "pairs") if "val_loss" in record)
    assert row["loss"] == pytest.approx(validation["val_loss"], rel=1e-6)
    assert row["bits_per_byte"] == pytest.approx(validation["val_bits_per_byte"], rel=1e-6)
    (again,) = scored(1, runs / "pairs", f"--data={runs / 'prepared'}", out=tmp_path / "again.json")
    assert list(again["texts"].values()) == [row]


def test_a_prepared_folder_scores_as_its_text(runs: Path, text: Path, tmp_path: Path) -> None:
    """The same documents, as text or as tokens."""
    out, other = tmp_path / "prepared", tmp_path / "other.txt"
    other.write_text("to train on")
    tokenizer = f"--tokenizer={runs / 'one' / 'tokenizer.json'}"
    succeeded(
        ranks(
            1,
            str(other),
            "--held-out",
            str(text),
            f"--out={out}",
            tokenizer,
            entry="torchtitan_lite.data.prepare.__main__",
        )
    )
    arguments = [runs / "one", "--data", out, text]
    (model,) = scored(2, *arguments, out=tmp_path / "scores.json")
    tokens, raw = model["texts"][str(out)], model["texts"][str(text)]
    assert tokens["documents"] == raw["documents"]
    assert (tokens["tokens"], tokens["bytes"]) == (raw["tokens"], raw["bytes"])
    assert tokens["loss"] == pytest.approx(raw["loss"], rel=1e-6)  # batches have other windows
    (some,) = scored(1, runs / "one", "--documents=1", "--data", out, text, out=tmp_path / "some.json")
    assert some["texts"][str(out)]["documents"] == some["texts"][str(text)]["documents"] == 1
    assert some["texts"][str(text)]["loss_stderr"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["HF"], "give --data"),
        (["HF", "--data", "nosuch.txt"], "nosuch.txt"),
        (["HF", "--data", "TEXT", "--seq-len=17"], "at most 16 tokens"),
        (["HF", "--data", "TEXT", "nosuch.txt"], "nosuch.txt"),
        (["nosuch", "--data", "TEXT"], "nosuch does not exist"),
        (["HF", "nosuch", "--data", "TEXT"], "nosuch does not exist"),
        (
            ["HF", "--data", "TEXT", "--tokenizer=/dev/null"],
            "/dev/null is not a regular file: name the model's tokenizer.json",
        ),
        (["PAIRS", "--data", "TEXT"], "--source-key"),
        (["ONE", "--data", "PREPARED"], "was not prepared with the tokenizer of"),
        (["ONE", "--json", "nosuch/x.json"], "it is a folder, or its folder is missing or read-only"),
        (["ONE", "--json", "."], "--json=. can't be written: it is a folder"),
        (["ONE", "--json", "/dev/null/x.json"], "its folder is missing or read-only"),
        (["HF", "--data", "TEXT", ""], "one of the names of the text is empty"),
        (["ONE", "--documents=0"], "--documents=0 should be at least 1"),
        (["ONE", "--seq-len=-1"], "--seq-len=-1 should be"),
    ],
)
def test_bad_input_is_an_error_with_a_remedy(
    arguments: list[str], message: str, folder: Path, texts: Path, runs: Path
) -> None:
    named = {"HF": folder, "TEXT": texts, "PAIRS": runs / "pairs", "ONE": runs / "one", "PREPARED": runs / "prepared"}
    wanted = given(*(named.get(argument, argument) for argument in arguments))
    with pytest.raises(UserError, match=message):
        evaluate.evaluate(wanted, Process(0, 1, torch.device("cpu"), 1))
