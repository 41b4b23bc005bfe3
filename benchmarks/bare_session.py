"""A session for single steps, without run folder, validation, checkpoints or log, for benchmarks and tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.fsdp import averaged_over
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.groups import Blocks
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.run.metrics import Meter
from torchtitan_lite.run.preemption import Preemption
from torchtitan_lite.run.rank_seconds import RankSeconds
from torchtitan_lite.run.session import Session
from torchtitan_lite.run.source_losses import SourceLosses


def bare_session(config: Config, process: Process, model: Transformer, loader: Any) -> Session:
    """Build the session that `train.train_step` needs, for a sharded model and its loader."""
    unused: Any = None  # the loop reads these, a step does not
    watchdog: Any = SimpleNamespace(computing=lambda: None)
    optimizer = build_optimizer(model, config.optim)
    averaged = averaged_over(config.fsdp, process.world_size)
    scaler = GradScaler(config.grad_scaler, config.fsdp.uses_float16, process.device, None, averaged)
    meter = Meter(TrainState(), process.device)
    rank_seconds = RankSeconds(model, process, meter, unused)
    return Session(
        config=config,
        data=unused,
        process=process,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        guards=[FiniteGuard(scaler, [])],
        blocks=Blocks(model, config.fsdp.mesh_shape(process.world_size)[0]),
        source_losses=SourceLosses(model, []),
        metrics=[rank_seconds.metric],
        phase=config,
        samples=unused,
        loader=loader,
        log=unused,
        meter=meter,
        rank_seconds=rank_seconds,
        watchdog=watchdog,
        preemption=Preemption(0, Path("none")),
        checkpointer=unused,
        periodic=[],
        profile=None,
        state=TrainState(),
    )
