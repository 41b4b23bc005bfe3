"""Scores a task on all ranks.

The batches depend on the questions only, and each is computed by one rank, so that any number of ranks finds the same
bits.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.generation import Continuation
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import Batch, in_turn, nats_only, over_ranks, padded, sums_by_item
from torchtitan_lite.scoring.questions import METRICS, Task
from torchtitan_lite.scoring.statistics import Array, mean, plus_minus, ratio
from torchtitan_lite.scoring.task_tokens import Encoded, Span

BATCH_TOKENS = 4096  # of a batch, padding included
LOGITS_BYTES = 1 << 28  # of a batch whose logits are stored, in float32


@dataclass(frozen=True)
class TaskScore:
    """The score of a task, by question."""

    task: Task
    correct: dict[str, Array]  # by metric: 1 or 0; NaN where the model's likelihoods are not finite
    nats: Array = field(default_factory=lambda: np.zeros(0))  # negative log-likelihood of the right choice
    n_bytes: Array = field(default_factory=lambda: np.zeros(0))  # of its text

    def figures(self) -> dict[str, float]:
        """The main score first, then all others; each with its standard error. Undefined values are NaN."""
        figures: dict[str, float] = {"questions": len(self.task.questions), "chance": self.task.chance}
        for name, metric in (("score", self.task.main), *((metric, metric) for metric in METRICS[self.task.kind])):
            figures[name], figures[f"{name}_stderr"] = mean(self.correct[metric])
        if len(self.nats):
            figures["bits_per_byte"], figures["bits_per_byte_stderr"] = ratio(self.nats / math.log(2), self.n_bytes)
        return figures


def figure_text(figures: dict[str, float], name: str) -> str:
    """A figure and its standard error, for a line or a table."""
    return plus_minus(figures[name], figures[f"{name}_stderr"], 3) if math.isfinite(figures[name]) else "not finite"


@torch.no_grad()
def score(model: Transformer, encoded: Encoded, tokenizer: Tokenizer, ends: tuple[int, ...], world: World) -> TaskScore:
    """Score a task. Collective: every rank gets the same bits.

    Args:
        ends: tokens that end the model's answer to an exact match.
    """
    task = encoded.task
    if task.kind == "exact match":
        return TaskScore(task, {"accuracy": _exact_matches(model, encoded, tokenizer, ends, world)})
    n_bytes = encoded.n_bytes.astype(np.float64)
    if task.kind == "last word":
        nats, misses = _sums_by_choice(model, encoded, world, greedy=True)
        return TaskScore(task, {"accuracy": _where_finite(nats, misses == 0)}, nats, n_bytes)

    (nats,) = _sums_by_choice(model, encoded, world)
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


def _sums_by_choice(model: Transformer, encoded: Encoded, world: World, *, greedy: bool = False) -> list[Array]:
    """The negative log-likelihood of each choice; with `greedy`, also its tokens that are not the likeliest."""
    batch_tokens = BATCH_TOKENS
    if greedy:  # the logits are stored
        batch_tokens = max(min(BATCH_TOKENS, LOGITS_BYTES // (4 * model.tok_embeddings.num_embeddings)), 1)
    sums = sums_by_item(
        model,
        _batches(encoded.spans, batch_tokens),
        lambda spans: padded([span.window() for span in spans]),
        encoded.n_tokens,
        world,
        measure=_nats_and_misses if greedy else nats_only,
        n_values=2 if greedy else 1,
    )
    return list(sums.numpy())


def _batches(spans: list[Span], most: int) -> list[list[Span]]:
    """The spans by length: as many in a batch as have `most` tokens with padding, at least one."""
    batches: list[list[Span]] = []
    for span in sorted(spans, key=len, reverse=True):  # sorting is stable
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= most:
            batches[-1].append(span)
        else:
            batches.append([span])
    return batches


def _nats_and_misses(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """A measure of two values: the negative log-likelihood, and the targets that are not the likeliest token."""
    tokens, targets = batch.rows.on(device)
    assert targets is not None
    known = targets != IGNORE
    logits, wanted = model(tokens)[known].float(), targets[known]
    nats = -logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    misses = (logits.argmax(-1) != wanted).float()
    sizes = known.sum(1).tolist()
    return torch.stack([torch.stack([part.sum() for part in values.split(sizes)]) for values in (nats, misses)])


def _exact_matches(
    model: Transformer, encoded: Encoded, tokenizer: Tokenizer, ends: tuple[int, ...], world: World
) -> Array:
    """Whether the model's own answer to each question is an accepted one; NaN where its logits are not finite."""
    questions = encoded.task.questions
    correct = torch.zeros(len(questions), dtype=torch.float64)
    for number, counts in in_turn(range(len(questions)), world):
        question, prompt = questions[number], encoded.prompts[number]
        max_tokens = question.max_tokens if counts else 0
        text = _answer(model, prompt, max_tokens, question.stop, tokenizer, ends, world)
        if counts:
            accepted = [choice.strip() for choice in question.choices]
            correct[number] = math.nan if text is None else text.strip() in accepted
    return over_ranks(correct, world).numpy()


def _answer(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    stop: tuple[str, ...],
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    world: World,
) -> str | None:
    """The likeliest continuation of a prompt, up to an end token or a stop text; None if the logits are not finite.

    A rank that is done joins the forward passes of the others.
    """
    continuation = Continuation(model, prompt)
    tokens: list[int] = []
    text, limit = "", min(max_tokens, continuation.limit)
    done, finite = limit < 1, True
    while over_ranks(torch.tensor([float(not done)]), world).item():
        if done:
            model(torch.tensor([prompt[:1]], device=world.device))
            continue
        logits = continuation.logits([tokens[-1:]])[0]
        finite = bool(logits.isfinite().all())
        token = int(logits.argmax())
        if token not in ends:
            tokens.append(token)
            text = tokenizer.decode(tokens)
        stops = [text.index(mark) for mark in stop if mark in text]
        text = text[: min(stops)] if stops else text
        done = bool(stops) or token in ends or len(tokens) == limit or not finite
    return text if finite else None
