"""`make_plan`: a config on a number of ranks, with one simulated step."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch

from torchtitan_lite import models
from torchtitan_lite.config.derive import Layout, derive
from torchtitan_lite.config.paths import expand, is_prepared, unfound
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run.mfu import Device, active_parameters, flops_per_token
from torchtitan_lite.tools.estimate.muon import muon_step
from torchtitan_lite.tools.estimate.simulate import GRADIENTS, OPTIMIZER, PARAMETERS, Simulated, simulate
from torchtitan_lite.tools.estimate.work import Traffic, Work

RESERVE = 0.06  # of the device's memory: CUDA context, NCCL buffers, fragmentation


@dataclass(frozen=True)
class Plan:
    """A config on a number of ranks of a device, with its simulated step. Bytes and FLOPs are per rank."""

    config: Config
    world_size: int
    device: Device | None  # None: a CPU, or a device without known figures
    layout: Layout
    vocab_size: int
    n_parameters: int
    n_active: int  # without those of experts that do not compute a token
    flops_per_token: int
    simulated: Simulated
    checkpoint_bytes: int  # parameters, the optimizer's state and averages, of all ranks

    @property
    def full_steps(self) -> float:
        """Steps of the last batch size that have as many samples as the run."""
        train = self.config.train
        return train.samples / train.batch_size(train.steps)

    @property
    def device_bytes(self) -> dict[str, int]:
        """Peak bytes by kind, without those that `cpu_offload` keeps on the host."""
        on_host = (PARAMETERS, OPTIMIZER, GRADIENTS) if self.config.fsdp.cpu_offload else ()
        return {kind: n for kind, n in self.simulated.peak.items() if kind not in on_host}

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the device's memory minus the reserve."""
        room = math.inf if self.device is None else (1 - RESERVE) * self.device.memory_gib * 2**30
        return sum(self.device_bytes.values()) <= room


def make_plan(config: Config, world_size: int, device: Device | None, *, on_gpu: bool | None = None) -> Plan:
    """Simulate a step and collect the figures.

    Args:
        on_gpu: whether to plan for a GPU; None: if `device` is given. Needed for a GPU with unknown figures.
    """
    on_gpu = device is not None if on_gpu is None else on_gpu
    vocab_size = config.model.vocab_size or vocabulary(config)[0]
    layout = derive(config, world_size)
    with torch.device("meta"):
        model = models.build(config.model, vocab_size)
    n_parameters = sum(p.numel() for p in model.parameters())
    flops = flops_per_token(model, config.input_len, config.target_len)
    simulated = simulate(config, world_size, vocab_size, on_gpu=on_gpu)
    # of Muon's matrices, the simulated rank owns another number in a shallow model: they are counted in the whole one
    products, exchanges = muon_step(model, config.optim, layout, on_gpu=on_gpu)
    start, n_bytes = simulated.peaks["start"], 4 * n_parameters
    shards = start[PARAMETERS] - sum(buffer.nbytes for buffer in model.buffers())  # of a rank; buffers are not saved
    update: Counter[Work] = Counter({w: n for w, n in simulated.optimizer.items() if isinstance(w, Traffic)})
    return Plan(
        config=config,
        world_size=world_size,
        device=device and device.computing(config),
        layout=layout,
        vocab_size=vocab_size,
        n_parameters=n_parameters,
        n_active=active_parameters(model),
        flops_per_token=flops,
        simulated=replace(simulated, optimizer=update + products, exchanges=exchanges),
        checkpoint_bytes=n_bytes + round(n_bytes * start[OPTIMIZER] / shards),
    )


def vocabulary(config: Config) -> tuple[int, str]:
    """Entries of the tokenizer that training would use, and a note if that is uncertain here.

    Raises:
        ConfigError: `tokenizer.path` is not on this machine.
    """
    data, path = config.data, config.tokenizer.path
    prepared = [p for p in data.texts if is_prepared(p)]
    if prepared or path:
        file = expand(prepared[0]) / "tokenizer.json" if prepared else expand(path)
        if not file.is_file():
            raise ConfigError(f"{file} is not on this machine; --model.vocab_size=N gives its number of entries")
        return bpe.size(bpe.load(file)), ""
    missing = [p for p in data.texts if unfound(p)]
    note = f"{', '.join(missing[:1])} is not on this machine: if it is a prepared folder, give --model.vocab_size=N"
    return config.tokenizer.vocab_size, note if missing else ""
