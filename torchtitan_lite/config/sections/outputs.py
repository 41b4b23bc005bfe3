"""[eval], [sample], [checkpoint] and [profile]: what a run does and writes beside its steps.

TRACKERS and Tracker are here as in version 1.0, for trackers of your own. See log.py.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from torchtitan_lite.config.section import IS_PATH, Every, PathText, Section, UsedIf
from torchtitan_lite.config.sections.log import TRACKERS as TRACKERS
from torchtitan_lite.config.sections.log import Tracker as Tracker

_WITH_TASKS = UsedIf("tasks", "eval.tasks")


class EvalConfig(Section):
    every: Every = 100
    """validate every N steps and at the end; "epoch": after each epoch; 0: never"""
    samples: Annotated[PositiveInt, UsedIf("eval.every", "eval.every above 0")] = 128
    """validation sequences, drawn at random; the same at every step"""
    tasks: Annotated[list[str], IS_PATH] = ["auto"]
    """tasks to score: .jsonl files or "brackets"; auto: "brackets" on the default text, else none"""
    tasks_every: Annotated[Every, _WITH_TASKS] = 0
    """score the tasks every N steps and at the end; "epoch": after each epoch; 0: at the end"""
    task_questions: Annotated[NonNegativeInt, _WITH_TASKS] = 0
    """questions per task, drawn at random; 0: all"""


_SAMPLING = UsedIf("sample.every", "sample.every above 0")  # 0 may switch it off for this command only


class SampleConfig(Section):
    every: Every = 100
    """generate from the prompts every N steps and at the end; "epoch": after each epoch; 0: never"""
    prompts: Annotated[list[str], _SAMPLING] = Field(default=[], examples=[["def "]])
    """prompts to continue; "" is the start of a document; []: some that suit the data"""
    max_tokens: Annotated[PositiveInt, _SAMPLING] = 48
    """maximum new tokens; each gathers all parameters once"""
    temperature: Annotated[NonNegativeFloat, _SAMPLING] = 0.8
    """sampling temperature; 0: greedy"""


_DELETING = UsedIf("checkpoint.keep_latest", "checkpoint.keep_latest above 0 (0 keeps all)")


class CheckpointConfig(Section):
    every: Every = 100
    """save every N steps and at the end; "epoch": after each epoch; 0: at the end"""
    state_dict: Literal["full", "sharded"] = "full"
    """full: rank 0 writes full tensors; sharded: each rank writes its shards, to a shared file system"""
    api: Literal["dtensor", "dcp"] = "dtensor"
    """gather and distribute state by DTensor or torch.distributed.checkpoint; the files are the same"""
    async_save: bool = False
    """save in the background; costs a host copy of the shards (full: of the whole state, on rank 0)"""
    resume: PathText = ""
    """start as a fork of this run or checkpoint, under a new run.name; ignored once this run has a checkpoint"""
    verify: Literal["full", "size", "off"] = "full"
    """before loading, check SHA-256 and size (full), the size, or nothing"""
    keep_latest: NonNegativeInt = 3
    """keep this many of the newest checkpoints; 0: all"""
    keep_every: Annotated[NonNegativeInt, _DELETING] = 0
    """also keep the checkpoints of every Nth step; 0: none"""
    keep_best: Annotated[bool, _DELETING, UsedIf("eval.every", "eval.every above 0")] = False
    """also keep the checkpoint with the lowest validation loss"""


_REACHED = UsedIf(
    "train.epochs profile.steps train.steps",
    "train.steps that reach them",
    lambda epochs, profiled, steps: epochs > 0 or min(profiled, default=0) <= steps,
)
_PROFILES = UsedIf("profile.steps", "profile.steps, e.g. [10, 12]")


class ProfileConfig(Section):
    steps: Annotated[list[PositiveInt], _REACHED] = Field(default=[], examples=[[10, 12]])
    """first and last step to profile, e.g. [10, 12]; writes to profile/"""
    ranks: Annotated[list[NonNegativeInt], _PROFILES] = Field(default=[], examples=[[0, 8]])
    """ranks to profile; []: the first of each machine, of at most eight machines"""
    memory_snapshot: Annotated[bool, _PROFILES] = False
    """CUDA: also record the allocator's history, for pytorch.org/memory_viz"""
