"""Patterns of parameter names, for [optim] freeze, [[optim.groups]] and precision_overrides."""

import fnmatch
from collections.abc import Iterator, Sequence

from torchtitan_lite.errors import shortened


def first_match(name: str, patterns: Sequence[str]) -> int | None:
    """The index of the first pattern that matches a name, or None."""
    return next((i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern)), None)


def unused(key: str, names: Sequence[str], patterns: Sequence[str]) -> Iterator[str]:
    """A message for each pattern that is never the first match.

    Args:
        key: the config key, for the message.
        names: the parameters; may be empty.
    """
    used = {first_match(name, patterns) for name in names}
    for i, pattern in enumerate(patterns):
        if i not in used:
            why = f"names look like {names[0]}, {names[-1]}" if names else "everything is frozen"
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                why = "earlier patterns match all of its parameters"
            yield f'{key}: match = "{shortened(pattern)}" matches no parameter: {why}'
