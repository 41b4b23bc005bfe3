"""A run of nanochat's or nanoGPT's own code on this project's tokens, for benchmarks/learning.py.

    python -m benchmarks.learning_peer CLONE OPTIONS SEED RESULT TEXT

CLONE is a checkout of karpathy/nanochat or karpathy/nanoGPT. Model, optimizer, schedules and the defaults of their
options are imported from it. This file has the loop, which feeds them the sequences that a run of train.py of this seed
gets, and scores the result as `evaluate` does, on TEXT, on the "held out" text, or not ("unscored"). OPTIONS are JSON:

    peer               "nanochat" or "nanoGPT"
    depth, dim, heads  of the model
    batch, steps       sequences of 256 tokens in a step, and the number of steps
    rate               nanochat: multiplies the learning rates that its base_train.py computes; nanoGPT: learning_rate
    decay              nanochat: multiplies the weight decay that its base_train.py computes
    dtype, compile     "float32" or "bfloat16" (nanochat only), and whether to use torch.compile

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
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.distributed.process_group import Process, process_group
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.tools.evaluation import tables
from torchtitan_lite.tools.evaluation.documents import Scores, Texts
from torchtitan_lite.tools.evaluation.evaluate import scores_of
from torchtitan_lite.tools.load_model import Opened

SEQ_LEN = 256
Logits = Callable[[Tensor], Tensor]  # of tokens (B, T): (B, T, V)


class Run:
    """A peer's model, and what its script does in a step: set the rates, forward, backward, update."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], update: Callable[[int], None]):
        self.model, self.loss, self.update = model, loss, update


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


def nanochat(clone: Path, o: dict[str, Any], vocab_size: int) -> Run:
    """scripts/base_train.py of nanochat, with full attention, as it recommends without Flash Attention 3."""
    gpt: Any = importlib.import_module("nanochat.gpt")
    schedules = "get_lr_multiplier", "get_muon_momentum", "get_weight_decay"
    script = of_script(clone / "scripts" / "base_train.py", schedules, {"num_iterations": o["steps"]})
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
    # base_train.py's rules for the size of a batch, and for weight decay: tokens in proportion to parameters
    root = math.sqrt(o["batch"] * SEQ_LEN / 2**19)
    longer = scaling(build(12, 768, 6)) / scaling(model)
    script["weight_decay_scaled"] = args.weight_decay * root * longer * o["decay"]
    rates = {
        f"{name}_lr": getattr(args, f"{name}_lr") * root * o["rate"]
        for name in ("unembedding", "embedding", "scalar", "matrix")
    }
    optimizer = model.setup_optimizer(**rates, weight_decay=script["weight_decay_scaled"])
    forward = torch.compile(model, dynamic=False) if o["compile"] else model

    def update(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * script["get_lr_multiplier"](step)
            if group["kind"] == "muon":
                group["momentum"] = script["get_muon_momentum"](step)
                group["weight_decay"] = script["get_weight_decay"](step)
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return Run(model, forward, update)


def nanogpt(clone: Path, o: dict[str, Any], vocab_size: int) -> Run:
    """train.py of nanoGPT with its config for small networks, without dropout, as in the CPU example of its README."""
    gpt: Any = importlib.import_module("model")
    script = of_script(clone / "train.py", ("get_lr",), {})
    exec((clone / "config" / "train_shakespeare_char.py").read_text(encoding="utf-8"), script)
    script |= {"learning_rate": o["rate"], "min_lr": o["rate"] / 10, "lr_decay_iters": o["steps"]}
    script["warmup_iters"] = min(script["warmup_iters"], o["steps"] // 10)
    sizes = {"n_layer": o["depth"], "n_head": o["heads"], "n_embd": o["dim"], "dropout": 0.0}
    model = gpt.GPT(gpt.GPTConfig(SEQ_LEN, vocab_size, **sizes, bias=script["bias"]))
    betas = script["beta1"], script["beta2"]
    optimizer = model.configure_optimizers(script["weight_decay"], o["rate"], betas, "cpu")
    forward = torch.compile(model) if o["compile"] else model

    def update(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = script["get_lr"](step)
        nn.utils.clip_grad_norm_(model.parameters(), script["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Run(model, lambda x, y: forward(x, y)[1], update)


def train(run: Run, o: dict[str, Any], loader: Loader) -> float:
    """Train on the sequences of a run. Returns the processor time of all steps."""
    began = 0.0
    for step in range(o["steps"]):
        if step == 2:
            began = time.process_time()
        [micro] = loader.batch(step * o["batch"], o["batch"]).micro_batches
        loss = run.loss(micro.tokens, micro.targets)
        loss.backward()
        run.update(step)
        if step % 25 == 0 or step == o["steps"] - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step == 0:  # as base_train.py does
            gc.collect()
            gc.freeze()
            gc.disable()
    return (time.process_time() - began) * o["steps"] / (o["steps"] - 2)


class Scored(nn.Module):
    """A peer's model, called as this project's scoring calls its own."""

    def __init__(self, logits: Logits, vocab_size: int) -> None:
        super().__init__()
        self.logits = logits
        self.config = SimpleNamespace(max_seq_len=SEQ_LEN, family="llama")  # a decoder
        self.tok_embeddings = SimpleNamespace(num_embeddings=vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor, *, per_sequence: bool) -> Tensor:
        rows = F.pad(tokens, (0, 1))  # nanochat takes at least two tokens
        logits = self.logits(rows[:, :SEQ_LEN].contiguous())[:, : tokens.shape[1]].float()
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return nats.view(targets.shape).sum(1)


def score(run: Run, peer: str, config: Config, data: DataSet, text: str, process: Process) -> Scores:
    """Score whole documents in the windows of `evaluate`."""
    model = run.model.eval().requires_grad_(False)
    logits: Logits = model if peer == "nanochat" else lambda rows: model(rows, rows)[0]
    tokenizer = bpe.load(data.folder / "tokenizer.json")
    scored: Any = Scored(logits, data.vocab_size)
    opened = Opened(peer, scored, tokenizer, (data.end_token,), [], config=config)
    texts = Texts(data=[str(data.folder) if text == "held out" else text])
    [(_, scores)] = scores_of(opened, texts, process, print)
    return scores


def main() -> None:
    """Train, score, and write the result."""
    clone, given, seed, result, text = sys.argv[1:]
    o = json.loads(given)
    sys.path.insert(0, clone)
    os.environ["NANOCHAT_DTYPE"] = o["dtype"]
    if not o["compile"]:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nanochat's optimizer
    keys = {"train.seq_len": SEQ_LEN} | ({} if text == "held out" else {"data.val_fraction": 0.1})
    config = load_config(overrides=keys)
    data = prepare_all(config.data, config.tokenizer, print)
    samples = open_samples(data, "train", config)
    loader = Loader(samples, micro_batch_size=o["batch"], rank=0, world_size=1, seed=int(seed))
    with process_group(RunConfig(device="cpu", threads=1)) as process, contextlib.chdir(clone):
        torch.manual_seed(int(seed))
        run = {"nanochat": nanochat, "nanoGPT": nanogpt}[o["peer"]](Path(clone), o, data.vocab_size)
        seconds = train(run, o, loader)
        learning_train.documents()
        figures = {} if text == "unscored" else tables.figures(score(run, o["peer"], config, data, text, process))
    commit = Path(clone).with_suffix(".commit")
    if (Path(clone) / ".git").exists():
        head = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        name = head.stdout.strip()
    else:
        name = commit.read_text(encoding="utf-8").strip() if commit.exists() else ""
    parameters = sum(p.numel() for p in run.model.parameters())
    found = {"seconds": seconds, "commit": name, "parameters": parameters} | figures
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
