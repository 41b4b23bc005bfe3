"""train.py in a process that is not as it should be: `tests.helpers.ranks(..., entry="tests.config.limited_process")`.

The variable LIMIT says how: "restricted" may read no file of another user, even as root; "denied" is refused a file
while the data is prepared; "huge" asks for more memory than there is while it builds.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch

import train
from torchtitan_lite.run import start_and_end


def main(argv: Sequence[str]) -> int:
    how = os.environ["LIMIT"]
    if how == "restricted":
        _drop_the_right_to_read_everything()
    elif how == "denied":
        vars(start_and_end)["prepare_all"] = _denied
    else:
        vars(train)["build"] = _huge
    return train.main(argv)


def _drop_the_right_to_read_everything() -> None:
    """Without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH root is a user like any other."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0 to 31, then of the others
    assert libc.capget(header, sets) == 0
    for i in range(3):
        sets[i] &= ~0b110
    assert libc.capset(header, sets) == 0


def _denied(*_: Any) -> Any:
    raise PermissionError(13, "Permission denied", "/their/text.txt")


def _huge(*_: Any) -> Any:
    return torch.empty(2**50)
