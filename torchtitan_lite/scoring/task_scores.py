"""Scores a task on all ranks.

The batches depend on the questions only, and each is computed by one rank, so that any number of ranks finds the same
bits. All ranks make the same number of forward passes, as FSDP needs: one without a batch computes another's again.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from torchtitan_lite.distributed.process_group import World, sum_over_ranks
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.generation import Continuation
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import Window, losses, padded, ratio
from torchtitan_lite.scoring.questions import METRICS, Task
from torchtitan_lite.scoring.task_tokens import Encoded, Span

BATCH_TOKENS = 4096  # of a batch, padding included
_LOGITS_BYTES = 1 << 28  # of a batch whose logits are stored, in float32

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TaskScore:
    """The score of a task, by question."""

    task: Task
    correct: dict[str, Array]  # by metric: 1 or 0
    nats: Array = field(default_factory=lambda: np.zeros(0))  # negative log-likelihood of the right choice
    n_bytes: Array = field(default_factory=lambda: np.zeros(0))  # of its text

    def figures(self) -> dict[str, float]:
        """The main score first, then all others; each with its standard error. Undefined values are NaN."""
        found = {"questions": len(self.task.questions), "chance": self.task.chance}
        for name, metric in (("score", self.task.main), *((metric, metric) for metric in METRICS[self.task.kind])):
            found[name], found[f"{name}_stderr"] = mean(self.correct[metric])
        if len(self.nats):
            bits = ratio(self.nats / math.log(2), self.n_bytes)
            found |= dict(zip(("bits_per_byte", "bits_per_byte_stderr"), bits, strict=True))
        return found


def mean(values: Array) -> tuple[float, float]:
    """The mean and its standard error, NaN for one value.

    Equal values show no spread, but 3 right answers of 3 do not prove a score of 1. The error is then that of Laplace's
    rule: the standard deviation of a rate of which n of n were observed, all rates being as likely before.
    """
    n = len(values)
    spread = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return float(values.mean()), spread if spread != 0 else math.sqrt((n + 1) / (n + 3)) / (n + 2)


@torch.no_grad()
def score(model: Transformer, encoded: Encoded, tokenizer: Tokenizer, ends: tuple[int, ...], world: World) -> TaskScore:
    """Score a task. Collective: every rank gets the same bits.

    Args:
        ends: tokens that end the model's answer to an exact match.
    """
    task = encoded.task
    if task.kind == "exact match":
        return TaskScore(task, {"accuracy": _exact_matches(model, encoded, tokenizer, ends, world)})
    nats, greedy = _likelihoods(model, encoded, world)
    if task.kind == "last word":
        return TaskScore(task, {"accuracy": _where_known(greedy, nats)}, nats, encoded.n_bytes.astype(np.float64))
    firsts = np.cumsum([0, *(len(question.choices) for question in task.questions)])
    right = firsts[:-1] + [question.answer for question in task.questions]
    correct = {}
    for metric, scale in (("plain", None), ("per_byte", encoded.n_bytes), ("per_token", encoded.n_tokens)):
        values = nats if scale is None else nats / scale
        best = [first + np.argmin(values[first:end]) for first, end in itertools.pairwise(firsts)]
        known = np.add.reduceat(nats, firsts[:-1])
        correct[metric] = _where_known((np.array(best) == right).astype(np.float64), known)
    return TaskScore(task, correct, nats[right], encoded.n_bytes[right].astype(np.float64))


def _where_known(values: Array, nats: Array) -> Array:
    """NaN where the model's likelihoods are not finite."""
    return np.where(np.isfinite(nats), values, math.nan)


def _likelihoods(model: Transformer, encoded: Encoded, world: World) -> tuple[Array, Array]:
    """Of each choice: the negative log-likelihood, and of last words whether each token is the likeliest."""
    needs_logits = encoded.task.kind == "last word"
    most = BATCH_TOKENS
    if needs_logits:
        most = max(min(most, _LOGITS_BYTES // (4 * model.tok_embeddings.num_embeddings)), 1)
    batches = _batches(encoded.spans, most)
    found = torch.zeros(2, len(encoded.n_tokens), dtype=torch.float64)
    for first in range(0, len(batches), world.world_size):
        mine = first + world.rank
        batch = [span.window() for span in batches[min(mine, len(batches) - 1)]]
        if needs_logits:
            nats, wrong = _greedy(model, batch, world.device)
        else:
            nats, wrong = losses(model, batch, world.device), torch.zeros(len(batch))
        if mine < len(batches):
            which = torch.tensor([window.document for window in batch])
            found.index_add_(1, which, torch.stack((nats.double().cpu(), wrong.double().cpu())))
    nats, wrong = sum_over_ranks(found.to(world.device)).cpu()
    return nats.numpy(), (wrong == 0).double().numpy()


def _batches(spans: list[Span], most: int) -> list[list[Span]]:
    """The spans by length, as many as have `most` tokens with padding, at least one."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=len, reverse=True):  # sorting is stable
        if found and (len(found[-1]) + 1) * len(found[-1][0]) <= most:
            found[-1].append(span)
        else:
            found.append([span])
    return found


def _greedy(model: Transformer, batch: list[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each window: the summed loss, and the number of targets that are not the likeliest token, (B,) each."""
    tokens, targets = padded(batch, device)
    logits = model(tokens)
    known = targets != IGNORE
    rows, wanted = logits[known].float(), targets[known]
    nats = -rows.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    wrong = rows.argmax(-1) != wanted
    counts = known.sum(1).tolist()
    return tuple(torch.stack([part.sum() for part in values.split(counts)]) for values in (nats, wrong))  # type: ignore[return-value]


def _exact_matches(
    model: Transformer, encoded: Encoded, tokenizer: Tokenizer, ends: tuple[int, ...], world: World
) -> Array:
    """Whether the model's own answer to each question is an accepted one; NaN where its logits are not finite."""
    questions = encoded.task.questions
    found = torch.zeros(len(questions), dtype=torch.float64)
    for first in range(0, len(questions), world.world_size):
        mine = first + world.rank
        if mine < len(questions):
            question = questions[mine]
            text = _answer(model, encoded.prompts[mine], question.max_tokens, question.stop, tokenizer, ends, world)
            right = text is not None and text.strip() in [choice.strip() for choice in question.choices]
            found[mine] = math.nan if text is None else right
        else:
            _answer(model, [0], 0, (), tokenizer, ends, world)
    return sum_over_ranks(found.to(world.device)).cpu().numpy()


def _answer(
    model: Transformer,
    prompt: list[int],
    most: int,
    stop: tuple[str, ...],
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    world: World,
) -> str | None:
    """The likeliest continuation of a prompt, up to an end token or a stop text; None if the logits are not finite.

    Ranks that are done go along.
    """
    continuation = Continuation(model, prompt)
    tokens: list[int] = []
    text, limit = "", min(most, continuation.limit)
    done, finite = limit < 1, True
    while sum_over_ranks(torch.tensor([float(not done)], device=world.device)).item():
        if done:
            model(torch.tensor([prompt[:1]], device=world.device))
            continue
        logits = continuation.logits([tokens[-1:]])[0]
        finite = bool(logits.isfinite().all())
        token = int(logits.argmax())
        if token not in ends:
            tokens.append(token)
            text = tokenizer.decode(tokens)
        found = [text.index(mark) for mark in stop if mark in text]
        text = text[: min(found)] if found else text
        done = bool(found) or token in ends or len(tokens) == limit or not finite
    return text if finite else None
