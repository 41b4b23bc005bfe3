"""A strict reader for untrusted YAML files.

Plain PyYAML keeps the last of two equal keys, expands aliases exponentially, and raises many kinds of errors.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from torchtitan_lite.errors import ConfigError

MAX_BYTES = 1 << 20  # `accelerate config` writes about a thousand
MAX_SHOWN = 120  # characters of a name or a value in a message


def shown(value: Any) -> str:
    """A name or value of the file as one line of printable ASCII, safe in a TOML comment and a terminal."""
    if isinstance(value, list | dict | set):
        return "a list" if isinstance(value, list) else "a table"  # its text may be long
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN:
        return "a very large number"  # Python refuses to convert thousands of digits
    text = str(value).encode("unicode_escape").decode("ascii")
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class _Loader(yaml.SafeLoader):
    """YAML without aliases (which can expand exponentially), tags and duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _at(event, f"*{shown(event.anchor)} is an alias, which is not supported; write the value itself")
        if getattr(event, "tag", None) is not None:
            raise _at(event, f"{shown(event.tag)} is a tag, which is not supported; remove it")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # the rest is refused below
                if key in keys:
                    raise _at(key_node, f"{shown(key)} is set twice; remove one of the two")
                keys.add(key)
        return super().construct_mapping(node, deep)


def _at(where: yaml.Event | yaml.Node, problem: str) -> yaml.YAMLError:
    mark = where.start_mark
    return yaml.YAMLError(f"line {mark.line + 1}: {problem}" if mark else problem)


def read(file: Path) -> dict[Any, Any]:
    """The keys and values of an Accelerate config.

    Raises:
        ConfigError: it can't be read, or is not a YAML table.
    """
    try:
        with file.open("rb") as stream:
            return parse(stream.read(MAX_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{file} {error}") from None


def parse(raw: bytes) -> dict[Any, Any]:
    """The keys and values in the bytes of a file.

    Raises:
        ConfigError: the problem, phrased to follow the file's name.
    """
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"is larger than {MAX_BYTES:,} bytes: an Accelerate config has about 1,000")
    try:
        content = yaml.load(raw.decode("utf-8"), _Loader)
    except RecursionError:
        raise ConfigError("can't be read as YAML: it is nested too deeply") from None
    # PyYAML raises ValueError and OverflowError for numbers and dates that Python can't hold
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"can't be read as YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError("is not a table of keys and values, as an Accelerate config is")
    return content
