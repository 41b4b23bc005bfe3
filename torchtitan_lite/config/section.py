"""Building blocks of config sections: base class, field types, and the metadata of a key.

A field declares everything about its key: type and bounds, default, help text, and by `Annotated` what a resume does
with a different value (`Resume`), whether bits depend on it (`Bits`), and when it is used (`UsedIf`). Notes on unused
keys (load.py), comparison with checkpoints (checkpointing/compatibility.py), `--help` and docs follow from these.
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
    - kept: like allowed, but the run's value is kept if the command does not set it.
    - fork: the value decides what the run learns. If the command does not set it, the run's value is kept. A different
      value needs a fork: a new run that starts from the checkpoint.
    - refused: like fork, but a fork is refused too, because the value changes the meaning of the checkpoint's tensors.
    """

    rule: Literal["allowed", "kept", "fork", "refused"]
    note: str = ""  # for the table in docs/resume.md
    changes: Literal["nothing", "start", "steps"] = "steps"  # the numbers of step 0 or of every step; a replay compares

    @property
    def compares(self) -> bool:
        """Whether a resume stops if the command sets a different value."""
        return self.rule in ("fork", "refused")


ALLOWED = Resume("allowed", changes="nothing")
ALLOWED_FOR_LATER_STEPS = Resume("allowed")
FORK = Resume("fork")
REFUSED = Resume("refused")


@dataclass(frozen=True)
class Bits:
    """The value affects the order or rounding of sums: if it differs, a resume or a replay is not bit for bit.

    Each checkpoint records the value, or its meaning on the machine (compatibility.bitwise_setting).
    """

    name: str = ""  # in the record; default: the key without its section


BITS = Bits()


@dataclass(frozen=True)
class UsedIf:
    """The condition under which a key is used. A note names the keys that are given without effect."""

    decided_by: str  # the keys of the condition, separated by spaces
    needs: str  # for the note: what to set
    holds: Callable[["Config"], bool]


IS_PATH = "path"  # the value is a location, so a resume does not keep it


def used_with(key: str, *values: str | bool) -> UsedIf:
    """Return the condition that a key has one of these values."""
    *others, last = (json.dumps(value) for value in values)
    needs = f"{key} = {', '.join(others)}{' or ' if others else ''}{last}"
    section, name = key.split(".")
    return UsedIf(key, needs, lambda config: getattr(getattr(config, section), name) in values)


# --- rules between keys -----------------------------------------------------------------------------------------

# "the keys involved", and the message: what is wrong and what works
Rules = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Machine:
    """The ranks and GPUs that a config runs on."""

    world_size: int = 1
    n_gpus: int = 0  # on this machine
    local_world_size: int = 1  # ranks on this machine


# --- sections ---------------------------------------------------------------------------------------------------


class Frozen(BaseModel):
    """The base of all parts of a config."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Section(Frozen):
    """A table of the TOML file."""

    on_resume: ClassVar[Resume] = ALLOWED  # for keys without their own `Resume`

    @field_validator("*", mode="wrap")
    @classmethod
    def _checked(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """Validate a value; else accept any case of choices, bf16 for bfloat16, and lists without brackets."""
        try:
            return check(value)
        except ValidationError:
            name = info.field_name or ""
            return check(spelled(cls.model_fields[name].annotation, value, commas=name != "prompts"))


_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def spelled(annotation: Any, value: Any, *, commas: bool = True) -> Any:
    """Normalize spelling: choices in any case, short names of dtypes, and lists as one value or comma-separated values.

    Args:
        commas: whether commas separate values; false for free text.
    """
    if (kind := get_origin(annotation)) in (list, tuple):
        if isinstance(value, str) and commas:
            # a comma in brackets belongs to a pattern: layers.[0,1].*
            value = [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|[^,])+", value)]
        items = value if isinstance(value, list | tuple) else [value]
        return kind(spelled(get_args(annotation)[0], item) for item in items)
    if not isinstance(value, str):
        return value
    kinds = [annotation, *get_args(annotation)]  # a Literal, or a union with one
    choices = {c.lower(): c for k in kinds if get_origin(k) is Literal for c in get_args(k) if isinstance(c, str)}
    return choices.get(value.lower(), choices.get(_SHORT_NAMES.get(value.lower(), value), value))


# --- types of fields --------------------------------------------------------------------------------------------


def _every(least: int, value: Any) -> Any:
    if value == "epoch" or (type(value) is int and least <= value < 2**63):
        return value
    raise ValueError(f'should be "epoch", or a number of steps of at least {least}')


if TYPE_CHECKING:  # run/epochs.py replaces "epoch" before any code reads the value
    Every = int
    PositiveEvery = int
else:
    Every = Annotated[int | Literal["epoch"], PlainValidator(functools.partial(_every, 0))]
    PositiveEvery = Annotated[int | Literal["epoch"], PlainValidator(functools.partial(_every, 1))]
Dtype = Literal["float32", "bfloat16", "float16"]
# Bounds far above any use: sizes multiplied together stay within 64 bits, and a typo does not exhaust the memory.
Size = Annotated[int, Field(gt=0, lt=2**31)]
SizeOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Width = Annotated[int, Field(gt=0, le=2**20)]
WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
PathText = Annotated[str, IS_PATH]
