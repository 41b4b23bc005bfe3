"""Qwen3-MoE and OLMoE: Llama with a mixture-of-experts feed-forward (Shazeer et al., 2017).

A router scores all experts for each token. The output is the weighted sum of the best `experts_per_token` experts. No
token is dropped. For the matmuls, tokens are sorted by expert:

    x (N, D) -> scores (N, E) -> the k best (N, k) -> rows by expert (N k, D) -> SwiGLU -> back in order -> sum over k

Experts that get few tokens learn little, so two mechanisms balance the loads.

`train.router_aux_loss` adds a loss to the gradients (Fedus et al., 2021; Switch Transformers), as in `transformers`,
but for each layer separately:

    E * sum over e of (share of the tokens that chose e) * (mean probability of e)

The sum covers the tokens with a target in one micro-batch on one rank: a mean over the global batch would need a
collective in each forward.

`model.router_bias` adds a bias to the scores, used only to choose experts. After each step it grows for experts below
the mean load of the global batch, and shrinks for the others (Wang et al., 2024; DeepSeek-V3).

Shapes: N tokens, D dim, E experts, k experts per token, F hidden_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.config.sections.log import Metric
from torchtitan_lite.models import llama, olmo
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.grouped_matmul import grouped_matmul
from torchtitan_lite.models.induction import Fill
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
        """(N, D) -> logits (N, E), and weights and indices of the chosen experts, (N, k)"""
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
        """(N k, I) rows sorted by expert -> (N k, O)"""
        return self.multiply(x, self.weight, ends)


class FeedForward(nn.Module):
    """The weighted sum of the chosen experts, each a SwiGLU."""

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
    """A block that, in training, also returns the router's logits and choices."""

    make_feed_forward = FeedForward

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Any:
        x = x + self.attention(self.attention_norm(x), cos, sin, cache=cache, mask=mask)
        more, logits, chosen = self.feed_forward(self.ffn_norm(x))
        return (x + more, logits, chosen) if self.training else x + more


class NormedAttention(llama.Attention):
    """Normalises each query head and each key head separately."""

    norm = nn.RMSNorm


class Qwen3MoeBlock(TransformerBlock):
    make_attention = NormedAttention


class OlmoeBlock(TransformerBlock):
    make_attention = olmo.Attention


def extreme_loads(loads: Tensor) -> dict[str, float]:
    """Return the highest and the lowest load of an expert, relative to its layer's mean."""
    shares = loads / loads.mean(1, keepdim=True)
    return {"load_max": shares.max().item(), "load_min": shares.min().item()}


class Experts(llama.Llama):
    """Llama with experts, router losses and router biases."""

    metrics = (Metric(lambda model, **_: model.loads, extreme_loads, "loads {load_min:.2f}-{load_max:.2f}"),)

    @torch.no_grad()
    def reset_parameters(self, normal_: Fill) -> None:
        """Fill parameters as in every family, and the routers' biases with 0."""
        super().reset_parameters(normal_)
        for bias in self.router_biases():
            bias.zero_()

    def router_biases(self) -> list[Tensor]:
        """Return each layer's bias, (E,); empty without model.router_bias."""
        return [buffer for name, buffer in self.layers.named_buffers() if name.endswith("router.bias")]

    def with_router_losses(self, loss: Tensor, routed: list[tuple[Tensor, Tensor]], targets: Tensor) -> Tensor:
        """Return the token loss; router losses contribute gradients only. Also counts the loads."""
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
    def balance(self, sum_over_ranks: Callable[[Tensor], Tensor], withheld: Tensor | None = None) -> None:
        """After a step, raise the bias of experts below their layer's mean load, and lower the others.

        Args:
            withheld: () on the device; 1: the step's update was withheld, so change nothing.
        """
        if self.loads is not None and self.config.router_bias:
            loads = sum_over_ranks(self.loads.double())  # (L, E) tokens per layer and expert in the step
            for layer, bias in enumerate(self.router_biases()):
                change = self.losses.router_bias_rate * (loads[layer].mean() - loads[layer]).sign()
                bias += change if withheld is None else change * (1 - withheld)
        self.loads = None


class Qwen3Moe(Experts):
    block = Qwen3MoeBlock


class Olmoe(Experts):
    block = OlmoeBlock
