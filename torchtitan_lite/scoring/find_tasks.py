"""Finds tasks by name: .jsonl files, built-in tasks, and the user's "module:name".

The latter two are functions that make a task from held-out documents of a run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType

from torchtitan_lite.config.paths import problem
from torchtitan_lite.config.registry import Registry
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.token_files import PAIRS, documents
from torchtitan_lite.errors import DataError
from torchtitan_lite.scoring.brackets import brackets
from torchtitan_lite.scoring.questions import Task, read

BUILT_IN: Registry[Callable[[Iterable[str]], Task]] = Registry(
    "eval.tasks", "docs/extending.md", FunctionType, {"brackets": brackets}
)
MOST_DOCUMENTS, MOST_TOKENS = 2000, 1 << 16  # held-out documents read per source, and tokens per document


def find(names: Sequence[str], data: Callable[[], DataSet] | None, n_questions: int = 0) -> list[Task]:
    """Read tasks.

    Args:
        data: opens the run's data, from which built-in tasks are made; None: leave these tasks out.
        n_questions: number per task, drawn at random; 0: all.

    Raises:
        UserError: a task does not exist or can't be read, or two have the same name.
    """
    tasks: dict[str, Task] = {}
    for task in filter(None, (_task(name, data) for name in names)):
        if task.name in tasks:
            raise DataError(f"two tasks are called {task.name}; rename one of the files, or name each task once")
        tasks[task.name] = task.subset(n_questions)
    return list(tasks.values())


def _task(name: str, data: Callable[[], DataSet] | None) -> Task | None:
    BUILT_IN.add(name)
    if make := BUILT_IN.get(name):
        return make(held_out_documents(name, data())) if data else None
    if name.endswith(".jsonl") or not problem(name):
        return read(name)
    raise DataError(f"no task {name}: give a .jsonl file (docs/tasks.md), or {', '.join(BUILT_IN)}")


def held_out_documents(name: str, data: DataSet) -> Iterator[str]:
    """Yield held-out documents for a built-in task, evenly spaced in each source.

    Raises:
        DataError: the data is damaged, or holds pairs.
    """
    tokenizer = bpe.load(data.folder / "tokenizer.json")
    for source in data.sources:
        if PAIRS in source.meta.files:
            raise DataError(f"task {name}: {source.name} holds pairs, and the task is made from text")
        step = -(-source.meta.val_documents // MOST_DOCUMENTS)
        for tokens in documents(source.folder, source.meta, "val", step, MOST_TOKENS):
            yield tokenizer.decode(tokens, skip_special_tokens=False)
