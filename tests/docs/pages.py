"""The commands of a page, and what they print with paths and runs of a test in place of the reader's."""

import re
import shlex
from collections.abc import Mapping, Sequence

from tests.helpers import ranks, run_python, start, succeeded


def blocks(page: str, language: str = "sh") -> list[str]:
    """The code blocks of a page in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def commands(page: str) -> list[str]:
    """The lines of its sh blocks."""
    return [line for block in blocks(page) for line in block.splitlines()]


def obeyed(command: str, places: Mapping[str, object], first: Sequence[str] = (), last: Sequence[str] = ()) -> str:
    """What a command prints.

    Args:
        places: what stands in the place of a text of the page.
        first, last: options of train.py that go before and after those of the page, which replace the earlier ones.
    """
    for name, place in places.items():
        command = command.replace(name, str(place))
    words = shlex.split(command, comments=True)
    if words[0] == "torchrun":
        assert words[1:4] == ["--nproc-per-node", "2", "train.py"], command
        return succeeded(ranks(2, *first, *words[4:], *last))
    return succeeded(run_python(words[1:]) if words[0] == "python" else start(words))
