"""[log]: the log of a run, and the registries of trackers and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt

from torchtitan_lite.config.registry import Registry
from torchtitan_lite.config.section import Section, UsedIf


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
    values: Callable[[Any], Mapping[str, Any]]
    line: str = ""


METRICS: Registry[Metric] = Registry("log.metrics", "docs/extending.md", Metric, {})


class LogConfig(Section):
    every: PositiveInt = 10
    """log a line and a record every N steps"""
    trackers: list[Annotated[str, AfterValidator(TRACKERS.known)]] = Field(default=[], examples=[["tensorboard"]])
    """also send the records to these trackers; each is an extra: pip install -e ".[tensorboard]\""""
    metrics: list[Annotated[str, AfterValidator(METRICS.known)]] = Field(
        default=[], examples=[["examples.own_metric:KIND_NORMS"]]
    )
    """metrics of your own (docs/extending.md)"""
    norms: bool = False
    """also log the norms of weights and updates by block"""
    wandb_project: Annotated[
        str, UsedIf("log.trackers", 'log.trackers = ["wandb"]', lambda trackers: "wandb" in trackers)
    ] = "torchtitan_lite"
    """wandb: the project"""
