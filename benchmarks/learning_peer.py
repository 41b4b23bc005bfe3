"""A run of nanochat's own code on this project's tokens, for benchmarks/learning.py.

    python -m benchmarks.learning_peer CLONE OPTIONS SEED RESULT TEXT SCORED

CLONE is a checkout of karpathy/nanochat. Model, optimizer, schedules and the defaults of their options are imported
from it. This file has the loop, which feeds them the sequences that a run of train.py of this seed gets, and scores the
result as `evaluate` does. TEXT is data.path. SCORED is the documents to score, "held out" for those of TEXT's default
split, or "nothing". OPTIONS are JSON:

    depth, dim, heads  of the model
    batch, steps       sequences of 256 tokens in a step, and the number of steps
    rate, decay        multiply the learning rates and the weight decay that its base_train.py computes
    compile            whether to use torch.compile
    induction_head     true: begin with model.induction_head's values, in the scales of nanochat

Seconds are processor time of this process for all steps, at the cost of those after the second: compiling is free.
"""

import argparse
import ast
import contextlib
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import learning_train
from torchtitan_lite.api import load_config
from torchtitan_lite.config.schema import ModelConfig, RunConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import prepare_all
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.distributed.process_group import process_group
from torchtitan_lite.models.induction import entries
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.tools.evaluation import tables
from torchtitan_lite.tools.evaluation.documents import Texts
from torchtitan_lite.tools.evaluation.evaluate import scores_of
from torchtitan_lite.tools.load_model import Opened

SEQ_LEN = 256
CONSTANT, GAIN = 10.0, 4.0  # the first coordinate in standard deviations of an embedding; of values and outputs
SCHEDULES = "get_lr_multiplier", "get_muon_momentum", "get_weight_decay"


def of_script(script: Path, functions: tuple[str, ...], names: dict[str, Any]) -> dict[str, Any]:
    """Take functions, constants and options out of a training script, without running it."""
    tree = ast.parse(script.read_text(encoding="utf-8"))

    def wanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef):
            return node.name in functions
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return isinstance(node.targets[0], ast.Name)
        return ast.unparse(node).startswith(("parser = ", "parser.add_argument("))

    tree.body = list(filter(wanted, tree.body))
    names |= {"argparse": argparse, "math": math}
    exec(compile(tree, str(script), "exec"), names)
    return names


def nanochat(clone: Path, o: dict[str, Any], vocab_size: int) -> tuple[Any, Callable[[int], None]]:
    """What scripts/base_train.py builds: the model, and the update of a step, which sets rates, momentum and decay.

    Attention is full, as it recommends without Flash Attention 3.
    """
    gpt: Any = importlib.import_module("nanochat.gpt")
    script = of_script(clone / "scripts" / "base_train.py", SCHEDULES, {"num_iterations": o["steps"]})
    args = script["args"] = script["parser"].parse_args([])

    def build(depth: int, dim: int, heads: int) -> Any:
        with torch.device("meta"):
            sizes = {"n_layer": depth, "n_head": heads, "n_kv_head": heads, "n_embd": dim}
            return gpt.GPT(gpt.GPTConfig(SEQ_LEN, vocab_size, **sizes, window_pattern="L"))

    def scaling(model: Any) -> int:
        counts = model.num_scaling_params()
        return int(counts["transformer_matrices"] + counts["lm_head"])

    model = build(o["depth"], o["dim"], o["heads"])
    model.to_empty(device="cpu")
    model.init_weights()
    if o.get("induction_head"):
        begin_with_induction_head(model, vocab_size)
    # base_train.py's rules for the size of a batch, and for weight decay: tokens in proportion to parameters
    root = math.sqrt(o["batch"] * SEQ_LEN / 2**19)
    longer = scaling(build(12, 768, 6)) / scaling(model)
    script["weight_decay_scaled"] = args.weight_decay * root * longer * o["decay"]
    rates = {
        f"{name}_lr": getattr(args, f"{name}_lr") * root * o["rate"]
        for name in ("unembedding", "embedding", "scalar", "matrix")
    }
    optimizer = model.setup_optimizer(**rates, weight_decay=script["weight_decay_scaled"])

    def update(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * script["get_lr_multiplier"](step)
            if group["kind"] == "muon":
                group["momentum"] = script["get_muon_momentum"](step)
                group["weight_decay"] = script["get_weight_decay"](step)
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return model, update


@torch.no_grad()
def begin_with_induction_head(model: Any, vocab_size: int) -> None:
    """Put the initial values of torchtitan_lite/models/induction.py into nanochat's model.

    Its rotary positions turn the other way, and slower. Its residual stream begins at the length of a normed vector, so
    values and outputs are larger. The normal values of the two heads are those of this project, which are smaller.
    """
    dim, heads = model.config.n_embd, model.config.n_head
    config = ModelConfig(family="llama", dim=dim, n_layers=2, n_heads=heads, n_kv_heads=heads, rope_theta=1e5)
    embeddings = model.transformer.wte.weight
    std = embeddings.std()
    model.lm_head.weight.copy_(-embeddings / std * dim**-0.5)
    embeddings[:, 0] += CONSTANT * std
    for name, (rows, columns, values) in entries(config, vocab_size).items():
        if name == "tok_embeddings.weight":
            continue
        _, layer, _, matrix, _ = name.split(".")
        attention = model.transformer.h[int(layer)].attn
        weight = getattr(attention, {"wq": "c_q", "wk": "c_k", "wv": "c_v", "wo": "c_proj"}[matrix]).weight
        if matrix != "wo":  # which is zero
            weight[: dim // heads].normal_(std=0.02)
        values = values * (GAIN if matrix in ("wv", "wo") else 1.0)
        if (layer, matrix) == ("0", "wk"):
            values[rows >= dim // heads // 2] *= -1
        weight[rows, columns] += values


def train(model: Any, update: Callable[[int], None], o: dict[str, Any], loader: Loader) -> float:
    """Train on the sequences of a run. Returns the processor time of all steps."""
    forward = torch.compile(model, dynamic=False) if o["compile"] else model
    began = 0.0
    for step in range(o["steps"]):
        if step == 2:
            began = time.process_time()
        [micro] = loader.batch(step * o["batch"], o["batch"]).micro_batches
        loss = forward(micro.tokens, micro.targets)
        loss.backward()
        update(step)
        if step % 25 == 0 or step == o["steps"] - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step == 0:  # as base_train.py does
            gc.collect()
            gc.freeze()
            gc.disable()
    return (time.process_time() - began) * o["steps"] / (o["steps"] - 2)


class Scored(nn.Module):
    """A peer's model, called as this project's scoring calls its own."""

    def __init__(self, logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        super().__init__()
        self.logits = logits  # of tokens (B, T): (B, T, V)
        self.config = SimpleNamespace(max_seq_len=SEQ_LEN, family="llama")  # a decoder
        self.tok_embeddings = SimpleNamespace(num_embeddings=vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor, *, per_sequence: bool) -> Tensor:
        rows = F.pad(tokens, (0, 1))  # nanochat takes at least two tokens
        logits = self.logits(rows[:, :SEQ_LEN].contiguous())[:, : tokens.shape[1]].float()
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return nats.view(targets.shape).sum(1)


def main() -> None:
    """Train, score, and write the result."""
    clone, given, seed, result, text, scored = sys.argv[1:]
    o = json.loads(given)
    sys.path.insert(0, clone)
    os.environ["NANOCHAT_DTYPE"] = "float32"
    if not o["compile"]:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nanochat's optimizer
    keys = {"train.seq_len": SEQ_LEN, "data.path": text}
    config = load_config(overrides=keys | ({} if scored == "held out" else {"data.val_fraction": 0.1}))
    data = prepare_all(config.data, config.tokenizer, print)
    loader = Loader(
        open_samples(data, "train", config), micro_batch_size=o["batch"], rank=0, world_size=1, seed=int(seed)
    )
    figures: dict[str, Any] = {}
    with process_group(RunConfig(device="cpu", threads=1)) as process, contextlib.chdir(clone):
        torch.manual_seed(int(seed))
        model, update = nanochat(Path(clone), o, data.vocab_size)
        seconds = train(model, update, o, loader)
        if scored != "nothing":
            learning_train.documents()
            as_ours: Any = Scored(model.eval().requires_grad_(False), data.vocab_size)
            tokenizer = bpe.load(data.folder / "tokenizer.json")
            opened = Opened("nanochat", as_ours, tokenizer, (data.end_token,), [], config=config)
            texts = Texts(data=[str(data.folder) if scored == "held out" else scored])
            [(_, scores)] = scores_of(opened, texts, process, print)
            figures = tables.figures(scores)
    head = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    parameters = sum(p.numel() for p in model.parameters())
    found = {"seconds": seconds, "commit": head.stdout.strip(), "parameters": parameters} | figures
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
