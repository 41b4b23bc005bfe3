"""Simulates the memory, compute and communication of one training step, with FakeTensors and a fake process group.

The model, `fully_shard`, activation checkpointing and the optimizer run as in training, so every option of FSDP2 has
its real effect. Nothing is allocated; a block takes about a quarter of a second. A dispatch mode sees each operator and
tracks its output tensors until they are freed.

    timeline:    (allocated, freed, bytes, kind) of each storage  ->  the peak, by kind
    collectives: (operator, bytes, ranks) by micro-batch          ->  the communication of a step
    work:        matmuls, attention and memory traffic            ->  the compute of a step
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite import cpu, models
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import Config
from torchtitan_lite.cpu.fused import fuse_norms
from torchtitan_lite.distributed.fsdp import apply_fsdp, before_micro_batch
from torchtitan_lite.distributed.process_group import build_mesh
from torchtitan_lite.distributed.recompute_and_compile import apply_activation_checkpointing
from torchtitan_lite.models.attention import attend
from torchtitan_lite.optim import muon
from torchtitan_lite.optim.groups import freeze
from torchtitan_lite.optim.guarded import GuardedOptimizer
from torchtitan_lite.optim.optimizer import build_optimizer, clip_factor, gradient_norms, make_state, squared_norm
from torchtitan_lite.tools.estimate.work import Collective, Recorder, Storage, Work, local, tensors_of

KINDS = "parameters", "optimizer state", "gradients", "gathered parameters", "communication buffers", "activations"
PARAMETERS, OPTIMIZER, GRADIENTS, GATHERED, COMMUNICATION, ACTIVATIONS = KINDS


@dataclass
class Simulated:
    """One rank's simulated step."""

    peak: dict[str, int]  # bytes by kind at the peak of the step
    collectives: list[Counter[Collective]]  # of the first, middle (unless like the first) and last micro-batch
    work: list[Counter[Work]]  # likewise
    optimizer: Counter[Work]  # clipping and the update
    muon_collectives: Counter[Collective] = field(default_factory=Counter)  # see `make_plan`

    def micro_batches(self, grad_accum_steps: int) -> list[tuple[int, int]]:
        """Return the index of each simulated micro-batch, and how many of the step's micro-batches it represents."""
        n = len(self.work)
        return [(i, 1 + (grad_accum_steps - n) * (i == (n - 1) // 2)) for i in range(n)]


class Timeline(TorchDispatchMode):
    """Tracks every storage from allocation to release, and counts collectives.

    Args:
        n_replicas: number of HSDP replicas, the group size of an all-reduce.
        compiled: whether the blocks are compiled.
    """

    def __init__(self, n_replicas: int, compiled: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n_replicas, self.compiled = n_replicas, compiled
        self._held, self._most, self._at_peak = 0, 0, list[Storage]()
        self.collectives: Counter[Collective] = Counter()
        self.recorder = Recorder(lambda tensor: self._alive.get(id(tensor.untyped_storage())))
        self.phase, self._in_block = "forward", False
        self._alive: dict[int, Storage] = {}  # by id of torch's storage

    def begin_part(self, *, in_block: bool) -> None:
        """Begin a part of the step, in a block or outside of all of them."""
        self.recorder.end_of_kernel(self.phase)
        self._in_block = in_block

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "prim":  # the device: read so often that torch's way to it takes a sixth of the time
            return args[0].fake_device
        out = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self._collective(function, args)
        else:
            for tensor in tensors_of(out):
                self.track(tensor, ACTIVATIONS)
            fused = self.compiled and self._in_block and function.namespace != "fsdp"
            self.recorder.count(function, args, kwargs, out, self.phase, fused=fused)
        return out

    def track(self, tensor: Tensor, kind: str) -> None:
        """Track a tensor's storage. If it is already tracked, set its kind, unless `kind` is ACTIVATIONS."""
        storage = tensor.untyped_storage()
        known = self._alive.get(key := id(storage))
        if known is None:
            self._allocated(storage, kind, weakref.ref(storage, lambda _: self._freed(key)))
        elif kind != ACTIVATIONS:
            known.kind = kind

    def _allocated(self, storage: Any, kind: str, reference: Any) -> None:
        self._alive[id(storage)] = Storage(storage.nbytes(), kind, reference)
        self._held += storage.nbytes()
        if self._held > self._most:
            self._most, self._at_peak = self._held, [*self._alive.values()]

    def _freed(self, key: int) -> None:
        storage = self._alive.pop(key)
        storage.freed = True
        self._held -= storage.bytes

    def _collective(self, function: Any, args: Any) -> None:
        kind = _COLLECTIVES.get(function.__name__.split(".")[0])
        if kind is None:
            return
        tensors = sorted((*tensors_of(args[0]), *tensors_of(args[1])), key=Tensor.numel)
        part, whole = tensors[0], tensors[-1]
        ranks = self.n_replicas if kind == "all-reduce" else whole.numel() // part.numel()
        self.track(whole, COMMUNICATION)
        self.collectives[
            Collective(f"{kind}, {self.phase}" if kind == "all-gather" else kind, whole.nbytes, ranks)
        ] += 1

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Track all storages and collectives in this context."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            if known := self._alive.get(id(storage)):  # FSDP frees and allocates gathered parameters in this way
                known.kind = GATHERED
                self._freed(id(storage))
                self._allocated(storage, GATHERED, known.reference)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize_), self:
            yield

    def peak(self) -> dict[str, int]:
        """Return the bytes by kind at the peak of the step."""
        held = dict.fromkeys(KINDS, 0)
        for storage in self._at_peak:
            held[storage.kind] += storage.bytes
        return held


# torch's names
_COLLECTIVES = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}
_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"


@contextlib.contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Create a process group whose collectives do nothing. This process is rank 0, which has the largest shards.

    FSDP2 chunks each parameter into one tensor per rank, and keeps this rank's. Here only rank 0's chunk is made: in a
    large world, all chunks would take minutes and gigabytes.
    """
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        with patch(f"{_FSDP_PARAM}._chunk_with_empty", _first_chunk):
            yield
    finally:
        dist.destroy_process_group()


def _first_chunk(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // num_chunks))]


def simulate(config: Config, world_size: int, vocab_size: int, *, on_gpu: bool) -> Simulated:
    """Simulate rank 0's step, without host offload. Of compilation, only the memory traffic is modeled, not the peak.

    Args:
        on_gpu: simulate CUDA's kernels. E.g. attention with dropout needs T x T matrices only on a CPU.
    """
    layout = derive(config, world_size)
    fsdp = config.fsdp.model_copy(update={"cpu_offload": False, "comm_memory": "default"})
    timeline = Timeline(layout.dp_replicate, config.compile.enabled)
    with torch.device("meta"):
        model = models.build(config.model, vocab_size, models.LossOptions.from_config(config))
    freeze(model, config.optim.freeze)
    if on_gpu:
        fuse_norms(model)  # CUDA's fused RMSNorm saves as little for backward as this CPU version
    else:
        cpu.apply(model, config.speed)
    apply_activation_checkpointing(model, config.activation_checkpointing)
    with fake_world(world_size), patch.object(muon, "orthogonalise"):  # `muon_step` counts that
        apply_fsdp(model, build_mesh(fsdp, torch.device("cpu")), fsdp)
        if on_gpu:
            modules: list[Any] = [*model.modules()]
            for module in modules:
                if isinstance(getattr(module, "dropout", None), float):
                    module.dropout = 0.0
                if getattr(module, "window", 0):
                    module.attend = _windowed_on_gpu
        _mark_blocks(model, timeline)
        alike = fsdp.grad_sync == "every" and fsdp.reshard_after_backward  # the first micro-batch is like later ones
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            model.tie_weights()
            optimizer = build_optimizer(model, config.optim)
            make_state(optimizer)
            for tensor in (*model.parameters(), *model.buffers()):
                timeline.track(local(tensor), PARAMETERS)
            for tensor in tensors_of([*optimizer.state.values()]):
                timeline.track(tensor, OPTIMIZER)
            return _step(config, min(layout.grad_accum_steps, 2 if alike else 3), model, optimizer, timeline)


def _mark_blocks(model: models.Transformer, timeline: Timeline) -> None:
    """Tell the timeline where blocks begin and end, in forward and backward."""

    def after(block: nn.Module, _args: Any, output: Any) -> None:
        if block is model.layers[-1]:
            timeline.begin_part(in_block=False)
        x = output[0] if isinstance(output, tuple) else output  # MoE blocks return a tuple
        if x.requires_grad:
            x.register_hook(lambda _: timeline.begin_part(in_block=True))

    for block in model.layers:
        block.register_forward_pre_hook(lambda *_: timeline.begin_part(in_block=True))
        block.register_forward_hook(after)


def _step(config: Config, n_micro: int, model: nn.Module, optimizer: GuardedOptimizer, timeline: Timeline) -> Simulated:
    train = config.train
    collectives, work = [], []
    with timeline.tracking():
        for i in range(n_micro):
            timeline.phase = "forward"
            timeline.begin_part(in_block=False)
            tokens = torch.zeros(train.micro_batch_size, config.input_len, dtype=torch.int64)
            targets = torch.zeros(train.micro_batch_size, config.target_len, dtype=torch.int64)
            before_micro_batch(model, config.fsdp, last=i == n_micro - 1)
            loss = model(tokens, targets)
            timeline.phase = "backward"
            loss.backward()
            del loss
            for parameter in model.parameters():
                if parameter.grad is not None:
                    timeline.track(local(parameter.grad), GRADIENTS)
            collectives.append(timeline.collectives)
            timeline.collectives = Counter()
            work.append(timeline.recorder.take())
        timeline.phase = "optimizer"
        timeline.begin_part(in_block=False)
        norm = squared_norm(gradient_norms(model), 1).sqrt().float()
        optimizer.multiply_gradients(clip_factor(norm, config.optim.max_norm, torch.ones(())))
        optimizer.step()
        optimizer.zero_grad()
    return Simulated(timeline.peak(), collectives, work, timeline.recorder.take())


def _windowed_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, window: int = 0
) -> Tensor:
    """Attend to the first `window` keys, without a mask: the same FLOPs and memory as windowed attention on a GPU."""
    if q.shape[1] <= window:
        return attend(q, k, v)
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) if groups > 1 else t for t in (k[:, :window], v[:, :window]))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
