"""Named model sizes: what `[model] size` stands for. Plain numbers, so that reading a config needs no torch."""

GPT: dict[str, dict[str, int]] = {
    # name    matrices of the layers (12 n_layers dim^2); the embeddings come on top
    "1M": {"dim": 128, "n_layers": 4, "n_heads": 4},
    "3M": {"dim": 256, "n_layers": 4, "n_heads": 4},
    "10M": {"dim": 320, "n_layers": 8, "n_heads": 5},
    "124M": {"dim": 768, "n_layers": 12, "n_heads": 12},  # GPT-2
    "355M": {"dim": 1024, "n_layers": 24, "n_heads": 16},  # GPT-2 medium
    "774M": {"dim": 1280, "n_layers": 36, "n_heads": 20},  # GPT-2 large
    "1558M": {"dim": 1600, "n_layers": 48, "n_heads": 25},  # GPT-2 XL
}

SIZES = {"gpt": GPT}
