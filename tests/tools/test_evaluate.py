"""`python -m torchtitan_lite.evaluate`: scores against transformers, on any number of ranks, and against validation."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tests.helpers import checkpoint, ranks, records, succeeded, tiny
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.huggingface import weights
from torchtitan_lite.tools.evaluation import evaluate
from torchtitan_lite.tools.evaluation.documents import Document, Texts, documents, hash_of, score_documents
from torchtitan_lite.tools.load_model import Opened, open_model

ALONE = Process(0, 1, torch.device("cpu"), 1)
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


def scored(n: int, *arguments: Any, out: Path) -> list[dict[str, Any]]:
    """The figures of all models, from n ranks; one is this process."""
    words = [*map(str, arguments), f"--json={out}"]
    if n == 1:
        evaluate.evaluate(evaluate.options_of(words), ALONE)
    else:
        succeeded(ranks(n, *words, entry="torchtitan_lite.tools.evaluation.evaluate"))
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
    one, three = (scored(n, *arguments, out=tmp_path / f"{n}.json") for n in (1, 3))
    assert one == three


def test_bytes_are_those_of_the_raw_text(texts: Path) -> None:
    """With a tokenizer that drops some: decoded tokens would have fewer."""
    words = sorted({word for text in TEXTS for word in text.lower().split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<eos>", *words])}, "<eos>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model: Any = torch.nn.Identity()
    found = documents(Opened("", model, tokenizer, (), []), str(texts), Texts())
    sizes = [(len(document.tokens), document.n_bytes) for document in found]
    assert sizes == [(len(text.split()), len(text.encode())) for text in TEXTS]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `prepared` of pairs, and a run on it."""
    out = tmp_path_factory.mktemp("pairs")
    lines = [{"text": f"number {i} comes before number", "target": str(i + 1)} for i in range(200)]
    (out / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--source-key=text", "--target-key=target", f"--out={out / 'prepared'}", "--train-tokenizer=420"]
    assert prepare([str(out / "pairs.jsonl"), *words]) == 0
    values = {"model__family": "t5", "data__objective": "pairs", "data__target_len": 8, "run__name": "run"}
    values |= {"train__steps": 4, "eval__every": 4, "eval__samples": 1000, "checkpoint__every": 4}
    succeeded(ranks(1, *tiny(out / "prepared", out, **values)))
    return out


def test_models_are_compared_document_by_document(finished: Path, tmp_path: Path) -> None:
    models = checkpoint(finished, 2), finished
    first, second = scored(2, *models, "--split=train", out=tmp_path / "scores.json")
    (name,) = first["texts"]
    (source,) = open_model(finished, ALONE.device, torch.float32).own_data().sources
    assert first["texts"][name]["documents"] == source.meta.documents - source.meta.val_documents
    difference = second["minus_first"][name]
    for key in ("loss", "bits_per_byte"):
        assert difference[key] == pytest.approx(second["texts"][name][key] - first["texts"][name][key], rel=1e-6)
        assert 0 < difference[f"{key}_stderr"] < second["texts"][name][f"{key}_stderr"]
    assert "minus_first" not in first


def test_different_documents_have_no_difference(folder: Path) -> None:
    """As many, of as many tokens and bytes: only their text tells. run/test_recorded_lines.py has what follows."""
    model = open_model(folder, ALONE.device, torch.float32).model
    three = ([Document([5, 6], 2, hash_of(text))] for text in (b"ab", b"ab", b"ba"))
    one, same, other = (score_documents(model, found, [0], 16, ALONE, 1) for found in three)
    assert [one.same_documents(found) for found in (same, other)] == [True, False]


def test_an_encoder_decoder_scores_as_in_its_validation(pairs: Path, tmp_path: Path) -> None:
    (model,) = scored(2, pairs / "run", out=tmp_path / "scores.json")
    (row,) = model["texts"].values()
    validation = next(record for record in records(pairs / "run") if "val_loss" in record)
    assert row["loss"] == pytest.approx(validation["val_loss"], rel=1e-6)
    assert row["bits_per_byte"] == pytest.approx(validation["val_bits_per_byte"], rel=1e-6)
    (again,) = scored(1, pairs / "run", f"--data={pairs / 'prepared'}", out=tmp_path / "again.json")
    assert list(again["texts"].values()) == [row]
    weights.export(pairs / "run", tmp_path / "export")  # whose config says nothing about pairs
    theirs, _ = scored(1, *[tmp_path / "export"] * 2, f"--data={pairs / 'prepared'}", out=tmp_path / "theirs.json")
    assert theirs["texts"] == {str(pairs / "prepared"): pytest.approx(row | {"seq_len": 37}, rel=1e-5)}


def test_a_prepared_folder_scores_as_its_text(finished: Path, text: Path, tmp_path: Path) -> None:
    """The same documents, as text or as tokens."""
    out, other = tmp_path / "prepared", tmp_path / "other.txt"
    other.write_text("to train on")
    tokenizer = f"--tokenizer={finished / 'tokenizer.json'}"
    assert prepare([str(other), "--held-out", str(text), f"--out={out}", tokenizer]) == 0
    arguments = [finished, "--data", out, text]
    (model,) = scored(2, *arguments, out=tmp_path / "scores.json")
    tokens, raw = model["texts"][str(out)], model["texts"][str(text)]
    assert [tokens[key] - raw[key] for key in ("documents", "tokens", "bytes")] == [0, 0, 0]
    assert tokens["loss"] == pytest.approx(raw["loss"], rel=1e-6)  # batches have other windows
    opened = open_model(finished, ALONE.device, torch.float32)
    assert [*documents(opened, str(out), Texts())] == [*documents(opened, str(text), Texts())]
    (some,) = scored(1, *arguments, "--documents=1", out=tmp_path / "some.json")
    assert some["texts"][str(out)]["documents"] == some["texts"][str(text)]["documents"] == 1
    assert some["texts"][str(text)]["loss_stderr"] is None
