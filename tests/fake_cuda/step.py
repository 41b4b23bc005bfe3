"""Steps of train.py on FakeTensors of device cuda."""

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from benchmarks.bare_session import bare_session
from tests.distributed.knob_table import FixedSamples
from tests.fake_cuda import stand_ins
from tests.fake_cuda.operators import OperatorLog
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.loader import Loader, PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed.process_group import Process, build_mesh

DEVICE = torch.device("cuda", 0)


def config_of(values: dict[str, Any], world_size: int) -> Config:
    """A config with these values, by "section.key"."""
    return load.load(None, values, world_size=world_size, n_gpus=stand_ins.GPUS).config


def logged_step(config: Config, world_size: int, vocab_size: int) -> OperatorLog:
    """The operators of the second step of train.py; the first one makes FSDP's and the optimizer's state.

    The session is what train.build makes, with parameters that are FakeTensors; nothing is loaded or written.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    process = Process(0, world_size, DEVICE, 1, min(world_size, stand_ins.GPUS))
    loader = Loader(
        Mixture([FixedSamples(config.train.seq_len)], [1.0], ["fixed"]),
        micro_batch_size=config.train.micro_batch_size,
        rank=0,
        world_size=world_size,
        seed=config.run.seed,
        document_mask=config.data.document_mask,
        pin=True,
    )
    prefetching, mesh = PrefetchingLoader(loader, DEVICE), build_mesh(config.fsdp, DEVICE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = train.sharded_model(config, vocab_size, mesh)
        model.to_empty(device=DEVICE)  # what materialize does, but for the values
        model.tie_weights()
        session = bare_session(config, process, model, prefetching)
        for step in (1, 2):
            stand_ins.next_step()
            with OperatorLog(paused=step == 1) as log:
                train.train_step(session, step)
    prefetching.close()
    dist.destroy_process_group()
    return log
