"""The registry of model families: class, config keys and named sizes. It is plain data, so a config needs no torch.

A new family is one file in models/ and one entry of FAMILIES. Its `defaults` define the architecture. A size sets
numbers; the size of a published model also sets the switches that differ from the defaults. Names below 100M count only
the matrices of the layers, because embeddings depend on the vocabulary; the 1M of llama and resformer also counts the
head of the default vocabulary. The parameter counts of the larger sizes are tested.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_lite.config.registry import Registry

DEFAULT_SIZE = "1M"


@dataclass(frozen=True)
class Family:
    """A family of models."""

    model: str  # "module:class" of its Transformer
    sizes: Mapping[str, Mapping[str, Any]]  # the [model] keys of each size
    defaults: Mapping[str, Any] = field(default_factory=dict)  # [model] keys that define its architecture
    keys: tuple[str, ...] = ()  # [model] keys that not every family reads
    hidden_dim: tuple[int, int, int] = (4, 1, 1)  # (a, b, c): feed-forward width a/b dim, rounded up to a multiple of c
    fused_functions: bool = False  # whether cpu/fused.py replaces part of its blocks
    delta: bool = False  # whether layer_pattern may contain delta
    encoder_decoder: bool = False  # an encoder reads the tokens; a decoder predicts targets of a separate length

    @functools.cached_property
    def reads(self) -> set[str]:
        """The keys that this family reads and not every one does: `keys`, and what its defaults and sizes set."""
        return _OPTIONAL & {*self.keys, *self.defaults, *(key for size in self.sizes.values() for key in size)}

    def shape(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the architecture and, unless a size is given, the default size, by "section.key".

        If dim is given without a size, heads (of width 64, or the next larger even divisor of dim) and hidden_dim
        follow.

        Args:
            given: values by "section.key".
        """
        keys = dict(self.defaults)
        if "model.size" not in given:
            keys |= self.sizes.get(DEFAULT_SIZE, {})
            if isinstance(dim := given.get("model.dim"), int):
                fitting = (n for n in range(dim // 64, 1, -1) if dim % n == dim // n % 2 == 0)
                widths = "n_heads", "n_kv_heads", "head_dim", "hidden_dim"
                keys = {key: value for key, value in keys.items() if key not in widths} | {"n_heads": next(fitting, 1)}
        return {
            f"model.{key}": value
            for key, value in keys.items()
            if key != "induction_head" or not given.get("model.init_from")  # weights replace initial values
        }


def _size(names: str, *values: int, **more: Any) -> dict[str, Any]:
    """Return the [model] keys of a size, whose first ones are given by position."""
    return dict(zip(names.split(), values, strict=True)) | more


_llama = functools.partial(_size, "dim n_layers n_heads n_kv_heads hidden_dim", rope_theta=1e4)
_gemma3 = functools.partial(
    _size, "dim n_layers n_heads n_kv_heads hidden_dim head_dim window", rope_theta=1e6, norm_eps=1e-6
)
_t5 = functools.partial(_size, "dim n_layers n_heads hidden_dim head_dim", norm_eps=1e-6)

GPT: dict[str, dict[str, Any]] = {
    "1M": {"dim": 128, "n_layers": 4, "n_heads": 4},
    "3M": {"dim": 256, "n_layers": 4, "n_heads": 4},
    "10M": {"dim": 320, "n_layers": 8, "n_heads": 5},
    "124M": {"dim": 768, "n_layers": 12, "n_heads": 12},  # GPT-2
    "355M": {"dim": 1024, "n_layers": 24, "n_heads": 16},  # GPT-2 medium
    "774M": {"dim": 1280, "n_layers": 36, "n_heads": 20},  # GPT-2 large
    "1558M": {"dim": 1600, "n_layers": 48, "n_heads": 25},  # GPT-2 XL
}
# lowest loss at equal time (benchmarks/learning.py)
_LEARNS_FAST = {"qk_norm": True, "induction_head": True}
_UNTIED = {"qk_norm": False, "induction_head": False, "tie_embeddings": False}  # as published
_TIED = _UNTIED | {"tie_embeddings": True}
LLAMA = {
    #             dim  layers heads kv hidden
    "1M": _llama(128, 2, 2, 2, 384),
    "3M": _llama(256, 4, 4, 2, 704),
    "15M": _llama(384, 8, 6, 3, 1088),
    "150M": _llama(768, 16, 12, 4, 2048, tie_embeddings=True),  # with a vocabulary of 65,536
    "1B": _llama(2048, 16, 32, 8, 8192, rope_theta=5e5, **_TIED),  # Llama 3.2
    "3B": _llama(3072, 28, 24, 8, 8192, rope_theta=5e5, **_TIED),  # Llama 3.2
    "8B": _llama(4096, 32, 32, 8, 14336, rope_theta=5e5, **_UNTIED),  # Llama 3
    "70B": _llama(8192, 80, 64, 8, 28672, rope_theta=5e5, **_UNTIED),  # Llama 3
    "405B": _llama(16384, 126, 128, 8, 53248, rope_theta=5e5, **_UNTIED),  # Llama 3.1
}
OLMO2 = {
    "1M": _llama(128, 4, 4, 2, 384, rope_theta=5e5),
    "1B": _llama(2048, 16, 16, 16, 8192, rope_theta=5e5, norm_eps=1e-6),
    "7B": _llama(4096, 32, 32, 32, 11008, rope_theta=5e5, norm_eps=1e-6),
    "13B": _llama(5120, 40, 40, 40, 13824, rope_theta=5e5, norm_eps=1e-6),
    "32B": _llama(5120, 64, 40, 8, 27648, rope_theta=5e5, norm_eps=1e-6),
}
_QWEN3_MOE = {"rope_theta": 1e6, "n_experts": 128, "experts_per_token": 8, "head_dim": 128, "norm_eps": 1e-6}
_T5_V1_0 = {"gated": False, "tie_embeddings": True, "scale_output": True}

_ROTARY = ("n_kv_heads", "head_dim", "rope_theta")
_EXPERTS = ("n_experts", "experts_per_token", "norm_topk_prob", "router_bias")
FAMILIES = Registry(
    "model.family",
    "docs/own_model.md",
    Family,
    {
        "gpt": Family(
            "torchtitan_lite.models.gpt:GPT",
            GPT,
            defaults={"tie_embeddings": True},
            keys=("dropout", "mup_base_dim"),
        ),
        "llama": Family(
            "torchtitan_lite.models.llama:Llama",
            LLAMA,
            defaults=_LEARNS_FAST,
            keys=(
                *(*_ROTARY, "qk_norm", "qkv_bias", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor"),
                *("rope_original_max_seq_len", "mup_base_dim", "window", "layer_pattern", "induction_head"),
            ),
            hidden_dim=(8, 3, 64),
            fused_functions=True,
        ),
        "resformer": Family(
            "torchtitan_lite.models.resformer:ResFormer",
            {size: LLAMA[size] for size in ("1M", "3M", "15M")},
            defaults=_LEARNS_FAST,
            keys=(*_ROTARY, "qk_norm", "induction_head", "mup_base_dim"),
            hidden_dim=(8, 3, 64),
            fused_functions=True,
        ),
        "mistral": Family(
            "torchtitan_lite.models.llama:Llama",
            {
                "1M": _llama(128, 4, 4, 2, 384, window=64),
                "7B": _llama(4096, 32, 32, 8, 14336, window=4096),  # v0.1
                "12B": _llama(5120, 40, 32, 8, 14336, rope_theta=1e6, head_dim=128, window=0),  # Nemo
            },
            keys=(*_ROTARY, "window"),
            hidden_dim=(8, 3, 64),
            fused_functions=True,
        ),
        "smollm3": Family(
            "torchtitan_lite.models.llama:Llama",
            {
                "1M": _llama(128, 4, 4, 2, 384, rope_theta=5e4),
                "3B": _llama(2048, 36, 16, 4, 11008, rope_theta=5e6, norm_eps=1e-6, tie_embeddings=True),
            },
            defaults={"layer_pattern": ["full", "full", "full", "nope"]},
            keys=(*_ROTARY, "layer_pattern"),
            hidden_dim=(8, 3, 64),
            fused_functions=True,
        ),
        "olmo2": Family(
            "torchtitan_lite.models.olmo:Olmo", OLMO2, keys=_ROTARY, hidden_dim=(8, 3, 64), fused_functions=True
        ),
        "olmo3": Family(
            "torchtitan_lite.models.olmo:Olmo",
            {
                "1M": OLMO2["1M"] | {"window": 64},
                "7B": OLMO2["7B"] | {"window": 4096},
                "32B": OLMO2["32B"] | {"window": 4096},
            },
            defaults={"layer_pattern": ["window", "window", "window", "full"]},
            keys=(*_ROTARY, "window", "layer_pattern"),
            hidden_dim=(8, 3, 64),
            fused_functions=True,
        ),
        "olmo_hybrid": Family(
            "torchtitan_lite.models.gated_delta:OlmoHybrid",
            {
                "1M": _llama(128, 4, 4, 2, 384, rope_theta=5e5),
                # as released, without rotary positions
                "7B": _llama(3840, 32, 30, 30, 11008, layer_pattern=["delta", "delta", "delta", "nope"], norm_eps=1e-6),
            },
            defaults={"layer_pattern": ["delta", "delta", "delta", "full"]},
            keys=("n_kv_heads", "rope_theta", "layer_pattern"),
            hidden_dim=(8, 3, 64),
            fused_functions=True,
            delta=True,
        ),
        "gemma3": Family(
            "torchtitan_lite.models.gemma3:Gemma3",
            {
                #               dim  layers heads kv hidden head window
                "1M": _gemma3(128, 6, 4, 1, 256, 32, 64),
                "270M": _gemma3(640, 18, 4, 1, 2048, 256, 512),
                "1B": _gemma3(1152, 26, 4, 1, 6912, 256, 512),
            },
            defaults={"layer_pattern": [*["window"] * 5, "full"], "tie_embeddings": True},
            keys=(*_ROTARY, "window", "layer_pattern", "window_rope_theta"),
            fused_functions=True,
        ),
        "qwen3_moe": Family(
            "torchtitan_lite.models.experts:Qwen3Moe",
            {
                "1M": _llama(128, 4, 4, 2, 192, n_experts=8, experts_per_token=2),  # active; 3M in all
                "30B-A3B": _llama(2048, 48, 32, 4, 768, **_QWEN3_MOE),
                "235B-A22B": _llama(4096, 94, 64, 4, 1536, **_QWEN3_MOE),
            },
            defaults={"norm_topk_prob": True},
            keys=(*_ROTARY, *_EXPERTS),
            hidden_dim=(8, 3, 64),
            fused_functions=True,
        ),
        "olmoe": Family(
            "torchtitan_lite.models.experts:Olmoe",
            {
                "1M": _llama(128, 4, 4, 4, 192, n_experts=8, experts_per_token=2),
                "1B-7B": _llama(2048, 16, 16, 16, 1024, n_experts=64, experts_per_token=8),  # OLMoE-1B-7B-0924
            },
            keys=("n_kv_heads", "rope_theta", *_EXPERTS),
            hidden_dim=(8, 3, 64),
            fused_functions=True,
        ),
        "t5": Family(
            "torchtitan_lite.models.t5:T5",
            {
                # blocks of each stack; dim, layers, heads, hidden, head
                "1M": _t5(128, 2, 4, 256, 32),
                "3M": _t5(192, 3, 6, 512, 32),
                "10M": _t5(320, 4, 5, 832, 64),
                "t5-small": _t5(512, 6, 8, 2048, 64, **_T5_V1_0),
                "t5-base": _t5(768, 12, 12, 3072, 64, **_T5_V1_0),
                "t5-large": _t5(1024, 24, 16, 4096, 64, **_T5_V1_0),
                "t5-3b": _t5(1024, 24, 32, 16384, 128, **_T5_V1_0),
                "t5-11b": _t5(1024, 24, 128, 65536, 128, **_T5_V1_0),
                "t5-v1_1-small": _t5(512, 8, 6, 1024, 64),
                "t5-v1_1-base": _t5(768, 12, 12, 2048, 64),
                "t5-v1_1-large": _t5(1024, 24, 16, 2816, 64),
                "t5-v1_1-xl": _t5(2048, 24, 32, 5120, 64),
                "t5-v1_1-xxl": _t5(4096, 24, 64, 10240, 64),
            },
            keys=("dropout", "head_dim", "gated", "scale_output", "n_decoder_layers"),
            fused_functions=True,
            encoder_decoder=True,
        ),
    },
)
_OPTIONAL = {key for family in FAMILIES.values() for key in family.keys}

# the family of each block class of the transformers package
BLOCKS = {
    **dict.fromkeys(("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"), "llama"),
    "MistralDecoderLayer": "mistral",
    "SmolLM3DecoderLayer": "smollm3",
    "Olmo2DecoderLayer": "olmo2",
    "Olmo3DecoderLayer": "olmo3",
    **dict.fromkeys(("OlmoHybridAttentionDecoderLayer", "OlmoHybridLinearAttentionDecoderLayer"), "olmo_hybrid"),
    "Gemma3DecoderLayer": "gemma3",
    "Qwen3MoeDecoderLayer": "qwen3_moe",
    "OlmoeDecoderLayer": "olmoe",
    "GPT2Block": "gpt",
    "T5Block": "t5",
}


def unread(family: str) -> set[str]:
    """Return the keys of [model] that only other families read."""
    return _OPTIONAL - FAMILIES[family].reads
