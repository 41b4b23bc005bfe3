"""The items of benchmarks/gpu.py, each in its own process: `python -m benchmarks.gpu_items FUNCTION OPTIONS FILE`.

OPTIONS are the function's arguments, as JSON; its result is written to FILE. A figure `plan_NAME` is the prediction of
`plan` for the figure NAME. With --stand-in everything runs on the CPU, with tiny sizes.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import train
from benchmarks.bare_session import bare_session
from checkpoint import WAYS
from tests.forkserver import free_port
from torchtitan_lite import models
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.before_save import require_equal_replicas
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.data.loader import Loader, PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows, Samples
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh, exit_process, process_group, sum_over_ranks
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.environment import disable_automatic_gc
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import loss_operators
from torchtitan_lite.models.attention import attend
from torchtitan_lite.models.chunked_loss import chunked_cross_entropy
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.models.masks import within_documents
from torchtitan_lite.optim import optimizer as optim
from torchtitan_lite.run import mfu
from torchtitan_lite.run.session import Session, check_previous_step
from torchtitan_lite.run.watchdog import Watchdog
from torchtitan_lite.tools.estimate import planned_run
from torchtitan_lite.tools.estimate.planned_run import Plan, make_plan
from torchtitan_lite.tools.estimate.simulate import fake_world

# the names in torch 2.13, and before
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
GIB = 2**30
STAND_IN = "--stand-in" in sys.argv
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun: one rank per card
DEVICE = torch.device("cpu") if STAND_IN else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
STEPS = 3 if STAND_IN else 20
Figures = dict[str, Any]


class Found(Figures):
    """Figures that are written as they are found, so that a crash or a time limit loses only the rest."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        write(self)


def write(figures: Figures) -> None:
    """Write figures to FILE atomically, on rank 0, rounded to four digits."""
    if os.environ.get("RANK", "0") != "0":
        return
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) and math.isfinite(v) else v for k, v in figures.items()}
    out, part = Path(sys.argv[3]), Path(f"{sys.argv[3]}.part")
    part.write_text(json.dumps(rounded))
    part.replace(out)


# the sizes of a stand-in
TINY: dict[str, Any] = {
    **{"model.dim": 32, "model.n_layers": 2, "model.n_heads": 2, "model.max_seq_len": 64, "model.vocab_size": 517},
    **{"train.seq_len": 64, "compile.enabled": False, "run.device": "cpu", "run.threads": 1},
}
TINY_LLAMA = {"model.n_kv_heads": 2, "model.hidden_dim": 64}


def config_of(file: str, values: dict[str, Any], world_size: int = 1) -> Config:
    """Load a shipped config with these values, by "section.key"; a stand-in is smaller."""
    more = TINY | (TINY_LLAMA if "llama" in file else {}) if STAND_IN else {"run.device": "cuda"}
    overrides = values | more
    if STAND_IN and "data.target_len" in values:
        overrides["data.target_len"] = 32
    n_gpus = 0 if STAND_IN else 8
    return load.load(ROOT / "configs" / file, overrides, world_size=world_size, n_gpus=n_gpus, elsewhere=True).config


def gpu() -> mfu.Device | None:
    """Return this card's entry in mfu.DEVICES."""
    return mfu.DEVICES["h100"] if STAND_IN else mfu.named(torch.cuda.get_device_name())


def device() -> Figures:
    """Return the card's name and torch's version."""
    if not STAND_IN and not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU here; --stand-in runs the items on the CPU, with tiny sizes")
    name, cards = ("stand-in", 2) if STAND_IN else (torch.cuda.get_device_name(), torch.cuda.device_count())
    return {"device": name, "torch": torch.__version__, "cards": cards}


def synchronise() -> None:
    if not STAND_IN:
        torch.cuda.synchronize()


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds per call: the median of five rounds of calls, after a warm-up round."""
    times, calls = [], 1 if STAND_IN else 10
    for _ in range(6):
        synchronise()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronise()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_(grad)


# --- the parts of a step ------------------------------------------------------------------------------------------


def linear_matmuls(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a linear layer's matmuls: forward, and backward for input and weight."""
    return x @ weight.T, grad @ weight, grad.T @ x


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor | None = None) -> None:
    """Run forward and backward."""
    torch.autograd.grad(function(*inputs), inputs, grad)


def matmuls() -> Figures:
    """Measure TFLOP/s of three models' linear layers, forward and backward, and their share of the peak."""
    found = Found()
    card = gpu()
    for file in ("llama_1b", "llama_8b", "gpt_124m"):
        config = config_of(f"{file}.toml", {})
        with torch.device("meta"):
            model = models.build(config.model, config.model.vocab_size)
        shapes = Counter(tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear))
        tokens, total_s, total = 64 if STAND_IN else 8192, 0.0, 0.0
        for (out, width), n in shapes.items():
            x, w, g = random(tokens, width), random(out, width), random(tokens, out)
            seconds, flops = timed(functools.partial(linear_matmuls, x, w, g)), 6 * tokens * width * out
            found[f"{file} {width} -> {out}, TFLOP/s"] = flops / seconds / 1e12
            total_s, total = total_s + n * seconds, total + n * flops
        if card:
            found[f"{file}, share of the peak"] = total / total_s / card.half_flops
            found[f"plan_{file}, share of the peak"] = sum(planned_run.shares(card)) / 2
    return found


BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention() -> Figures:
    """Measure TFLOP/s of causal attention, forward and backward: each backend, our choice, within documents."""
    found = Found()
    card = gpu()
    for head_dim, batch, length in ((64, 2, 4096), (128, 1, 8192)):
        batch, length = (1, 64) if STAND_IN else (batch, length)
        q, k, v = (random(batch, length, 32, head_dim, grad=True) for _ in range(3))
        g, flops = random(batch, length, 32, head_dim), 7 * batch * 32 * length**2 * head_dim

        def by(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        ways: dict[str, Callable[..., Tensor]] = {n: functools.partial(by, b) for n, b in BACKENDS.items()}
        ways["ours"] = attend
        positions = torch.arange(length // 2, device=DEVICE).repeat(batch, 2)
        mask = within_documents(positions, dense=STAND_IN)
        ways["two documents"] = functools.partial(attend, mask=mask)
        for name, way in ways.items():
            key = f"{name}, heads of {head_dim}, TFLOP/s"
            try:
                seconds = timed(functools.partial(with_gradients, way, (q, k, v), g))
                found[key] = flops / (2 if name == "two documents" else 1) / seconds / 1e12
            except RuntimeError as error:
                found[key] = str(error).splitlines()[0][:80]
        ours = found[f"ours, heads of {head_dim}, TFLOP/s"]
        if card and isinstance(ours, float):
            key = f"heads of {head_dim}, share of the peak"
            found[key] = ours * 1e12 / card.half_flops
            found[f"plan_{key}"] = planned_run.ATTENTION * sum(planned_run.shares(card)) / 2
    return found


def vocabularies() -> Figures:
    """Time the loss of 8,192 tokens with its matmuls, and its kernel alone (one read and one write of the logits)."""
    found = Found()
    for vocabulary, dim in ((50257, 768), (50304, 768), (128256, 2048)):
        tokens, dim, size = (64, 32, vocabulary // 97) if STAND_IN else (8192, dim, vocabulary)
        x, w = random(1, tokens, dim, grad=True), random(size, dim, grad=True)
        targets = torch.randint(size, (1, tokens), device=DEVICE)

        def loss(x: Tensor, w: Tensor, targets: Tensor = targets) -> Tensor:
            return chunked_cross_entropy(x, w, targets)[0]

        found[f"{vocabulary}, ms"] = 1e3 * timed(functools.partial(with_gradients, loss, (x, w)))
        logits = random(tokens // 4, size)
        kernel = functools.partial(loss_operators.logits_to_gradient_, logits, targets[0, : len(logits)], IGNORE, True)
        seconds = timed(kernel)
        found[f"{vocabulary}, kernel GB/s"] = 2 * logits.nbytes / seconds / 1e9
    return found


def copies() -> Figures:
    """Measure the bandwidth of copies and of the optimizer, and the host's time for a small operator."""
    n = 1 << (16 if STAND_IN else 28)
    full, half = torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE, dtype=torch.bfloat16)
    host, other = torch.zeros(n, pin_memory=not STAND_IN), torch.zeros(n, device=DEVICE)
    found: Figures = {
        "copy, GB/s": 2 * full.nbytes / timed(lambda: other.copy_(full)) / 1e9,
        "cast to bfloat16, GB/s": 1.5 * full.nbytes / timed(lambda: half.copy_(full)) / 1e9,
        "from the host, GB/s": full.nbytes / timed(lambda: full.copy_(host, non_blocking=True)) / 1e9,
        "to the host, GB/s": full.nbytes / timed(lambda: host.copy_(full, non_blocking=True)) / 1e9,
    }
    parameter = nn.Parameter(full)
    parameter.grad = other
    adam = torch.optim.AdamW([parameter], fused=True)
    found["fused AdamW, GB/s"] = 7 * full.nbytes / timed(adam.step) / 1e9  # 4 tensors read, 3 of them written
    small = torch.zeros(8, device=DEVICE)
    synchronise()
    start = time.perf_counter()
    for _ in range(1000):
        small.add_(1)
    found["launch, us"] = 1e3 * (time.perf_counter() - start)
    found["plan_launch, us"] = 1e6 * planned_run.LAUNCH_S
    if card := gpu():
        found["share of the bandwidth"] = 1e9 * found["copy, GB/s"] / card.memory_bandwidth
        found["plan_share of the bandwidth"] = planned_run.MEMORY
    return found


# --- steps of train.py ----------------------------------------------------------------------------------------------


class RandomSamples(Samples):
    """Random sequences of mostly small ids: two documents each, or pairs with lengths that differ by step."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        self.config, self.vocab_size = config, vocab_size

    def _lengths(self, run_samples: Indices) -> tuple[int, int]:
        config = self.config
        if config.data.objective != "pairs":
            return config.input_len, config.target_len
        step = int(run_samples[0]) // config.train.batch_size(1)
        return config.input_len - 8 * (step % 4), config.target_len - 8 * (step % 4)

    def draw(self, run_samples: Indices, _seed: int | None) -> Rows:
        drawn = np.random.default_rng(run_samples.tolist())
        shapes = [(len(run_samples), n) for n in self._lengths(run_samples)]
        tokens, targets = ((drawn.random(s) ** 4 * (self.vocab_size - 1)).astype(np.int64) + 1 for s in shapes)
        begins = np.zeros(tokens.shape, np.bool_)
        begins[:, tokens.shape[1] // 2] = True
        return Rows(tokens, targets, begins)

    def n_targets(self, run_samples: Indices, _seed: int | None) -> int:
        return len(run_samples) * self._lengths(run_samples)[1]


@contextlib.contextmanager
def session(config: Config, process: Process) -> Iterator[Session]:
    """Build a session like train.build's, on random tokens and without files."""
    vocab_size = config.model.vocab_size
    model = train.sharded_model(config, vocab_size, build_mesh(config.fsdp, process.device))
    materialize(model, process.device, config.run.seed, offload=config.fsdp.cpu_offload)
    loader = Loader(
        Mixture([RandomSamples(config, vocab_size)], [1.0], ["random"]),
        micro_batch_size=config.train.micro_batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.run.seed,
        document_mask=config.data.document_mask,
        pin=process.device.type == "cuda",
    )
    prefetching = PrefetchingLoader(loader, process.device)
    try:
        if config.speed.gc_every:
            disable_automatic_gc()
        yield bare_session(config, process, model, prefetching)
    finally:
        gc.enable()
        gc.unfreeze()
        prefetching.close()


def run_steps(s: Session, plan: Plan, steps: int = STEPS, *, hidden: bool = False) -> Figures:
    """Measure the median step and the peak memory, and add the predictions of `plan`. A quarter of the steps warm up.

    Args:
        hidden: leave communication out of the expected time.
    """
    times, peak, warm_up = [], 0, max(steps // 4, 1)
    for step in range(1, steps + 1):
        if step == warm_up + 1 and not STAND_IN:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        train.train_step(s, step)
        synchronise()
        times.append(time.perf_counter() - start)
    check_previous_step(s)
    if not STAND_IN:
        peak = torch.cuda.max_memory_allocated()
    step_s = statistics.median(times[warm_up:])
    found: Figures = {"step, s": step_s, "peak, GiB": peak / GIB}
    found["plan_peak, GiB"] = sum(plan.device_bytes.values()) / GIB
    found["tokens/s"] = s.config.target_len * s.config.train.batch_size(1) / plan.world_size / step_s
    found["first step, s"] = times[0]
    if plan.device:
        found["MFU"] = plan.flops_per_token * found["tokens/s"] / plan.device.peak_flops(s.config.fsdp.param_dtype)
        expected = planned_run.expected(plan, plan.device)
        found["plan_step, s"] = expected.total - (expected.exposed if hidden else 0.0)
    return found


def row(config: str, values: dict[str, Any]) -> Figures:
    """Run steps of a config on this card alone, or on torchrun's cards."""
    settings = config_of(config, values, WORLD_SIZE)
    plan = make_plan(settings, WORLD_SIZE, gpu(), on_gpu=True)
    with process_group(settings.run) as process, session(settings, process) as s:
        found = run_steps(s, plan)
        if WORLD_SIZE > 1:
            found |= by_kind(lambda: train.train_step(s, STEPS + 1))
            computing_s = sum(found[f"{kind}, s"] for kind in (*KINDS, "others") if kind != "communication")
            found["communication not hidden, s"] = found["step, s"] - computing_s
        return found


def torchtitan(arguments: Sequence[str]) -> Figures:
    """Run torchtitan_peer.py with these arguments. Returns medians of its log lines after the first two.

    Raises:
        ConfigError: torchtitan is not installed, or logged nothing.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise ConfigError("torchtitan is not installed")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    sizes = {"seq_len": 4096, "local_batch_size": 2, "global_batch_size": 8, "steps": 20}
    with tempfile.TemporaryDirectory() as out_dir:
        common = [*(f"--training.{name}={size}" for name, size in sizes.items()), "--compile.enable"]
        common += ["--metrics.log_freq=2", f"--job.dump_folder={out_dir}"]
        command = [*launcher, "-m", "benchmarks.torchtitan_peer", *common, *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(result.stdout, result.stderr)
    if not (found := read_torchtitan(result.stdout + result.stderr)):
        raise ConfigError(f"torchtitan logged no throughput; exit code {result.returncode}")
    return found


def read_torchtitan(log: str) -> Figures:
    """Return medians of the lines "memory:  9.46GiB(64.99%)  tps: 7,049" after the first two; empty without any."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    lines = re.findall(r"memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", plain)[2:]
    rates = [float(tps.replace(",", "")) for _, tps in lines]
    return {"tokens/s": statistics.median(rates), "peak, GiB": float(lines[-1][0])} if lines else {}


# --- one rank of a large world --------------------------------------------------------------------------------------


class Allocates:
    """The base of both custom collectives for FSDP: allocation and timing."""

    def __init__(self) -> None:
        self.spans: list[tuple[Any, Any]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Record the stream's time in this block."""
        if STAND_IN:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.spans.append((begin, end))

    def take_seconds(self) -> float:
        """Return the seconds recorded since the last call."""
        synchronise()
        seconds = sum(begin.elapsed_time(end) for begin, end in self.spans) / 1e3
        self.spans = []
        return seconds


class FillAllGather(Allocates):
    """Fills every rank's slot with this rank's shard."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        with self.timing():  # the input is a part of the output
            output_tensor.view(-1, input_tensor.numel()).copy_(input_tensor.clone())


class TakeReduceScatter(Allocates):
    """Takes this rank's part of its own gradients."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        with self.timing():
            output_tensor.copy_(input_tensor[: output_tensor.numel()])


def fake_rank(config: str, values: dict[str, Any], world_size: int) -> Figures:
    """Run rank 0 of a world without the other ranks: true memory and kernels, no communication."""
    settings = config_of(config, values, world_size)
    plan = make_plan(settings, world_size, gpu(), on_gpu=True)
    gather, reduce = FillAllGather(), TakeReduceScatter()
    if not STAND_IN:
        torch.cuda.set_device(DEVICE)
    with fake_world(world_size):
        process = Process(0, world_size, DEVICE, 1, min(world_size, 8))
        with session(settings, process) as s:
            for module in s.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # a protocol in all but name
                    module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
            found = run_steps(s, plan, 3, hidden=True)
            for comm in (gather, reduce):
                comm.take_seconds()
            found |= by_kind(lambda: train.train_step(s, 4))
    # if it is below 1, the device waits for the host
    found["kernels, share of the step"] = sum(found[f"{kind}, s"] for kind in (*KINDS, "others")) / found["step, s"]
    found["communication's stand-in, s"] = gather.take_seconds() + reduce.take_seconds()
    if plan.device:
        expected = planned_run.expected(plan, plan.device)
        found |= {f"plan_{kind}, s": getattr(expected, kind) for kind in ("matmuls", "attention", "optimizer")}
        found["plan_others and copies, s"] = expected.others
        found["others and copies, s"] = found["others, s"] + found["copies, s"] - found["communication's stand-in, s"]
    return found


# The first matching pattern decides a kernel's kind. Inductor's names list all operators that they fuse.
KINDS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention|sdpa",
    "matmuls": r"gemm|nvjet|cutlass|xmma|cublas|::b?mm|::addmm|::baddbmm",
    "optimizer": r"adam|lpnorm",
    "copies": r"^(?!triton).*(memcpy|memset|copy|CatArray|chunk_cat|split_with_sizes|::cat|fill)",
}


def kernels_of(step: Callable[[], Any], times: int = 1) -> Counter[str]:
    """Return the seconds by kernel; on a stand-in, by operator."""
    activity = ProfilerActivity.CPU if STAND_IN else ProfilerActivity.CUDA
    with profile(activities=[activity]) as trace:
        for _ in range(times):
            step()
        synchronise()
    name = "self_cpu_time_total" if STAND_IN else "self_device_time_total"
    return Counter({event.key: getattr(event, name) / 1e6 / times for event in trace.key_averages()})


def by_kind(step: Callable[[], Any]) -> Figures:
    """Return the seconds of a step's kernels by kind."""
    found = dict.fromkeys((*KINDS, "others"), 0.0)
    for name, seconds in kernels_of(step).items():
        kind = next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "others")
        found[kind] += seconds
    return {f"{kind}, s": seconds for kind, seconds in found.items()}


def profiled(config: str, values: dict[str, Any]) -> Figures:
    """Measure the milliseconds of a step's ten longest kernels, over three steps."""
    settings = config_of(config, values)
    with process_group(settings.run) as process, session(settings, process) as s:
        steps = iter(range(1, 100))
        for _ in range(STEPS // 4):
            train.train_step(s, next(steps))
        found = kernels_of(lambda: train.train_step(s, next(steps)), 3)
    longest: Figures = {f"{name[:60]}, ms": 1e3 * seconds for name, seconds in found.most_common(10)}
    return {"all kernels, ms": 1e3 * found.total()} | longest


# --- several ranks on one card --------------------------------------------------------------------------------------

# NCCL refuses two ranks on one card, and gloo lacks some of these for CUDA tensors. Names depend on torch's version.
STAGED = ["all_reduce", "all_gather", "gather", "scatter", "all_to_all_single"]
STAGED += ["all_gather_into_tensor", "all_gather_single"]
STAGED += ["reduce_scatter_tensor", "reduce_scatter_single", "broadcast"]


def stage_collectives() -> None:
    """Make gloo run every device's collectives, on copies in host memory."""

    def staged(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **others: Any) -> None:
            pairs: list[tuple[Tensor, Tensor]] = []

            def on_host(value: Any) -> Any:
                if isinstance(value, list) and value and isinstance(value[0], Tensor):
                    return [on_host(one) for one in value]
                if not isinstance(value, Tensor):
                    return value
                pairs.append((value, value.detach().to("cpu", copy=True)))
                return pairs[-1][1]

            original(*map(on_host, args), **{name: on_host(value) for name, value in others.items()})
            for tensor, copy in pairs:
                tensor.detach().copy_(copy)

        return call

    for name in STAGED:
        if hasattr(dist, name):
            setattr(dist, name, staged(getattr(dist, name)))


def losses_of(config: Config, process: Process) -> Tensor:
    """Return loss and gradient norm of eight steps, (8, 2). The replicas have to be equal afterwards."""
    with session(config, process) as s:
        records = [train.train_step(s, step) for step in range(1, 9)]
        require_equal_replicas(s.model, s.optimizer, 8)
        return torch.tensor([[record.loss.item(), record.grad_norm.item()] for record in records])


def small(n: int, values: dict[str, Any]) -> Config:
    """Return the config of a small model on n ranks."""
    given = {"model.size": "1M", "model.vocab_size": 517, "train.seq_len": 128, "train.micro_batch_size": 2}
    given |= {"train.global_batch_size": 4 * n, "optim.warmup_steps": 2, "tokenizer.vocab_size": 517}
    return config_of("debug.toml", given | {key: v for key, v in values.items() if key != "fsdp.cpu_offload"}, n)


@contextlib.contextmanager
def one_of(rank: int, n: int, port: int, cards: bool) -> Iterator[tuple[Process, Callable[[], None]]]:
    """Open a process group in a process of its own. Yields the rank on its device, and what stages collectives."""
    die_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, n, is_master=rank == 0)  # type: ignore[attr-defined]  # as HashStore
    through_nccl, device = cards and not STAND_IN, torch.device(DEVICE.type, rank if cards else 0)
    backend = "cpu:gloo,cuda:nccl" if through_nccl else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=n)
    if not STAND_IN:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # otherwise a mesh would choose a card by the rank
    yield Process(rank, n, CPU if STAND_IN else device, 1), (lambda: None) if through_nccl else stage_collectives
    dist.barrier()
    exit_process()


def one_of_ranks(rank: int, n: int, port: int, cards: bool, cases: dict[str, dict[str, Any]]) -> None:
    """Run one rank's process: each case's losses on the CPU, then on the card."""
    found = Found()
    plain = {name: getattr(dist, name) for name in STAGED if hasattr(dist, name)}
    with one_of(rank, n, port, cards) as (process, stage):
        for name, values in cases.items():
            config = small(n, values)
            expected = losses_of(small(n, values | {"compile.enabled": False}), replace(process, device=CPU))
            if values.get("fsdp.cpu_offload") and not STAND_IN:  # the config refuses it with HSDP: torch issue 180665
                config = config.model_copy(update={"fsdp": config.fsdp.model_copy(update={"cpu_offload": True})})
            stage()
            losses = losses_of(config, process)
            for function, original in plain.items():
                setattr(dist, function, original)
            found[f"{name}: largest difference from the CPU"] = ((losses - expected) / expected).abs().max().item()
            found[f"{name}: loss, first and last"] = " ".join(f"{loss:.5f}" for loss in losses[[0, -1], 0].tolist())


def ranks(n: int, cases: dict[str, dict[str, Any]], *, cards: bool = False) -> Figures:
    """Compare losses of n ranks with the CPU's: on this card, or on a card each.

    Raises:
        RuntimeError: a rank failed. The finished cases are in FILE.
    """
    return started(one_of_ranks, n, cards, cases)


def started(function: Callable[..., None], n: int, *arguments: Any) -> Figures:
    """Run a function on n ranks, and return what its rank 0 has found."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=function, args=(i, n, port, *arguments)) for i in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"ranks ended with {codes}")
    return Figures(json.loads(Path(sys.argv[3]).read_text()))


WAYS_OF_SAVING = "full", "sharded"


def bits(tensors: Mapping[str, Tensor], replicas: int) -> int:
    """Return the sum of all ranks' shards as integers: the same on any world."""
    parts = [own_part(tensor.detach())[0] for tensor in tensors.values() if tensor.ndim]
    total = torch.stack([part.contiguous().view(torch.int32).sum(dtype=torch.int64) for part in parts]).sum()
    return int(sum_over_ranks(total).item()) // replicas


def one_that_saves(rank: int, n: int, port: int, cards: bool, folder: str, load: bool) -> None:
    """Run one rank's process: a full and a sharded save after three steps, or a load of each, with HSDP."""
    values = {**({"fsdp.dp_replicate": 2} if load and n >= 2 else {}), "checkpoint.async_save": False}
    found = Found(json.loads(Path(sys.argv[3]).read_text()) if load else {})
    with one_of(rank, n, port, cards) as (process, stage):
        stage()
        for way in WAYS_OF_SAVING:
            config = small(n, values | {"checkpoint.state_dict": way})
            with session(config, process) as s:
                c = Checkpointer(Path(folder, way), s.model, s.optimizer, config.checkpoint, process, WAYS)
                if load:
                    optim.make_state(s.optimizer)
                    c.load_tensors(storage.step_folder(c.folder, 3))
                    require_equal_replicas(s.model, s.optimizer, 3)
                    loaded = bits(c.tensors(), config.fsdp.mesh_shape(n)[0])
                    found[f"{way}: loaded by {n} ranks"] = "the same" if loaded == found[f"{way}: bits"] else "differs"
                    continue
                for step in (1, 2, 3):
                    train.train_step(s, step)
                check_previous_step(s)
                c.save(replace(s.state, step=3))
                saved = c.wait()
                assert saved is not None
                if saved.error:
                    raise RuntimeError(saved.error)
                found[f"{way}: GB/s"] = saved.bytes / saved.seconds / 1e9
                found[f"{way}: bits"] = bits(c.tensors(), 1)


def saves(n: int, *, cards: bool = False) -> Figures:
    """Save on n ranks, and load on half of them, on another mesh."""
    with tempfile.TemporaryDirectory() as folder:
        started(one_that_saves, n, cards, folder, False)
        return started(one_that_saves, n // 2, cards, folder, True)


# --- several cards --------------------------------------------------------------------------------------------------


def one_that_is_slow(rank: int, n: int, port: int, cards: bool) -> None:
    """Run one rank's process: some steps in which each block of the last rank computes 0.1 s longer."""
    found, slow_s = Found(), 0.1
    with one_of(rank, n, port, cards) as (process, stage):
        stage()
        with session(small(n, {"log.every": 1}), process) as s:
            for block in s.model.layers if rank == n - 1 else ():
                block.register_forward_pre_hook(lambda *_: pause(slow_s))
            for step in range(1, 6):
                train.train_step(s, step)
            check_previous_step(s)
            metric = s.rank_seconds.metric
            seconds = metric.values(sum_over_ranks(metric.parts()))["rank_seconds"]
            extra, pauses = seconds[-1] - max(seconds[:-1]), 2 * len(s.model.layers)  # of two micro-batches
            found["seconds by rank"], found["extra, share of the pauses"] = seconds, extra / slow_s / pauses
            if extra < slow_s:
                raise RuntimeError(f"the last rank is not the slow one: {seconds}")


def pause(seconds: float) -> None:
    """Keep the device busy for a time, without work for the host: at 1 to 2 GHz, so longer on a slow card."""
    time.sleep(seconds) if STAND_IN else torch.cuda._sleep(int(seconds * 1.5e9))


def slow_rank(n: int, *, cards: bool = False) -> Figures:
    """Measure the computing time by rank while the last one of n is slow.

    Raises:
        RuntimeError: another one seems to be slow.
    """
    return started(one_that_is_slow, n, cards)


def collectives() -> Figures:
    """Check the values of the collectives that training uses, and measure GB/s of each rank's own data."""
    found, size = Found(), 64 if STAND_IN else 1 << 24
    with process_group(RunConfig(device="cpu" if STAND_IN else "cuda", threads=1)) as process:
        n, rank = process.world_size, process.rank
        own = torch.full((size,), rank + 1.0, device=DEVICE)
        rows = torch.arange(1.0, n + 1, device=DEVICE).repeat_interleave(size)  # row r is that of rank r
        gathered, part = torch.empty_like(rows), torch.empty_like(own)
        parts, total = list(gathered.split(size)), n * (n + 1) / 2
        ways: dict[str, tuple[Callable[[], Any], Tensor, Any]] = {
            "all-gather": (lambda: all_gather(gathered, own), gathered, rows),
            "all-gather of a list": (lambda: dist.all_gather(parts, own), gathered, rows),
            "reduce-scatter": (lambda: reduce_scatter(part, rows), part, n * (rank + 1.0)),
            "all-reduce": (lambda: dist.all_reduce(part.copy_(own)), part, total),
            "all-to-all": (lambda: dist.all_to_all_single(gathered, own.repeat(n)), gathered, rows),
            "broadcast": (lambda: dist.broadcast(part.copy_(own), 0), part, 1.0),
            "gather": (lambda: dist.gather(own, parts if rank == 0 else None), gathered, rows if rank == 0 else 0.0),
            "scatter": (lambda: dist.scatter(part, list(rows.split(size)) if rank == 0 else None), part, rank + 1.0),
        }
        for name, (way, result, expected) in ways.items():
            gathered.zero_()
            part.zero_()
            way()
            if not bool((result == expected).all()):
                raise RuntimeError(f"{name}: wrong values on rank {rank}")
            found[f"{name}, GB/s"] = own.nbytes / timed(way) / 1e9
    return found


def one_of_two(rank: int, port: int, folder: Path) -> None:
    """Run one of two ranks: rank 1 dies while rank 0 waits in a kernel. Each makes a group of its own with NCCL."""
    die_with_parent()
    os.environ.update({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)})
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)  # type: ignore[attr-defined]  # as HashStore
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if not STAND_IN:
        torch.cuda.set_device(DEVICE)
    alone = [dist.new_group([each], backend="gloo" if STAND_IN else "nccl") for each in range(2)]
    started = time.perf_counter()
    sum_over_ranks(torch.zeros(1, device=DEVICE), alone[rank]).item()
    (folder / f"connected-{rank}").write_text(str(time.perf_counter() - started))
    watchdog = Watchdog(folder, Process(rank, 2, DEVICE, 1, 2, store=store), RunConfig())
    watchdog.on_abort = lambda reason: (folder / "reason").write_text(reason)
    with watchdog.training():
        watchdog.step(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if not STAND_IN:
            torch.cuda._sleep(100_000_000_000)  # cycles, about a minute, like a collective of NCCL that waits
            torch.cuda.synchronize()
        time.sleep(60)


def dead_rank() -> Figures:
    """Measure how soon a rank ends that waits for a dead one, and what it leaves behind for torchfrtrace."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        context = multiprocessing.get_context("spawn")
        both = [context.Process(target=one_of_two, args=(rank, port, folder)) for rank in range(2)]
        for process in both:
            process.start()
        both[1].join()
        died = time.perf_counter()
        both[0].join()
        ended = time.perf_counter()
        found: Figures = {
            "the other ends after, s": ended - died,
            "reason": (folder / "reason").read_text(),
            "first all-reduce, s": float((folder / "connected-0").read_text()),
        }
        for library in ("gloo",) if STAND_IN else ("gloo", "nccl"):
            command = ["torch.distributed.flight_recorder.fr_trace", "--allow-incomplete-ranks", "--just_print_entries"]
            command += ["--prefix", f"{library}_trace_rank_", str(folder / "stacks")]
            read = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
            found[f"all-reduces in the trace of {library}"] = (read.stdout + read.stderr).count("all_reduce(")
    return found


# --- runs of train.py -----------------------------------------------------------------------------------------------


def arguments_of(folder: Path, config: str, values: dict[str, Any]) -> list[str]:
    """Return train.py's arguments for a run on the text of docs/, which is written to the folder."""
    text = folder / "text.txt"
    if not text.is_file():
        text.write_text("\n\n".join(file.read_text() for file in sorted((ROOT / "docs").rglob("*.md"))))
    own = {"run.name": "run", "run.out_dir": folder, "data.path": text, "tokenizer.vocab_size": 512, "log.every": 1}
    own |= {"tokenizer.path": "", "eval.every": 0, "sample.every": 0, "checkpoint.keep_latest": 2}
    own |= {"optim.warmup_steps": 2}
    more = TINY | (TINY_LLAMA if "llama" in config else {}) if STAND_IN else {"run.device": "cuda"}
    options = [
        f"--{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in (own | values | more).items()
    ]
    return [f"--config=configs/{config}", *options]


def train_py(folder: Path, config: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Run train.py on the text of docs/. Returns its metrics."""
    subprocess.run([sys.executable, "train.py", *arguments_of(folder, config, values)], cwd=ROOT, check=True)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def save_pause(config: str, values: dict[str, Any]) -> Figures:
    """Measure how long a background save pauses training, and how much it slows concurrent steps."""
    with tempfile.TemporaryDirectory() as folder:
        more = {"checkpoint.async_save": True, "checkpoint.state_dict": "sharded", "checkpoint.every": 8}
        records = train_py(Path(folder), config, values | more | {"train.steps": 16, "checkpoint.keep_latest": 1})
    saves = [record for record in records if "save_s" in record]
    rates = {record["step"]: record["tokens_per_second"] for record in records if "loss" in record}
    return {
        "pause, s": saves[0]["save_s"],
        "size, GiB": saves[0]["bytes"] / GIB,
        "tokens/s before": statistics.median(rates[step] for step in range(4, 8)),
        "tokens/s meanwhile": statistics.median(rates[step] for step in range(9, 16)),
    }


def resume(config: str, values: dict[str, Any]) -> Figures:
    """Check that a resumed deterministic run equals an uninterrupted one, bit for bit."""
    from tests.helpers import checkpoint, losses, tensors

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, straight = folder / "run", folder / "straight"
        more = {"run.deterministic": True, "train.steps": 6, "checkpoint.every": 3}
        train_py(folder, config, values | more)
        shutil.copytree(run, straight)
        shutil.rmtree(checkpoint(run, 6))
        train_py(folder, config, values | more)
        ours, theirs = (tensors(checkpoint(path, 6)) for path in (run, straight))
        return {
            "same losses": losses(run) == losses(straight),
            "same tensors": ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in theirs),
        }


def ends(
    fault: str, code: int, words: str, values: dict[str, Any] | None = None, ranks: int = 0, file: str = ""
) -> Figures:
    """Run train.py with a fault. Its exit code and output have to be as expected.

    Args:
        fault: of tests/faults/worker.py; after a `device`, SIGTERM follows.
        words: what the output has to contain.
        ranks: by torchrun; 0: without it.
        file: a pattern of files that have to exist in the run's folder.

    Raises:
        ConfigError: it ended differently.
    """
    found = Found()
    if STAND_IN and words == "out of memory":
        return {"not run": "a stand-in has no memory of a device"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    script = "tests/faults/worker.py" if fault else "train.py"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = {"train.steps": 6, "train.global_batch_size": 8 * max(ranks, 1), **(values or {})}
        command = [sys.executable, *launcher, script, *arguments_of(folder, "debug.toml", given)]
        began, env, output = time.monotonic(), os.environ | {"FAULT": fault}, ""
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            output += line
            if "FAULT device fired" in line:
                process.terminate()
        found["exit code"], found["seconds"] = process.wait(), time.monotonic() - began
        found["files"] = " ".join(str(path.relative_to(folder / "run")) for path in folder.glob(f"run/{file or '0'}"))
        found["traces of the flight recorder"] = len([*folder.glob("run/stacks/*_trace_rank_*")])
    if found["exit code"] != code or words not in output or (file and not found["files"]):
        raise ConfigError(f"ended with {found['exit code']}, not {code} and '{words}'")
    return found


# Tests of tests/gpu/test_cuda.py that run next to each other, by words for -k. Those of a group share a fixture.
TESTS = {"options": "every_knob", "memory": "memory", "steps": "losses or host_waits", "resume": "resume"}
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")


def gpu_tests(*, memory: bool) -> Figures:
    """Run the tests of memory in tests/gpu, or the others, in parallel. A failing test does not stop the others."""
    found, outcomes, lock = Found(failed=""), Counter[str](), threading.Lock()
    parallel = ["-n", "1" if STAND_IN else "4"] if importlib.util.find_spec("xdist") else []

    def run_group(name: str, words: str) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-p",
            "no:cacheprovider",
            "tests/gpu/test_cuda.py",
            "-k",
            words,
        ]
        command += parallel if name == "steps" else []
        process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            outcome = OUTCOME.search(line)
            if outcome is None or "%]" not in line:
                continue
            with lock:
                outcomes[outcome[1].lower()] += 1
                if outcome[1] in ("FAILED", "ERROR"):
                    found["failed"] += OUTCOME.split(line.split("::")[-1])[0].strip() + "; "
                found["outcomes"] = " ".join(f"{n} {kind}" for kind, n in outcomes.items())
        with lock:
            found[f"{name}, exit code"] = process.wait()

    all_groups = TESTS | {"others": f"not ({' or '.join(TESTS.values())})"}
    groups = {name: words for name, words in all_groups.items() if (name == "memory") == memory}
    with ThreadPoolExecutor() as threads:
        list(threads.map(run_group, groups.keys(), groups.values()))
    return found


def die_with_parent() -> None:
    """End this process with its parent; otherwise an item would outlive a killed benchmark."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(argv: Sequence[str]) -> int:
    die_with_parent()
    os.chdir(ROOT)
    write(globals()[argv[0]](**json.loads(argv[1])))
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
