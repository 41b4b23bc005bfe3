"""What the sections of the config are made of: their base class, types of fields, and the metadata of a key.

A key stands with everything about it: type and bounds, default, help text, and by `Annotated` what a resume does with
another value (`Resume`), whether bits depend on it (`Bits`), and when it is used (`UsedIf`). Everything else follows
from there: refusing unused keys (load.py), comparing checkpoints (checkpointing/compatibility.py), `--help` and docs.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin

import tomli
from pydantic import (
    AfterValidator,
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
    """What a resume does if a key has another value than the run so far. docs/resume.md has the table."""

    rule: Literal["allowed", "asks", "refused"]
    note: str = ""  # for the table
    by_hash: bool = False  # what the key leads to is compared, not its value
    changes_steps: bool = True  # whether a step computes other numbers, so that a replay needs the same value
    changes_start: bool = False  # whether only the values that a run begins with differ
    keeps: bool = False  # allowed, but a command that does not give the key keeps the run's value (see `keeps_value`)


ALLOWED = Resume("allowed", changes_steps=False)
ALLOWED_FOR_LATER_STEPS = Resume("allowed")
ASKS = Resume("asks")
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
    """The key is used only under a condition. Another value than the default is an error, or dropped, without it.

    It is an error if it is set in the same layer as the keys that decide, or in a later one. If it comes from a lower
    layer, e.g. a `base` file whose optimizer another file replaces, it stays at its default, with a note.
    """

    decided_by: str  # the keys that decide, separated by spaces
    needs: str  # what would have to be set, for the message
    holds: Callable[["Config"], bool]
    refuse: bool = True  # False: always a note, never an error: a feature that is switched off may keep its values


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

_LARGEST = 2**63 - 1  # TOML's integers have 64 bits


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
        """A value that TOML can represent. Choices may be in upper or lower case, and bf16 is bfloat16."""
        _require_toml(value)
        try:
            return check(value)
        except ValidationError:
            name = info.field_name or ""
            return check(spelled(cls.model_fields[name].annotation, value, commas=name != "prompts"))


def _require_toml(value: Any) -> None:
    """Raise ValueError if TOML can't represent a number or string in the value."""
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError("should be a number of at most 64 bits")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError("should be UTF-8")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    for item in value if isinstance(value, list | tuple) else ():
        _require_toml(item)


_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def spelled(annotation: Any, value: Any, *, commas: bool = True) -> Any:
    """What a text means where it is not valid as it is: case does not matter in a choice, dtypes have short names, and
    a list may be one value or values separated by commas.

    Args:
        commas: whether they separate; not in free text.
    """
    if (kind := get_origin(annotation)) in (list, tuple):
        if isinstance(value, str):
            value = _items(get_args(annotation)[0], value) if commas else [value]
        elif isinstance(value, int | float | dict):
            value = [value]
        if not isinstance(value, list):
            return value
        return kind([spelled(get_args(annotation)[0], item) for item in value])
    if not isinstance(value, str):
        return value
    kinds = [annotation, *get_args(annotation)]  # of a Literal, or of a union with one
    choices = {c.lower(): c for k in kinds if get_origin(k) is Literal for c in get_args(k) if isinstance(c, str)}
    return choices.get(value.lower(), choices.get(_SHORT_NAMES.get(value.lower(), value), value))


def _items(annotation: Any, text: str) -> list[Any]:
    """The items of a list that is written without its brackets."""
    if annotation is str or get_origin(annotation) is Literal:
        # a comma in brackets belongs to a pattern: layers.[0,1].*
        return [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|[^,])+", text)]
    try:
        return list(tomli.loads(f"value = [{text}]")["value"])
    except (ValueError, RecursionError):
        pass
    try:
        return [float(part) for part in text.split(",")]  # .9,.95 is common, but not TOML
    except ValueError:
        return [text]


# --- types of fields --------------------------------------------------------------------------------------------


def _every(least: int, value: Any) -> Any:
    if value == "epoch" or (type(value) is int and least <= value <= _LARGEST):
        return value
    raise ValueError(f'should be "epoch", or a number of steps of at least {least}')


def _without_nul(value: Any) -> Any:
    if any("\0" in path for path in ([value] if isinstance(value, str) else value)):
        raise ValueError("should have no NUL character: it is a path or part of one")
    return value


if TYPE_CHECKING:  # training/epochs.py replaces "epoch" before anything counts steps
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
WITHOUT_NUL = AfterValidator(_without_nul)
PathText = Annotated[str, WITHOUT_NUL]
