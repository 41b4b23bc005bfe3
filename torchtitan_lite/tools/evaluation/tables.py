"""Computes figures of scores and their differences between models, and formats the tables of `evaluate`."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.scoring.questions import METRICS
from torchtitan_lite.scoring.statistics import mean, plus_minus, ratio, ratio_difference
from torchtitan_lite.scoring.task_scores import TaskScore
from torchtitan_lite.terminal import columns
from torchtitan_lite.tools.evaluation.documents import Scores

# --- texts ------------------------------------------------------------------------------------------------------


def figures(scores: Scores) -> dict[str, float]:
    """Return the figures of a row. Undefined ones are NaN."""
    loss, loss_stderr = ratio(scores.nats, scores.tokens)
    bits, bits_stderr = ratio(scores.nats / math.log(2), scores.n_bytes)
    return {
        "documents": len(scores.nats),
        "seq_len": scores.seq_len,
        "tokens": int(scores.tokens.sum()),
        "bytes": round(float(scores.n_bytes.sum())),
        "loss": loss,
        "loss_stderr": loss_stderr,
        "bits_per_byte": bits,
        "bits_per_byte_stderr": bits_stderr,
        "perplexity": math.exp(min(loss, 700.0)),
    }


def difference(scores: Scores, first: Scores) -> dict[str, float]:
    """Return a model's figures minus the first one's, on the same documents. Correlated errors make it precise."""
    bits, bits_stderr = ratio_difference(
        (scores.nats / math.log(2), scores.n_bytes), (first.nats / math.log(2), first.n_bytes)
    )
    figures = {"bits_per_byte": bits, "bits_per_byte_stderr": bits_stderr}
    if (scores.tokens == first.tokens).all():
        loss, loss_stderr = ratio_difference((scores.nats, scores.tokens), (first.nats, first.tokens))
        figures |= {"loss": loss, "loss_stderr": loss_stderr}
    return figures


def text_differences(texts: dict[str, Scores], first: dict[str, Scores]) -> dict[str, dict[str, float]]:
    """Return the difference to the first model on each text where both were scored on the same documents.

    Names may differ: a text may be prepared in two folders.
    """
    return {
        name: difference(scores, other)
        for name, scores in texts.items()
        if (other := next(filter(scores.same_documents, first.values()), None)) is not None
    }


@dataclass(frozen=True)
class Scored:
    """A model's scores."""

    path: str
    texts: dict[str, Scores]
    tasks: dict[str, TaskScore]
    window: int  # tokens
    tokenizer: str  # its hash


def compare_with_first(model: Scored, first: Scored | None) -> tuple[list[str], dict[str, Any]]:
    """Return a model's lines, and its entry of --json: scores, and differences to the first model."""
    rows = {name: figures(scores) for name, scores in model.texts.items()}
    lines = [*table(rows), *task_table(model.tasks, model.window)]
    result: dict[str, Any] = {"model": model.path, "texts": rows}
    if model.tasks:
        result["tasks"] = {
            name: {"kind": one.task.kind, "metric": one.task.main, **one.figures(), "seq_len": model.window}
            for name, one in model.tasks.items()
        }
    if first is None:
        return lines, result
    by_text, by_task = text_differences(model.texts, first.texts), task_differences(model.tasks, first.tasks)
    texts = {name: difference_text(row) for name, row in by_text.items()}
    tasks = {name: plus_minus(row["score"], row["score_stderr"], 3) for name, row in by_task.items()}
    why = "the two were scored on different documents; --data TEXT scores both on the same text"
    lines += difference_lines(first.path, model.texts, texts, why)
    on_both = [name for name in model.tasks if name in first.tasks]
    lines += difference_lines(first.path, on_both, tasks, "the two were asked different questions")
    if (texts or tasks) and model.tokenizer != first.tokenizer:
        lines.append("  (the tokenizers differ, so windows of equal length hold different amounts of text)")
    differences = {"minus_first": by_text, "tasks_minus_first": by_task}
    return lines, result | {key: rows for key, rows in differences.items() if rows}


def table(rows: dict[str, dict[str, float]]) -> list[str]:
    """Return a header and one line per text."""
    cells = [["  text", "documents", "window", "tokens", "nats/token", "bits/byte", "perplexity"]]
    for name, row in rows.items():
        scores = (plus_minus(row[key], row[f"{key}_stderr"], 4) for key in ("loss", "bits_per_byte"))
        sizes = f"{row['documents']:,}", f"{row['seq_len']}", f"{row['tokens']:,}"
        cells.append([f"  {name}", *sizes, *scores, f"{row['perplexity']:,.2f}"])
    return columns(cells, right=range(1, 7)) if rows else []


def difference_text(row: dict[str, float]) -> str:
    """Format the difference to the first model on a text."""
    units = {"loss": "nats/token", "bits_per_byte": "bits/byte"}
    finite = [key for key in units if key in row and math.isfinite(row[key])]
    return ", ".join(f"{plus_minus(row[key], row[f'{key}_stderr'], 4)} {units[key]}" for key in finite)


def difference_lines(first: str, names: Iterable[str], differences: Mapping[str, str], why: str) -> list[str]:
    """Return one line per text or task: the difference to the first model, or why there is none."""
    return [
        f"  minus {first}, {name}: {differences[name]}"
        if name in differences
        else f"  no difference to {first}, {name}: {why}"
        for name in names
    ]


# --- tasks ------------------------------------------------------------------------------------------------------


def task_differences(scores: dict[str, TaskScore], first: dict[str, TaskScore]) -> dict[str, dict[str, float]]:
    """Return the difference to the first model and its standard error, on tasks with equal questions."""
    pairs = {name: (score, first[name]) for name, score in scores.items() if name in first}
    differences = {
        name: mean(one.correct[one.task.main] - other.correct[one.task.main])
        for name, (one, other) in pairs.items()
        if one.task == other.task
    }
    return {name: {"score": value, "score_stderr": stderr} for name, (value, stderr) in differences.items()}


def task_table(scores: dict[str, TaskScore], length: int) -> list[str]:
    """Return a header and one line per task.

    Args:
        length: tokens in a window.
    """
    heads = "questions", "window", "accuracy", "per byte", "per token", "chance", "bits/byte of the right answers"
    cells = [["  task", *heads]]
    for name, score in scores.items():
        figures, task = score.figures(), score.task
        metrics = METRICS[task.kind]
        *texts, bits = (plus_minus(figures[m], figures[f"{m}_stderr"], 3) for m in (*metrics, "bits_per_byte"))
        texts += ["-"] * (3 - len(metrics)) + [f"{task.chance:.3f}", bits]
        cells.append([f"  {name}", f"{len(task.questions):,}", f"{length}", *texts])
    return columns(cells, right=range(1, 8)) if scores else []
