"""Text generation, shared by the `generate` command and the samples of a training run."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from torchtitan_lite.errors import NonFiniteError
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.attention import KeysValues


@dataclass(frozen=True)
class Sampler:
    """Draws the next token, from its own random generator: torch's global one is left to training."""

    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the smallest set of likeliest tokens with this total probability
    seed: int = 0
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator("cpu"), init=False)

    def __post_init__(self) -> None:
        self._generator.manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token, given logits (V,) of any float dtype on any device.

        Raises:
            NonFiniteError: the logits are not finite.
        """
        if not logits.isfinite().all():
            raise NonFiniteError("the model computes logits that are not finite: it diverged, or its file is damaged")
        likeliest = int(logits.argmax())
        if self.temperature == 0:
            return likeliest
        logits = logits.float().cpu() / self.temperature
        if not logits.isfinite().all():  # the temperature is so close to 0 that the division overflows
            return likeliest
        if 0 < self.top_k < len(logits):
            logits[logits < logits.topk(self.top_k).values[-1]] = -torch.inf
        if self.top_p < 1:
            probabilities, order = logits.softmax(0).sort(descending=True)
            before = probabilities.cumsum(0) - probabilities
            logits[order[1:][before[1:] >= self.top_p]] = -torch.inf  # never removes the likeliest
        return int(torch.multinomial(logits.softmax(0), 1, generator=self._generator))


@torch.no_grad()
def new_tokens(
    model: Transformer, prompt: list[int], max_tokens: int, choose: Callable[[Tensor], int], ends: Collection[int] = ()
) -> Iterator[int]:
    """Yield at most max_tokens tokens after a prompt, up to an end token or the model's max_seq_len.

    Args:
        prompt: at least one token, and fewer than max_seq_len.
        choose: returns the next token for logits (V,), e.g. a Sampler.
        ends: tokens that end the text; they are not yielded.
    """
    device = model.tok_embeddings.weight.device
    cache = [KeysValues() for _ in model.layers]
    fed = prompt
    for _ in range(min(max_tokens, model.config.max_seq_len - len(prompt))):
        token = choose(model(torch.tensor([fed], device=device), None, cache)[0, -1])
        if token in ends:
            return
        yield token
        fed = [token]


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of new tokens once it is known: a token may end in the middle of a character.

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
