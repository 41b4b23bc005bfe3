"""Scores, recorded: encoded questions, the likelihoods of a fixed model, figures, lines, and messages of bad tasks.

Nothing else holds: digests and subsets of questions, those made from brackets, the lines of a validation, and most
messages on bad files; read their diffs. Likelihoods and scores are those of transformers in test_tasks.py.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.test_recorded_data import PAIR, SHORT, TOKENIZERS, jsonl, lines, said, table
from tests.helpers import run_distributed
from tests.recorded import assert_recorded
from torchtitan_lite.config.schema import Config, ModelConfig
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring import find_tasks, questions, task_scores, task_tokens
from torchtitan_lite.scoring.brackets import _closing, brackets
from torchtitan_lite.scoring.questions import Question, Task
from torchtitan_lite.scoring.statistics import plus_minus
from torchtitan_lite.scoring.task_tokens import Inputs
from torchtitan_lite.scoring.validation import Validation, eval_line, evaluate

RECORD = Path(__file__).parent
ALONE = Process(0, 1, torch.device("cpu"), 1)
CHOICES: list[dict[str, Any]] = [
    {"context": "a river of", "choices": [" stone", " light grün", " 東京"], "answer": 1},
    {"context": "the house ", "choices": ["tree", "boxes"], "answer": 0, "id": 7},
    {"context": "call f(", "choices": [")", "x)"], "answer": 0, "meta": {"a": 1}},
    {"contexts": ["small", "", "yes,\n "], "choices": [" house", " house", "no"], "answer": 2},
    {"context": "a river of stone " * 5, "choices": [" light", "  end."], "answer": 1},
    {"context": "ok", "choices": [" a very long choice of " + "house " * 6, " no"], "answer": 0},
    {"context": "small", "choices": [" x", " river", " box river stone"], "answer": 1},  # a token of six bytes
    {"context": "of", "choices": [" stone", " river"], "answer": 0},
    {"context": "<|endoftext|> is text", "choices": [" a", " b", " c", " d"], "answer": 3},
]
LAST: list[dict[str, Any]] = [
    {"context": "a river of stone", "continuation": " light"},
    {"context": "", "continuation": "house"},
    {"context": "über ", "continuation": " grün"},
    {"context": "small " * 9, "continuation": " box" * 8},
    {"context": "o", "continuation": "o"},
    {"context": "a river of", "continuation": "5"},  # the likeliest tokens of the model below
    {"context": "the house of light", "continuation": "55"},
    {"context": "the house of light", "continuation": "5x"},
]
TASKS: dict[str, list[dict[str, Any]]] = {
    "choices": CHOICES,
    "per_byte": [{"score": "per_byte"}, *CHOICES[:5]],
    "one": [{"score": "per_token"}, CHOICES[2]],
    "last": LAST,
    "accurate": [{"score": "accuracy"}, *LAST[1:3]],
}


@torch.no_grad()
def fixed_model(vocab_size: int, family: str = "gpt") -> Transformer:
    """Weights by formula: no random numbers."""
    model = build(ModelConfig(family=family, dim=16, n_layers=1, n_heads=2, max_seq_len=64), vocab_size)
    for number, parameter in enumerate(model.parameters()):
        angles = torch.arange(parameter.numel(), dtype=torch.float64) * (0.7 + number / 10) + number
        parameter.copy_(
            (torch.sin(angles * angles * 0.01 + angles) * 0.5 + (parameter.dim() == 1) * 0.8).view(parameter.shape)
        )
    return model.eval()


def asked(tasks: list[Task]) -> list[str]:
    """Names and questions, the latter by the last characters of the first context."""
    lines = [f"..{q.contexts[0][-24:]} {q.choices} {q.answer}" for task in tasks for q in task.questions]
    return [*(f"{task.name}, {len(task.questions)} questions, {task.main}" for task in tasks), *lines]


def find_asked(names: list[str], data: DataSet | None, n: int) -> list[str]:
    return asked(find_tasks.find(names, (lambda: data) if data else None, n))


def numbers(values: Any) -> str:
    return " ".join(f"{value:.4f}" for value in np.atleast_1d(values).tolist())


def windows_of(encoded: task_tokens.Encoded) -> list[str]:
    lines = [f"{w.item}: {' '.join(map(str, w.ids.tolist()))}, {w.known} known" for w in encoded.windows]
    return [*lines, f"tokens {encoded.n_tokens.tolist()}, bytes {encoded.n_bytes.tolist()}"]


def encoded_windows(task: Task, encode: task_tokens.Encode, inputs: Inputs) -> list[str]:
    return windows_of(task_tokens.encode_task(task, encode, inputs))


def scored(model: Transformer, encoded: task_tokens.Encoded) -> list[str]:
    score = task_scores.score(model, encoded, ALONE)
    figures, task = score.figures(), encoded.task
    return [
        f"{task.kind}, {task.main}, {len(task.questions)} questions, chance {task.chance:.4f}",
        *(f"{name}: {' '.join(map(str, values.tolist()))}" for name, values in score.correct.items()),
        f"nats {numbers(score.nats)}",
        f"bytes {numbers(score.n_bytes)}",
        *(f"{name} {value:.5f}" for name, value in figures.items() if not name.endswith("_stderr")),
        *(
            f"{name}: {plus_minus(figures[name], figures[f'{name}_stderr'], 3)}"
            for name in figures
            if f"{name}_stderr" in figures
        ),
    ]


def test_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_scores, "BATCH_TOKENS", 40)
    found: dict[str, Any] = {}
    trained = TOKENIZERS["trained"]()
    # the tokens before a context, and those instead of none
    inputs = {
        "choices": ([0], [0]),
        "per_byte": ([], [3]),
        "one": ([5, 0], []),
        "last": ([], [0]),
        "accurate": ([0], []),
    }
    for name, rows in TASKS.items():
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(*rows))
        task = questions.read(str(tmp_path / f"{name}.jsonl"))
        encode = task_tokens.text_encoder(trained, [0], "a question")
        prefix, alone = inputs[name]
        encoded = task_tokens.encode_task(task, encode, Inputs(prefix, alone, 24))
        batches = task_scores._batches(encoded.windows, 40)
        found[name] = {
            "digest": task.digest,
            "other digests": [replace(task, metric="plain", kind=kind).digest for kind in questions.METRICS],
            "windows": windows_of(encoded),
            "batches": [" ".join(f"{w.item}:{len(w)}" for w in batch) for batch in batches],
            "scores": scored(fixed_model(270), encoded),
            "subsets": [str([task.questions.index(q) for q in task.subset(n).questions]) for n in (0, 1, 3, 5, 9, 10)],
        }
    model, encode = fixed_model(270), task_tokens.text_encoder(trained, [0], "a question")
    model.norm.weight.data.fill_(math.nan)  # type: ignore[operator]
    for kind, question in (
        ("multiple choice", Question(("a",) * 2, (" b", " c"))),
        ("last word", Question(("a",), ("b",))),
    ):
        task = Task("task", kind, [question])  # type: ignore[arg-type]
        found[f"{kind}, not finite"] = scored(model, task_tokens.encode_task(task, encode, Inputs([0], [0], 24)))
    task, cases = questions.read(str(tmp_path / "last.jsonl")), {}
    for name, tokenizer, ends, given in (
        ("no context", "trained", [0], Inputs([], [], 24)),
        ("an end inside", "not_special", [0, 257], Inputs([0], [0], 24)),
        ("unknown", "words", [1], Inputs([0], [0], 24)),
        ("drops", "drops", [20], Inputs([0], [0], 24)),
    ):
        words = Task("end", "last word", [Question(("a",), ("中</s>" + "x" * 60,)), *task.questions])
        of = words if "end" in name or name == "drops" else task
        encoder = task_tokens.text_encoder(TOKENIZERS[tokenizer](), ends, "a question of the task")
        cases[name] = said(tmp_path, encoded_windows, of, encoder, given)
    dropped = Task("dropped", "last word", [Question(("a",), ("a",)), Question(("",), ("中",))])
    encoder = task_tokens.text_encoder(TOKENIZERS["drops"](), [20], "it")
    cases["dropped"] = said(tmp_path, encoded_windows, dropped, encoder, Inputs([], [20], 9))
    wrong: list[tuple[Any, ...]] = [
        ((), (), 0),
        (("a",), ("b", "c"), 0),
        (("a",), ("",), 0),
        (("a",), ("b",), 1),
        (("a",), ("b",), -1),
    ]
    cases["questions"] = [said(tmp_path, Question, *one) for one in wrong]
    assert_recorded(found | {"cases": cases}, RECORD / "recorded_tasks.json")


GOOD = json.dumps(CHOICES[2])
FILES: list[str | bytes] = [
    "",
    "\n \n",
    '{"score": "f1"}\n' + GOOD,
    '{"score": "accuracy"}\n' + GOOD,
    '{"score": "plain"}\n{"context": "a", "continuation": "b"}',
    '{"score": "plain"}\n',
    GOOD + '\n{"score": "plain"}',
    "\ufeff" + GOOD + "\r\n{",
    *(f"{GOOD}\n\n{line}" for line in ("[1]", "5", "null", '"choices"')),
    b'{"context": "\xff"}',
    "[" * 500,
    *(json.dumps({"context": "a", **more}) for more in (
        {},
        {"choices": ["b"], "answer": 0},
        {"choices": ["b", ""], "answer": 0},
        {"choices": ["b", 1], "answer": 0},
        {"choices": "bc", "answer": 0},
        {"choices": ["b", "c"], "answer": 2},
        {"choices": ["b", "c", "d"], "answer": -1},
        {"choices": ["b", "c"], "answer": True},
        {"choices": ["b", "c"], "answer": "0"},
        {"choices": ["b", "c"]},
        {"choices": ["b" * 90, "c", "b" * 90], "answer": 2},
        {"choices": ["b", "c", "c"], "answer": 0},
        {"contexts": ["a", "b"], "choices": ["b", "c"], "answer": 0},
        {"continuation": "b", "choises": ["b"]},
        {"continuation": " "},
        {"continuation": ""},
        {"continuation": 3, "context": None},
        {"continuation": "b", "choices": ["b", "c"], "answer": 0},
        {"choices": ["b", "c"], "answer": 0, "more": "x" * 90},
    )),
    '{"choices": ["b", "c"], "answer": 0}',
    '{"contexts": ["a"], "choices": ["b", "c"], "answer": 0}',
    '{"contexts": ["a", "b", "c"], "choices": ["b", "b"], "answer": 0}',
    '{"contexts": ["a", "d"], "choices": ["b", "b"], "answer": 1, "id": 3}',
    '{"continuation": "b"}',
    '{"context": "\\ud800", "continuation": "b"}',
    GOOD + '\n{"context": "a", "continuation": "b"}',
    '{"context": "a", "continuation": "b"}\n' + GOOD,
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of text with brackets, of words with another tokenizer, and of pairs."""
    folder = tmp_path_factory.mktemp("scoring")
    code = [f"{line} f(x, {i}) and [a, b{i}] or {{c: {i}}} (" for i, line in enumerate(lines(40, 6, seed=30))]
    (folder / "code.jsonl").write_bytes(jsonl(text=code))
    (folder / "words.jsonl").write_bytes(jsonl(text=SHORT))
    (folder / "pairs.csv").write_bytes(table(",", **PAIR))
    for name, make in TOKENIZERS.items():
        make().save(str(folder / f"{name}.json"))
    for command in (
        "code.jsonl --tokenizer @/trained.json --out @/code --val-fraction 0.5",
        "words.jsonl --tokenizer @/trained.json --out @/words --val-fraction 0.4",
        "pairs.csv --tokenizer @/t5.json --source-key text --target-key headline --out @/pairs --val-fraction 0.5",
    ):
        assert main(f"@/{command}".replace("@", str(folder)).split()) == 0
    return folder


def test_finding_tasks(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    for number, content in enumerate(FILES):
        file = tmp_path / "a.b.jsonl"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        shown = content if isinstance(content, str) else content.decode(errors="replace")
        found[f"{number} {shown[:60]}"] = said(tmp_path, questions.read, str(file))
    (tmp_path / "folder.jsonl").mkdir()
    for name, rows in TASKS.items():
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(*rows))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/one.jsonl").write_bytes(jsonl(*TASKS["one"]))
    data = {
        "code": DataSet.open({"code": (1, prepared / "code")}),
        "words": DataSet.open({"words": (1, prepared / "words")}),
        "both": DataSet.open({"words": (1, prepared / "words"), "code": (2, prepared / "code")}),
        "pairs": DataSet.open({"code": (1, prepared / "pairs")}),
    }
    monkeypatch.setattr(find_tasks, "MOST_DOCUMENTS", 7)
    monkeypatch.setattr(find_tasks, "MOST_TOKENS", 60)
    names = [
        *(
            ["nosuch"],
            ["nosuch.jsonl"],
            ["@/folder.jsonl"],
            ["@/none/a.jsonl"],
            ["json:JSONDecoder"],
            ["json:none"],
            ["@/sub"],
        ),
        *(["@/one.jsonl", "@/sub/one.jsonl"], ["@/one.jsonl", "@/last.jsonl", "brackets"], ["brackets", "brackets"]),
    ]
    for words in names:
        given = [word.replace("@", str(tmp_path)) for word in words]
        found[" ".join(words)] = said(tmp_path, find_asked, given, None, 2)
    for name, source in data.items():
        for n in (0, 4):
            found[f"{n} brackets of {name}"] = said(tmp_path, find_asked, ["brackets"], source, n)
        found[f"held out of {name}"] = said(
            tmp_path, lambda data: [text[-30:] for text in find_tasks.held_out_documents("x", data)], source
        )
    text = f"()(a)({'x' * 99})({'x' * 100})[)](b){{c d}} ((e)f) [g(h]i) "
    found["closing"] = str([*_closing(text)])
    many = brackets([text + f"f({i}) and [{i}, {i + 1}] or {{{i}: 3}}" for i in range(90)])
    found["many"] = [many.digest, f"{many.chance:.4f}", *asked([many])[::33]]
    found["few"] = [said(tmp_path, brackets, ["f(x) [y] " * n + "f(x) {z}"]) for n in (1, 4)]
    assert_recorded(found, RECORD / "recorded_finding.json")


VALIDATIONS: dict[str, dict[str, Any]] = {
    "code": {"train": {"seq_len": 16}, "eval": {"samples": 7}},
    "all of it": {"train": {"seq_len": 24}, "eval": {"samples": 1000}},
    "one": {"train": {"seq_len": 16}, "eval": {"samples": 1}},
    "mask": {"train": {"seq_len": 30}, "eval": {"samples": 6}, "data": {"document_mask": True}},
    "best_fit": {
        "train": {"seq_len": 30},
        "eval": {"samples": 6},
        "data": {"packing": "best_fit", "document_mask": True},
    },
    "mixture": {"train": {"seq_len": 12}, "eval": {"samples": 9}},
    "pairs": {"train": {"seq_len": 14}, "eval": {"samples": 5}, "data": {"objective": "pairs", "target_len": 9}},
}


def validated(process: Process, folder: Path) -> dict[str, Any]:
    """The scores of each validation, and what this rank has of it."""
    found: dict[str, Any] = {}
    for name, values in VALIDATIONS.items():
        sources = {"code": (1.0, folder / ("pairs" if name == "pairs" else "code"))}
        if name == "mixture":
            sources["words"] = 0.5, folder / "words"
        data = DataSet.open(sources)
        config = Config.model_validate({**values, "model": {"family": "gpt", "max_seq_len": 64}})
        validation = Validation.from_config(config, data, 2, process.rank, process.world_size)
        score = evaluate(fixed_model(data.vocab_size), validation, torch.device("cpu"))
        again = evaluate(fixed_model(data.vocab_size), validation, torch.device("cpu"))
        rows = [f"{row[row != IGNORE].tolist()}" for micro in validation.micro_batches() for row in micro.targets]
        found[name] = {
            "description": str(validation.description()),
            "record": [
                f"{key} {value if value is None else format(value, '.5f')}" for key, value in score.record().items()
            ],
            "line": eval_line(12, score, validation, 2.349, best=name == "mask"),
            "numbers": str(validation.numbers().tolist()),
            "targets": [rows[0], rows[-1], str(len(rows))],
        }
        assert repr(score) == repr(again)
    return found


def test_validations_on_two_ranks(prepared: Path) -> None:
    one, other = run_distributed(validated, 2, prepared)
    own = {name: {key: value for key, value in other[name].items() if value != one[name].get(key)} for name in one}
    assert_recorded({"rank 0": one, "what differs on rank 1": own}, RECORD / "recorded_validation.json", rel=1e-3)
