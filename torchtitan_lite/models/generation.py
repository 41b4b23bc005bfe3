"""Text generation, shared by the `generate` command and the samples of a training run."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.errors import NonFiniteError
from torchtitan_lite.models import Transformer


@dataclass(frozen=True)
class Sampler:
    """Draws the next token from its own random generator, so that training's global one stays unchanged."""

    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the smallest set of likeliest tokens with this total probability
    seed: int = 0
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator("cpu"), init=False)

    def __post_init__(self) -> None:
        self._generator.manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        """Return the next token for finite logits (V,) of any float dtype on any device."""
        likeliest = int(logits.argmax())
        if self.temperature < 1e-6:  # a division by it might overflow
            return likeliest
        logits = logits.float().cpu() / self.temperature
        if 0 < self.top_k < len(logits):
            logits[logits < logits.topk(self.top_k).values[-1]] = -torch.inf
        if self.top_p < 1:
            probabilities, order = logits.softmax(0).sort(descending=True)
            before = probabilities.cumsum(0) - probabilities
            logits[order[1:][before[1:] >= self.top_p]] = -torch.inf  # never removes the likeliest
        return int(torch.multinomial(logits.softmax(0), 1, generator=self._generator))


def is_encoder_decoder(model: Transformer) -> bool:
    """Return whether the model is an encoder-decoder, which answers a prompt instead of continuing it."""
    return FAMILIES[model.config.family].encoder_decoder


class Continuation:
    """A prompt that a model continues, with cached keys and values. An encoder-decoder answers it instead.

    Args:
        prompt: at least one token, and fewer than max_seq_len.
    """

    def __init__(self, model: Transformer, prompt: list[int]) -> None:
        self._model = cast(Any, model)
        self._prompt = prompt
        self._device = model.tok_embeddings.weight.device
        self._is_encoder_decoder = is_encoder_decoder(model)
        self._cache: list[Any] = self._model.new_cache()
        n_before = 0 if self._is_encoder_decoder else len(prompt)
        self.limit = model.config.max_seq_len - n_before  # tokens that can follow

    def logits(self, rows: list[list[int]]) -> Tensor:
        """Append new tokens to each row and return its next logits, (N, V). The first call has one empty row.

        Raises:
            NonFiniteError: the logits are not finite.
        """
        logits: Tensor
        if self._is_encoder_decoder:
            answer = self._tokens([row or [self._model.start] for row in rows])
            source = self._tokens([self._prompt]).expand(len(rows), -1)
            logits = self._model(source, None, self._cache, answer=answer)
        else:
            logits = self._model(self._tokens([row or self._prompt for row in rows]), None, self._cache)
        if not logits[:, -1].isfinite().all():
            raise NonFiniteError("the model computes logits that are not finite: it diverged, or its file is damaged")
        return logits[:, -1]

    def select(self, rows: list[int]) -> None:
        """Continue only these rows of an encoder-decoder, in this order; a row may be repeated."""
        for cache in self._cache:
            cache.select(self._tokens(rows))

    def _tokens(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self._device)


@torch.no_grad()
def new_tokens(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    choose: Callable[[Tensor], int],
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Yield at most max_tokens tokens that continue a prompt, or that an encoder-decoder answers.

    Stops at an end token or at the model's max_seq_len.

    Args:
        prompt: at least one token, and fewer than max_seq_len.
        choose: returns the next token for logits (V,), e.g. a Sampler.
        ends: tokens that end the text; they are not yielded.
    """
    continuation = Continuation(model, prompt)
    fed: list[int] = []
    for _ in range(min(max_tokens, continuation.limit)):
        token = choose(continuation.logits([fed])[0])
        if token in ends:
            return
        yield token
        fed = [token]


@torch.no_grad()
def beam_search(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    beams: int,
    ends: Collection[int] = (),
    length_penalty: float = 1.0,
) -> list[int]:
    """Return an encoder-decoder's best answer by beam search, without its end token.

    The tokens are those of transformers' `generate`.

    Args:
        beams: number of answers to keep.
        length_penalty: the score of a finished answer of n tokens is log(probability) / n^length_penalty.
    """
    continuation = Continuation(model, prompt)
    running: list[tuple[float, list[int]]] = [(0.0, [])]  # log(probability) and tokens, the best first
    finished: list[tuple[float, list[int]]] = []  # scores and tokens, the best first
    longest = min(max_tokens, continuation.limit)
    for length in range(1, longest + 1):
        logits = continuation.logits([tokens[-1:] for _, tokens in running]).float().cpu()
        totals = logits.log_softmax(-1) + torch.tensor([score for score, _ in running])[:, None]
        # enough candidates that at least `beams` continue, even if every end token is among each beam's best
        best = totals.flatten().topk(min(max(2, 1 + len(ends)) * beams, totals.numel()))
        going: list[tuple[float, int, list[int]]] = []
        for rank, (score, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            row, token = divmod(index, totals.shape[1])
            tokens = [*running[row][1], token]
            if token not in ends and length < longest:
                going.append((score, row, tokens))
            elif rank < beams:
                finished.append((score / length**length_penalty, tokens))
        finished = sorted(finished, key=lambda answer: answer[0], reverse=True)[:beams]
        going = going[:beams]
        # stop when no running beam can beat the worst finished one
        if not going or (len(finished) == beams and going[0][0] / length**length_penalty <= finished[-1][0]):
            break
        continuation.select([row for _, row, _ in going])
        running = [(score, tokens) for score, _, tokens in going]
    tokens = finished[0][1]
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of new tokens in whole characters: a token may end in the middle of one.

    (The library's DecodeStream raises on invalid UTF-8, which an untrained model produces.)
    """
    ids = list(prompt)
    start, shown = max(len(ids) - 4, 0), len(ids)  # a leading space may depend on a few earlier tokens
    more = ""
    for token in tokens:
        ids.append(token)
        more = tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:shown])) :]
        if more and not more.endswith("\ufffd"):
            yield more
            start, shown, more = shown, len(ids), ""
    if more:
        yield more
