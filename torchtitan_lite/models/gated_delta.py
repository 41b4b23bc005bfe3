"""OLMo Hybrid: gated DeltaNet (Yang et al., 2024) in `delta` layers, OLMo's attention in the others.

1. The recurrence. Instead of all keys and values, a head keeps one matrix S (K, V): a memory that maps a key k to the
value S^T k. Each token decays the memory by exp(g), moves its value for k towards v, and reads it with q:

    S <- exp(g) S
    S <- S + k u^T      with  u = b (v - S^T k)      the delta rule: with b = 1, S^T k is then exactly v
    o  = S^T q

g <= 0 and b in (0, 2) are scalars per token and head, and |k| = 1. In generation, the cost and memory of a token do not
grow with the context.

2. Chunks. Training needs all tokens at once. Within a chunk of C tokens (1 in generation) that begins with the memory
S_0, let
c_i = g_1 + ... + g_i. Unrolled, the memory after token i is exp(c_i) S_0 + sum over j <= i of exp(c_i - c_j) k_j u_j^T.
Substituting it into the definition of u gives a triangular system for the rows u_i of U (C, V):

    u_i + sum over j < i of b_i exp(c_i - c_j) (k_i k_j) u_j = b_i (v_i - exp(c_i) S_0^T k_i)

    (1 + A) U = b (V - exp(c) K S_0)          A = b (K K^T) exp(c_i - c_j), below the diagonal
    O         = exp(c) Q S_0 + P U            P =   (Q K^T) exp(c_i - c_j), up to the diagonal
    S_C       = exp(c_C) S_0 + (exp(c_C - c) K)^T U

`chunked` computes A and P for all chunks together, then the last three lines chunk by chunk.

3. Documents. The memory is empty at the first token of a document. So each factor exp(...) between two tokens, or
between a token and S_0 or S_C, is 0 across documents. The convolution before the recurrence, over each channel's last
4 tokens, also stays within a document.

Convolution and recurrence use float32, whatever fsdp.param_dtype is.

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
from torchtitan_lite.models.induction import Fill

CHUNK = 64  # tokens
TAPS = 4  # the convolution's kernel size


class Memory:
    """The cache of one layer, for generation."""

    def __init__(self) -> None:
        self.length = 0  # tokens so far
        self.inputs: dict[nn.Module, Tensor] = {}  # by convolution: its last inputs, (B, TAPS - 1, channels)
        self.state: Tensor | None = None  # S, (B, H, K, V) float32


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor, documents: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute T tokens: q, k (B, T, H, K), v (B, T, H, V), g, b (B, T, H, 1), S -> o (B, T, H, V) and the last S.

    Args:
        documents: (B, T) or (1, T), the index of each token's document. `state` belongs to the first one. The returned
            S is valid only if all tokens are in document 0, because the last chunk is padded with 0.
    """
    tokens, size = q.shape[1], min(q.shape[1], CHUNK)
    n = -(-tokens // size)

    def split(x: Tensor) -> Tensor:  # (B, T, H, X) -> (N, B, H, C, X); padding tokens leave S unchanged
        return F.pad(x, (0, 0, 0, 0, 0, n * size - tokens)).unflatten(1, (n, size)).permute(1, 0, 3, 2, 4)

    q, k, v, g, b, d = (split(x) for x in (q, k, v, g, b, documents[:, :, None, None]))
    last = d[..., -1:, :]
    before = torch.cat((d[:1, ..., :1, :], last[:-1]))  # the document of each chunk's S_0
    c = g.cumsum(-2)  # (N, B, H, C, 1)

    def factor(exponent: Tensor, connected: Tensor) -> Tensor:
        return torch.where(connected, exponent, -math.inf).exp()

    pairs = factor(c - c.mT, (d == d.mT).tril())  # (N, B, H, C, C), to token i from tokens j <= i
    entering = factor(c, d == before)
    leaving = factor(c[..., -1:, :] - c, d == last)
    a, p = (b * k @ k.mT) * pairs, (q @ k.mT) * pairs
    chunks = (a, p, b * entering * k, entering * q, b * v, entering[..., -1:, :], (leaving * k).mT)
    outputs = []
    for a_n, p_n, k_n, q_n, v_n, kept, k_out in zip(*(x.unbind() for x in chunks), strict=True):
        u = torch.linalg.solve_triangular(a_n, v_n - k_n @ state, upper=False, unitriangular=True)  # 1 + a_n
        outputs.append(q_n @ state + p_n @ u)
        state = kept * state + k_out @ u
    return torch.cat(outputs, dim=2).transpose(1, 2)[:, :tokens], state


class Convolution(nn.Module):
    """A causal depthwise convolution over TAPS tokens, then SiLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, TAPS))  # the last tap is for the current token

    def forward(self, x: Tensor, positions: Tensor, memory: Memory | None) -> Tensor:
        """(B, T, channels) -> (B, T, channels) float32. Positions: as in GatedDeltaNet."""
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
    """The recurrence, with convolved q, k and v, and a gated output."""

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
        self.o_norm = nn.RMSNorm(self.dims[1], 1e-5)  # as published, not norm_eps

    def forward(self, x: Tensor, positions: Tensor, memory: Memory | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). Positions: (T,), or (B, T), from 0 in each document, to separate documents."""
        parts = (self.wq, self.conv_q), (self.wk, self.conv_k), (self.wv, self.conv_v)
        q, k, v = (conv(w(x), positions, memory).unflatten(-1, (self.n_heads, -1)) for w, conv in parts)
        key, value = self.dims
        q, k = unit(q) * key**-0.5, unit(k)
        z = self.wa(x).float() + self.dt_bias.float()
        # softplus(z); F.softplus's backward has other strides than a compiled graph expects (aot_eager, torch 2.13)
        g = -self.A_log.float().exp() * torch.logaddexp(z, torch.zeros_like(z))
        b = 2 * self.wb(x).float().sigmoid()
        g, b = g.unsqueeze(-1), b.unsqueeze(-1)  # (B, T, H, 1)
        state = q.new_zeros(len(q), self.n_heads, key, value)
        if memory is not None and memory.state is not None:
            state = memory.state
        starts = positions == 0 if positions.ndim == 2 else positions.new_zeros(1, x.shape[1])
        o, state = chunked(q, k, v, g, b, state, starts.cumsum(1))
        if memory is not None:
            memory.length, memory.state = memory.length + x.shape[1], state
        return self.wo(self.o_norm(o.type_as(x)).flatten(2) * F.silu(self.wg(x)))

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward in the matmuls of `chunked`, without those of parameters.

        Forward, per head: 2 K V each for K S_0, Q S_0 and S_C; 2 C K each for A and P; 2 C V for P U; C V for the
        triangular system. Backward doubles each matmul; for the system it solves one more and adds 2 C V.
        """
        (key, value), n = self.dims, self.n_heads
        return n * (18 * key * value + CHUNK * (12 * key + 10 * value))


def unit(x: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class DeltaBlock(nn.Module):
    """The pre-norm recurrence and feed-forward, each with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.delta_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.delta = GatedDeltaNet(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = llama.FeedForward(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: Memory | None = None, mask: Any = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). Ignores the mask: positions separate documents."""
        x = x + self.delta(self.delta_norm(x), positions, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class AttentionBlock(olmo.TransformerBlock):
    """OLMo's post-norm block."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: KeysValues | None = None, mask: Any = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). Ignores positions: the mask separates documents."""
        return super().forward(x, cos, sin, cache=cache, mask=mask)


class OlmoHybrid(llama.Llama):
    """Llama with DeltaBlocks and AttentionBlocks."""

    @staticmethod
    def block(config: ModelConfig, layer: int) -> nn.Module:
        return DeltaBlock(config) if config.layer_kinds[layer] == "delta" else AttentionBlock(config, layer)

    def new_cache(self) -> list[Any]:
        """Return empty caches for generation: a Memory for each delta layer, KeysValues for the others."""
        kinds = zip(super().new_cache(), self.config.layer_kinds, strict=True)
        return [Memory() if kind == "delta" else cache for cache, kind in kinds]

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return embedded tokens (B, T, D); cos, sin and the positions, which have two dims only with documents."""
        x, shared = super().inputs(tokens, positions)
        return x, shared | {"positions": positions}

    @torch.no_grad()
    def reset_parameters(self, normal_: Fill) -> None:
        """Fill parameters as in every family, and delta layers as published, with r uniform in (0, 1):

        tensor        initial value
        conv_*        N(0, 1 / TAPS), which keeps the variance
        A_log         log(16 r)
        dt_bias       d such that softplus(d) = exp(log(0.1) + r log(0.01)), between 0.001 and 0.1

        A memory then decays by exp(-16 r softplus(d)) per token.
        """
        super().reset_parameters(normal_)
        for name, parameter in self.named_parameters():
            if ".conv_" in name:
                normal_(name, parameter, TAPS**-0.5)
            elif name.endswith(("A_log", "dt_bias")):
                normal_(name, parameter, 1.0)
                # in float64: in float32, the last bits depend on a value's position in the shard
                r = (1 + (parameter.double() * 0.5**0.5).erf()) / 2
                dt = (math.log(0.1) + math.log(0.01) * r).exp()
                parameter.copy_((16 * r).log() if name.endswith("A_log") else dt + (-(-dt).expm1()).log())
