"""Connects the guard against loss spikes to a run. Loaded only if [spike] asks for it."""

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.exchange import on_rank0
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import this_command
from torchtitan_lite.optim.spike_guard import SpikeGuard
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run.metrics import Log
from torchtitan_lite.run.saving import report_save


def build_guard(
    config: Config, process: Process, state: TrainState, skipped: list[int], checkpointer: Checkpointer, log: Log
) -> SpikeGuard:
    """Build the guard for [spike]."""

    def fork_without(record: StepRecord) -> str:
        """Return the command of a fork from the newest checkpoint that skips the step's samples. Collective.

        If this run has no usable checkpoint, the fork starts as this run did.
        """
        report_save(checkpointer, log, wait=True)
        folder = checkpointer.folder
        saved = on_rank0(
            lambda: [n for n in storage.find_steps(folder) if n < record.step and n not in checkpointer.damaged],
            process.untimed,
        )
        start = storage.step_folder(folder, saved[-1]) if saved else checkpointer.forked_from or ""
        return this_command(
            run__name=f"{config.run.name}-without-{record.step}",
            checkpoint__resume=str(start),
            data__skip_samples=f"{sorted([*config.data.skip_samples, [*record.samples]])}",
        )

    return SpikeGuard(
        config.spike, config.optim.warmup_steps, state.spikes, skipped, config.train.max_skipped, fork_without
    )
