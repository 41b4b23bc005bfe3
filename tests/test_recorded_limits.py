"""Just below and just above each limit, and what is not finite or empty: recorded_limits.json has the results.

Nothing else holds: "numbers of the package", the backends in "attention on a GPU", what `plan` counts ("matmuls",
"bytes", "a micro-batch"), most limits of "spikes" and "guard", and "prompt"; read their diffs. Real runs skip spikes in
test_spikes.py.
"""

import argparse
import contextlib
import functools
import io
import json
import math
import pkgutil
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.recorded import assert_recorded, differences
from tests.run.test_recorded_lines import ONE_SOURCE, PAIRS, SAMPLES, T5, config_of, data_lines, planned, result
from torchtitan_lite import environment
from torchtitan_lite.checkpointing import compatibility, safetensors_file, shards, storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import (
    CompileConfig,
    GradScalerConfig,
    ModelConfig,
    OptimConfig,
    SpikeConfig,
)
from torchtitan_lite.cpu import attention as by_blocks
from torchtitan_lite.cpu import barrier, fused, shared_memory
from torchtitan_lite.cpu import loss as in_chunks
from torchtitan_lite.data import loader, mixture, packing, pairs, token_files
from torchtitan_lite.data.prepare import documents, folder, texts, tokenizer
from torchtitan_lite.distributed import float8, process_group, recompute_and_compile
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import UserError
from torchtitan_lite.models import (
    attention,
    chunked_loss,
    generation,
    grouped_matmul,
    kernels,
    loss,
    loss_operators,
    t5,
)
from torchtitan_lite.models.experts import Experts
from torchtitan_lite.optim import finite_guard, grad_scaler, groups, muon, spike_guard
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.optim.step_record import Numbers, StepRecord
from torchtitan_lite.run import attempts, between_steps, metrics, mfu, session
from torchtitan_lite.scoring import brackets, find_tasks, statistics, task_scores, validation
from torchtitan_lite.scoring.likelihood import Window
from torchtitan_lite.tools import dry_run, generate, load_model, which
from torchtitan_lite.tools.estimate import command, planned_run, work

CPU, INF, NAN, BF16 = torch.device("cpu"), math.inf, math.nan, torch.ones(2, 2, dtype=torch.bfloat16)
Stub: Any = SimpleNamespace


def patched(call: Callable[[], Any], **values: Any) -> Any:
    """The result of a call with other values in the package; "__" stands for a dot."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(f"torchtitan_lite.{name.replace('__', '.')}", value)
        return result(call, ())


def spied(name: str, shown: Callable[..., Any], call: Callable[[], Any], instead: Any = None, **values: Any) -> Any:
    """What is shown of each call of a function, which may be replaced."""
    found: list[Any] = []
    original = instead or pkgutil.resolve_name(f"torchtitan_lite.{name.replace('__', '.')}")

    def spy(*args: Any, **kwargs: Any) -> Any:
        found.append(shown(*args, **kwargs))
        return original(*args, **kwargs)

    patched(call, **{name: spy}, **values)
    return found


# --- the way that a computation takes ---------------------------------------------------------------------------


def kernels_of(length: int, head_dim: int, capability: tuple[int, int], dtype: Any = torch.bfloat16) -> Any:
    """On a GPU: the backend that is tried first, the heads of keys, and whether the kernel shares them."""
    q, k = (OnGpu(torch.zeros(1, length, heads, head_dim, dtype=dtype)) for heads in (4, 2))
    first: list[Any] = []
    return patched(
        lambda: attention.attend(q, k, k),
        models__kernels__torch__cuda__get_device_capability=lambda: capability,
        models__kernels__torch__backends__cuda__is_flash_attention_available=lambda: True,
        models__attention__sdpa_kernel=lambda tried, **_: contextlib.nullcontext(first.__iadd__(tried)),
        models__attention__F__scaled_dot_product_attention=lambda _q, k, _, **more: Text(
            f"{first[0]}, {k.shape[1]} heads, shared {more['enable_gqa']}"
        ),
    )


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


class Text(str):
    """Stands for an output."""

    def transpose(self, *_dims: int) -> str:
        return str(self)


def model_of(logits: torch.Tensor) -> Any:
    """A decoder that always computes these logits, (1, 1, V)."""
    about = {"config": Stub(family="gpt", max_seq_len=9), "tok_embeddings": Stub(weight=Stub(device=CPU))}
    return Mock(return_value=logits, new_cache=list, **about)


def chunks(n: int, dtype: torch.dtype) -> Any:
    x, weight, targets = torch.zeros(1, n, 2, dtype=dtype), torch.zeros(3, 2, dtype=dtype), torch.zeros(1, n).long()
    compute = functools.partial(in_chunks.chunked_cross_entropy, x, weight, targets)
    return spied("cpu__loss___softmax_minus_onehot", lambda logits, *_: len(logits), compute)


# --- what is not finite -----------------------------------------------------------------------------------------


def checked(enabled: bool, scale: float, norm: float, of_ranks: list[float], skipped: list[int], most: int = 1) -> Any:
    """What a guard says of step 5, the overflows that it has counted, and the steps that it has skipped."""
    scaler = grad_scaler.GradScaler(GradScalerConfig(), enabled, CPU)
    guard = finite_guard.FiniteGuard(scaler, [*skipped], most)
    blocks = {"inputs": norm, "layers.0": norm, "head": 1.0}
    record = Stub(step=5, samples=(8, 16), numbers=Numbers(sum(of_ranks), norm, scale, 0.0, of_ranks, blocks))
    found = patched(lambda: guard.check(record), optim__finite_guard__this_command=lambda **given: f"{given}")
    return [found and [*found[:2], str(found.error)], scaler.skipped_steps, guard.state()]


def spike(keys: dict[str, Any], loss: float, norm: float, window: Any = 4, step: int = 5, skipped: Any = ()) -> Any:
    """Of 4, 4, ... and 1, 1, ..., after a warm-up of 3: whether it is withheld, what is said, and the state."""
    losses = [4.0] * window if type(window) is int else window
    before = {"losses": losses, "norms": [value / 4 for value in losses], "blocks": [4.0, 0.3]}
    blocks = {"inputs": 2.0, "layers.0": 0.9}
    config, steps = SpikeConfig.model_validate({"window": 4} | keys), [*skipped]
    guard = spike_guard.SpikeGuard(config, 3, before, steps, 3, lambda _: "the command")
    record = Stub(
        step=step, samples=(8, 16), numbers=Numbers(loss, norm, 1.0, 0.0, [loss], blocks), losses_of_ranks=dict
    )
    record.finite, record.loss, record.grad_norm = torch.tensor(True), torch.tensor(loss), torch.tensor(norm)
    withheld, found = guard.withholds(record).item(), guard.check(record)
    return [withheld, found and [*found[:2], str(found.error)], guard.state(), steps]


def logged(mean: float | None, loss: float, norm: float, of_ranks: list[float], loads: Any = None) -> Any:
    """The record and the line of step 6, which is a multiple of log.every, and the sums of losses after it.

    With loads of experts: on a GPU, of which 128 tokens per second are the peak, and of two sources.
    """
    said, numbers, parts = (
        list[Any](),
        Numbers(loss, norm, 1.0, 0.0, of_ranks, {}),
        {"data_s": 0.5, "optimizer_s": 0.25},
    )
    lap = metrics.Lap(2.0, parts, 64)
    rank_losses = {"rank_losses": of_ranks} if of_ranks else {}
    record = Stub(
        numbers=numbers,
        metrics=[torch.tensor(loads)] if loads else [],
        losses_of_ranks=lambda: rank_losses,
        norms_of_blocks=dict,
    )
    meter = Stub(lap=lambda _: lap, mean_loss=lambda: mean, started=0.0, first_step=5, loss_since=torch.ones(2))
    log = Stub(record=said.append, info=lambda line, **_: said.append(line.rpartition(" (")[0]))
    state = planned(SAMPLES if loads else ONE_SOURCE, 60)[-1][-1]
    s = Stub(state=replace(state, step=6, tokens=96), process=Stub(device=torch.device("cuda") if loads else CPU))
    meter.peak_tokens_per_second = 128.0 if loads else 0.0
    s.config = config_of({"train.steps": 9, "log.every": 3, "data.skip_samples": [[3, 9]]})
    s.meter, s.log, s.scaler, s.phase = meter, log, Stub(enabled=False), s.config.changed({"optim.lr": 0.25})
    s.metrics = Experts.metrics
    patched(
        lambda: between_steps.log_step(s, record),
        run__between_steps__peak_memory_gib=lambda _: 1.0,
        run__between_steps__time__perf_counter=lambda: 1.0,
    )
    return [*said, meter.loss_since.tolist()]


def mean_with(total: float, since: list[float]) -> Any:
    """Of a run that has resumed after step 5, also the tokens from then on."""
    meter = metrics.Meter(TrainState(step=5, tokens=64, loss_since=since), CPU, 7.0)
    meter.add_loss(torch.tensor(total, dtype=torch.float64), 4)
    return [meter.loss_since.tolist(), meter.mean_loss(), meter.first_step, *(meter.lap(n).tokens for n in (96, 100))]


# --- what is said -----------------------------------------------------------------------------------------------


def listed(n_steps: int, n_rows: int, n_characters: int) -> Any:
    """What `which --find` says of so many parts of documents, in so many steps."""
    rows = [
        which.Row(i % n_steps + 1, 3, "s", 4, "", "", "", 0, 9, 1, 8, 11, 18, "x" * n_characters) for i in range(n_rows)
    ]
    config = Stub(data=Stub(skip_samples=[[1, 2]]))
    record = Stub(
        config=config,
        steps=dict.fromkeys(range(1, 200)),
        sources={Path("a"): True, Path("b"): False},
        attempts=[Stub(forked_from="", step=0)],
    )
    options = argparse.Namespace(run=Path("run"), step=None, to=None, find="x", json=None, family="")
    names = {
        **{"rows": lambda *_: rows, "read_record": lambda _: record, "require_own_step": lambda *_: None},
        "Documents": lambda known: Stub(known=known, path=Path(f"{known}/train.tokens")),
        "documents_with": lambda known, split, _: {1, 2, 3} if known and split == "train" else {4},
    }
    with contextlib.redirect_stdout(io.StringIO()) as out:
        patched(lambda: which._run(options), **{f"tools__which__{name}": f for name, f in names.items()})
    return [len(lines := out.getvalue().splitlines()), *lines[:4], lines[-1]]


# --- data and scores --------------------------------------------------------------------------------------------


def held_out(n: int) -> Any:
    """Every how many documents are read, and the tokens of each that are."""
    data = Stub(folder=Path(), sources=[Stub(name="s", folder=Path(), meta=Stub(files={}, val_documents=n))])
    return patched(
        lambda: [*find_tasks.held_out_documents("x", data)],
        scoring__find_tasks__bpe__load=lambda _: Stub(decode=lambda tokens, **_: tokens),
        scoring__find_tasks__documents=lambda *given: [[*given[3:]]],
    )


def about_brackets(*counts: int) -> Any:
    given = [f"{'x' * 150} {f' {pair[0]}x{pair[1]}' * n}" for pair, n in zip(("()", "[]", "{}"), counts, strict=False)]
    questions = brackets.brackets(given).questions
    return [Counter(each.answer for each in questions), max(len(each.contexts[0]) for each in questions)]


NOISY = [2.0, 2.2, 1.8, 2.1, 1.9, 2.2, 1.8, 2.0]
EVEN = {"action": "skip", "loss_deviations": 6.25, "norm_deviations": 12.5}  # limits of 4.5 and 1.25
COMPILED = "compile", "block_attention"
STRIDES = (8, 1), (12, 1), (4, 1), (16, 8), (16, 3)
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    # without comments: tests replace many of them by smaller ones
    "numbers of the package": (
        lambda package: {
            f"{file.parent.name}/{file.name}": found
            for file in sorted((Path(environment.__file__).parent.parent / package).rglob("*.py"))
            if (
                found := re.findall(
                    r"^(_?[A-Z][A-Z0-9_, ]*(?:: Final)? = [-(]*\d.*?) *(?:#.*)?$", file.read_text(), re.M
                )
            )
        },
        [("torchtitan_lite",)],
    ),
    "sequences of some steps": (
        lambda first, last: config_of({"train.steps": 90, "train.batch_schedule": [[20, 16], [50, 40]]}).train.samples(
            first, last
        ),
        [(first, last) for last in (None, 30, 50, 51) for first in (0, 20, 21, 30, 70) if first < (last or 90)],
    ),
    "rows of a table": (
        lambda n: [
            documents.need("pyarrow.parquet").write_table(
                documents.need("pyarrow").table({"text": ["a"] * n}), out := io.BytesIO()
            ),
            len(found := [row for row, _ in documents.read_parquet(out, Stub(keys=["text"]))]),
            found[-1],
        ],
        [(256,), (257,), (600,)],
    ),
    # the way that a computation takes
    "attention on a CPU": (
        lambda n, window=0, keys=0, mask=None, dropout=0.0: patched(
            lambda: by_blocks.attend(
                torch.zeros(1, n, 1, 1), k := torch.zeros(1, keys or n, 1, 1), k, mask, dropout, window
            ),
            cpu__attention__block_attention=lambda *given: f"blocks {given[3]}",
            models__attention__attend=lambda *_, **given: f"SDPA {given}",
        ),
        [
            *((1023,), (1024,), (1025,), (1024, 5000), (1025, 5000)),
            *((2048, 512), (2048, 513), (4096, 256), (4097, 256)),
            *((1024, 0, 0, None, 0.1), (1024, 0, 1023), (1024, 0, 1025), (8, 0, 0, True)),
        ],
    ),
    "attention on a GPU": (
        kernels_of,
        [
            *((n, 192, (9, 0)) for n in (127, 128, 129, 256)),
            *((128, n, (9, 0)) for n in (191, 193)),
            *((128, 64, capability) for capability in ((7, 5), (8, 0), (8, 9), (10, 3), (11, 0), (12, 0))),
            *((128, 64, (9, 0), dtype) for dtype in (torch.float16, torch.float32)),
        ],
    ),
    "chunks of the loss on a CPU": (
        chunks,
        [(n, dtype) for dtype, most in ((torch.float32, 512), (torch.bfloat16, 256)) for n in (most, most + 1)],
    ),
    "chunks of the loss on a GPU": (
        chunked_loss.chunk_size,
        [
            *((n, 32768, 2) for n in (0, 1, 127, 128, 129, 16384, 16385, 32768, 32769)),
            *((9999, v, size) for v, size in ((32769, 2), (32768, 4), (2**24, 4), (2**23 // 16 + 1, 16), (1 << 22, 2))),
        ],
    ),
    "columns added to logits": (
        lambda v, device: loss_operators.padding(torch.empty(1, device=device), v),
        [*((v, "meta") for v in (63, 64, 65, 72, 80, 81, 50257)), (65, "cpu")],
    ),
    "grouped_mm takes": (
        lambda strides, dtype: grouped_matmul._grouped_mm_takes(torch.empty_strided((2, 3), strides, dtype=dtype)),
        [*((strides, torch.bfloat16) for strides in STRIDES), *(((8, 1), d) for d in (torch.float16, torch.float32))],
    ),
    "probabilities": (
        lambda logits, options: spied(
            "models__generation__torch__multinomial",
            lambda p, *_, **__: p.tolist(),
            lambda: generation.Sampler(**options)(torch.tensor(logits)),
        ),
        [
            *(([1.0, 3.0, 2.0], {"top_k": k}) for k in (0, 1, 2, 3, 4)),
            *(([0.0, 0.0, 0.0, 0.0], {"top_p": p}) for p in (0.5, 0.51, 0.25, 0.2, 1.0)),
            *(([1.0, 3.0], {"temperature": t}) for t in (0.0, 1e-40, 0.5)),
        ],
    ),
    "generated": (
        lambda *logits: list(
            generation.new_tokens(model_of(torch.tensor([[logits]])), [1], 2, lambda row: int(row.argmax()))
        ),
        [*((1.0, value, 2.0) for value in (3.0, INF, NAN))],
    ),
    "bits of a resume": (
        lambda world, local, values: {
            key: value
            for key, value in compatibility.bitwise_setting(
                config_of(values, world), Process(0, world, CPU, 1, local)
            ).items()
            if key in ("shared_memory", "shared_memory_copies", "blocks_per_group", "dp_replicate", *COMPILED)
        },
        [
            *((n, n, {}) for n in (1, 2, 3)),
            *((n, n, {"fsdp.blocks_per_group": 2, "speed.shared_memory": False}) for n in (2, 3)),
            *((n, n // 2, {"fsdp.blocks_per_group": 2}) for n in (2, 4)),
            *((n, n, {"fsdp.dp_replicate": r}) for n, r in ((4, 2), (6, 3), (6, 2), (4, 4))),
            (2, 2, T5 | {"fsdp.blocks_per_group": 2}),
            *((n, n, PAIRS | {"compile.enabled": True}) for n in (1, 2)),
            (1, 1, {"compile.enabled": True, "compile.backend": "eager"}),
        ],
    ),
    "buckets of T5": (
        lambda both, n: t5.buckets(torch.arange(-n, n + 1), both_ways=both).tolist(),
        [(True, 20), (False, 20)],
    ),
    "far buckets of T5": (
        lambda both, *far: t5.buckets(torch.tensor(far), both_ways=both).tolist(),
        [
            (both, *(sign * n for n in (63, 64, 90, 91, 112, 113, 127, 128, 129, 5000)))
            for both in (True, False)
            for sign in (1, -1)
        ],
    ),
    # the work of a step, as `plan` counts it
    "matmuls": (
        lambda name, *args: str(
            work._matmuls(
                name,
                tuple(torch.empty(arg, dtype=torch.bfloat16) if isinstance(arg, tuple) else arg for arg in args),
                *([0] * 3, "forward"),
            )
        ),
        [
            *(
                ("mm", (2, 3), (3, 5)),
                ("addmm", (5,), (2, 3), (3, 5)),
                ("bmm", (4, 2, 3), (4, 3, 5)),
                ("add", (2,), (2,)),
            ),
            *(("baddbmm", (9, 9, 9), (4, 2, 3), (4, 3, 5)), ("linalg_solve_triangular", (2, 3, 6, 6), (2, 3, 6, 5))),
            *(("grouped_matmul", (7, 3), (2, 5, 3)), ("grouped_gradient", (7, 3), (7, 5))),
            *(("scaled_dot_product", *[(2, 4, n, 16) for n in (8, 6, 6)], causal) for causal in (False, True)),
            ("scaled_dot_product_backward", *[(2, 4, n, 16) for n in (9, 8, 6, 6)], True),
        ],
    ),
    "bytes": (
        lambda name, *shapes: work._bytes(
            operator := pkgutil.resolve_name(f"torch:ops.aten.{name}"),
            given := tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes),
            [*given],
            work.tensors_of(operator(*given)),
        ),
        [
            *(
                (name, ((2, 3), torch.float32), ((3,), torch.float32))
                for name in ("add.Tensor", "add_.Tensor", "copy_.default")
            ),
            *(
                ("embedding.default", ((9, 4), torch.float32), ((5,), torch.int64)),
                ("zero_.default", ((4,), torch.bfloat16)),
            ),
        ],
    ),
    "suggested": (
        lambda batch, n, room: patched(
            lambda: [
                *command._suggestions(
                    Stub(
                        config=Stub(train=Stub(global_batch_size=batch), changed=dict),
                        **{"device": "a device", "world_size": n, "layout": Stub(tokens_per_step=4096)},
                    )
                )
            ],
            tools__estimate__command__why_unknown=lambda _: "",
            tools__estimate__command__make_plan=lambda change, *_: Stub(
                free=room
                - (
                    used := change["train.micro_batch_size"]
                    * {"none": 4, "selective": 2, "full": 1}[change["activation_checkpointing.mode"]]
                ),
                device_bytes={"all": used},
                simulated=Stub(peak={"activations": used / 2}),
                seconds=used / 9 + change["fsdp.reshard_after_backward"],
            ),
            tools__estimate__command__expected=lambda candidate, _: Stub(total=candidate.seconds),
        ),
        [(16, 2, 0), (16, 2, 1), (16, 2, 4), (16, 2, 9), (16, 2, 40), (24, 3, 1000)],
    ),
    "a micro-batch": (
        lambda n, sent, fused: astuple(
            planned_run.micro_batch(
                mfu.DEVICES["h100"],
                Counter(
                    {
                        work.Matmul("forward", 1, 4096, 4096, 4096, 2): n,
                        work.Matmul("backward", 2, 512, 64, 4096, 4): n,
                        work.Matmul("optimizer", 9, 512, 64, 4096, 4): n,
                        work.Attention("backward", 32, 2048 * 2048 / 2, 64, 5, 2): n,
                        work.Traffic("forward"): 10**9 * n,
                        work.Traffic("forward", kernels=True): 20000,
                        work.Traffic("backward"): 3 * 10**9 * n,
                        work.Traffic("backward", kernels=True): 30,
                    }
                ),
                sent,
                fused=fused,
            )
        ),
        [
            *((n, {}, fused) for n in (1, 200) for fused in (False, True)),
            (
                2,
                {"all-gather, forward": (0.003, 6), "reduce-scatter": (0.004, 2), "all-gather, backward": (0.5, 4)},
                False,
            ),
            (2, {"all-gather, forward": (0.5, 6), "all-reduce": (0.001, 1)}, True),
        ],
    ),
    "collectives": (
        lambda world_size: planned_run.expected_s(
            {
                work.Collective(kind, 10**9, ranks): n
                for kind, ranks, n in (("all-reduce", 2, 1), ("reduce-scatter", 8, 3), ("reduce-scatter", 16, 2))
            },
            mfu.DEVICES["h100"],
            world_size,
        ),
        [(8,), (32,)],
    ),
    # what is not finite
    "finite": (between_steps.finite, [(value,) for value in (0.0, -2.5, INF, -INF, NAN)]),
    "guard": (
        checked,
        [
            *((enabled, 4.0, norm, [1.0, 2.0], [3]) for enabled in (True, False) for norm in (1.5, INF, -INF, NAN)),
            *((True, scale, INF, [1.0, 2.0], [3]) for scale in (2.0, 1.999, 1.0)),
            *((enabled, 4.0, NAN, [1.0, loss, 3.0], [3]) for enabled in (True, False) for loss in (INF, -INF, NAN)),
            *((False, 1.0, 2.0, [INF, 1.0, -INF], *skipped) for skipped in (([3],), ([4],), ([4], 2), ([3, 4], 2))),
            *((False, 1.0, INF, [1.0], skipped, most) for skipped, most in (([3], 0), ([4], 1))),
        ],
    ),
    "loss scale": (
        lambda scale, good, overflow: [
            scaler := grad_scaler.GradScaler(
                GradScalerConfig(growth_interval=3), True, CPU, {"scale": scale, "good_steps": good}
            ),
            scaler.update(torch.tensor(overflow)),
            scaler.state_dict(),
        ][2],
        [
            *((4.0, good, overflow) for good in (0, 1, 2) for overflow in (True, False)),
            *((2.0**n, 2, False) for n in (99, 100)),
        ],
    ),
    "balance of experts": (
        lambda name, withheld: [
            model := torch.nn.Linear(2, 1),
            told := list[str](),
            vars(model).update(balance=lambda summed, held: told.append(f"{summed.__name__} {held}")),
            patched(
                lambda: build_optimizer(model, OptimConfig(name=name)).update(
                    1, 0.1, torch.ones(()), torch.tensor(withheld)
                )
            ),
            told,
        ][-1],
        [("adamw", withheld) for withheld in (True, False)],
    ),
    # what it keeps before the first step, and the norm of each update; that of one that is withheld is 0
    "updates": (
        lambda name, *withheld: [
            model := torch.nn.Linear(2, 1, bias=False),
            optimizer := build_optimizer(model, OptimConfig(name=name, weight_decay=0, eps=2.0)),
            [*optimizer.state[model.weight]],
            *(
                [
                    patched(lambda: setattr(model.weight, "grad", torch.tensor([[3.0, 4.0]]))),
                    patched(
                        functools.partial(optimizer.update, 1, 0.5, torch.ones(()), torch.tensor(held), measure=True)
                    ),
                    groups.Blocks(model, 1).of_update(optimizer)["update_norm"].tolist(),
                ][-1]
                for held in withheld
            ),
        ][2:],
        [(name, False, True, False) for name in ("adamw", "muon", "sgd")],
    ),
    "spike limit": (
        lambda *given: min(spike_guard.limit(*given), 1e9),
        [
            *(([2.0] * n, 8, stds) for n, stds in ((7, 8.0), (8, 0.0), (8, 8.0), (0, 8.0))),
            *((before + NOISY + after, 8, 8.0) for before, after in (([], []), ([], [1e6]), ([9.0, 9.0], []))),
            *((values, 4, 8.0) for values in ([0.0] * 4, [-2.0] * 4)),
        ],
    ),
    "spikes": (
        spike,
        [
            *(
                ({"action": a}, loss, norm)
                for a in ("log", "skip", "stop")
                for loss, norm in ((4.65, 1.0), (4.0, 1.41))
            ),
            *((EVEN, *values) for values in ((4.5, 1.25), (4.51, 1.0), (4.0, 1.26), (4.6, 1.3))),
            *((EVEN, 9.0, 9.0, 4, step) for step in (3, 4)),
            *((EVEN, 9.0, 1.0, 4, 6, skipped) for skipped in ([2, 4, 5], [1, 3, 4, 5], [1, 2, 3, 4])),
            *(({"action": a, f"{off}_deviations": 0}, 9.0, 9.0) for off in ("loss", "norm") for a in ("log", "skip")),
            *((EVEN | {"loss_deviations": 0}, loss, norm) for loss, norm in ((9.0, 1.0), (INF, 1.0), (4.0, INF))),
            *(({"action": "log"}, loss, norm) for bad in (INF, -INF, NAN) for loss, norm in ((bad, 1.0), (4.0, bad))),
            *(({"action": "log"}, 9.0, 9.0, window) for window in (0, 3, 5, [9.0, 4.0, 4.0, 4.0, 4.0])),
        ],
    ),
    "step": (
        logged,
        [
            (2.5, 2.25, 1.5, [40.0, 32.0]),
            (2.5, INF, NAN, [INF, 32.0]),
            (None, NAN, INF, [NAN, -INF], [[2.0, 6.0], [8.0, 0.0]]),
            (2.5, 2.25, 1.5, [], [[0.25, 0.25, 1.0]]),
        ],
    ),
    "rank_losses": (
        lambda n: len(StepRecord.losses_of_ranks(Stub(rank_losses=range(n), numbers=Stub(rank_losses=[1.0] * n)))),
        [(1,), (1024,), (1025,)],
    ),
    "mean loss": (mean_with, [(value, [6.0, 4.0]) for value in (2.0, 0.0, INF, -INF, NAN)] + [(NAN, [0.0, 0.0])]),
    # when it is done, and what is said
    "goodput": (attempts.goodput, [([], [])]),
    "the last record": (
        lambda n: attempts.last_record(
            [
                {"step": i, "time": 2.0 * i, "loss": NAN if i else None, "mean_loss": i, "tokens_per_second": -i}
                for i in range(n)
            ]
            + [{"step": n, "val_loss": 1.0}]
        ),
        [(n,) for n in (0, 1, 4, 10, 12)],
    ),
    "due": (session.due, [(0, 0), (0, 3), (3, 3), (4, 3), (6, 3), (3, -1)]),
    "which": (listed, [(2, 3, 60), (2, 3, 61), (1, 0, 1)]),
    "clocks": (
        lambda seconds: [
            said := list[Any](),
            saver := Stub(),
            vars(saver).update(require_space=lambda: said.append(f"space in {saver.folder}")),
            patched(
                lambda: dry_run.check_machines(Path("run"), Stub(checkpointer=saver, config="config")),
                tools__dry_run__values_of_ranks=lambda value: (
                    ["a", "b"] if isinstance(value, str) else [5.0, 5.0 + seconds]
                ),
                tools__dry_run__require_shared=lambda *given: said.append(f"shared: {given}"),
                tools__dry_run__dist__barrier=lambda: said.append("at the same time"),
            ),
        ][::3],
        [(s,) for s in (1.99, 2.0, 2.1, -2.0, -2.1)],
    ),
    "disk": (
        lambda n: patched(
            lambda: storage.require_space(Path("/none/such"), n),
            checkpointing__storage__shutil__disk_usage=lambda _: Stub(free=5120),
        ),
        [(5119,), (5120,), (5121,)],
    ),
    "threads": (
        lambda words, launched, cores: patched(
            lambda: environment.cpu_threads(0),
            environment__os__environ={"OMP_NUM_THREADS": words} | ({"LOCAL_WORLD_SIZE": launched} if launched else {}),
            environment__usable_cores=lambda: cores,
        ),
        [
            *((n, "", 6) for n in ("0", "1", "4096", "4097", "-1", "x", "", " 2 , 1")),
            *(("2", *of) for of in (("1", 6), ("4", 6), ("7", 6), ("3", 8), ("2", 1))),
        ],
    ),
    "epochs": (
        lambda n: patched(
            lambda: data_lines({}, (3,), ONE_SOURCE),
            run__console__seen_of_sources=lambda *_: {"a": {"tokens": 7, "epochs": n}},
        ),
        [(10.0,), (10.1,)],
    ),
    "options": (
        lambda values: generate.Options(**values).problems(),
        [
            ({key: value},)
            for key, some in {
                "beams": (0, 1, 1000, 1001),
                "length_penalty": (-10.1, -10, 10, 10.1, NAN, INF),
                "max_tokens": (0, 1),
                "temperature": (-0.1, 0.0, 1e9, INF, NAN),
                "top_k": (-1, 0),
                "top_p": (0.0, 1.0, 1.1, NAN),
                "seed": (-1, 0, 2**63 - 1, 2**63),
            }.items()
            for value in some
        ],
    ),
    "window": (
        lambda limit, seq_len: load_model.Opened.window(
            Stub(model=Stub(config=Stub(max_seq_len=limit)), config=None, source="x"), seq_len
        ),
        [*((n, 0) for n in (2047, 2048, 2049)), (16, 16), (16, 17)],
    ),
    "cost of an update": (muon.cost, [(3, 5), (5, 3), (4, 4)]),
    "timeouts of groups": (
        lambda *minutes: [
            told := list[str](),
            patched(
                lambda: process_group.set_group_timeouts(*minutes),
                distributed__process_group__dist__distributed_c10d___world=Stub(
                    pg_map=[
                        Stub(group_desc=name, set_timeout=lambda timeout, name=name: told.append(f"{name} {timeout}"))
                        for name in ("a", "untimed", "b")
                    ]
                ),
            ),
        ][0],
        [(7,), ()],
    ),
    "float8 on a GPU": (
        lambda *capability: patched(
            lambda: float8.convert(Stub(), Stub(device_type="cuda")),
            distributed__float8__torch__cuda__get_device_capability=lambda: capability,
            distributed__float8__torch__cuda__get_device_name=lambda: "NVIDIA A100",
            distributed__float8__logging__getLogger=Mock(side_effect=UserError("it has float8")),
        ),
        [(8, 0), (8, 8), (8, 9), (9, 0)],
    ),
    "kept by selective checkpointing": (
        lambda: sorted(map(str, recompute_and_compile.MATMULS | recompute_and_compile.ATTENTION)),
        [()],
    ),
    "compiled": (
        lambda enabled, n, limit: patched(
            lambda: [
                calls := list[Any](),
                patched(
                    lambda: recompute_and_compile.apply_compile(
                        Stub(layers=[Stub(compile=lambda **how: calls.append(how))] * n), CompileConfig(enabled=enabled)
                    )
                ),
                vars(torch.compiler.config),
            ][::2],
            distributed__recompute_and_compile__torch__compiler__config=Stub(recompile_limit=limit),
        ),
        [(True, 2, 8), (True, 2, 33), (False, 2, 8)],
    ),
    "the kernel of the loss": (
        lambda factor: patched(
            lambda: kernels.kernel_works.__wrapped__(CPU, torch.float32, 91),
            models__kernels__launch=lambda *given: factor * loss.plain_logits_to_gradient_(*given),
            models__kernels__torch__cuda__get_sync_debug_mode=lambda: 0,
            models__kernels__torch__cuda__set_sync_debug_mode=lambda _: None,
            models__kernels__warnings__warn=lambda *_, **__: None,
        ),
        [(1.0,), (1.01,)],
    ),
    "the loss of a GPU": (
        lambda works: patched(
            lambda: str(loss_operators._on_cuda(torch.zeros(1, 2), torch.zeros(1).long(), -7, True, 0.5)),
            models__kernels__kernel_works=lambda *_: works,
            models__kernels__launch=lambda *given: f"kernel {given[2:]}",
        ),
        [(True,), (False,)],
    ),
    "sums in float32": (
        lambda first, adds: patched(
            lambda: [
                total := torch.full((2, 2), 3.0),
                result(lambda: loss_operators.add_matmul_(total, BF16, BF16, first=first), ()),
                total.tolist(),
            ][2],
            models__loss_operators__of_gpu=lambda _: True,
            models__kernels__adds_in_place=lambda *_: adds,
            models__loss_operators__torch__mm=lambda a, b, out=None, **_: (
                a.float() @ b.float() if out is None else out.copy_(a.float() @ b.float())
            ),
            models__loss_operators__torch__addmm=lambda total, a, b, out, **_: out.copy_(
                total + 10 * a.float() @ b.float()
            ),
        ),
        [(True, True), (False, True), (False, False)],
    ),
    "adds in place": (
        lambda error: patched(
            lambda: kernels.adds_in_place.__wrapped__(CPU, torch.bfloat16),
            models__kernels__torch__addmm=Mock(side_effect=error),
        ),
        [(None,), (RuntimeError,), (TypeError,)],
    ),
    "fused": (
        lambda eps, affine: fused.RMSNorm(2, eps, affine)(torch.tensor([0.0, 2.0])).tolist(),
        [(None, True), (1.0, False), (1.0, True)],
    ),
    "on another device": (
        lambda: [
            patched(
                lambda: fused.rotate(torch.ones(1, 1, 1, 2, device="meta"), *torch.zeros(2, 1, 2)),
                models__llama__rotate=lambda *_: "not fused",
            ),
            patched(
                lambda: in_chunks.chunked_cross_entropy(torch.ones(1, device="meta"), one := torch.ones(1), one, 0.5),
                models__chunked_loss__chunked_cross_entropy=lambda *given: f"not on a CPU: {given[1:]}",
            ),
        ],
        [()],
    ),
    "ranks of a group": (
        lambda *ranks: patched(
            lambda: shared_memory.SharedMemory._global(Stub(group="2, "), [*ranks]),
            cpu__shared_memory__dist__get_global_rank=lambda group, rank: f"global {group}{rank}",
        ),
        [(0,), (1, 2)],
    ),
    "a full socket": (
        lambda error: barrier.Barrier._sent(
            Stub(_rank=1, _names=["a"], _socket=Mock(**{"sendto.side_effect": error})), 0
        ),
        [(None,), (BlockingIOError,), (ConnectionRefusedError,)],
    ),
    # data and scores
    "beams": (  # by a chain: rows of probabilities of the next token
        lambda chain, most, penalty, *ends: generation.beam_search(
            Mock(
                side_effect=lambda _source, _targets, _cache, answer: torch.tensor(chain).add(1e-6).log()[answer],
                new_cache=list,
                start=0,
                config=Stub(family="t5", max_seq_len=3),
                tok_embeddings=Stub(weight=Stub(device=CPU)),
            ),
            [5],
            *(most, 2, ends, penalty),
        ),
        [
            *(([[0, 0.2, 0.5, 0.3], [0] * 4, [0, 0, 0.6, 0.4], [0, 0, 0.5, 0.5]], most, 0.0, 1) for most in (2, 9)),
            ([[0, 0.3, 0.2, 0.18, 0.22, 0.1], *[[0] * 6] * 3, [0, *[0.2] * 5], [0, 1, 0, 0, 0, 0]], 3, 2.0, 1, 2, 3),
        ],
    ),
    "prompt": (
        lambda family, prompt, prefix, begin, mark: pairs.encode_prompt(
            Stub(encode=lambda text, **_: Stub(ids=[*map(ord, text)])),
            prompt,
            ModelConfig(family=family, max_seq_len=4),
            prefix,
            begin,
            mark,
        ),
        [
            *(("gpt", "", "p", begin, mark) for begin, mark in (((), []), ((), [7]), ((9,), [7]))),
            *(("gpt", text, "p", (9,), [7]) for text in ("ab", "\tab", "abc", "x" * 50)),
            *(("t5", text, "p", (9,), [7]) for text in ("", "a", "pa", "ab", "pab", "\a", "abc")),
        ],
    ),
    "thread of batches": (
        lambda device: spied(
            "data__loader__ThreadPoolExecutor",
            lambda *given: str(given[2:]).partition(" at 0x")[0],
            lambda: loader.PrefetchingLoader(Stub(), torch.device(device)),
        ),
        [("cpu",), ("cuda",)],
    ),
    "batches of a validation": (
        lambda n, device: spied(
            "scoring__validation__PrefetchingLoader__close",
            lambda ahead: ahead._loader.pin,
            lambda: [
                *validation.Validation(
                    loader.Loader(Stub(), micro_batch_size=1, rank=0, world_size=1, seed=0), n, torch.ones(1), Stub()
                ).micro_batches(torch.device(device))
            ],
            data__loader__torch__cuda__set_device=lambda _: None,
        ),
        [(0, "cpu"), (0, "cuda")],
    ),
    "the line of a validation": (
        lambda bits, unigram: validation.eval_line(
            7, validation.Score(1.5, NAN, bits, NAN, unigram), Stub(n_samples=3, samples=Stub(n_samples=4)), 0.25
        ),
        [(1.0, 2.0), (3.0, 2.0), (2.0, 2.0), (2.0, 0.0), (NAN, 2.0), (NAN, NAN)],
    ),
    "a validation is compiled": (
        lambda: spied(
            "scoring__validation__evaluating",
            lambda _, **more: more,
            lambda: validation.evaluate(Stub(), Stub(bytes_per_token=[1]), CPU),
            Mock(side_effect=UserError("not further")),
        ),
        [()],
    ),
    "files of tokens": (
        lambda: spied(
            "data__token_files__weakref__finalize",
            lambda _, close, n: [close.__name__, n],
            lambda: token_files.TokenFiles(Path("d"), Stub(vocab_size=9), "val"),
            lambda *_: None,
            data__token_files__os__open=lambda path, _: str(path),
        ),
        [()],
    ),
    "named if a disk fails": (
        lambda: [
            spied(
                "data__token_files__naming",
                str,
                lambda: token_files.TokenFiles.read(
                    Stub(path="d/val.bin", _dtype=np.dtype("u2"), _vocab_size=9, _descriptor=77), 0, 3
                ),
                lambda _: contextlib.nullcontext(),
                data__token_files__os__pread=lambda *_: bytes(6),
            ),
            spied(
                "data__prepare__folder__naming",
                str,
                lambda: folder.Writer._write(
                    Stub(_folder=Path("d"), _streams={"a": io.BytesIO()}, _progress=Stub(sizes={"a": 0})), "a", b"x"
                ),
                lambda _: contextlib.nullcontext(),
            ),
        ],
        [()],
    ),
    "files of packed documents": (
        lambda *ends: spied(
            "data__packing__flush_to_disk",
            lambda file: file.tell(),
            lambda: packing._write(np.array(ends), 4, Stub(with_suffix=lambda _: Stub(open=lambda _: io.BytesIO()))),
            lambda _: None,
        ),
        [(3, 9, 10)],
    ),
    "texts of a tokenizer": (
        lambda size, limit: patched(
            lambda: [*tokenizer.training_texts([texts.Corpus(())], [limit])],
            data__prepare__texts__Corpus__size=size,
            data__prepare__tokenizer__usable=lambda *_: [Stub(hash=h, texts=[h]) for h in (4, 5, 2**31, 2**32 + 6)],
        ),
        [*((n, 0) for n in (0, 2**27, 2**27 + 1, 2**28)), (2**28, 5)],
    ),
    "block of text": (
        lambda n: patched(lambda: texts.Corpus(()).block, data__prepare__texts__Corpus__size=n),
        [(n,) for n in (0, 16_399, 16_400, 16_416, 2**20 - 1, 2**20, 2**20 + 16)],
    ),
    "other files": (lambda n: texts._listed(f".s{i}" for i in range(n)), [(10,), (11,)]),
    "token dtype": (lambda n: token_files.token_dtype(n).__name__, [(1,), (2**16,), (2**16 + 1,)]),
    "columns of pairs": (
        lambda *used: pairs._columns(np.array([[i in used for i in range(12)]] * 2)),
        [(), (0,), (3, 6), (7,), (8,), (11,)],
    ),
    "rare source": (
        lambda entries, *weights: spied(
            "data__mixture___schedule",
            lambda _, length: length,
            lambda: mixture.Mixture([], list(weights), []),
            lambda *_: entries,
        ),
        [([0, 1], 1.0, 65535.0), ([0, 1], 1.0, 65536.0), ([0, 1], 0.1, 0.2)],
    ),
    "header": (
        lambda more, *dtypes: str(
            safetensors_file.header_of(
                {f"t{i}": (getattr(torch, name), (3, i)) for i, name in enumerate(dtypes)}, {"more": "x" * more}
            )
        ),
        [
            (0, "uint8", "float32", "bool", "float64", "bfloat16", "int64", "float16", "int32"),
            *((n, "float32") for n in range(8)),
            *((0,), (0, "int16")),
        ],
    ),
    "layout": (
        lambda *dtypes: str(shards.layout_of({f"t{i}": torch.ones(3, dtype=d) for i, d in enumerate(dtypes)}, [2, 4])),
        [(torch.bool, torch.float64, torch.uint8), (torch.float64, torch.int16)],
    ),
    "file of a rank": (
        lambda rank: patched(
            lambda: shards.write_rows(
                Path("x"),
                shards.Layout([2, 4], {"a": ("F32", [5, 2], 0, 1), "b": ("I64", [], None, 0)}),
                *(rank, lambda _: torch.ones(1)),
            ),
            checkpointing__shards__write_tensors=lambda path, parts, _, metadata: f"{path}: {parts} {metadata}",
        ),
        [(rank,) for rank in (0, 1, 4, 6, 7)],
    ),
    "finite weights": (
        lambda *parts: compatibility.require_finite({f"t{i}": torch.tensor(p) for i, p in enumerate(parts)}, Path("c")),
        [([1.0], [], [2.0]), ([], [1.0, NAN], [-INF]), ([0.0, INF, 1.0],)],
    ),
    "held-out documents": (held_out, [(n,) for n in (1, 2000, 2001, 4000, 4001)]),
    "batches": (
        lambda most, *lengths: [
            [len(w) for w in b]
            for b in task_scores._batches([Window(0, np.zeros(n + 1, np.int32)) for n in lengths], most)
        ],
        [(most, 4, 2, 4, 3, 9) for most in (1, 7, 8, 11, 12, 99)],
    ),
    "tokens together": (
        lambda vocab_size, greedy: patched(
            lambda: task_scores._sums_by_choice(
                Stub(tok_embeddings=Stub(num_embeddings=vocab_size)),
                Stub(windows=[], n_tokens=[]),
                Stub(),
                greedy=greedy,
            ),
            scoring__task_scores__sums_by_item=lambda _, most, *__, **___: Stub(numpy=lambda: [most]),
            scoring__task_scores___batches=lambda _, most: most,
        ),
        [*((n, True) for n in (9, 16384, 16385, 2**26, 2**27)), (2**27, False)],
    ),
    "brackets": (about_brackets, [(66, 70), (67, 70), (5, 9), (4, 9), (70, 6, 5), (70, 6, 4)]),
    "closing": (
        lambda n, text: list(brackets._closing("(" + "x" * n + text)),
        [*((n, ")") for n in (0, 1, 99, 100)), (1, "])"), (1, ")]"), (1, "[x])")],
    ),
}


def test_limits() -> None:
    """All of it is JSON without NaN and infinity. First, which differences to a recording are seen."""
    one = {"number": 1.0, "text": "1.25 s of 3", "list": [1, None]}
    for key, alike, others in (
        ("number", (1.0, 1.00009), (1.0002, 1, True, "1.0", None)),
        ("text", ("1.25 s of 3", "1.26 s of 3"), ("1.27 s of 3", "1.25 s of 4", "1.25 s of 3!", 1.25)),
        ("list", ([1, None],), ([1, 0], [1], [1, None, None], [None, 1], {"0": 1, "1": None})),
        ("another", (), (None, "")),
    ):
        assert [value for value in (*alike, *others) if differences(one, one | {key: value}, "", 1e-4)] == [*others]
    # what otherwise only recordings hold, by hand: a median of 2 with a MAD of 0.15, three right answers, three devices
    assert [
        *(spike_guard.limit(NOISY, 8, 8.0), statistics.mean(np.ones(3))[1]),
        mfu.peak_flops(config_of({"run.peak_tflops": 2}), Process(0, 3, CPU, 1)),
    ] == pytest.approx([2 + 8 * 1.4826 * 0.15, math.sqrt(4 / 6) / 5, 6e12])
    found = {name: {str(row): result(call, row) for row in rows} for name, (call, rows) in CALLS.items()}
    json.dumps(found, allow_nan=False)
    assert_recorded(found, Path(__file__).with_name("recorded_limits.json"))
