"""Steps of train.py on FakeTensors of device cuda."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from benchmarks.bare_session import bare_session
from tests.fake_cuda import stand_ins
from tests.fake_cuda.operators import OperatorLog
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.loader import Loader, PrefetchingLoader
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows
from torchtitan_lite.distributed.process_group import Process, build_mesh
from torchtitan_lite.run.session import Session

DEVICE = torch.device("cuda", 0)


class Sequences:
    """Sequences of T tokens, with a document of T / 2 tokens in each."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def draw(self, run_samples: Indices, _seed: int | None) -> Rows:
        tokens = np.ones((len(run_samples), self.seq_len), np.int64)
        begins = np.zeros(tokens.shape, np.bool_)
        begins[:, self.seq_len // 2] = True
        return Rows(tokens, tokens, begins)

    def n_targets(self, run_samples: Indices, _seed: int | None) -> int:
        return len(run_samples) * self.seq_len


def config_of(values: dict[str, Any], world_size: int) -> Config:
    """A config with these values, by "section.key"."""
    return load.load(None, values, world_size=world_size, n_gpus=stand_ins.GPUS).config


@contextlib.contextmanager
def fake_session(config: Config, world_size: int, vocab_size: int) -> Iterator[Session]:
    """What train.build makes, with parameters that are FakeTensors; nothing is loaded or written."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    process = Process(0, world_size, DEVICE, 1, min(world_size, stand_ins.GPUS))
    train_keys = config.train
    samples = Sequences(train_keys.seq_len)
    loader = Loader(
        samples,
        micro_batch_size=train_keys.micro_batch_size,
        rank=0,
        world_size=world_size,
        seed=config.run.seed,
        document_mask=config.data.document_mask,
        pin=True,
    )
    prefetching, mesh = PrefetchingLoader(loader, DEVICE), build_mesh(config.fsdp, DEVICE)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = train.sharded_model(config, vocab_size, mesh)
            _allocate(model, offload=config.fsdp.cpu_offload)
            yield bare_session(config, process, model, prefetching)
    finally:
        prefetching.close()
        dist.destroy_process_group()


def _allocate(model: Any, *, offload: bool) -> None:
    """What distributed.initialize.materialize does, but for the values."""
    model.to_empty(device="cpu" if offload else DEVICE)
    if offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=DEVICE))
    model.tie_weights()


def logged_step(config: Config, world_size: int, vocab_size: int) -> OperatorLog:
    """The operators of the second step of train.py; the first one makes FSDP's and the optimizer's state."""
    with fake_session(config, world_size, vocab_size) as session:
        for step in (1, 2):
            stand_ins.next_step()
            with OperatorLog(silent=step == 1) as log:
                train.train_step(session, step)
    return log
