"""The tables of `evaluate`, and its --json: scores whose figures can be computed by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from torchtitan_lite.scoring.questions import Question, Task
from torchtitan_lite.scoring.statistics import Array
from torchtitan_lite.scoring.task_scores import TaskScore
from torchtitan_lite.tools.evaluation.documents import Scores
from torchtitan_lite.tools.evaluation.tables import Scored, compare_with_first


def of(*values: float) -> Array:
    return np.array(values)


NEWS = Scores(of(20, 30, 70), of(10, 10, 30), of(40, 50, 110), of(1, 2, 3), seq_len=1024)
SAME = replace(NEWS, nats=of(22, 31, 75))
CODE = Scores(of(22, 31), of(10, 10), of(40, 50), of(1, 4), seq_len=16)
CHOICES = [Question(("a",) * n, ("b", "c", "d", "e")[:n], answer) for n, answer in ((2, 0), (4, 1), (2, 1))]
QUIZ, WORDS = Task("quiz", "multiple choice", CHOICES, "per_byte"), [Question(("a",), ("b",))] * 3
NATS = of(3, 4, 5), of(4, 4, 8)
FIRST_QUIZ = TaskScore(QUIZ, {"plain": of(1, 0, 0), "per_byte": of(1, 1, 0), "per_token": of(0, 0, 0)}, *NATS)
SECOND_QUIZ = replace(FIRST_QUIZ, correct=FIRST_QUIZ.correct | {"per_byte": of(1, 0, 0)})
WORD = TaskScore(Task("word", "last word", WORDS), {"accuracy": of(1, 0, 1)}, *NATS)
OTHER_WORD = TaskScore(Task("word", "last word", WORDS[:1]), {"accuracy": of(0)}, of(3), of(4))
FIRST = Scored("first", {"news": NEWS, "code": CODE}, {"quiz": FIRST_QUIZ, "word": WORD}, 1024, "x")
# the same documents as the first model's news, as other tokens, and others
TEXTS = {"web": SAME, "more": replace(SAME, tokens=of(11, 10, 30)), "gone": replace(CODE, hashes=of(8, 9))}
SECOND = Scored("second", TEXTS, {"quiz": SECOND_QUIZ, "word": OTHER_WORD, "new": WORD}, 512, "y")
LINES = """\
  text  documents  window  tokens        nats/token         bits/byte  perplexity
  news          3    1024      50  2.4000 +- 0.1833  0.8656 +- 0.0500       11.02
  code          2      16      20  2.6500 +- 0.4500  0.8496 +- 0.0499       14.15
  task  questions  window        accuracy         per byte       per token  chance  bits/byte of the right answers
  quiz          3    1024  0.333 +- 0.333  0.667 +- 0.333*  0.000 +- 0.163   0.417                  1.082 +- 0.156
  word          3    1024  0.667 +- 0.333                -               -   0.000                  1.082 +- 0.156
  *: the main score of the task"""
COMPARED = """\
  text  documents  window  tokens        nats/token         bits/byte  perplexity
  web           3    1024      50  2.5600 +- 0.1650  0.9233 +- 0.0524       12.94
  more          3    1024      51  2.5098 +- 0.1956  0.9233 +- 0.0524       12.30
  gone          2      16      20  2.6500 +- 0.4500  0.8496 +- 0.0499       14.15
  task  questions  window        accuracy         per byte       per token  chance  bits/byte of the right answers
  quiz          3     512  0.333 +- 0.333  0.333 +- 0.333*  0.000 +- 0.163   0.417                  1.082 +- 0.156
  word          1     512           0.000                -               -   0.000                           1.082
  new           3     512  0.667 +- 0.333                -               -   0.000                  1.082 +- 0.156
  *: the main score of the task
  minus first, web: 0.1600 +- 0.0183 nats/token, 0.0577 +- 0.0109 bits/byte
  minus first, more: 0.0577 +- 0.0109 bits/byte
  no difference to first, gone: the two were scored on different documents; --data TEXT scores both on the same text
  minus first, quiz: -0.333 +- 0.333
  no difference to first, word: the two were asked different questions
  (the tokenizers differ, so windows of equal length hold different amounts of text)"""
TEXT: dict[str, Any] = {"documents": 3, "seq_len": 1024, "tokens": 50, "bytes": 200, "loss": 2.4, "perplexity": 11.0231}
TEXT |= {"loss_stderr": 0.1833030, "bits_per_byte": 0.8656170, "bits_per_byte_stderr": 0.0499764}
WORDS_JSON: dict[str, Any] = {"kind": "last word", "metric": "accuracy", "questions": 3, "chance": 0, "seq_len": 512}
WORDS_JSON |= {"score": 2 / 3, "score_stderr": 1 / 3, "accuracy": 2 / 3, "accuracy_stderr": 1 / 3}
WORDS_JSON |= {"bits_per_byte": 1.0820213, "bits_per_byte_stderr": 0.1561763}
QUIZ_SCORES = {
    "score": 1 / 3,
    "score_stderr": 1 / 3,
    "per_byte": 1 / 3,
    "plain": 1 / 3,
    "per_token": 0,
}


def test_the_lines_and_records_of_two_models() -> None:
    lines, record = compare_with_first(FIRST, None)
    assert "\n".join(lines) == LINES
    assert record.keys() == {"model", "texts", "tasks"}
    assert record["model"] == "first"
    assert record["texts"]["news"] == pytest.approx(TEXT, rel=1e-5)
    lines, record = compare_with_first(SECOND, FIRST)
    assert "\n".join(lines) == COMPARED
    assert record["minus_first"].keys() == {"web", "more"}
    assert record["minus_first"]["more"].keys() == {"bits_per_byte", "bits_per_byte_stderr"}
    assert record["minus_first"]["web"]["loss"] == pytest.approx(0.16)
    assert record["tasks_minus_first"] == {"quiz": pytest.approx({"score": -1 / 3, "score_stderr": 1 / 3})}
    expected = {k: v if isinstance(v, str) else pytest.approx(v, rel=1e-5) for k, v in WORDS_JSON.items()}
    assert record["tasks"]["new"] == expected
    assert record["tasks"]["quiz"]["metric"] == "per_byte"
    assert {key: record["tasks"]["quiz"][key] for key in QUIZ_SCORES} == pytest.approx(QUIZ_SCORES)
    alone = replace(SECOND, texts={"a": CODE}, tasks={}, tokenizer="x")
    lines, record = compare_with_first(alone, replace(FIRST, tasks={}))
    assert record.keys() == {"model", "texts", "minus_first"}
    assert lines[2:] == ["  minus first, a: 0.0000 +- 0.0000 nats/token, 0.0000 +- 0.0000 bits/byte"]
    huge = replace(CODE, nats=of(1e5, 1e5), n_bytes=of(0, 0))
    assert compare_with_first(replace(alone, texts={"a": huge}), None)[0][1].split()[4:] == [
        "10000.0000",
        "+-",
        "0.0000",
        "nan",
        f"{np.exp(700):,.2f}",
    ]
