"""Scores the [eval] tasks during training, at an interval and at the end.

Scoring does not change training: it draws no random numbers, and parameters are resharded afterwards.
"""

import math
import time
from dataclasses import dataclass

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.evaluating import generating
from torchtitan_lite.distributed.exchange import gather
from torchtitan_lite.errors import DataError, UserError
from torchtitan_lite.run.session import Session
from torchtitan_lite.scoring.find_tasks import find
from torchtitan_lite.scoring.questions import METRICS
from torchtitan_lite.scoring.statistics import plus_minus
from torchtitan_lite.scoring.task_scores import TaskScore, score
from torchtitan_lite.scoring.task_tokens import Encoded, Inputs, encode_task, text_encoder


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run, encoded."""

    encoded: list[Encoded]
    digests: dict[str, str]  # by task: a hash of its questions

    @classmethod
    def from_config(cls, config: Config, data: DataSet) -> "Tasks | None":
        """Read and encode the tasks; None if the default text has too few brackets. Collective.

        Raises:
            UserError: a task can't be read, does not suit the model, or differs from rank 0's.
        """
        tasks = []
        try:
            tasks = find(config.tasks, lambda: data, config.eval.task_questions)
        except DataError:
            if config.eval.tasks != ["auto"]:
                raise
        digests = {task.name: task.digest for task in tasks}
        if any(other != digests for other in gather(digests)):
            raise DataError("eval.tasks: the ranks have read different questions: is it the same file everywhere?")
        if not tasks:
            return None
        inputs = Inputs([data.sources[0].meta.marks[-1]], [], config.input_len)
        encode = text_encoder(bpe.load(data.folder / "tokenizer.json"), (data.end_token,), "a question")
        return cls([encode_task(task, encode, inputs) for task in tasks], digests)

    def score(self, s: Session) -> None:
        """Score, log and record all tasks. Collective."""
        step, model, log, before = s.state.step, s.model, s.log, time.perf_counter()
        with generating(model, s.config.fsdp, s.process.device):
            scores = [score(model, task, s.process) for task in self.encoded]
        seconds = time.perf_counter() - before
        for task_score in scores:
            log.record({"step": step, **record(task_score)})
            log.info(f"task    step {step}  {line(task_score)}")
        log.record({"step": step, "task_s": seconds})


def record(task_score: TaskScore) -> dict[str, float | None]:
    """Return a record for metrics.jsonl: the main score first."""
    name, figures = task_score.task.name, task_score.figures()
    figures = {"score": figures.pop("score"), **figures}
    short = {"score": "task", "score_stderr": "task_stderr"}
    return {
        f"{short.get(key, f'task_{key}')}/{name}": value if math.isfinite(value) else None
        for key, value in figures.items()
    }


def line(task_score: TaskScore) -> str:
    """Format the score of a task for the log."""
    figures, task = task_score.figures(), task_score.task
    others = [f"{key.replace('_', ' ')} {figures[key]:.3f}" for key in METRICS[task.kind] if key != task.main]
    notes = [f"chance {task.chance:.3f}", f"{len(task.questions)} questions", *others]
    return f"{task.name}  {plus_minus(figures['score'], figures['score_stderr'], 3)}  ({'; '.join(notes)})"


def wrong_tasks(config: Config) -> dict[str, str]:
    """Return the problems of [eval] tasks, by key, except those that need the data."""
    if FAMILIES[config.model.family].encoder_decoder:
        return {"eval.tasks": f"eval.tasks: tasks are for decoders, not {config.model.family}; eval.tasks = [] works"}
    try:
        find(config.tasks, None)
    except UserError as error:
        return {"eval.tasks": f"eval.tasks: {error}"}
    return {}
