"""Writes a config as TOML, with the origin of each value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from torchtitan_lite.config.schema import Config

COMMAND_LINE = "command line"  # the origin of an option


@dataclass(frozen=True)
class Loaded:
    """A config and the origins of its values."""

    config: Config
    origins: dict[str, str]  # by "section.key"; defaults are absent
    notes: Sequence[str] = ()  # on values without effect, or overridden by a size
    retry: bool = False  # --retry
    written: Config | None = None  # the config as given, if `config` has steps instead of epochs
    kept: Sequence[str] = ()  # keys whose values a resume keeps, because they were not given


def to_toml(config: Config) -> str:
    """Format the config as TOML that loads back as the same config."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def to_toml_with_origins(loaded: Loaded) -> str:
    """Format the config as TOML, with each value's origin in a comment. Loads back as the same config."""
    lines = [f"# note: {note}" for note in loaded.notes]
    for section, table in (loaded.written or loaded.config).model_dump(exclude_none=True).items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            assignment = f"{key} = {format_value(value)}"
            lines.append(f"{assignment:<44} # {loaded.origins.get(f'{section}.{key}', 'default')}")
        lines.append("")
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """Format a value as TOML on one line. Leaves out unset values of tables."""
    if isinstance(value, dict):
        items = ((key, item) for key, item in value.items() if item is not None)  # TOML has no null
        return "{ " + ", ".join(f"{_key(key)} = {format_value(item)}" for key, item in items) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _key(key: str) -> str:
    """Format a key as TOML, quoted where needed."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")
