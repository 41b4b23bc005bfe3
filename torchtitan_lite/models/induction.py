"""Initial values with an induction head (Olsson et al., 2022): it predicts what followed the current token before.

A Transformer learns this circuit late, and its loss falls fast when it does. With these initial values it learns it
within some dozen steps. The architecture stays the same. It takes head 0 of the first two blocks:

1. The first coordinate of every embedding begins at 1, far above the others: the same for all tokens, as a bias is.
2. In block 0, head 0 makes queries and keys mostly of that coordinate. They point in the same direction if the query is
   one position after the key, so it attends to the token before. It copies coordinates 1 to E - 1 of that token to
   coordinates E + 1 to 2 E - 1.
3. In block 1, head 0 compares these coordinates of the query's token with those copies. So it attends to the tokens
   that followed an equal one, and subtracts their coordinates from the residual stream.
4. The output matrix begins as the negative of the embeddings' normal values, times a constant. So what was subtracted
   raises the logit of its token. (The current token's own coordinates, which are still there, lower that of a
   repetition.)

All of this is added to the normal values, except in the output matrix. Those are noise to it, which grows with the
width: without muP, little of the circuit is there at step 0 if D is 1,024. Queries and keys must be normalised: their
lengths then do not matter. Rotary positions turn coordinates i and i + E / 2 of a head by t / theta^(2 i / E), where t
is the position. The head of block 0 uses the fastest pairs, which tell neighbours apart, and that of block 1 those that
take more than 600 tokens for a turn, at theta = 1e4.

Shapes: D dim, E head_dim, V vocabulary.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan_lite.config.schema import ModelConfig

Entries = tuple[Tensor, Tensor, Tensor]  # rows, columns and values of elements of a matrix

CONSTANT = 1.0  # 50 standard deviations of an embedding
FASTEST = 4  # pairs by which block 0 tells neighbours apart
LOOK_BACK, MATCH, COPY = 0.8, 2.0, 0.45  # weights of queries and keys in block 0 and block 1; of values and outputs


def entries(config: ModelConfig, vocab_size: int) -> Mapping[str, Entries]:
    """What to add to each parameter's normal values."""
    e, half = config.dim_of_heads, config.dim_of_heads // 2
    first = range(min(FASTEST, e // 4))
    turns = [config.rope_theta ** (-2 * i / e) for i in first]  # radians from a position to the next
    back = {(i, 0): LOOK_BACK * math.cos(turn) for i, turn in zip(first, turns, strict=True)}
    back |= {(i + half, 0): LOOK_BACK * math.sin(turn) for i, turn in zip(first, turns, strict=True)}
    slow = [i + offset for i in range(-(-e // 4), half) for offset in (0, half)]
    added = {
        "layers.0.attention.wq": {(i, 0): LOOK_BACK for i in first},
        "layers.0.attention.wk": back,
        "layers.0.attention.wv": {(i, i): COPY for i in range(1, e)},
        "layers.0.attention.wo": {(e + i, i): COPY for i in range(1, e)},
        "layers.1.attention.wq": {(i, i): MATCH for i in slow},
        "layers.1.attention.wk": {(i, e + i): MATCH for i in slow},
        "layers.1.attention.wv": {(i, i): COPY for i in range(1, e)},
        "layers.1.attention.wo": {(i, i): -COPY for i in range(1, e)},
    }
    tokens = torch.arange(vocab_size, device="cpu")
    found = {
        "tok_embeddings.weight": (
            tokens,
            torch.zeros_like(tokens),
            torch.full(tokens.shape, CONSTANT, dtype=torch.float32, device="cpu"),
        )
    }
    return found | {f"{name}.weight": _entries(values) for name, values in added.items()}


def _entries(values: Mapping[tuple[int, int], float]) -> Entries:
    places = torch.tensor(list(values), device="cpu")
    return places[:, 0], places[:, 1], torch.tensor(list(values.values()), dtype=torch.float32, device="cpu")
