"""Initial values with an induction head (Olsson et al., 2022), which predicts the token that followed the current one.

A Transformer learns this circuit late, and its loss then falls fast. With these initial values it learns the circuit
within a few dozen steps. The architecture stays the same. The circuit uses head 0 of the first two blocks:

1. The first coordinate of every embedding begins at 1, far above the others. It is the same for all tokens, like a
   bias.
2. In block 0, head 0 builds queries and keys mostly from that coordinate. A query points in the direction of the key
   one position before, so each token attends to its predecessor. The head copies the predecessor's coordinates 1 to
   E - 1 to coordinates E + 1 to 2 E - 1.
3. In block 1, head 0 compares coordinates 1 to E - 1 of the query's token with these copies. So it attends to tokens
   whose predecessor equals the current token, and subtracts their coordinates from the residual stream.
4. The output matrix begins as the negative of the embeddings' normal values, times a constant. So subtracting a token's
   coordinates raises its logit. (The current token's own coordinates lower the logit of a repetition.)

These values are added to the normal values, except in the output matrix. The normal values act as noise that grows
with the width: without muP at D = 1,024, little of the circuit works at step 0. Queries and keys must be normalised, so
that their lengths do not matter. Rotary positions rotate coordinates i and i + E / 2 of a head by t / theta^(2 i / E),
where t is the position. Block 0 uses the fastest pairs, which distinguish neighbours. Block 1 uses pairs that take more
than 600 tokens per turn at theta = 1e4.

Shapes: D dim, E head_dim, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchtitan_lite.config.schema import ModelConfig

Entries = tuple[Tensor, Tensor, Tensor]  # rows, columns and values of matrix elements

CONSTANT = 1.0  # 50 times the std of an embedding
FASTEST = 4  # rotary pairs that block 0 uses
LOOK_BACK, MATCH, COPY = 0.8, 2.0, 0.45  # sizes of block 0's queries and keys, block 1's, and values and outputs


# of a name, a parameter, std and perhaps Entries: fills with N(0, std^2), seeded by the name, then adds the entries
Fill = Callable[..., None]


def with_induction_head(normal_: Fill, config: ModelConfig, vocab_size: int, width: float) -> Fill:
    """Return `normal_` with the values of the circuit; `width`: muP's width multiplier."""
    by_name = entries(config, vocab_size)

    def fill(name: str, parameter: Tensor, std: float, added: Entries | None = None) -> None:
        if name == "output.weight":
            normal_("tok_embeddings.weight", parameter, (config.dim / width) ** -0.5 * (1 / width))
            parameter.neg_()
        else:
            normal_(name, parameter, std, by_name.get(name, added))

    return fill


def entries(config: ModelConfig, vocab_size: int) -> Mapping[str, Entries]:
    """Return the elements to add to each parameter's normal values."""
    e, half = config.dim_of_heads, config.dim_of_heads // 2
    first = range(min(FASTEST, e // 4))
    turns = [config.rope_theta ** (-2 * i / e) for i in first]  # radians from a position to the next
    back = {(i, 0): LOOK_BACK * math.cos(turn) for i, turn in zip(first, turns, strict=True)}
    back |= {(i + half, 0): LOOK_BACK * math.sin(turn) for i, turn in zip(first, turns, strict=True)}
    slow = [i + offset for i in range(-(-e // 4), half) for offset in (0, half)]
    added: dict[str, Mapping[tuple[int, int], float]] = {
        "tok_embeddings": {(token, 0): CONSTANT for token in range(vocab_size)},
        "layers.0.attention.wq": {(i, 0): LOOK_BACK for i in first},
        "layers.0.attention.wk": back,
        "layers.0.attention.wv": {(i, i): COPY for i in range(1, e)},
        "layers.0.attention.wo": {(e + i, i): COPY for i in range(1, e)},
        "layers.1.attention.wq": {(i, i): MATCH for i in slow},
        "layers.1.attention.wk": {(i, e + i): MATCH for i in slow},
        "layers.1.attention.wv": {(i, i): COPY for i in range(1, e)},
        "layers.1.attention.wo": {(i, i): -COPY for i in range(1, e)},
    }
    return {f"{name}.weight": _entries(values) for name, values in added.items()}


def _entries(values: Mapping[tuple[int, int], float]) -> Entries:
    places = torch.tensor(list(values), device="cpu")
    return places[:, 0], places[:, 1], torch.tensor(list(values.values()), dtype=torch.float32, device="cpu")
