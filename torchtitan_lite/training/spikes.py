"""What a run does at a loss spike: log, skip or stop. Loaded at the first one."""

from dataclasses import replace

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.distributed.ranks import on_rank0
from torchtitan_lite.errors import SpikeError
from torchtitan_lite.optim.finite_guard import too_many
from torchtitan_lite.optim.spike_guard import Spike
from torchtitan_lite.process import fork_command
from torchtitan_lite.training.session import Session, report_save


def act(s: Session, spike: Spike) -> None:
    """Record the last step as a spike, and do what `spike.action` says. Collective.

    Raises:
        SpikeError: on every rank: the run stops.
    """
    step, action, (first, end) = s.state.step, s.config.spike.action, s.last_samples
    what = f"{spike}; run samples {first} to {end - 1}"
    s.log.record(
        {"step": step, "spike": {**spike._asdict(), **s.rank_losses(), "samples": [first, end], "action": action}}
    )
    s.log.info(f"SPIKE   step {step}: {what}{'' if action == 'log' else '; the update was withheld'}")
    if action == "log":
        return
    if action == "stop":
        raise SpikeError(
            f"step {step}: {what}. The update was withheld, and nothing was saved after it\n"
            f"  This command starts a run that skips these samples:\n  {fork_without(s, first, end)}"
        )
    s.guard.skipped.append(step)
    s.state = replace(s.state, skipped=list(s.guard.skipped))
    if too_many(s.guard.skipped, most := s.config.train.max_skipped):
        raise SpikeError(
            f"step {step}: {what}. This and the {most} steps before it were skipped (train.max_skipped), and nothing "
            "has been saved since. If the loss is right, a larger spike.loss_deviations or spike.norm_deviations "
            "accepts it; a lower optim.lr may help"
        )


def fork_without(s: Session, first: int, end: int) -> str:
    """The command of a run that starts from the newest checkpoint, and skips the last step's samples. Collective.

    Without a checkpoint of its own, it starts as this run did.
    """
    report_save(s, wait=True)
    checkpoints, damaged, step = s.checkpointer.folder, s.checkpointer.damaged, s.state.step
    saved = on_rank0(
        lambda: [n for n in storage.find_steps(checkpoints) if n < step and n not in damaged], s.world.untimed
    )
    start = storage.step_folder(checkpoints, saved[-1]) if saved else s.checkpointer.forked_from or ""
    skipped = sorted([*s.config.data.skip_samples, [first, end]])
    return fork_command(f"{s.config.run.name}-without-{step}", str(start), data__skip_samples=str(skipped))
