"""train.py in a process that is not as it should be: `tests.helpers.ranks(..., entry="tests.config.limited_process")`.

The variable LIMIT says how: "denied" is refused a file while the data is prepared; "huge" asks for more memory than
there is while it builds.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

import train
from torchtitan_lite.run import start_and_end


def main(argv: Sequence[str]) -> int:
    if os.environ["LIMIT"] == "denied":
        vars(start_and_end)["prepare_all"] = _denied
    else:
        vars(train)["build"] = _huge
    return train.main(argv)


def _denied(*_: Any) -> Any:
    raise PermissionError(13, "Permission denied", "/their/text.txt")


def _huge(*_: Any) -> Any:
    return torch.empty(2**50)
