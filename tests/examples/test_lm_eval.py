"""examples/lm_eval_model.py: lm-eval scores a run on the task of docs/tasks.md, offline."""

import functools
import json
import random
from pathlib import Path

import pytest
import torch

from tests.docs.pages import blocks
from tests.helpers import ROOT
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.tools.evaluation import evaluate

ALONE = Process(0, 1, torch.device("cpu"), 1)


def test_the_scores_of_a_task_are_those_of_evaluate(
    finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and the YAML of the page: acc is the score `plain`, and acc_norm `per_byte` of ASCII."""
    # here: each worker would spend a second on them to collect the tests
    from lm_eval.tasks import TaskManager

    from examples import lm_eval_model

    source, chance = (text / "argparse.txt").read_text(), random.Random(0)
    assert source.isascii()
    rows = []
    for _ in range(60):  # some contexts are longer than the window of 32 tokens
        at, n = chance.randrange(500, len(source) - 500), chance.choice((10, 40, 400))
        choices = [source[at : at + 9], *(source[i : i + 3 * n % 25 + 2] for i in chance.sample(range(9999), 2))]
        chance.shuffle(choices)
        answer = choices.index(source[at : at + 9])
        rows.append({"context": source[at - n : at], "choices": choices, "answer": answer})
    file = tmp_path / "my_task.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = blocks((ROOT / "docs/tasks.md").read_text(), "yaml")
    task = task.replace("my_task.jsonl", str(file)).replace(
        "data_files:", f"cache_dir: {tmp_path / 'cache'}\n  data_files:"
    )
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/my_task.yaml").write_text(task)
    # the thousands of tasks that come with lm-eval would be read as well
    only = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval_model, "TaskManager", only)
    found = lm_eval_model.main([str(finished), "--tasks=my_task", f"--include-path={tmp_path / 'tasks'}"])["results"][
        "my_task"
    ]
    (ours,) = evaluate.evaluate(evaluate.options_of([str(finished), "--tasks", str(file)]), ALONE)
    expected = ours["tasks"]["my_task"]
    assert expected["plain"] != expected["per_byte"], "the test can't tell the scores apart"
    assert found["acc,none"] == pytest.approx(expected["plain"])
    assert found["acc_norm,none"] == pytest.approx(expected["per_byte"])
