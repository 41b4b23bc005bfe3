"""One run, three ways: `python -m benchmarks.oracle`. Do independent implementations compute the same?

    torchtitan_lite   train.train_step on shards, with gloo
    transformers      its own FSDP2, with DistributedConfig(fsdp_size=..., dp_replicate_size=...), and its loss
    unsharded         one process: transformers' model, and torch's cross entropy over the batch in one forward

All start from the same weights file, exported by `huggingface`, and see the same sequences, with different numbers of
targets. All use AdamW with torch's defaults (`ADAMW`). The loss is the global batch's mean per target, and the gradient
norm is the norm of its gradient, before clipping.

float32, with accumulation on one and two ranks: each mesh is compared with the unsharded run (`bound`).
bfloat16, with gradients summed in float32: this project, rounding where transformers does, is compared with
transformers on the same mesh. They may differ by twice transformers' own difference between meshes. On one rank
transformers neither shards nor casts, so it is replaced by the unsharded run with FSDP2's casts.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import train
from benchmarks import contenders
from benchmarks.bare_session import bare_session
from benchmarks.contenders import RandomSamples, Shape
from benchmarks.machine import cpu as cpu_name
from benchmarks.train import versions
from torchtitan_lite import cpu, models
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh
from torchtitan_lite.huggingface import configs, names
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.run.session import check_pending

Curve = list[tuple[float, float]]  # each step's loss and gradient norm
Job = tuple[str, str]  # way and dtype
Meshes = dict[str, tuple[int, int]]  # ranks and replicas

MESHES: Meshes = {"1 rank": (1, 1), "2 ranks": (2, 1), "4 ranks": (4, 1), "HSDP 2 x 2": (4, 2)}
STEPS, BATCH, MAX_NORM = 20, 8, 0.84
# 259 and 70 rows do not divide by four
SHAPE = Shape(36, 70, 2, 6, 2, vocab_size=259, seq_len=24, dtype="float32")
MICRO_BATCH = 2  # in float32; in bfloat16 all of a rank's sequences
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}  # torch.optim.AdamW's defaults


class UnevenSamples(RandomSamples):
    """Sequences with 1 to T targets, so that averaging the ranks' means would be wrong."""

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        """See loader.SampleSource."""
        rows = super().draw(run_samples, seed)
        rows.targets[np.arange(self.seq_len) < run_samples[:, None] * 7 % self.seq_len] = IGNORE
        return rows

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        """See loader.SampleSource."""
        return int((self.draw(run_samples, seed).targets != IGNORE).sum())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return a step's global batch: tokens and targets, (BATCH, T) each."""
    rows = UnevenSamples(SHAPE).draw(np.arange((step - 1) * BATCH, step * BATCH), None)
    return torch.from_numpy(rows.tokens), torch.from_numpy(rows.targets)


def micro_batch(world_size: int, dtype: str) -> int:
    """Return the number of sequences in one forward of a rank."""
    return MICRO_BATCH if dtype == "float32" else BATCH // world_size


def config_of(world_size: int, replicas: int, dtype: str, more: dict[str, Any]) -> Config:
    """Return this project's config."""
    values: dict[str, Any] = {f"optim.{key}": value for key, value in ADAMW.items()}
    values |= {"optim.groups": [{"match": "*", "weight_decay": ADAMW["weight_decay"]}], "optim.betas": [0.9, 0.999]}
    values |= {"optim.schedule": "constant", "optim.warmup_steps": 0, "optim.max_norm": MAX_NORM}
    values |= {"fsdp.dp_replicate": replicas, "fsdp.param_dtype": dtype, "train.global_batch_size": BATCH}
    values["train.micro_batch_size"] = micro_batch(world_size, dtype)
    return contenders.config_of(SHAPE, world_size, values | {"speed.shared_memory": False} | more)


def export(folder: Path) -> None:
    """Write the initial weights as a transformers folder."""
    config = config_of(1, 1, "float32", {}).model
    with torch.device("meta"):
        model = models.build(config, SHAPE.vocab_size)
    materialize(model, torch.device("cpu"), seed=0)
    ours = model.state_dict()
    parts = names.hf_names(ours, config)
    save_file(
        {name: names.to_hf(part, ours.__getitem__, config.family) for name, part in parts.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(configs.to_hf_config(config, SHAPE.vocab_size)))


# --- three ways -------------------------------------------------------------------------------------------------


def ours(process: Process, folder: Path, replicas: int, dtype: str, steps: int, **more: Any) -> Curve:
    """Run train.train_step, as in a run. The initial values equal those of `export` on any mesh."""
    keys = {key.replace("__", "."): value for key, value in more.items()}
    config = config_of(process.world_size, replicas, dtype, keys)
    widen = cpu.widens(config, process)
    model = train.sharded_model(config, SHAPE.vocab_size, build_mesh(config.fsdp, process.device), widen=widen)
    materialize(model, process.device, seed=0)
    loader = Loader(
        UnevenSamples(SHAPE),
        micro_batch_size=config.train.micro_batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=None,
    )
    session = bare_session(config, process, model, loader)
    curve = []
    for step in range(1, steps + 1):
        record = train.train_step(session, step)
        check_pending(session)
        curve.append((record.loss.item(), record.grad_norm.item()))
    return curve


def ours_rounded(process: Process, folder: Path, replicas: int, dtype: str, steps: int) -> Curve:
    """Run `ours` with operators that round where transformers' do."""

    def norm(self: nn.RMSNorm, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + (self.eps or 0))).to(x.dtype)

    fast = "chunked_loss", "block_attention", "fused_functions", "widen_matmuls"
    with mock.patch.object(nn.RMSNorm, "forward", norm):
        return ours(process, folder, replicas, dtype, steps, **{f"speed__{key}": False for key in fast})


def transformers(process: Process, folder: Path, replicas: int, dtype: str, steps: int) -> Curve:
    """Run transformers with transformers.Trainer's loss scale: the mean per target times the number of ranks."""
    from transformers import AutoModelForCausalLM

    n = process.world_size
    model: Any = AutoModelForCausalLM.from_pretrained(folder).train()
    contenders.shard_with_transformers(model, n // replicas, replicas, dtype=dtype)
    assert n == 1 or all(p.device_mesh.size() == n for p in model.parameters())

    def forward_backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss, n_targets, size = torch.zeros(()), (targets != IGNORE).sum(), micro_batch(n, dtype)
        # a different layout from this project's: sequence i goes to rank i % n
        mine = (rows[process.rank :: n].contiguous().split(size) for rows in (tokens, targets))
        for part, labels in zip(*mine, strict=True):
            # the targets are already shifted; `labels` only requests a loss
            out = model(input_ids=part, labels=labels, shift_labels=labels, num_items_in_batch=n_targets)
            (out.loss * n).backward()
            loss += out.loss.detach()
        dist.all_reduce(loss)
        return loss

    return plain_steps(model, forward_backward, steps)


def unsharded(process: Process, folder: Path, replicas: int, dtype: str, steps: int) -> Curve:
    """Run on one process; in bfloat16 with FSDP2's casts of parameters, and so of gradients after backward."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).train()

    def forward_backward(tokens: Tensor, targets: Tensor) -> Tensor:
        cast = {name: p.to(getattr(torch, dtype)) for name, p in model.named_parameters()}
        logits = torch.func.functional_call(model, cast, (), {"input_ids": tokens}).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        return loss.detach()

    return plain_steps(model, forward_backward, steps)


def plain_steps(model: nn.Module, forward_backward: Callable[[Tensor, Tensor], Tensor], steps: int) -> Curve:
    """Apply torch's gradient norm and AdamW after forward and backward of each global batch."""
    optimizer, curve = torch.optim.AdamW(model.parameters()), []
    assert all(optimizer.defaults[key] == value for key, value in ADAMW.items())
    for step in range(1, steps + 1):
        loss = forward_backward(*batch(step))
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()))
    return curve


OURS, ROUNDED, THEIRS, WHOLE = "torchtitan_lite", "torchtitan_lite, rounded alike", "transformers", "unsharded"
WAYS = {OURS: ours, ROUNDED: ours_rounded, THEIRS: transformers, WHOLE: unsharded}


def curves(process: Process, folder: Path, replicas: int, steps: int, jobs: list[Job]) -> dict[Job, Curve]:
    """Run ways and dtypes on one mesh, for tests.helpers.run_distributed."""
    return {(way, dtype): WAYS[way](process, folder, replicas, dtype, steps) for way, dtype in jobs}


# --- allowed differences ----------------------------------------------------------------------------------------


def bound(step: int) -> float:
    """Return the relative difference that float32 rounding may cause by a step."""
    return 1e-6 + 1e-7 * (step - 1)


def differences(curve: Curve, other: Curve) -> list[tuple[float, float]]:
    """Return the relative differences of loss and norm at each step."""
    return [tuple(abs(a / b - 1) for a, b in zip(*pair, strict=True)) for pair in zip(curve, other, strict=True)]  # type: ignore[misc]


def beyond_rounding(curve: Curve, other: Curve) -> list[int]:
    """Return the steps at which float32 curves differ by more than `bound`, or are not finite."""
    found = enumerate(differences(curve, other), start=1)
    return [step for step, both in found if not all(one <= bound(step) for one in both)]  # `not <=` also finds NaN


def largest(found: list[list[tuple[float, float]]]) -> tuple[float, float]:
    """Return the largest difference of losses, and of norms, over several pairs of curves."""
    losses, norms = zip(*(step for pair in found for step in pair), strict=True)
    return np.max(losses).item(), np.max(norms).item()  # NaN if one of them is


def cells(found: list[tuple[float, float]]) -> list[str]:
    """Return the cells of a table's row, without its name."""
    loss, norm = largest([found])
    return [f"{value:.1e}" for value in (found[0][0], loss, found[0][1], norm)]


def print_row(*row: str) -> None:
    """Print a table's row."""
    print(f"| {' | '.join(row)} |")


HEADER = "loss, step 1 | loss, all steps | norm, step 1 | norm, all steps |"


def main() -> int:
    """Run all meshes and print the tables. Exit code 1: a difference exceeds its bound."""
    from benchmarks import oracle  # not __main__, because the ranks import it
    from tests.helpers import run_distributed

    found: dict[str, dict[Job, Curve]] = {}
    with tempfile.TemporaryDirectory() as name:
        export(Path(name))
        for mesh, (n, replicas) in MESHES.items():
            jobs = [(OURS, "float32"), (THEIRS, "float32"), (OURS, "bfloat16"), (ROUNDED, "bfloat16")]
            jobs += [(WHOLE, "float32"), (WHOLE, "bfloat16")] if n == 1 else [(THEIRS, "bfloat16")]
            found[mesh] = run_distributed(oracle.curves, n, Path(name), replicas, STEPS, jobs)[0]
    whole, alone = found["1 rank"][WHOLE, "float32"], found["1 rank"][WHOLE, "bfloat16"]
    print(f"{cpu_name()}; {versions()}; {STEPS} steps of {BATCH} sequences\n")
    print(f"float32, relative differences to the unsharded run\n\n| | {HEADER}\n|---{'|---:' * 4}|")
    failed = []
    for way in (OURS, THEIRS):
        for mesh, of in found.items():
            print_row(f"{way}, {mesh}", *cells(differences(of[way, "float32"], whole)))
            failed += [f"{way}, {mesh}, step {step}" for step in beyond_rounding(of[way, "float32"], whole)]

    theirs = {mesh: of.get((THEIRS, "bfloat16"), alone) for mesh, of in found.items()}
    print("\nbfloat16, relative differences to transformers on the same mesh, and to the unsharded run in float32\n")
    print(f"| | {HEADER} norm to float32 |\n|---{'|---:' * 5}|")
    for way in (OURS, ROUNDED, THEIRS):
        for mesh, of in found.items():
            curve = theirs[mesh] if way == THEIRS else of[way, "bfloat16"]
            apart = [""] * 4 if way == THEIRS else cells(differences(curve, theirs[mesh]))
            print_row(f"{way}, {mesh}", *apart, cells(differences(curve, whole))[-1])
    spreads = {
        way: largest([differences(a, b) for a, b in itertools.combinations(of, 2)])
        for way, of in ((ROUNDED, [of[ROUNDED, "bfloat16"] for of in found.values()]), (THEIRS, list(theirs.values())))
    }
    for way, (loss, norm) in spreads.items():
        print(f"\nlargest difference between meshes, {way}: loss {loss:.1e}, norm {norm:.1e}")
    between = largest([differences(of[ROUNDED, "bfloat16"], theirs[mesh]) for mesh, of in found.items()])
    failed += ["bfloat16"] * any(not one <= 2 * spread for one, spread in zip(between, spreads[THEIRS], strict=True))
    print("\nbeyond the bounds: " + ", ".join(failed) if failed else "\nall within the bounds")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
