"""Messages between the coordinator and the machines: one JSON object a line, over TCP.

machine -> coordinator    join: who it is          ended: exit codes of its processes     leave     alive
coordinator -> machine    start: ranks, address    stop: seconds until SIGKILL            done: exit code    alive
"""

import asyncio
import json
import socket
from typing import Any

ALIVE_S = 1.0  # how often each side sends `alive`
# A machine without contact stops its processes before the coordinator starts others in their place.
MACHINE_SILENCE_S = 10.0
QUICK_S = 5.0  # from SIGTERM to SIGKILL where a rank is gone, so that the others can't save
COORDINATOR_SILENCE_S = 20.0

LEFT = 75  # the exit code of a machine that left on a signal: EX_TEMPFAIL of sysexits.h


def send(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Queue a message. A broken connection shows in `receive`."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: asyncio.StreamReader, silence_s: float) -> dict[str, Any]:
    """The next message.

    Raises:
        ConnectionError: the other side is gone, was silent for so long, or sent something else.
    """
    try:
        line = await asyncio.wait_for(reader.readline(), silence_s)
        message = json.loads(line)
    except (OSError, TimeoutError, ValueError) as error:
        raise ConnectionError(str(error)) from None
    if not isinstance(message, dict):
        raise ConnectionError("not a message")
    return message


def free_port() -> int:
    """A port that is free on this machine now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
