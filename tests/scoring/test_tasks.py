"""Tasks: the format, likelihoods against transformers, and `evaluate --tasks` on any number of ranks."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.helpers import ranks, succeeded
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.scoring import questions, task_scores, task_tokens
from torchtitan_lite.tools.evaluation import evaluate
from torchtitan_lite.tools.load_model import Opened, open_model

LENGTH = 24  # tokens of the models below
ALONE = Process(0, 1, torch.device("cpu"), 1)
WORDS = "the cat sat on the mat, f(x) and g() end. "
CHOICE: list[dict[str, Any]] = [
    {"context": "the cat", "choices": [" sat", " sat on the mat", " caf\u00e9"], "answer": 1},
    {"context": "the cat sat ", "choices": ["on the mat", "and"], "answer": 0, "id": 7},  # a space to move
    {"context": "call f(", "choices": [")", "x)"], "answer": 0},  # "()" is one token
    {"contexts": ["the cat", ""], "choices": [" sat on", " sat on"], "answer": 1},
    {"context": WORDS * 5, "choices": [" the", " zebra"], "answer": 1},  # a context that is too long
    {"context": "the", "choices": [WORDS * 5, " mat"], "answer": 0},  # a choice that is
    {"context": "<|endoftext|> is text", "choices": [" the", " cat"], "answer": 0},
]
WORD = [{"context": "the cat sat on the", "continuation": " mat"}, {"context": "f(", "continuation": "x)"}]


def jsonl(file: Path, rows: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def bpe() -> Tokenizer:
    """A byte-level BPE with merges over spaces and brackets."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model of transformers. The tokenizer of the Llama puts a token first."""
    transformers = pytest.importorskip("transformers")
    where = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    shared = {"vocab_size": 300, "eos_token_id": 0, "bos_token_id": 0, "initializer_range": 0.3}
    tokenizer = bpe()
    if request.param == "llama":
        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=LENGTH, **shared)
        transformers.LlamaForCausalLM(config).save_pretrained(where)
        tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    else:
        config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=2, n_positions=LENGTH, **shared)
        transformers.GPT2LMHeadModel(config).save_pretrained(where)
    tokenizer.save(str(where / "tokenizer.json"))
    return where


def theirs(folder: Path) -> tuple[Any, list[int]]:
    """The model of transformers, and the tokens that it puts before a text."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    return model, [0] if "llama" in str(folder) else []


def expected(model: Any, prefix: list[int], context: str, choice: str) -> tuple[float, bool, int]:
    """By transformers: negative log-likelihood, whether each token is the likeliest, and the number of tokens."""
    tokenizer = bpe()
    tokenizer.encode_special_tokens = True
    kept = context.rstrip()
    together = tokenizer.encode(context + choice).ids
    n_context = min(len(tokenizer.encode(kept).ids), len(together) - 1)
    prefix = prefix or [0] * (not n_context)  # nothing predicts the first token of a text
    stream, start = [*prefix, *together], len(prefix) + n_context
    total, greedy = 0.0, True
    while start < len(stream):  # windows that end with as many new tokens as fit
        end = min(start + LENGTH, len(stream)) if len(stream) - start > LENGTH else len(stream)
        window = stream[max(end - LENGTH - 1, 0) : end]
        with torch.no_grad():
            found = model(torch.tensor([window[:-1]])).logits[0].double().log_softmax(-1)
        new = end - start
        wanted = torch.tensor(window[-new:])
        total -= float(found[-new:].gather(1, wanted[:, None]).sum())
        greedy = greedy and bool((found[-new:].argmax(-1) == wanted).all())
        start = end
    return total, greedy, len(together) - n_context


@pytest.fixture
def opened(folder: Path) -> Opened:
    return open_model(folder, torch.device("cpu"), torch.float32)


def test_choices_equal_those_of_transformers(
    folder: Path, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likelihoods within 1e-5, and the scores that follow from them."""
    file = jsonl(tmp_path / "choice.jsonl", CHOICE)
    model, prefix = theirs(folder)
    encoder = task_tokens.text_encoder(opened.tokenizer, opened.ends, "a question")
    ready = task_tokens.encode_task(questions.read(str(file)), encoder, task_tokens.Inputs(prefix, [0], LENGTH))
    monkeypatch.setattr(task_scores, "BATCH_TOKENS", 64)
    (ours,) = task_scores._sums_by_choice(opened.model, ready, ALONE)
    assert max(len(some) * len(some[0]) for some in task_scores._batches(ready.windows, 64)) in range(60, 65)
    right = dict.fromkeys(("plain", "per_byte", "per_token"), 0)
    nats_of_right, bytes_of_right, at = 0.0, 0, 0
    for row in CHOICE:
        choices = row["choices"]
        found = []
        for context, choice in zip(row.get("contexts", [row.get("context")] * len(choices)), choices, strict=True):
            nats, _, n_tokens = expected(model, prefix, context, choice)
            assert ours[at] == pytest.approx(nats, abs=1e-5 * max(1.0, nats)), (context, choice)
            assert ready.n_tokens[at] == n_tokens
            found.append((nats, nats / len(choice.encode()), nats / n_tokens))
            at += 1
        for i, metric in enumerate(right):
            right[metric] += int(np.argmin([values[i] for values in found])) == row["answer"]
        nats_of_right += found[row["answer"]][0]
        bytes_of_right += len(choices[row["answer"]].encode())
    assert len(set(right.values())) > 1, "the test can't tell the scores apart"
    given = evaluate.options_of([str(folder), "--tasks", str(file), f"--seq-len={LENGTH}"])
    (scored,) = evaluate.evaluate(given, ALONE)
    figures, n = scored["tasks"]["choice"], len(CHOICE)
    wanted = {metric: count / n for metric, count in right.items()}
    wanted |= {f"{metric}_stderr": math.sqrt(share * (1 - share) / (n - 1)) for metric, share in wanted.items()}
    wanted |= {"score": wanted["plain"], "chance": (1 / 3 + 6 / 2) / 7}
    wanted["bits_per_byte"] = nats_of_right / bytes_of_right / math.log(2)
    assert {key: figures[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
    assert figures["metric"] == "plain"


def test_last_words_equal_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """One of the words is the model's own, so that one is right."""
    model, prefix = theirs(folder)
    context, plain = "the cat sat", bpe()
    with torch.no_grad():
        ids = [*prefix, *plain.encode(context).ids]
        own = next(
            text
            for token in model(torch.tensor([ids])).logits[0, -1].argsort(descending=True).tolist()
            if plain.encode(context + (text := plain.decode([token]))).ids == [*ids[len(prefix) :], token]
        )
    rows = [*WORD, {"context": context, "continuation": own}]
    found = [expected(model, prefix, row["context"], row["continuation"]) for row in rows]
    file = jsonl(tmp_path / "word.jsonl", rows)
    words = str(folder), "--tasks", str(file), f"--seq-len={LENGTH}", f"--json={tmp_path / 'scores.json'}"
    succeeded(ranks(2, *words, entry="torchtitan_lite.tools.evaluation.evaluate"))
    (model_scores,) = json.loads((tmp_path / "scores.json").read_text())["models"]
    figures = model_scores["tasks"]["word"]
    assert figures["score"] == pytest.approx(sum(greedy for _, greedy, _ in found) / 3)
    assert figures["chance"] == 0
    n_bytes = sum(len(row["continuation"].encode()) for row in rows)
    assert figures["bits_per_byte"] == pytest.approx(sum(n for n, *_ in found) / n_bytes / math.log(2), rel=1e-5)
