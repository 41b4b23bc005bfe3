"""[eval], [sample], [checkpoint], [log] and [profile]: what a run writes, and when."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from torchtitan_lite.config.paths import expand, problem
from torchtitan_lite.config.registry import Registry
from torchtitan_lite.config.section import IS_PATH, Every, Machine, PathText, Rules, Section, UsedIf

if TYPE_CHECKING:
    from torchtitan_lite.config.schema import Config

# an interval of 0 may switch a feature off for this command only
_VALIDATING = UsedIf("eval.every", "eval.every above 0", lambda c: c.eval.every != 0)
_SAMPLING = UsedIf("sample.every", "sample.every above 0", lambda c: c.sample.every != 0)
_DELETING = UsedIf(
    "checkpoint.keep_latest",
    "checkpoint.keep_latest above 0 (0 keeps all)",
    lambda c: c.checkpoint.keep_latest > 0,
)
_WITH_TASKS = UsedIf("eval.tasks", "eval.tasks", lambda c: bool(c.tasks))
_WITH_WANDB = UsedIf("log.trackers", 'log.trackers = ["wandb"]', lambda c: "wandb" in c.log.trackers)
_REACHED = UsedIf(
    "train.steps",
    "train.steps that reach them",
    lambda c: bool(c.train.epochs) or min(c.profile.steps, default=0) <= c.train.steps,
)
_PROFILING = UsedIf("profile.steps", "profile.steps, e.g. [10, 12]", lambda c: bool(c.profile.steps))


class EvalConfig(Section):
    every: Every = 100
    """validate every N steps and at the end; "epoch": after each epoch; 0: never"""
    samples: Annotated[PositiveInt, _VALIDATING] = 128
    """validation sequences, drawn at random from the held-out text; the same at every step and in every run"""
    tasks: Annotated[list[str], IS_PATH] = ["auto"]
    """tasks to score: .jsonl files or "brackets"; auto: "brackets" on the default text, else none"""
    tasks_every: Annotated[Every, _WITH_TASKS] = 0
    """score the tasks every N steps and at the end; "epoch": after each epoch; 0: only at the end"""
    task_questions: Annotated[NonNegativeInt, _WITH_TASKS] = 0
    """questions per task, drawn at random, the same at every step; 0: all"""


class SampleConfig(Section):
    every: Every = 100
    """generate from the prompts every N steps and at the end; "epoch": after each epoch; 0: never"""
    prompts: Annotated[list[str], _SAMPLING] = Field(default=[], examples=[["def "]])
    """prompts to continue; "" is the start of a document. Default: "def " and "The " for the default text, "" for \
other text, and for pairs three held-out sources, shown with their targets"""
    max_tokens: Annotated[PositiveInt, _SAMPLING] = 48
    """maximum number of new tokens; each gathers all parameters once"""
    temperature: Annotated[NonNegativeFloat, _SAMPLING] = 0.8
    """sampling temperature; 0: greedy"""


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
    keep_best: Annotated[bool, _DELETING, _VALIDATING] = False
    """also keep the checkpoint with the lowest validation loss (validate at the saved steps)"""


@dataclass(frozen=True)
class Tracker:
    """A tracker: plain data, like an optimizer."""

    open: str  # "module:function", which is called with the LogConfig, the run's folder and the state
    package: str = ""  # the package that it imports, an extra of this name in pyproject.toml


TRACKERS = Registry(
    "log.trackers",
    "docs/extending.md",
    Tracker,
    {
        "tensorboard": Tracker("torchtitan_lite.run.trackers:tensorboard", package="tensorboard"),
        "wandb": Tracker("torchtitan_lite.run.trackers:weights_and_biases", package="wandb"),
    },
)


@dataclass(frozen=True)
class Metric:
    """Numbers of a logged step: plain data, like an optimizer.

    Args:
        parts: returns this rank's part, a tensor of any shape; the parts of all ranks are summed, in float64. It is
            called after backward with the model, and with `replicas` (HSDP's, each of which has all gradients) and
            `loss_scale` (a tensor, by which the gradients are multiplied). It should not wait for the device.
        values: returns the numbers for metrics.jsonl and the trackers, by name, from the sum.
        line: how they appear in the step's line, such as "loads {load_min:.2f}-{load_max:.2f}"; "": not at all.
    """

    parts: Callable[..., Any]
    values: Callable[[Any], Mapping[str, float]]
    line: str = ""


METRICS: Registry[Metric] = Registry("log.metrics", "docs/extending.md", Metric, {})


class LogConfig(Section):
    every: PositiveInt = 10
    """log a line and a record every N steps"""
    trackers: list[Annotated[str, AfterValidator(TRACKERS.known)]] = Field(default=[], examples=[["tensorboard"]])
    """also send the records to these trackers; each is an extra: pip install -e ".[tensorboard]\""""
    metrics: list[Annotated[str, AfterValidator(METRICS.known)]] = Field(
        default=[], examples=[["examples.own_metric:LAYER_NORMS"]]
    )
    """metrics of your own, of each logged step (docs/extending.md)"""
    wandb_project: Annotated[str, _WITH_WANDB] = "torchtitan_lite"
    """wandb: the project"""


class ProfileConfig(Section):
    steps: Annotated[list[PositiveInt], _REACHED] = Field(default=[], examples=[[10, 12]])
    """first and last step to profile, e.g. [10, 12]; writes traces and a table to profile/"""
    memory_snapshot: Annotated[bool, _PROFILING] = False
    """CUDA: also record the allocator's history in these steps, for pytorch.org/memory_viz"""


def rules(config: "Config", machine: Machine) -> Rules:
    """Yield the broken rule of the profiled steps."""
    steps = config.profile.steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        yield "profile.steps", f"profile.steps = {steps} should be a first and a last step, e.g. [10, 12]"


def local_rules(config: "Config", machine: Machine) -> Rules:
    """Yield the broken rules of a checkpoint's path and of packages."""
    resume = config.checkpoint.resume
    wrong = problem(resume) if resume else ""
    own = resume and not wrong and expand(resume).resolve().is_relative_to(config.folder.resolve())
    if own:
        yield (
            "checkpoint.resume",
            f'checkpoint.resume = "{resume}": a run does not go back within its folder, and resumes from its newest '
            "checkpoint without this key; start a new run with --run.name=NEW, from an earlier checkpoint with "
            f"--checkpoint.resume={config.folder}/checkpoints/step-N",
        )
    elif wrong and not config.has_checkpoint:  # after its first save, a fork no longer needs it
        yield (
            "checkpoint.resume",
            f'checkpoint.resume = "{resume}" should be the path of a run or checkpoint: {wrong}',
        )
    for name in config.log.trackers:
        package = TRACKERS[name].package
        if package and importlib.util.find_spec(package) is None:
            yield (
                f"log.trackers {name}",
                f'log.trackers = ["{name}"]: {package} is not installed; run pip install -e ".[{package}]"',
            )
