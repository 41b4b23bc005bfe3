"""Messages about wrong keys and values: what is wrong, where it was given, and what works."""

from typing import Any

from pydantic_core import ErrorDetails

from torchtitan_lite import hints
from torchtitan_lite.config.schema import default_of, known_keys
from torchtitan_lite.config.toml import COMMAND_LINE, format_value


def problem(key: str, value: Any, origin: str, item: ErrorDetails | None) -> str:
    """Return the message about a wrong key or value.

    Args:
        item: pydantic's error about the value; None: the key is unknown.
    """
    near = key if item else hints.nearest(key, known_keys())
    what = _sentence(item) if item else f"unknown key; the nearest known one is {near}"
    what += f"{';' if item else ','} {example(near, origin)}"
    if origin == COMMAND_LINE:
        return f"{origin}: --{key}={value}: {what}"
    section, _, name = key.rpartition(".")
    table = f"[{section}] " if section else ""
    return f"{origin}: {table}{name} = {value!r}: {what}"


def example(key: str, origin: str = COMMAND_LINE) -> str:
    """Return a valid assignment to a key, as TOML or as an option for a shell."""
    examples = known_keys()[key].examples
    value = examples[0] if examples else default_of(key)  # an empty default shows nothing
    as_toml = format_value(value)
    return f"e.g. {hints.option(key, value, as_toml) if origin == COMMAND_LINE else f'{key} = {as_toml}'}"


def _sentence(item: ErrorDetails) -> str:
    """Return what is wrong with a value or a part of it."""
    message = item["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if item["type"] == "literal_error":
        message += hints.choice(str(item["input"]), item["ctx"]["expected"])
    message = message[:1].lower() + message[1:]
    section, name, *inside = (part for part in item["loc"] if part not in ("str", "list[str]"))
    part = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in inside)
    return f"{section}.{name}{part}: {message}" if part else message
