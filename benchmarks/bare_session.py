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
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.run.metrics import Meter
from torchtitan_lite.run.preemption import Preemption
from torchtitan_lite.run.session import Session


def bare_session(config: Config, process: Process, model: Transformer, loader: Any) -> Session:
    """Build the session that `train.train_step` needs, for a sharded model and its loader."""
    unused: Any = None  # the loop reads these, a step does not
    s = Session(config, unused, process, unused)
    s.model = model
    s.loader = loader
    s.phase = config
    s.state = TrainState()
    s.optimizer = build_optimizer(model, config.optim)
    averaged = averaged_over(config.fsdp, process.world_size)
    s.scaler = GradScaler(config.grad_scaler, config.fsdp.uses_float16, process.device, None, averaged)
    s.guards = [FiniteGuard(s.scaler, [])]
    stand_ins: Any = SimpleNamespace(computing=lambda: None, names=[])
    s.watchdog = s.samples = stand_ins
    s.preemption = Preemption(0, Path("none"))
    s.meter = Meter(s.state, process.device)
    s.measure()
    return s
