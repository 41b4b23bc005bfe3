"""The validation loss of nanoGPT's checkpoint over the whole text: `python -m benchmarks.nanogpt_score CLONE`.

Its train.py estimates the loss on random batches. This scores CLONE/out-shakespeare-char/ckpt.pt on consecutive windows
of data/shakespeare_char/val.bin, as `evaluate` does.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def main() -> None:
    """Print nats per character."""
    clone = Path(sys.argv[1])
    sys.path.insert(0, str(clone))
    gpt: Any = importlib.import_module("model")
    saved = torch.load(clone / "out-shakespeare-char/ckpt.pt", map_location="cpu", weights_only=True)
    model = gpt.GPT(gpt.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    ids = torch.from_numpy(np.fromfile(clone / "data/shakespeare_char/val.bin", np.uint16).astype(np.int64))
    length = saved["model_args"]["block_size"]
    n = (len(ids) - 1) // length
    x, y = ids[: n * length].view(n, length), ids[1 : n * length + 1].view(n, length)
    with torch.no_grad():
        parts = [
            F.cross_entropy(model(a, b)[0].flatten(0, 1), b.flatten(), reduction="sum")
            for a, b in zip(x.split(128), y.split(128), strict=True)
        ]
    print(f"step {saved['iter_num']}: {sum(parts) / y.numel():.4f} nats per character of {y.numel():,}")


if __name__ == "__main__":
    main()
