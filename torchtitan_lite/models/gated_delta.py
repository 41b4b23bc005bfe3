"""OLMo Hybrid: gated DeltaNet (Yang et al., 2024) in the layers of the kind `delta`, OLMo's attention in the others.

1. The recurrence. Instead of all keys and values, a head keeps one matrix S (K, V): a memory that answers a key k with
the value S^T k. Each token makes the memory fade by exp(g), corrects its answer to k towards v, and reads with q:

    S <- exp(g) S
    S <- S + k u^T      with  u = b (v - S^T k)      the delta rule: b = 1 makes the new answer to k exactly v
    o  = S^T q

g <= 0 and b in (0, 2) are numbers of the token and the head, and |k| = 1. `step` computes this for the one token that
generation adds: its cost and its memory do not grow with the number of tokens before.

2. Chunks. Training needs all tokens at once. Within a chunk of C tokens that begins with the memory S_0, let
c_i = g_1 + ... + g_i. Unrolled, the memory after token i is exp(c_i) S_0 + sum over j <= i of exp(c_i - c_j) k_j u_j^T.
Put into the definition of u, this is a triangular system for the rows u_i of U (C, V):

    u_i + sum over j < i of b_i exp(c_i - c_j) (k_i k_j) u_j = b_i (v_i - exp(c_i) S_0^T k_i)

    (1 + A) U = b (V - exp(c) K S_0)          A = b (K K^T) exp(c_i - c_j), below the diagonal
    O         = exp(c) Q S_0 + P U            P =   (Q K^T) exp(c_i - c_j), up to the diagonal
    S_C       = exp(c_C) S_0 + (exp(c_C - c) K)^T U

`chunked` computes A and P of all chunks together, and the three lines chunk after chunk.

3. Documents. At the first token of a document the memory is empty. So wherever a factor exp(...) leads from one token
to another (or from S_0, or to S_C), it is 0 if they belong to different documents. The convolution before the
recurrence, over the last 4 tokens of each channel, does not reach into another document either.

Convolution and recurrence are computed in float32, whatever fsdp.param_dtype is.

Shapes: B sequences, T tokens, D dim, H heads, K = 3/4 D / H, V = 2 K, N chunks of C tokens.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models import llama, olmo
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.transformer import Fill

CHUNK = 64  # tokens
TAPS = 4  # of the convolution


class Memory:
    """What generation keeps of a layer."""

    def __init__(self) -> None:
        self.length = 0  # tokens so far
        self.inputs: dict[nn.Module, Tensor] = {}  # of each convolution: the last ones, (B, TAPS - 1, channels)
        self.state: Tensor | None = None  # S, (B, H, K, V) float32


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q and k (B, H, K), v (B, H, V), g and b (B, H, 1), S -> o (B, H, V) and the new S."""
    state = state * g.exp().unsqueeze(-1)
    u = b * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * u.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor, documents: Tensor
) -> tuple[Tensor, Tensor]:
    """T tokens: q and k (B, T, H, K), v (B, T, H, V), g and b (B, T, H, 1), S -> o (B, T, H, V) and the last S.

    Args:
        documents: (B, T) or (1, T), the number of each token's document. `state` belongs to the first token's. The
            last S is right if there is one document, number 0: then a last chunk may be filled up.
    """
    tokens, n = q.shape[1], -(-q.shape[1] // CHUNK)

    def split(x: Tensor) -> Tensor:  # (B, T, H, X) -> (N, B, H, C, X); the tokens that fill the last chunk change no S
        return F.pad(x, (0, 0, 0, 0, 0, n * CHUNK - tokens)).unflatten(1, (n, CHUNK)).permute(1, 0, 3, 2, 4)

    q, k, v, g, b, d = (split(x) for x in (q, k, v, g, b, documents[:, :, None, None]))
    last = d[..., -1:, :]
    before = torch.cat((d[:1, ..., :1, :], last[:-1]))  # the document that S_0 of each chunk belongs to
    c = g.cumsum(-2)  # (N, B, H, C, 1)

    def factor(exponent: Tensor, connected: Tensor) -> Tensor:
        return torch.where(connected, exponent, -math.inf).exp()

    pairs = factor(c - c.mT, (d == d.mT).tril())  # (N, B, H, C, C), from each token before, and itself, to each
    entering = factor(c, d == before)
    leaving = factor(c[..., -1:, :] - c, d == last)
    a, p = (b * k @ k.mT) * pairs, (q @ k.mT) * pairs
    of_each = (a, p, b * entering * k, entering * q, b * v, entering[..., -1:, :], (leaving * k).mT)
    outputs = []
    for a_n, p_n, k_n, q_n, v_n, kept, k_out in zip(*(x.unbind() for x in of_each), strict=True):
        u = torch.linalg.solve_triangular(a_n, v_n - k_n @ state, upper=False, unitriangular=True)  # 1 + a_n
        outputs.append(q_n @ state + p_n @ u)
        state = kept * state + k_out @ u
    return torch.cat(outputs, dim=2).transpose(1, 2)[:, :tokens], state


class Convolution(nn.Module):
    """Mixes the last TAPS tokens of each channel by itself, and applies SiLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, TAPS))  # the last one is of the current token

    def forward(self, x: Tensor, positions: Tensor, memory: Memory | None) -> Tensor:
        """(B, T, channels) -> the same, float32. Positions: as in GatedDeltaNet."""
        tokens, before = x.shape[1], x.new_zeros(len(x), TAPS - 1, x.shape[2])
        x = torch.cat((before if memory is None else memory.inputs.get(self, before), x), dim=1)
        if memory is not None:
            memory.inputs[self] = x[:, 1 - TAPS :]
        mixed = torch.zeros((), device=x.device)
        for back, tap in enumerate(self.weight.float().unbind(1)[::-1]):
            part = x[:, TAPS - 1 - back :][:, :tokens] * tap
            mixed = mixed + (part if positions.ndim == 1 else part * (positions >= back).unsqueeze(-1))
        return F.silu(mixed)


class GatedDeltaNet(nn.Module):
    """The recurrence, with q, k and v from a convolution, and a gate at its output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.dims = config.n_heads, config.delta_dims
        key, value = (self.n_heads * dim for dim in self.dims)
        self.wq = nn.Linear(config.dim, key, bias=False)
        self.wk = nn.Linear(config.dim, key, bias=False)
        self.wv = nn.Linear(config.dim, value, bias=False)
        self.wa = nn.Linear(config.dim, self.n_heads, bias=False)
        self.wb = nn.Linear(config.dim, self.n_heads, bias=False)
        self.wg = nn.Linear(config.dim, value, bias=False)  # the gate
        self.wo = nn.Linear(value, config.dim, bias=False)
        self.conv_q, self.conv_k, self.conv_v = Convolution(key), Convolution(key), Convolution(value)
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        self.o_norm = nn.RMSNorm(self.dims[1], 1e-5)  # whatever norm_eps is, as published

    def forward(self, x: Tensor, positions: Tensor, memory: Memory | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). Positions: (T,); (B, T), from 0 in each document, separate documents."""
        parts = (self.wq, self.conv_q), (self.wk, self.conv_k), (self.wv, self.conv_v)
        q, k, v = (conv(w(x), positions, memory).unflatten(-1, (self.n_heads, -1)) for w, conv in parts)
        key, value = self.dims
        q, k = unit(q) * key**-0.5, unit(k)
        z = self.wa(x).float() + self.dt_bias.float()
        # softplus, whose own backward has other strides than a compiled graph expects (aot_eager, torch 2.13)
        g = -self.A_log.float().exp() * torch.logaddexp(z, torch.zeros_like(z))
        b = 2 * self.wb(x).float().sigmoid()
        g, b = g.unsqueeze(-1), b.unsqueeze(-1)  # (B, T, H, 1)
        state = q.new_zeros(len(q), self.n_heads, key, value)
        if memory is not None and memory.state is not None:
            state = memory.state
        if memory is not None and x.shape[1] == 1:
            o, state = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], b[:, 0], state)
            o = o.unsqueeze(1)
        else:
            starts = positions == 0 if positions.ndim == 2 else positions.new_zeros(1, x.shape[1])
            o, state = chunked(q, k, v, g, b, state, starts.cumsum(1))
        if memory is not None:
            memory.length, memory.state = memory.length + x.shape[1], state
        return self.wo(self.o_norm(o.type_as(x)).flatten(2) * F.silu(self.wg(x)))

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward, without those of the parameters: the products of `chunked`.

        Forward, for each head: 2 K V with S_0 for K, for Q and for S_C, 2 C K for A and for P, 2 C V for P U, and the
        triangular system, C V. Backward takes each product twice, but for the system one more of its kind, and 2 C V.
        """
        (key, value), n = self.dims, self.n_heads
        return n * (18 * key * value + CHUNK * (12 * key + 10 * value))


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class DeltaBlock(nn.Module):
    """The recurrence and a feed-forward, each of a normalised copy of the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.delta_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.delta = GatedDeltaNet(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = llama.FeedForward(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: Memory | None = None, mask: Any = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). Positions separate documents, so it needs no mask."""
        x = x + self.delta(self.delta_norm(x), positions, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class AttentionBlock(olmo.TransformerBlock):
    """OLMo's, which normalises what it adds to the residual stream."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: KeysValues | None = None, mask: Any = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). It needs no positions: the mask separates documents."""
        return super().forward(x, cos, sin, cache=cache, mask=mask)


class OlmoHybrid(llama.Llama):
    """Blocks of both kinds."""

    @staticmethod
    def block(config: ModelConfig, layer: int) -> nn.Module:
        return DeltaBlock(config) if config.layer_kinds[layer] == "delta" else AttentionBlock(config, layer)

    def new_cache(self) -> list[Any]:
        """For generation: a memory for each layer of the kind delta, and keys and values for the others."""
        kinds = zip(super().new_cache(), self.config.layer_kinds, strict=True)
        return [Memory() if kind == "delta" else cache for cache, kind in kinds]

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Embedded tokens (B, T, D), cos and sin, and the positions, which have two dims only with documents."""
        x, shared = super().inputs(tokens, positions)
        return x, shared | {"positions": positions}

    @torch.no_grad()
    def reset_parameters(self, normal_: Fill) -> None:
        """As in every family, and for a layer of the kind delta as published, by uniform values r in (0, 1):

        tensor        initial value
        conv_*        normal, deviation 1 / sqrt(TAPS), which keeps the variance
        A_log         log(16 r)
        dt_bias       d such that softplus(d) is between 0.001 and 0.1: exp(log(0.1) + r log(0.01)), and
                      at first a memory fades by the factor exp(-16 r softplus(d)) with each token
        """
        super().reset_parameters(normal_)
        for name, parameter in self.named_parameters():
            if ".conv_" in name:
                normal_(name, parameter, TAPS**-0.5)
            elif name.endswith(("A_log", "dt_bias")):
                normal_(name, parameter, 1.0)
                # in float64: the last bits of these functions depend on the place of a value in a shard
                r = (1 + (parameter.double() * 0.5**0.5).erf()) / 2
                dt = (math.log(0.1) + math.log(0.01) * r).exp()
                parameter.copy_((16 * r).log() if name.endswith("A_log") else dt + (-(-dt).expm1()).log())
