"""[eval] tasks: scored during training, the same on any number of ranks and after a resume, and without any effect."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import assert_same_end, ranks, records, refused, succeeded, tiny
from tests.scoring.test_tasks import CHOICE, WORD, jsonl
from torchtitan_lite.tools.report.runs import read_run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A task of each kind, as a TOML list."""
    folder = tmp_path_factory.mktemp("tasks")
    kinds = {"choice": CHOICE, "word": WORD}
    return json.dumps([str(jsonl(folder / f"{name}.jsonl", rows)) for name, rows in kinds.items()])


def scores(run: Path) -> dict[int, dict[str, Any]]:
    """The records of tasks by step, without times."""
    found: dict[int, dict[str, Any]] = {}
    for record in records(run):
        values = {key: value for key, value in record.items() if key.startswith("task") and key != "task_s"}
        if values:
            assert not values.keys() & found.get(record["step"], {}).keys(), "recorded twice"
            found.setdefault(record["step"], {}).update(values)
    return found


def test_tasks_are_scored_and_training_is_the_same_bits(text: Path, files: str, tmp_path: Path) -> None:
    """On two ranks that shard, with dropout, and with the options that decide when parameters are gathered.

    Also with a tied head, and with averaged weights.
    """
    more: dict[str, Any] = {
        **{"fsdp__explicit_prefetching": "true", "fsdp__reshard_after_forward": "false", "model__dropout": 0.1},
        **{"model__tie_embeddings": "true", "optim__ema_decay": 0.9},
        **{"train__steps": 5, "checkpoint__every": 5, "eval__every": 0},
    }
    wanted = {"eval__tasks": files, "eval__tasks_every": 2}
    said = succeeded(ranks(2, *tiny(text, tmp_path, run__name="tasks", **more, **wanted)))
    succeeded(ranks(2, *tiny(text, tmp_path, run__name="none", **more)))
    assert_same_end(tmp_path / "tasks", tmp_path / "none", 5)
    found = scores(tmp_path / "tasks")
    assert found.keys() == {2, 4, 5}
    stated = f"choice  {found[5]['task/choice']:.3f} +- {found[5]['task_stderr/choice']:.3f}  (chance 0.476; 7 "
    assert f"task    step 5  {stated}" in said
    assert scores(tmp_path / "none") == {}

    # a resume names the task whose file was replaced, and records it
    for file in json.loads(files):
        shutil.copy(file, tmp_path)
    jsonl(tmp_path / "choice.jsonl", [*CHOICE[1:], CHOICE[0]])
    wanted["eval__tasks"] = files.replace(str(Path(json.loads(files)[0]).parent), str(tmp_path))
    said = succeeded(ranks(2, *tiny(text, tmp_path, run__name="tasks", **more | {"train__steps": 6}, **wanted)))
    (line,) = (line for line in said.splitlines() if "different questions" in line)
    assert "eval.tasks choice has different questions: do not compare its scores with those of earlier steps" in line
    changed = {key: (before, now) for _, key, before, now in read_run(tmp_path / "tasks").changes}
    before, now = changed["eval.tasks choice"]
    assert before != now
    assert "eval.tasks word" not in changed


def test_wrong_tasks_are_found_before_the_run(text: Path, tmp_path: Path) -> None:
    bad = jsonl(tmp_path / "bad.jsonl", [CHOICE[0], {"context": "a"}])
    said = "line 2: no known kind of question"
    refused(ranks(1, *tiny(text, tmp_path, eval__tasks=bad), "--check-config"), said)
