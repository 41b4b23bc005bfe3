"""The scores of tasks on the report: lines with error bars, chance levels, and tiles."""

import html
from typing import Any

from torchtitan_lite.tools.report.runs import TASK, Records, Run

_TILES = 6  # of a run
_COLOURS = ("#b279a2", "#54a24b", "#f58518", "#4c78a8", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")


def names(runs: list[Run]) -> list[str]:
    """The tasks of all runs."""
    return list(
        dict.fromkeys(key[len(TASK[0]) :] for run in runs for r in run.tasks for key in r if key[:5] == TASK[0])
    )


def lines(runs: list[Run]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """The lines of the figure, see `page.lines_figure`."""
    dashes = ("solid", "dash", "dot")
    return [
        ("tasks", TASK[0] + name, name, {"color": _COLOURS[i % 8], "dash": dashes[i % 3], "errors": TASK[1] + name})
        for i, name in enumerate(names(runs))
    ]


def error_bars(records: Records, key: str, steps: list[int], colour: str) -> dict[str, Any]:
    """What a trace gets: an error bar at each of its steps."""
    errors = {r["step"]: r.get(key) for r in records if key in r}
    bars = {
        "type": "data",
        "array": [errors.get(step) for step in steps],
        "color": colour,
        "thickness": 1.2,
        "width": 3,
    }
    return {"error_y": bars}


def with_chance(figure: dict[str, Any] | None, runs: list[Run]) -> dict[str, Any] | None:
    """The figure with a line at each chance level, and an axis that shows them."""
    if figure is None:
        return None
    levels: dict[float, list[str]] = {}
    for name in names(runs):
        for value in {r[TASK[2] + name] for run in runs for r in run.tasks if r.get(TASK[2] + name)}:
            levels.setdefault(round(value, 3), []).append(name)
    shown = [
        {"y": value, "text": html.escape("chance" if len(levels) == 1 else f"chance of {_listed(of)}")}
        for value, of in levels.items()
    ]
    tops = [*levels, 0.05]
    for trace in figure["traces"]:
        pairs = zip(trace["y"], trace["error_y"]["array"], strict=True)
        tops += [value + (error or 0.0) for value, error in pairs if value is not None]
    unit = f"score of {names(runs)[0]}" if len(names(runs)) == 1 else "score"
    return figure | {"unit": unit, "levels": shown, "axis": {"range": [0, 1.1 * max(tops)]}, "from_zero": True}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The newest score of each task: label, value, and its error and chance."""
    found = []
    for name in names([run])[:_TILES]:
        newest = [r for r in run.tasks if TASK[0] + name in r][-1]
        value, stderr, chance = (newest.get(key + name) for key in TASK)
        more = [f"+- {stderr:.3f}"] if isinstance(stderr, int | float) else []
        more += [f"chance {chance:.3f}"] if isinstance(chance, int | float) else []
        score = f"{value:.3f}" if isinstance(value, int | float) else "not finite"
        found.append((f"task {name}", score, "; ".join(more)))
    return found
