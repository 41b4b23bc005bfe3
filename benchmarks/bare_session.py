"""A session for steps alone: without a run's folder, validation, checkpoints and log. Benchmarks and tests use it."""

from types import SimpleNamespace
from typing import Any

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.models import Transformer
from torchtitan_lite.monitoring.metrics import Meter
from torchtitan_lite.optim.finite_guard import FiniteGuard, Skipped
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.training.preemption import Preemption
from torchtitan_lite.training.session import Beside, Services, Session, Trained


def bare_session(config: Config, world: World, model: Transformer, loader: Any) -> Session:
    """What `train.train_step` works with, for a sharded model and its loader."""
    unused: Any = None  # the loop's, not a step's
    watchdog: Any = SimpleNamespace(computing=lambda: None)
    optimizer = build_optimizer(model, config.optim)
    scaler = GradScaler(config.grad_scaler, config.fsdp.uses_float16, world.device)
    trained = Trained(model, optimizer, scaler, [FiniteGuard(scaler, Skipped([]))], unused, loader)
    services = Services(unused, Meter(TrainState(), world.device), watchdog, Preemption(max_minutes=0), unused)
    return Session(config, world, trained, services, Beside(), TrainState())
