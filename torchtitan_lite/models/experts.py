"""Qwen3-MoE and OLMoE: Llama whose feed-forward is a choice of experts for each token (Shazeer et al., 2017).

A router scores all experts, and the token's output is the weighted sum of those of the best `experts_per_token`. No
token is dropped. Between the products, tokens are sorted by expert:

    x (N, D) -> scores (N, E) -> the k best (N, k) -> rows by expert (N k, D) -> SwiGLU -> back in order -> sum over k

Experts that get few tokens learn little, so two things keep loads even. `train.router_aux_loss` adds a loss to the
gradients (Fedus et al., 2021; Switch Transformers), as `transformers` computes it, but of each layer by itself:

    E sum over e of (share of the tokens that chose e) (mean probability of e)

over the tokens with a target of one micro-batch of a rank: a mean over the global batch would need a collective in each
forward. `model.router_bias` adds a bias to the scores, for the choice only, which after each step grows for experts
with less than the mean load of the global batch, and shrinks for the others (Wang et al., 2024; DeepSeek-V3).

Shapes: N tokens, D dim, E experts, k of them for each token, F hidden_dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models import llama, olmo
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.grouped_matmul import grouped_matmul
from torchtitan_lite.models.loss import IGNORE


class Router(nn.Module):
    """Chooses experts, in float32."""

    bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k, self.normalizes = config.experts_per_token, config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.register_buffer("bias", torch.empty(config.n_experts) if config.router_bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, D) -> logits (N, E), and weights and numbers of the chosen experts, (N, k)"""
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1)
        chosen = (scores if self.bias is None else scores + self.bias).topk(self.k).indices
        weights = scores.gather(1, chosen)
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen


class Stack(nn.Module):
    """The matrices (E, O, I) of all experts."""

    def __init__(self, n: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.multiply = grouped_matmul  # cpu/ may replace it
        self.weight = nn.Parameter(torch.empty(n, outputs, inputs))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows by expert, (N k, I) -> (N k, O)"""
        return self.multiply(x, self.weight, ends)


class FeedForward(nn.Module):
    """The weighted sum of the SwiGLUs that the router chooses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n, dim, hidden = config.n_experts, config.dim, config.dim_of_ffn
        self.router = Router(config)
        self.w1 = Stack(n, dim, hidden)  # the gates
        self.w2 = Stack(n, hidden, dim)
        self.w3 = Stack(n, dim, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> (B, T, D), and the router's logits (N, E) and choices (N, k)"""
        flat = x.flatten(0, -2)
        logits, weights, chosen = self.router(flat)
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(logits.shape[1], device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        rows = flat.index_select(0, order // chosen.shape[1])
        rows = self.w2(F.silu(self.w1(rows, ends)) * self.w3(rows, ends), ends)
        each = rows.index_select(0, order.argsort()).unflatten(0, chosen.shape)  # (N, k, D)
        return (each * weights.type_as(each).unsqueeze(-1)).sum(1).view_as(x), logits, chosen


class TransformerBlock(llama.TransformerBlock):
    """In training it also returns the router's logits and choices."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.feed_forward = FeedForward(config)  # type: ignore[assignment]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Any:
        x = x + self.attention(self.attention_norm(x), cos, sin, cache=cache, mask=mask)
        more, logits, chosen = self.feed_forward(self.ffn_norm(x))
        return (x + more, logits, chosen) if self.training else x + more


class Qwen3MoeBlock(TransformerBlock):
    """Each head of the queries and of the keys is normalised."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.attention.q_norm = nn.RMSNorm(config.dim_of_heads, config.norm_eps)
        self.attention.k_norm = nn.RMSNorm(config.dim_of_heads, config.norm_eps)


class OlmoeBlock(TransformerBlock):
    """All queries have one norm, and so have all keys."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.attention = olmo.Attention(config, layer)


class Experts(llama.Llama):
    """Llama with these blocks, the losses of its routers, and their bias."""

    def reset_buffers(self) -> None:
        super().reset_buffers()
        for bias in self.router_biases():
            bias.zero_()

    def router_biases(self) -> list[Tensor]:
        """(E,) of each layer; empty without model.router_bias."""
        return [buffer for name, buffer in self.layers.named_buffers() if name.endswith("router.bias")]

    def with_router_losses(self, loss: Tensor, routed: list[tuple[Tensor, Tensor]], targets: Tensor) -> Tensor:
        """The summed loss, with the gradients of the routers' losses, and the same value. Counts the loads."""
        counted = (targets.flatten() != IGNORE).float()  # (N,)
        n, more, loads = counted.sum().clamp(min=1), loss.new_zeros(()), []
        for logits, chosen in routed:
            load = counted.new_zeros(logits.shape[1])  # (E,) tokens
            loads.append(load.scatter_add_(0, chosen.flatten(), counted.repeat_interleave(chosen.shape[1])))
            if self.losses.router_aux_loss:
                likely = (logits.softmax(-1) * counted[:, None]).sum(0)
                more = more + self.losses.router_aux_loss * len(load) * (load * likely).sum() / n
            if self.losses.router_z_loss:
                more = more + self.losses.router_z_loss * (logits.logsumexp(-1).square() * counted).sum()
        self.loads = torch.stack(loads) if self.loads is None else self.loads + torch.stack(loads)
        return loss + (more - more.detach()) / len(routed)

    @torch.no_grad()
    def balance(self, loads: Tensor | None, withheld: Tensor | None = None) -> None:
        """Up by `router_bias_rate` for experts with less than the mean load of their layer, else down."""
        for layer, bias in enumerate(self.router_biases()):
            assert loads is not None
            change = self.losses.router_bias_rate * (loads[layer].mean() - loads[layer]).sign()
            bias += change if withheld is None else change * (1 - withheld)


class Qwen3Moe(Experts):
    block = Qwen3MoeBlock


class Olmoe(Experts):
    block = OlmoeBlock
