"""Registries of built-in parts by name, and of the user's own by "module:Name".

load.py imports the user's parts that the command line or the config file names. Names in a checkpoint are never
imported, so loading a stranger's checkpoint runs no code.
"""

import pkgutil
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchtitan_lite.errors import ConfigError

T = TypeVar("T")


def is_module_name(name: str) -> bool:
    """Return whether a name is a "module:Name"."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


class Registry(dict[str, T], Generic[T]):
    """Entries by name.

    Args:
        key: the config key whose values are names of entries.
        page: the docs page on writing one.
    """

    def __init__(self, key: str, page: str, kind: type[Any], entries: Mapping[str, T]) -> None:
        super().__init__(entries)
        self.key, self.page, self.kind = key, page, kind

    def add(self, name: str) -> None:
        """Import a "module:Name", also from the working directory, and add it. Existing entries stay.

        Args:
            name: from the command line or its config file. Other names are ignored.

        Raises:
            ConfigError: it can't be imported, or is not an entry.
        """
        if not is_module_name(name) or name in self:
            return
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        try:
            entry = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.key}: {name}: {error} (looked in {here}, too; {self.page} has an example)"
            ) from None
        if not isinstance(entry, self.kind):
            raise ConfigError(
                f"{self.key}: {name} should be a {self.kind.__name__}, not a {type(entry).__name__}; {self.page} has "
                "an example"
            )
        self[name] = entry

    def known(self, name: str) -> str:
        """Return the name of an entry, given in any case. Raises ValueError if there is none."""
        if name in self or name.lower() in self:
            return name if name in self else name.lower()
        if is_module_name(name):
            raise ValueError(self.not_imported(name))

        *others, last = [*map(repr, self)] or ["module:Name"]
        choices = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"should be {choices}; {self.page} adds one of your own")

    def not_imported(self, name: str) -> str:
        """Return the message about a "module:Name" that was not imported."""
        return f"imported only if the command or its file names it: --{self.key}={name}"
