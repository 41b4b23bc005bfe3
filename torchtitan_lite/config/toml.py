"""A config as TOML, and where each of its values came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from torchtitan_lite.config.schema import Config


@dataclass(frozen=True)
class Loaded:
    """A config and where each of its values came from."""

    config: Config
    origins: dict[str, str]  # by "section.key"; what is absent is a default
    notes: Sequence[str] = ()  # settings that nothing reads


def to_toml(config: Config) -> str:
    """The whole config as TOML; reading it back gives the same config."""
    return tomli_w.dumps(_plain(config.model_dump()))


def to_toml_with_origins(loaded: Loaded) -> str:
    """The whole config as TOML, with the origin of each value beside it; reading it back gives the same config."""
    lines = [f"# note: {_in_comment(note)}" for note in loaded.notes]
    for section, table in _plain(loaded.config.model_dump()).items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            assignment = f"{key} = {format_value(value)}"
            origin = _in_comment(loaded.origins.get(f"{section}.{key}", "default"))
            lines.append(f"{assignment:<44} # {origin}")
        lines.append("")
    return "\n".join(lines)


def _in_comment(text: str) -> str:
    """Text as a comment of one line, which may hold no control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}  # TOML has no null
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def format_value(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {format_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _key(key: str) -> str:
    """A key as TOML: quoted, unless it is a plain word."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")
