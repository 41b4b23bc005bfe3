"""A session for steps alone: without a run's folder, validation, checkpoints and log. Benchmarks and tests use it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.training.preemption import Preemption
from torchtitan_lite.training.session import Session


def bare_session(config: Config, world: World, model: Transformer, loader: Any) -> Session:
    """What `train.train_step` works with, for a sharded model and its loader."""
    optimizer = build_optimizer(model, config.optim)
    scaler = GradScaler(config.grad_scaler, config.fsdp.uses_float16, world.device)
    unused: Any = None  # the loop's, not a step's
    watchdog: Any = SimpleNamespace(computing=lambda: None)
    return Session(
        config=config,
        world=world,
        dp_replicate=config.fsdp.mesh(world.world_size)[0],
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        guard=FiniteGuard(optimizer, scaler),
        preemption=Preemption(max_minutes=0, joining=Path("none")),
        watchdog=watchdog,
        loader=loader,
        checkpointer=unused,
        state=TrainState(),
        log=unused,
        samples=unused,
    )
