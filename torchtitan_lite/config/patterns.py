"""Patterns of parameter names, for [optim] freeze, [[optim.groups]] and precision_overrides."""

import fnmatch
from collections.abc import Iterator, Sequence


def first_match(name: str, patterns: Sequence[str]) -> int | None:
    """Return the index of the first pattern that matches a name, or None."""
    return next((i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern)), None)


def unused(
    key: str, names: Sequence[str], patterns: Sequence[str], field: str = "match = ", what: str = "parameter"
) -> Iterator[str]:
    """Yield a message for each pattern that is never the first match.

    Args:
        key: the config key, for the message.
        names: of the parameters; may be empty.
        field: precedes the pattern in the message.
        what: the kind of thing that `names` name.
    """
    used = {first_match(name, patterns) for name in names}
    for i, pattern in enumerate(patterns):
        if i not in used:
            from torchtitan_lite import hints

            why = "earlier patterns match all of its parameters"
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                why = hints.pattern(pattern, names)
            yield f'{key}: {field}"{pattern}" matches no {what}: {why}'
