"""The training loops that benchmarks.train compares. Each process is one rank of one contender.

    RANK=0 WORLD_SIZE=2 ... python -m benchmarks.contenders NAME SHAPE_AS_JSON

A process builds its model and prints {"ready": ...}. For each line of standard input, it runs that number of steps and
prints their seconds. All contenders train the same Llama in the same dtype with the same optimizer, on random tokens.
"""

import dataclasses
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import train
from benchmarks.bare_session import bare_session
from torchtitan_lite import cpu, models
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config, ModelConfig, RunConfig
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows, Samples
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh, exit_process, process_group
from torchtitan_lite.run.session import Session

Step = Callable[[], None]
SIZES = "dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model and batch of all contenders: a Llama, and one micro-batch per rank and step."""

    dim: int = 384
    hidden_dim: int = 1024
    n_layers: int = 6
    n_heads: int = 6
    n_kv_heads: int = 6
    vocab_size: int = 8192
    seq_len: int = 512
    micro_batch_size: int = 4
    dtype: str = "bfloat16"
    roof: int = 2048  # rows and columns of the roof's square matmul

    @property
    def torch_dtype(self) -> torch.dtype:
        """The compute dtype; parameters are float32."""
        return getattr(torch, self.dtype)

    def flops_per_token(self, *, causal: bool = False) -> int:
        """Count FLOPs of forward and backward as torchtitan does: 6 (N - N_embedding) + 12 L H Q T.

        Args:
            causal: count only the half of attention that a causal model needs.
        """
        shared = 2 * self.dim**2 * (self.n_heads + self.n_kv_heads) // self.n_heads
        layer = shared + 3 * self.dim * self.hidden_dim + 2 * self.dim
        parameters = self.n_layers * layer + self.dim + self.vocab_size * self.dim
        return 6 * parameters + 12 * self.n_layers * self.dim * self.seq_len // (2 if causal else 1)


SHAPES = {
    "default": Shape(
        128, 384, 4, 4, 2, vocab_size=4096, seq_len=256, micro_batch_size=8
    ),  # the former default experiment
    "17M": Shape(),
    "13M": Shape(320, 896, 7, 5, 5, vocab_size=6000, seq_len=768, micro_batch_size=2),
}
GROWTH = {  # only on request: deeper, and larger
    "12 layers": Shape(n_layers=12),
    "24 layers, 49M": Shape(n_layers=24),
    "150M": Shape(768, 2048, 14, 12, 12, vocab_size=32000, micro_batch_size=2),
}


class RandomSamples(Samples):
    """Sequences of random tokens, without a file."""

    def __init__(self, shape: Shape) -> None:
        self.seq_len = self.target_len = shape.seq_len
        self.n_samples = 64
        generator = torch.Generator().manual_seed(5)
        self._rows = torch.randint(shape.vocab_size, (self.n_samples, shape.seq_len + 1), generator=generator).numpy()

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        """Return these rows."""
        rows = Rows.empty(len(run_samples), self.seq_len)
        both = self._rows[run_samples % self.n_samples]
        rows.tokens[:], rows.targets[:] = both[:, :-1], both[:, 1:]
        return rows


# --- torchtitan_lite --------------------------------------------------------------------------------------------


def config_of(shape: Shape, world_size: int, more: dict[str, Any], device: str = "cpu") -> Config:
    """Return a config of this shape, with further keys."""
    values = {
        **{f"model.{key}": getattr(shape, key) for key in (*SIZES, "vocab_size")},
        **{"model.max_seq_len": shape.seq_len, "train.seq_len": shape.seq_len, "train.steps": 10**6},
        **{"train.micro_batch_size": shape.micro_batch_size, "run.device": device, "fsdp.param_dtype": shape.dtype},
        "train.global_batch_size": shape.micro_batch_size * world_size,
        **{"tokenizer.vocab_size": shape.vocab_size, "optim.name": "adamw", "model.qk_norm": False},
    }
    n_gpus = torch.cuda.device_count() if device == "cuda" else 0
    return load.load(None, values | more, world_size=world_size, n_gpus=n_gpus, local_world_size=world_size).config


def training_of(shape: Shape, process: Process, more: dict[str, Any]) -> Session:
    """Build a session like train.build's, on random tokens and without files."""
    config = config_of(shape, process.world_size, more, process.device.type)
    widen = cpu.widens(config, process)
    model = train.sharded_model(config, shape.vocab_size, build_mesh(config.fsdp, process.device), widen=widen)
    materialize(model, process.device, seed=0)
    loader = Loader(
        Mixture([RandomSamples(shape)], [1.0], ["random"]),
        micro_batch_size=shape.micro_batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=None,
    )
    return bare_session(config, process, model, loader)


def ours(**more: Any) -> Callable[[Shape, Process], Step]:
    """Run train.train_step with all its checks; `section__key=value` sets config keys."""

    def build(shape: Shape, process: Process) -> Step:
        t = training_of(shape, process, {key.replace("__", "."): value for key, value in more.items()})

        def step() -> None:
            train.train_step(t, t.state.step + 1)

        return step

    return build


# --- without a library: our model, computed plainly -------------------------------------------------------------


def batch_of(shape: Shape, process: Process) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and targets, (B, T) each."""
    generator = torch.Generator().manual_seed(process.rank)
    rows = torch.randint(shape.vocab_size, (shape.micro_batch_size, shape.seq_len + 1), generator=generator)
    return rows[:, :-1].to(process.device), rows[:, 1:].to(process.device)


def plain_model(shape: Shape, process: Process) -> nn.Module:
    """Build the Llama of models/llama.py, with PyTorch's attention and unchunked logits."""
    config = ModelConfig(
        **{key: getattr(shape, key) for key in SIZES},
        max_seq_len=shape.seq_len,
    )
    with torch.device("meta"):
        model = models.build(config, shape.vocab_size)
    materialize(model, process.device, seed=0)
    return model


def policy(shape: Shape) -> MixedPrecisionPolicy:
    """Return the policy of all contenders: compute in shape.dtype, reduce gradients in float32."""
    return MixedPrecisionPolicy(param_dtype=shape.torch_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of all contenders."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def bare_fsdp2(shape: Shape, process: Process) -> Step:
    """Apply fully_shard to each block and the root, with a minimal training loop."""
    model: Any = plain_model(shape, process)
    return loop(sharded(model, model.layers, shape, process), shape, process)


def ddp(shape: Shape, process: Process) -> Step:
    """Use DistributedDataParallel with autocast: all parameters on each rank."""
    return loop(DistributedDataParallel(plain_model(shape, process)), shape, process, autocast=True)


def sharded(model: Any, layers: Any, shape: Shape, process: Process) -> Any:
    """Apply fully_shard to each block and the root, in place."""
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy(shape))
    return model


def loop(model: nn.Module, shape: Shape, process: Process, *, autocast: bool = False) -> Step:
    """Return the step of a minimal training loop. The model returns logits, or an object that has them."""
    optimizer = adamw(model)
    tokens, targets = batch_of(shape, process)

    def step() -> None:
        with torch.autocast(process.device.type, shape.torch_dtype, enabled=autocast and shape.dtype != "float32"):
            out = model(tokens)
        logits = getattr(out, "logits", out)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- libraries, with a Hugging Face Llama -----------------------------------------------------------------------


def hugging_face_llama(shape: Shape) -> nn.Module:
    """Build the same architecture and sizes in transformers, with SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values: dict[str, Any] = {
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.seq_len,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**values))


def bare_fsdp2_hf(shape: Shape, process: Process) -> Step:
    """Run Fabric's training without Fabric."""
    model: Any = hugging_face_llama(shape)
    return loop(sharded(model, model.model.layers, shape, process), shape, process)


def ddp_hf(shape: Shape, process: Process) -> Step:
    """Run Accelerate's CPU training without Accelerate."""
    return loop(DistributedDataParallel(hugging_face_llama(shape)), shape, process, autocast=True)


def transformers_fsdp2(shape: Shape, process: Process) -> Step:
    """Use transformers' own FSDP2. On one rank it neither shards nor casts, so autocast does."""
    model = hugging_face_llama(shape).to(process.device)
    alone = process.world_size == 1
    return loop(shard_with_transformers(model, process.world_size, dtype=shape.dtype), shape, process, autocast=alone)


def shard_with_transformers(model: Any, dp_shard: int, dp_replicate: int = 1, *, dtype: str) -> Any:
    """Shard a model in place as `from_pretrained(distributed_config=...)` does, which would also need accelerate."""
    from transformers.distributed.configuration_utils import DistributedConfig

    given = DistributedConfig(
        fsdp_size=dp_shard, dp_replicate_size=dp_replicate, fsdp_mixed_precision=dtype == "bfloat16"
    )
    config, _, mesh = type(model).prepare_distribute_model(given)
    return type(model).maybe_distribute_model(model, config, mesh)


def fabric(shape: Shape, process: Process) -> Step:
    """Use Lightning Fabric's ModelParallelStrategy, which is FSDP2."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    def parallelize(model: Any, mesh: Any) -> Any:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data_parallel"], mp_policy=policy(shape))
        return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=policy(shape))

    # its default is tensor parallelism on one machine, without any communication here
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=process.world_size, tensor_parallel_size=1)
    lightning = Fabric(accelerator=process.device.type, devices=process.world_size, strategy=strategy)
    lightning.launch()
    model = lightning.setup(hugging_face_llama(shape))
    mine: Any = next(model.parameters())
    assert mine.device_mesh.size() == process.world_size, mine.device_mesh
    optimizer: Any = lightning.setup_optimizers(adamw(model))
    tokens, _ = batch_of(shape, process)

    def step() -> None:
        lightning.backward(model(input_ids=tokens, labels=tokens).loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerate(shape: Shape, process: Process) -> Step:
    """Use Accelerate with FSDP2. On a CPU it silently uses DDP, which we accept only there."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    on_cpu = process.device.type == "cpu"
    accelerator = Accelerator(
        cpu=on_cpu, mixed_precision="bf16" if shape.dtype == "bfloat16" else "no", fsdp_plugin=plugin
    )
    bare = hugging_face_llama(shape)
    model, optimizer = accelerator.prepare(bare, adamw(bare))
    if on_cpu:
        assert isinstance(model, DistributedDataParallel), type(model)
    tokens, _ = batch_of(shape, process)

    def step() -> None:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- the roof ---------------------------------------------------------------------------------------------------

MATMULS = 2  # per step of the roof


def roof(shape: Shape, process: Process) -> Step:
    """Multiply square matrices on all ranks at once: the machine's practical peak."""
    generator = torch.Generator().manual_seed(0)
    size = shape.roof, shape.roof
    one, other = (torch.randn(size, generator=generator).to(process.device, shape.torch_dtype) for _ in range(2))
    out = torch.empty_like(one)

    def matmuls() -> None:
        for _ in range(MATMULS):
            torch.mm(one, other, out=out)

    return matmuls


CONTENDERS: dict[str, Callable[[Shape, Process], Step]] = {
    "torchtitan_lite": ours(),
    "torchtitan_lite, compiled": ours(compile__enabled=True),
    "torchtitan_lite, fast paths off": ours(
        **{f"speed__{key}": False for key in ("chunked_loss", "block_attention", "fused_functions", "shared_memory")}
    ),
    "torchtitan_lite, not sharded": ours(fsdp__sharding_strategy="NO_SHARD"),
    "torchtitan_lite, blocks in one group": ours(fsdp__blocks_per_group=1000, fsdp__reshard_after_forward=False),
    "torchtitan_lite, bfloat16": ours(fsdp__param_dtype="bfloat16"),
    "bare FSDP2 loop": bare_fsdp2,
    "DDP": ddp,
    "transformers' FSDP2": transformers_fsdp2,
    "Fabric, HF Llama": fabric,
    "Accelerate, HF Llama": accelerate,
    "bare FSDP2 loop, HF Llama": bare_fsdp2_hf,
    "DDP, HF Llama": ddp_hf,
    "roof": roof,
}
# only on request; bfloat16 also in the float32 table, on a CPU without bf16 instructions
WIDENED = "torchtitan_lite, bfloat16"
EXTRA = "torchtitan_lite, compiled", "torchtitan_lite, not sharded", "torchtitan_lite, blocks in one group", WIDENED
# used if the contender is not installed
STAND_INS = {"Fabric, HF Llama": "bare FSDP2 loop, HF Llama", "Accelerate, HF Llama": "DDP, HF Llama"}
NEEDS = {
    "transformers' FSDP2": ("transformers",),
    "bare FSDP2 loop, HF Llama": ("transformers",),
    "DDP, HF Llama": ("transformers",),
    "Fabric, HF Llama": ("lightning-fabric", "transformers"),
    "Accelerate, HF Llama": ("accelerate", "transformers"),
}


def missing(name: str) -> list[str]:
    """Return the packages that a contender needs and that are not installed."""
    installed = {
        (found.metadata["Name"] or "").lower().replace("_", "-") for found in importlib.metadata.distributions()
    }
    return [package for package in NEEDS.get(name, ()) if package not in installed]


def peak_mib(device: torch.device) -> float:
    """Return this process's peak memory so far, in MiB: allocated on the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Build one contender, then run the steps that standard input asks for."""
    name, shape = sys.argv[1], Shape(**json.loads(sys.argv[2]))
    device: Any = os.environ.get("BENCHMARK_DEVICE", "cpu")
    with process_group(RunConfig(device=device, threads=int(os.environ["OMP_NUM_THREADS"]))) as process:
        before = peak_mib(process.device)
        step = CONTENDERS[name](shape, process)
        _say(process, ready=name)
        for line in sys.stdin:
            dist.barrier()
            start, on_cores = time.perf_counter(), time.process_time()
            for _ in range(int(line)):
                step()
            if process.device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            seconds = time.perf_counter() - start
            spent = torch.tensor(time.process_time() - on_cores)
            dist.all_reduce(spent)
            cpu_s = spent.item() / process.world_size
            _say(process, seconds=seconds, cpu_s=cpu_s, peak_mib=peak_mib(process.device), before_mib=before)
    exit_process()


def _say(process: Process, **values: Any) -> None:
    if process.rank == 0:
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
