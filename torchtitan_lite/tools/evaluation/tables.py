"""The figures of scores, their differences between models, and the tables of `evaluate`."""

import math
from collections.abc import Collection

from torchtitan_lite.scoring.questions import METRICS
from torchtitan_lite.scoring.statistics import mean, plus_minus, ratio, ratio_difference
from torchtitan_lite.scoring.task_scores import TaskScore, figure_text
from torchtitan_lite.tools.evaluation.documents import Scores

TOTAL = "(total)"  # no name of a text: an unlikely file

# --- texts ------------------------------------------------------------------------------------------------------


def figures(scores: Scores) -> dict[str, float]:
    """The figures of a row. Undefined ones are NaN."""
    loss, loss_stderr = ratio(scores.nats, scores.tokens)
    bits, bits_stderr = ratio(scores.nats / math.log(2), scores.n_bytes)
    return {
        "documents": len(scores),
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
    """A model minus the first one, on the same documents. Its error is small: the errors of both are correlated."""
    bits, bits_stderr = ratio_difference(
        (scores.nats / math.log(2), scores.n_bytes), (first.nats / math.log(2), first.n_bytes)
    )
    figures = {"bits_per_byte": bits, "bits_per_byte_stderr": bits_stderr}
    if (scores.tokens == first.tokens).all():
        loss, loss_stderr = ratio_difference((scores.nats, scores.tokens), (first.nats, first.tokens))
        figures |= {"loss": loss, "loss_stderr": loss_stderr}
    return figures


def with_total(texts: dict[str, Scores], first: dict[str, Scores]) -> dict[str, Scores]:
    """The scores of each text and, of several, of all together: in the order of the first model's texts.

    Another model may name the same texts in another order.
    """
    known = [name for name in first if name != TOTAL]
    parts = [texts[name] for name in (known if set(known) == set(texts) else texts)]
    return texts | ({TOTAL: sum(parts[1:], parts[0])} if len(parts) > 1 else {})


def compared(texts: dict[str, Scores], first: dict[str, Scores]) -> dict[str, dict[str, float]]:
    """The difference to the first model, on each text of which both were scored on the same documents.

    The names do not matter: one text may be prepared in two folders.
    """
    differences = {
        name: difference(scores, other)
        for name, scores in texts.items()
        if (other := next(filter(scores.of_the_same, first.values()), None)) is not None
    }
    if len(differences) < len(texts):
        differences.pop(TOTAL, None)  # of other documents
    return differences


def table(rows: dict[str, dict[str, float]]) -> list[str]:
    """One line for each text, under a head."""
    if not rows:
        return []
    width = max(len(name) for name in (*rows, "text"))
    lines = [
        f"  {'text':<{width}}  {'documents':>9}  {'window':>6}  {'tokens':>11}  {'nats/token':>20}  {'bits/byte':>20}  "
        "perplexity"
    ]
    for name, row in rows.items():
        loss, bits = (plus_minus(row[key], row[f"{key}_stderr"], 4) for key in ("loss", "bits_per_byte"))
        lines.append(
            f"  {name:<{width}}  {row['documents']:>9,}  {row['seq_len']:>6}  {row['tokens']:>11,}  {loss:>20}  "
            f"{bits:>20}  {row['perplexity']:,.2f}"
        )
    return lines


def difference_lines(rows: dict[str, dict[str, float]], first: str) -> list[str]:
    """The comparison with the first model, one line for each text."""
    lines = []
    for name, row in rows.items():
        parts = [
            f"{plus_minus(row[key], row[f'{key}_stderr'], 4)} {unit}"
            for key, unit in (("loss", "nats/token"), ("bits_per_byte", "bits/byte"))
            if key in row and math.isfinite(row[key])
        ]
        lines.append(f"  minus {first}, {name}: {', '.join(parts)}")
    return lines


# --- tasks ------------------------------------------------------------------------------------------------------


def tasks_compared(scores: dict[str, TaskScore], first: dict[str, TaskScore]) -> dict[str, dict[str, float]]:
    """The difference to the first model and its standard error, on tasks with the same questions."""
    differences = {}
    for name, score in scores.items():
        if name in first and first[name].task == score.task:
            main = score.task.main
            value, stderr = mean(score.correct[main] - first[name].correct[main])
            differences[name] = {"score": value, "score_stderr": stderr}
    return differences


def task_table(scores: dict[str, TaskScore], length: int) -> list[str]:
    """One line for each task, under a head.

    Args:
        length: tokens in a window.
    """
    if not scores:
        return []
    width = max(len(name) for name in (*scores, "task"))
    heads = "".join(f"  {head:>16}" for head in ("accuracy", "per byte", "per token"))
    lines = [f"  {'task':<{width}}  questions  window{heads}  chance  bits/byte of the right answers"]
    starred = False
    for name, score in scores.items():
        figures, task = score.figures(), score.task
        columns = ""
        for metric in METRICS[task.kind]:
            star = metric == task.main != METRICS[task.kind][0]
            starred = starred or star
            columns += f"  {figure_text(figures, metric) + '*' * star:>16}"
        columns += f"  {'-':>16}" * (3 - len(METRICS[task.kind]))
        bits = figure_text(figures, "bits_per_byte")
        lines.append(f"  {name:<{width}}  {len(task.questions):>9,}  {length:>6}{columns}  {task.chance:>6.3f}  {bits}")
    if starred:
        lines.append("  *: the main score of the task")
    return lines


def task_difference_lines(differences: dict[str, dict[str, float]], first: str, on_both: Collection[str]) -> list[str]:
    """The comparison with the first model, one line for each task that both were scored on."""
    return [
        *(f"  minus {first}, {name}: {figure_text(figures, 'score')}" for name, figures in differences.items()),
        *(
            f"  no difference to {first}, {name}: the two were asked different questions"
            for name in on_both
            if name not in differences
        ),
    ]
