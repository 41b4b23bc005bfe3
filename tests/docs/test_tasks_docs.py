"""docs/tasks.md: its commands run, and its examples are questions."""

import re
import shlex
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.docs.pages import blocks, commands
from tests.helpers import ROOT, checkpoint, ranks, records, succeeded, tiny
from torchtitan_lite.scoring import questions

PAGE = (ROOT / "docs/tasks.md").read_text()
COMMANDS = [shlex.split(line) for line in commands(PAGE)]
EXAMPLES = "".join(blocks(PAGE, "json")).splitlines()


def test_a_published_set_becomes_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the columns of ARC, where some labels are numbers."""
    choices = [{"text": ["ice", "steam"], "label": ["A", "B"]}, {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}]
    columns = {"id": ["a", "b"], "question": ["Hot?", "Last?"], "choices": choices, "answerKey": ["B", "3"]}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ARC-Easy").mkdir()
    parquet.write_table(pyarrow.table(columns), "ARC-Easy/test-00000-of-00001.parquet")
    (code,) = blocks(PAGE, "python")
    exec(code, {})
    task = questions.read("arc_easy.jsonl")
    assert (task.name, task.kind, task.main) == ("arc_easy", "multiple choice", "per_byte")
    assert task.questions == [
        questions.Question(("Question: Hot?\nAnswer:",) * 2, (" ice", " steam"), 1),
        questions.Question(("Question: Last?\nAnswer:",) * 3, (" x", " y", " z"), 2),
    ]


@pytest.mark.extended
def test_each_command_runs(finished: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "my_task.jsonl").write_text("\n".join(line for line in EXAMPLES if "choices" in line) + "\n")
    places = {"my_task.jsonl": str(tmp_path / "my_task.jsonl")}
    places |= {"runs/default": str(finished), "runs/mine": str(checkpoint(finished, 2))}
    places["scores.json"] = str(tmp_path / "scores.json")
    run = 0
    for words in COMMANDS:
        if words[1] == "examples/lm_eval_model.py":
            continue  # tests/examples/test_lm_eval.py runs it
        n, words = (2, words[3:]) if words[0] == "torchrun" else (1, words[1:])
        words = [places.get(word, re.sub("=my_task.jsonl", f"={places['my_task.jsonl']}", word)) for word in words]
        if words[0] == "train.py":
            succeeded(
                ranks(n, *words[1:], *tiny(text, tmp_path, run__name="train", train__steps=2, optim__warmup_steps=1))
            )
            assert any("task/my_task" in record for record in records(tmp_path / "train"))
        else:
            assert words[:2] == ["-m", "torchtitan_lite.evaluate"]
            said = succeeded(ranks(n, *words[2:], entry="torchtitan_lite.tools.evaluation.evaluate"))
            assert "bits/byte of the right answers" in said
        run += 1
    assert run == 4
