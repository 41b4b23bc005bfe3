"""[checkpoint]: when to save, how, and which checkpoints to keep."""

from typing import Annotated, Literal

from pydantic import NonNegativeInt

from torchtitan_lite.config.section import Every, PathText, Section, UsedIf

_DELETING = UsedIf("checkpoint.keep_latest", "checkpoint.keep_latest above 0 (0 keeps all)")


class CheckpointConfig(Section):
    every: Every = 100
    """save every N steps and at the end; "epoch": after each epoch; 0: only at the end"""
    state_dict: Literal["full", "sharded"] = "full"
    """full: rank 0 writes full tensors; sharded: each rank writes its own shards, to a shared file system"""
    api: Literal["dtensor", "dcp"] = "dtensor"
    """API that gathers and distributes state dicts: DTensor or torch.distributed.checkpoint; the files are the same"""
    async_save: bool = False
    """save in the background; costs a host copy of each rank's shards (full: of the whole state, on rank 0)"""
    resume: PathText = ""
    """start as a fork of this run or checkpoint, under a new run.name; ignored once this run has a checkpoint. A run \
always resumes from its newest complete checkpoint"""
    verify: Literal["full", "size", "off"] = "full"
    """what to check against the manifest before loading: full: SHA-256 and size; size: size only; off: nothing"""
    keep_latest: NonNegativeInt = 3
    """keep this many of the newest checkpoints; 0: all"""
    keep_every: Annotated[NonNegativeInt, _DELETING] = 0
    """also keep the checkpoints of every Nth step; 0: none"""
    keep_best: Annotated[bool, _DELETING, UsedIf("eval.every", "eval.every above 0")] = False
    """also keep the checkpoint with the lowest validation loss (validate at the saved steps)"""
