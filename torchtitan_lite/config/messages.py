"""Messages about wrong keys and values: what is wrong, where it was given, and what works."""

from typing import Any

from pydantic_core import ErrorDetails

from torchtitan_lite import hints
from torchtitan_lite.config.schema import default_of, known_keys
from torchtitan_lite.config.toml import COMMAND_LINE, format_value


def problem(key: str, value: Any, origin: str, error: ErrorDetails | None) -> str:
    """Return the message about a wrong key or value.

    Args:
        error: pydantic's error about the value; None: the key is unknown.
    """
    near = key if error else hints.nearest(key, known_keys())
    what = _sentence(error) if error else f"unknown key; the nearest known one is {near}"
    what += f"{';' if error else ','} {example(near, origin)}"
    if origin == COMMAND_LINE:
        return f"{origin}: --{key}={value}: {what}"
    section, _, name = key.rpartition(".")
    table = f"[{section}] " if section else ""
    return f"{origin}: {table}{name} = {value!r}: {what}"


def example(key: str, origin: str = COMMAND_LINE) -> str:
    """Return a valid assignment to a key, as TOML or as an option for a shell."""
    examples = known_keys()[key].examples
    value = examples[0] if examples else default_of(key)  # an example is better than the default, which may be empty
    as_toml = format_value(value)
    return f"e.g. {hints.option(key, value, as_toml) if origin == COMMAND_LINE else f'{key} = {as_toml}'}"


def _sentence(error: ErrorDetails) -> str:
    """Return what is wrong with a value or a part of it."""
    message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    section, name, *inside = (part for part in error["loc"] if part not in ("str", "list[str]"))
    part = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in inside)
    return f"{section}.{name}{part}: {message}" if part else message
