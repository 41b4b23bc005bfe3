"""Validation of the average of the weights (optim.ema_decay), after that of the weights themselves."""

import time
from typing import Any

import torch
from torch import nn

from torchtitan_lite.optim.average import averaged
from torchtitan_lite.training.evaluate import Validation, eval_line, evaluate


def evaluate_average(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, validation: Validation, device: torch.device
) -> tuple[dict[str, Any], str]:
    """The record and the log line of a validation with averaged weights. Collective; nothing else changes."""
    before = time.perf_counter()
    with averaged(optimizer):
        score = evaluate(model, validation, device)
    seconds = time.perf_counter() - before
    found = {f"ema_{key}": value for key, value in score.record().items() if key.startswith("val_")}
    line = eval_line(step, score, validation, seconds).replace("  loss", "  ema loss", 1)
    return {"step": step, **found, "eval_s": seconds}, line
