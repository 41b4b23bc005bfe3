"""The registry of model families: class, config keys and named sizes. It is plain data, so a config needs no torch.

A new family is one file in models/ and one entry of FAMILIES. A size name below 100M counts the matrices of the layers
only; embeddings depend on the vocabulary. The parameter counts of the larger sizes are tested.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Sizes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """A family of models."""

    model: str  # "module:class" of its Transformer
    sizes: Sizes | str  # the [model] keys of each size, or "module:name" of them
    keys: tuple[str, ...] = ()  # family-specific [model] keys that this family reads
    hidden_dim: tuple[int, int, int] = (4, 1, 1)  # (a, b, c): default feed-forward width a/b dim, a multiple of c
    fused_functions: bool = False  # whether cpu/fused.py replaces a part of its blocks
    encoder_decoder: bool = False  # whether tokens are an encoder's inputs, and targets of another length a decoder's

    def load(self) -> Any:
        """Import the model class."""
        return _load(self.model)

    def named_sizes(self) -> Sizes:
        """The [model] keys of each size."""
        found: Sizes = _load(self.sizes) if isinstance(self.sizes, str) else self.sizes
        return found


def _load(named: str) -> Any:
    module, name = named.split(":")
    return getattr(importlib.import_module(module), name)


GPT: dict[str, dict[str, Any]] = {
    "1M": {"dim": 128, "n_layers": 4, "n_heads": 4},
    "3M": {"dim": 256, "n_layers": 4, "n_heads": 4},
    "10M": {"dim": 320, "n_layers": 8, "n_heads": 5},
    "124M": {"dim": 768, "n_layers": 12, "n_heads": 12},  # GPT-2
    "355M": {"dim": 1024, "n_layers": 24, "n_heads": 16},  # GPT-2 medium
    "774M": {"dim": 1280, "n_layers": 36, "n_heads": 20},  # GPT-2 large
    "1558M": {"dim": 1600, "n_layers": 48, "n_heads": 25},  # GPT-2 XL
}


def _llama(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, *, tied: bool = False, theta: float = 1e4
) -> dict[str, Any]:
    names = "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "tie_embeddings", "rope_theta"
    return dict(zip(names, (dim, n_layers, n_heads, n_kv_heads, hidden_dim, tied, theta), strict=True))


LLAMA: dict[str, dict[str, Any]] = {
    #             dim  layers heads kv hidden
    "1M": {**_llama(128, 4, 4, 2, 384), "qk_norm": True},  # lower by 0.03 bits per byte (benchmarks/learning.py)
    "3M": _llama(256, 4, 4, 2, 704),
    "15M": _llama(384, 8, 6, 3, 1088),
    "150M": _llama(768, 16, 12, 4, 2048, tied=True),
    "1B": _llama(2048, 16, 32, 8, 8192, tied=True, theta=5e5),  # Llama 3.2
    "3B": _llama(3072, 28, 24, 8, 8192, tied=True, theta=5e5),  # Llama 3.2
    "8B": _llama(4096, 32, 32, 8, 14336, theta=5e5),  # Llama 3
    "70B": _llama(8192, 80, 64, 8, 28672, theta=5e5),  # Llama 3
    "405B": _llama(16384, 126, 128, 8, 53248, theta=5e5),  # Llama 3.1
}

FAMILIES: dict[str, Family] = {
    "gpt": Family("torchtitan_lite.models.gpt:GPT", GPT, keys=("dropout", "mup_base_dim")),
    "llama": Family(
        "torchtitan_lite.models.llama:Llama",
        LLAMA,
        keys=(
            *("n_kv_heads", "head_dim", "hidden_dim", "qk_norm", "qkv_bias", "rope_theta", "rope_factor"),
            *("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_seq_len", "mup_base_dim"),
        ),
        hidden_dim=(8, 3, 64),
        fused_functions=True,
    ),
    "t5": Family(
        "torchtitan_lite.models.t5:T5",
        "torchtitan_lite.config.presets:T5",
        keys=("dropout", "head_dim", "hidden_dim", "gated", "scale_output", "n_decoder_layers"),
        fused_functions=True,
        encoder_decoder=True,
    ),
}


# the family of a block's class in the package transformers
BLOCKS = {
    **dict.fromkeys(("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"), "llama"),
    "GPT2Block": "gpt",
    "T5Block": "t5",
}


def families_with(key: str) -> list[str]:
    """The families that read a key of [model]: all, unless the key is family-specific."""
    listed = [name for name, family in FAMILIES.items() if key in family.keys]
    return listed or list(FAMILIES)
