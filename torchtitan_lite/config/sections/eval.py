"""[eval]: validation and tasks."""

from typing import Annotated

from pydantic import NonNegativeInt, PositiveInt

from torchtitan_lite.config.section import IS_PATH, Every, Section, UsedIf

_WITH_TASKS = UsedIf("tasks", "eval.tasks")


class EvalConfig(Section):
    every: Every = 100
    """validate every N steps and at the end; "epoch": after each epoch; 0: never"""
    samples: Annotated[PositiveInt, UsedIf("eval.every", "eval.every above 0")] = 128
    """validation sequences, drawn at random from the held-out text; the same at every step and in every run"""
    tasks: Annotated[list[str], IS_PATH] = ["auto"]
    """tasks to score: .jsonl files or "brackets"; auto: "brackets" on the default text, else none"""
    tasks_every: Annotated[Every, _WITH_TASKS] = 0
    """score the tasks every N steps and at the end; "epoch": after each epoch; 0: only at the end"""
    task_questions: Annotated[NonNegativeInt, _WITH_TASKS] = 0
    """questions per task, drawn at random, the same at every step; 0: all"""
