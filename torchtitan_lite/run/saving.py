"""Saves between steps, and what is logged of them."""

from dataclasses import replace

from torchtitan_lite.checkpointing.before_save import require_equal_replicas, require_finite
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.distributed.exchange import on_rank0
from torchtitan_lite.errors import SaveError
from torchtitan_lite.run.metrics import Log
from torchtitan_lite.run.session import Session


def save(s: Session) -> None:
    """Save a checkpoint, after waiting for a previous background save.

    A synchronous save can take a minute, in which a signal may arrive: the ranks ask once, so that the run then ends
    with this checkpoint, instead of making two steps and saving again.

    Raises:
        NonFiniteError, ReplicaMismatchError: on every rank: this state must not be saved.
        SaveError: the last save of the run failed. Earlier failures are only logged.
    """
    state, ends = s.state, s.preemption.agreed or s.state.step == s.config.train.steps
    require_finite(s.model, state.step)
    require_equal_replicas(s.model, s.optimizer, state.step)
    report_save(s.checkpointer, s.log, wait=True)
    if (remote := s.checkpointer.remote) and not s.preemption.agreed:  # after a signal, the disk comes first
        remote.report(s.log, wait=True)
        on_rank0(remote.require_newest, s.process.untimed)
    state = replace(state, grad_scaler=s.scaler.state_dict(), loss_since=s.meter.loss_since.tolist())
    for guard in s.guards:
        state = replace(state, **guard.state())
    s.checkpointer.save(state)
    error = report_save(s.checkpointer, s.log, wait=ends or not s.config.checkpoint.async_save, ends=ends)
    if ends and error:
        raise SaveError(f"the last checkpoint was not saved: {error}. Older checkpoints are untouched")
    if not (ends or error or s.config.checkpoint.async_save):
        s.preemption.agree(s.process)


def report_save(checkpointer: Checkpointer, log: Log, *, wait: bool, ends: bool = False) -> str:
    """Log a save once it is committed or has failed, and its upload. Returns the error, and does not raise it.

    Args:
        ends: also wait for the upload.
    """
    saved = checkpointer.wait() if wait or checkpointer.finished() else None
    if saved and saved.error:
        then = "" if ends else ", training continues"
        log.info(f"NOT SAVED  step {saved.step}: {saved.error}; older checkpoints are untouched{then}")
    elif saved:
        paused = f", training paused for {saved.blocked_s:.1f} s" if checkpointer.config.async_save else ""
        log.record({"step": saved.step, "save_s": saved.blocked_s if paused else saved.seconds, "bytes": saved.bytes})
        where = ", on this machine only until it is uploaded" if checkpointer.remote else ""
        log.info(f"saved   {saved.folder}  ({saved.bytes / 2**20:.1f} MiB, {saved.seconds:.1f} s{paused}){where}")
    if saved and saved.note:
        log.info(f"note    older checkpoints were not deleted: {saved.note}")
    error = saved.error if saved else ""
    return error or (checkpointer.remote.report(log, wait=ends) if checkpointer.remote else "")
