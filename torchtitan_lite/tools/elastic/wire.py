"""Messages between the coordinator and the machines: one JSON object a line, over TCP.

machine -> coordinator    join: a Hello            ended: exit codes of its processes     leave     alive
coordinator -> machine    start: ranks, address    stop: seconds until SIGKILL            done: exit code    alive
"""

import asyncio
import json
import socket
from dataclasses import asdict, dataclass
from typing import Any

ALIVE_S = 1.0  # how often each side sends `alive`
# A machine without contact stops its processes before the coordinator starts others in their place.
MACHINE_SILENCE_S = 10.0
QUICK_S = 5.0  # from SIGTERM to SIGKILL where a rank is gone, so that the others can't save
COORDINATOR_SILENCE_S = 20.0

LINE_BYTES = 4 << 20  # the longest message; a command line of Linux has at most 2 MiB

LEFT = 75  # the exit code of a machine that left on a signal: EX_TEMPFAIL of sysexits.h


@dataclass(frozen=True)
class Hello:
    """What a machine says of itself.

    Args:
        port: free on this machine.
        run_id, last_world: of the coordinator that it knew before; empty and 0 if none.
    """

    name: str
    processes: int
    command: tuple[str, ...]
    port: int
    run_id: str = ""
    last_world: int = 0

    @classmethod
    def of(cls, message: dict[str, Any]) -> "Hello":
        """Raises ValueError: it is none."""
        given = message.get("join")
        if not isinstance(given, dict) or given.keys() != {*cls.__dataclass_fields__}:
            raise ValueError("this is no machine, or one of another version of torchtitan_lite")
        hello = cls(**given | {"command": tuple(given["command"]) if isinstance(given["command"], list) else ()})
        numbers = _are_ints([hello.processes, hello.port, hello.last_world], least=0)
        texts = all(isinstance(text, str) for text in (hello.name, hello.run_id, *hello.command))
        if not (numbers and texts and hello.processes and hello.command and hello.name.isprintable()):
            raise ValueError(f"this machine describes itself with wrong values: {str(given)[:200]!r}")
        return hello

    def message(self) -> dict[str, Any]:
        """For `of`."""
        return asdict(self)


def exit_codes(message: dict[str, Any]) -> tuple[list[int], int]:
    """The exit codes and the free port in a message about the end of processes. Raises ValueError: it has none."""
    codes, port = message["ended"], message.get("port")
    if not isinstance(codes, list) or not _are_ints([*codes, port], least=0):
        raise ValueError("this machine sends no exit codes")
    return codes, int(str(port))


def _are_ints(values: list[Any], least: int) -> bool:
    return all(type(value) is int and value >= least for value in values)


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
    except (OSError, TimeoutError, ValueError, RecursionError) as error:
        raise ConnectionError(str(error)) from None
    if not isinstance(message, dict):
        raise ConnectionError("not a message")
    return message


def free_port() -> int:
    """A port that is free on this machine now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
