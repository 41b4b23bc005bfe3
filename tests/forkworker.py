"""What pytest-xdist starts as a worker: it hands its streams to the server of forks, which has torch, and waits."""

import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.forkserver import ADDRESS


def main() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{os.environ[ADDRESS]}")
        socket.send_fds(connection, [json.dumps({"env": dict(os.environ)}).encode() + b"\n"], [0, 1, 2])
        connection.recv(1)  # nothing comes; the worker has ended


if __name__ == "__main__":
    main()
