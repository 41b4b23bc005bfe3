"""[log]: the log of a run, and the registry of trackers."""

from dataclasses import dataclass
from typing import Annotated

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


class LogConfig(Section):
    every: PositiveInt = 10
    """log a line and a record every N steps"""
    trackers: list[Annotated[str, AfterValidator(TRACKERS.known)]] = Field(default=[], examples=[["tensorboard"]])
    """also send the records to these trackers; each is an extra: pip install -e ".[tensorboard]\""""
    wandb_project: Annotated[
        str, UsedIf("log.trackers", 'log.trackers = ["wandb"]', lambda trackers: "wandb" in trackers)
    ] = "torchtitan_lite"
    """wandb: the project"""
