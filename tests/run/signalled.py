"""Two ranks of train.py with a fault, `FAULT OPTIONS`; what this process is sent, both are sent. Prints their codes."""

import os
import signal
import sys
from pathlib import Path

from tests.forkserver import Ranks


def main() -> None:
    import train  # noqa: F401  # once for both ranks

    ranks = Ranks(2, sys.argv[2:], Path("/dev/stdout"), Path("/dev/stderr"), fault=sys.argv[1])

    def forward(number: int, _: object) -> None:
        for rank in ranks.running():
            ranks.send(rank, signal.Signals(number))

    signal.signal(signal.SIGINT, forward)
    ranks.wait(100)
    print("codes", dict(sorted(ranks.codes.items())), flush=True)
    os._exit(0)  # a signal may come until the end


if __name__ == "__main__":
    main()
