"""Patterns that match names of parameters, as [optim] freeze, [[optim.groups]] and precision_overrides have them."""

import fnmatch
from collections.abc import Iterator, Sequence

from torchtitan_lite.errors import shortened


def first_match(name: str, patterns: Sequence[str]) -> int | None:
    """The first pattern that matches a name: it decides. None if none does."""
    return next((i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern)), None)


def unused(key: str, names: Sequence[str], patterns: Sequence[str]) -> Iterator[str]:
    """What is wrong with patterns that decide nothing.

    Args:
        key: of the config, for the message.
        names: of the parameters; may be empty.
    """
    used = {first_match(name, patterns) for name in names}
    for i, pattern in enumerate(patterns):
        if i not in used:
            why = f"names look like {names[0]}, {names[-1]}" if names else "everything is frozen"
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                why = "an earlier pattern has all that it matches"
            yield f'{key}: match = "{shortened(pattern)}" matches no parameter: {why}'
