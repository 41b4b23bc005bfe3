"""Scores a task on all ranks.

Batches depend only on the questions, and one rank computes each batch. So results are the same bits on any number of
ranks.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import Batch, Window, nats_only, pad_batch, sums_by_item
from torchtitan_lite.scoring.questions import METRICS, Task
from torchtitan_lite.scoring.statistics import Array, mean, ratio
from torchtitan_lite.scoring.task_tokens import Encoded

BATCH_TOKENS = 4096  # per batch, including padding
LOGITS_BYTES = 1 << 28  # of float32 logits, for a batch that stores them


@dataclass(frozen=True)
class TaskScore:
    """The score of a task, by question."""

    task: Task
    correct: dict[str, Array]  # by metric: 1 or 0; NaN where the model's likelihoods are not finite
    nats: Array  # negative log-likelihood of the right choice
    n_bytes: Array  # of its text

    def figures(self) -> dict[str, float]:
        """Return the main score first, then all others, each with its standard error. Undefined values are NaN."""
        figures: dict[str, float] = {"questions": len(self.task.questions), "chance": self.task.chance}
        for name, metric in (("score", self.task.main), *((metric, metric) for metric in METRICS[self.task.kind])):
            figures[name], figures[f"{name}_stderr"] = mean(self.correct[metric])
        figures["bits_per_byte"], figures["bits_per_byte_stderr"] = ratio(self.nats / math.log(2), self.n_bytes)
        return figures


@torch.no_grad()
def score(model: Transformer, encoded: Encoded, process: Process) -> TaskScore:
    """Score a task. Collective: every rank gets the same bits."""
    task = encoded.task
    n_bytes = encoded.n_bytes.astype(np.float64)
    if task.kind == "last word":
        nats, misses = _sums_by_choice(model, encoded, process, greedy=True)
        return TaskScore(task, {"accuracy": _where_finite(nats, misses == 0)}, nats, n_bytes)

    (nats,) = _sums_by_choice(model, encoded, process)
    firsts = np.cumsum([0, *(len(question.choices) for question in task.questions)])
    right = firsts[:-1] + [question.answer for question in task.questions]
    nats_of_questions = np.add.reduceat(nats, firsts[:-1])
    correct = {}
    for metric, values in (("plain", nats), ("per_byte", nats / n_bytes), ("per_token", nats / encoded.n_tokens)):
        likeliest = [first + np.argmin(values[first:end]) for first, end in itertools.pairwise(firsts)]
        correct[metric] = _where_finite(nats_of_questions, np.array(likeliest) == right)
    return TaskScore(task, correct, nats[right], n_bytes[right])


def _where_finite(nats: Array, correct: NDArray[np.bool_]) -> Array:
    return np.where(np.isfinite(nats), correct, math.nan)


def _sums_by_choice(model: Transformer, encoded: Encoded, process: Process, *, greedy: bool = False) -> list[Array]:
    """Return the negative log-likelihood of each choice; with `greedy`, also its number of mispredicted tokens."""
    most = LOGITS_BYTES // (4 * model.tok_embeddings.num_embeddings) if greedy else BATCH_TOKENS  # logits are stored
    sums = sums_by_item(
        model,
        _batches(encoded.windows, max(min(BATCH_TOKENS, most), 1)),
        pad_batch,
        encoded.n_tokens,
        process,
        measure=_nats_and_misses if greedy else nats_only,
        n_values=2 if greedy else 1,
    )
    return list(sums.numpy())


def _batches(windows: list[Window], most: int) -> list[list[Window]]:
    """Group windows by length: each batch has at most `most` tokens with padding, or one window."""
    batches: list[list[Window]] = []
    for window in sorted(windows, key=len, reverse=True):  # sorting is stable
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= most:
            batches[-1].append(window)
        else:
            batches.append([window])
    return batches


def _nats_and_misses(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Return two values per row (2, B): negative log-likelihood, and mispredicted targets. A Measure."""
    rows = batch.rows.on(device)
    known = rows["targets"] != IGNORE
    logits, wanted = model(rows["tokens"])[known].float(), rows["targets"][known]
    nats = -logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    misses = (logits.argmax(-1) != wanted).float()
    sizes = known.sum(1).tolist()
    return torch.stack([torch.stack([part.sum() for part in values.split(sizes)]) for values in (nats, misses)])
