"""What the sections of the config are made of: their base class, types of fields, and the metadata of a key.

A key stands with everything about it: type and bounds, default, help text, and by `Annotated` what a resume does with
another value (`Resume`), whether bits depend on it (`Bits`), and when it is used (`UsedIf`). Everything else follows
from there: notes on unused keys (load.py), comparing checkpoints (checkpointing/compatibility.py), `--help` and docs.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

if TYPE_CHECKING:
    from torchtitan_lite.config.schema import Config

# --- the metadata of a key --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resume:
    """What a resume does if a key's value differs from the run's. docs/resume.md has the table.

    - allowed: the value applies from the next step, and the start names it.
    - fork: the value decides what the run learns. It is kept if the command does not give it, and another one needs a
      fork: a run of its own, which begins with the checkpoint.
    - refused: the same, and a fork is refused, too: the checkpoint's tensors mean something else with another value.
    """

    rule: Literal["allowed", "fork", "refused"]
    note: str = ""  # for the table
    by_hash: bool = False  # what the key leads to is compared, not its value
    changes_steps: bool = True  # whether a step computes other numbers, so that a replay needs the same value
    changes_start: bool = False  # whether only the values that a run begins with differ
    keeps: bool = False  # allowed, but kept if the command does not give it


ALLOWED = Resume("allowed", changes_steps=False)
ALLOWED_FOR_LATER_STEPS = Resume("allowed")
FORK = Resume("fork")
REFUSED = Resume("refused")


@dataclass(frozen=True)
class Bits:
    """Another value changes the order or the rounding of sums, so a resume or a replay is not bit for bit.

    The value is recorded with each checkpoint, or what it means on a machine (compatibility.bitwise_setting).
    """

    name: str = ""  # of the record; default: the key without its section


BITS = Bits()


@dataclass(frozen=True)
class UsedIf:
    """The key is used only under a condition. A note names the keys that are given without effect."""

    decided_by: str  # the keys that decide, separated by spaces
    needs: str  # what would have to be set, for the note
    holds: Callable[["Config"], bool]


IS_PATH = "path"  # of a key that says where something is, so a resume does not keep it


def used_with(key: str, *values: str | bool) -> UsedIf:
    """The rule of a key that is used only if another key has one of these values."""
    *others, last = (json.dumps(value) for value in values)
    needs = f"{key} = {', '.join(others)}{' or ' if others else ''}{last}"
    section, name = key.split(".")
    return UsedIf(key, needs, lambda config: getattr(getattr(config, section), name) in values)


# --- rules between keys -----------------------------------------------------------------------------------------

# "the keys involved", and what is wrong and what works
Rules = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Machine:
    """Where a config is going to run."""

    world_size: int = 1
    n_gpus: int = 0  # of this machine
    local_world_size: int = 1  # ranks on this machine


# --- sections ---------------------------------------------------------------------------------------------------


class Frozen(BaseModel):
    """The base of all parts of a config."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Section(Frozen):
    """A table of the TOML file."""

    on_resume: ClassVar[Resume] = ALLOWED  # of keys without a `Resume` of their own

    @field_validator("*", mode="wrap")
    @classmethod
    def _checked(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """Choices may be in upper or lower case, bf16 is bfloat16, and a list may be written without brackets."""
        try:
            return check(value)
        except ValidationError:
            name = info.field_name or ""
            return check(spelled(cls.model_fields[name].annotation, value, commas=name != "prompts"))


_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def spelled(annotation: Any, value: Any, *, commas: bool = True) -> Any:
    """What a text means where it is not valid as it is: case does not matter in a choice, dtypes have short names, and
    a list may be one value or values separated by commas.

    Args:
        commas: whether they separate; not in free text.
    """
    if (kind := get_origin(annotation)) in (list, tuple):
        if isinstance(value, str) and commas:
            # a comma in brackets belongs to a pattern: layers.[0,1].*
            value = [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|[^,])+", value)]
        items = value if isinstance(value, list | tuple) else [value]
        return kind(spelled(get_args(annotation)[0], item) for item in items)
    if not isinstance(value, str):
        return value
    kinds = [annotation, *get_args(annotation)]  # of a Literal, or of a union with one
    choices = {c.lower(): c for k in kinds if get_origin(k) is Literal for c in get_args(k) if isinstance(c, str)}
    return choices.get(value.lower(), choices.get(_SHORT_NAMES.get(value.lower(), value), value))


# --- types of fields --------------------------------------------------------------------------------------------


def _every(least: int, value: Any) -> Any:
    if value == "epoch" or (type(value) is int and least <= value < 2**63):
        return value
    raise ValueError(f'should be "epoch", or a number of steps of at least {least}')


if TYPE_CHECKING:  # run/epochs.py replaces "epoch" before anything counts steps
    Every = int
    PositiveEvery = int
else:
    Every = Annotated[int | Literal["epoch"], PlainValidator(functools.partial(_every, 0))]
    PositiveEvery = Annotated[int | Literal["epoch"], PlainValidator(functools.partial(_every, 1))]
Dtype = Literal["float32", "bfloat16", "float16"]
# Bounds far above any use: products stay within 64 bits, and a typing error does not exhaust the memory.
Size = Annotated[int, Field(gt=0, lt=2**31)]
SizeOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Width = Annotated[int, Field(gt=0, le=2**20)]
WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
PathText = Annotated[str, IS_PATH]
