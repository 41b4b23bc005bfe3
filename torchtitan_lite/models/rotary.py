"""The angles of rotary positions (Su et al., 2021)."""

import math

import torch
from torch import Tensor

from torchtitan_lite.config.schema import ModelConfig


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position's angles, (max_seq_len, E) float32 each, on the CPU.

    rope_factor > 1 extends the context as Llama 3 does: it stretches long wavelengths by the factor, keeps short ones,
    and interpolates between (Meta's reference code, 2024).
    """
    exponents = torch.arange(0, config.dim_of_heads, 2, dtype=torch.float32, device="cpu") / config.dim_of_heads
    frequencies = 1.0 / config.rope_theta**exponents  # (E / 2,), radians per position
    if config.rope_factor > 1:
        turns = config.rope_original_max_seq_len * frequencies / (2 * math.pi)  # within the original context
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * kept + frequencies / config.rope_factor * (1 - kept)
    positions = torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()
