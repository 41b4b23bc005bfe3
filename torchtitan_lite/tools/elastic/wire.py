"""The messages between coordinator and machines over TCP, and the proof that both hold the run's secret.

    machine -> coordinator    VERSION, nonce M
    coordinator -> machine    nonce C, MAC(secret, "coordinator", VERSION, M, C)
    machine -> coordinator    MAC(secret, "machine", VERSION, M, C)

Until then a side reads these bytes and nothing else. MAC(secret, "session", VERSION, M, C) is the key of all messages
that follow: a length, MAC(key, sender, count, content), and the content, one JSON object:

    machine -> coordinator    join: a Hello       ended: exit codes of its processes     leave     alive
    coordinator -> machine    start: environment, why     stop: seconds until SIGKILL    done: exit code
                              refused: why        alive

A recorded message is not valid in another session (nonces), direction (sender) or place (count). Nothing is encrypted.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torchtitan_lite.errors import ConfigError

VERSION = b"torchtitan_lite elastic 2\n"
NONCE_BYTES = MAC_BYTES = 32
MESSAGE_BYTES = 64 << 10  # the longest content

HANDSHAKE_S = 10.0
ALIVE_S = 1.0  # how often each side sends `alive`
# A machine without contact stops its processes before the coordinator starts others in their place.
MACHINE_SILENCE_S = 10.0
QUICK_S = 5.0  # from SIGTERM to SIGKILL when a rank is gone: the others can't save
COORDINATOR_SILENCE_S = 20.0

LEFT = 75  # the exit code of a machine that left on a signal: EX_TEMPFAIL of sysexits.h

# the environment variables that a coordinator sets for a process
VARIABLES = {
    *("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
}


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of the parts, each with its length."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


class Connection:
    """A connection whose other side has proved to hold the secret.

    Args:
        key: of this session.
        me, other: the sides, b"machine" and b"coordinator".
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, me: bytes, other: bytes
    ) -> None:
        self._reader, self.writer, self._key, self._me, self._other = reader, writer, key, me, other
        self._sent = self._received = 0

    @classmethod
    async def proven(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, me: bytes) -> Self:
        """Prove to hold the secret, and make the other side prove it. `me` is b"machine" or b"coordinator".

        Raises:
            ConnectionError: it did not, or was silent. None of its bytes were used otherwise.
        """
        other = b"coordinator" if me == b"machine" else b"machine"
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if me == b"machine":  # the coordinator is first to show what it can compute
                    writer.write(VERSION + nonce)
                    session = VERSION, nonce, await reader.readexactly(NONCE_BYTES)
                else:
                    session = await reader.readexactly(len(VERSION)), await reader.readexactly(NONCE_BYTES), nonce
                    if session[0] != VERSION:
                        raise ConnectionError("it is no machine, or of another version of torchtitan_lite")
                    writer.write(nonce + mac(secret, me, *session))
                proof = await reader.readexactly(MAC_BYTES)
        except TimeoutError:
            raise ConnectionError("it does not prove to hold the secret") from None
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise ConnectionError("it closes the connection") from None
        if not hmac.compare_digest(proof, mac(secret, other, *session)):
            raise ConnectionError(f"it has another secret, or is no {other.decode()}")
        if me == b"machine":
            writer.write(mac(secret, me, *session))
        return cls(reader, writer, mac(secret, b"session", *session), me, other)

    def send(self, **message: Any) -> None:
        """Queue a message. A broken connection shows in `receive`."""
        if not self.writer.is_closing():
            content = json.dumps(message).encode()
            proof = mac(self._key, self._me, self._sent.to_bytes(8, "big"), content)
            self.writer.write(len(content).to_bytes(4, "big") + proof + content)
            self._sent += 1

    async def receive(self, silence_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
            ConnectionError: the other side is gone, was silent for `silence_s`, or the message is not from it.
        """
        try:
            async with asyncio.timeout(silence_s):
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                if size > MESSAGE_BYTES:
                    raise ConnectionError("not a message")
                proof = await self._reader.readexactly(MAC_BYTES)
                content = await self._reader.readexactly(size)
        except (OSError, EOFError) as error:
            raise ConnectionError(str(error)) from None
        if not hmac.compare_digest(proof, mac(self._key, self._other, self._received.to_bytes(8, "big"), content)):
            raise ConnectionError("not from the other side")
        self._received += 1
        try:
            message = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ConnectionError(str(error)) from None
        if not isinstance(message, dict):
            raise ConnectionError("not a message")
        return message


@dataclass(frozen=True)
class Hello:
    """How a machine introduces itself.

    Args:
        command: `digest_of` its command.
        address: its own, of its connection to the coordinator. The peer's address of a connection is not proven.
        port: free on this machine.
        last_world: the number of the last world that it was in; 0 if none.
    """

    name: str
    processes: int
    command: str
    address: str
    port: int
    last_world: int = 0

    @classmethod
    def of(cls, message: dict[str, Any]) -> Self:
        """The introduction in a message. Raises ValueError: there is none, or it is wrong."""
        fields = message.get("join")
        if not isinstance(fields, dict) or fields.keys() != {*cls.__dataclass_fields__}:
            raise ValueError("this is no machine, or one of another version of torchtitan_lite")
        hello = cls(**fields)
        numbers = _are_ints([hello.processes, hello.port, hello.last_world])
        texts = all(isinstance(text, str) for text in (hello.name, hello.command, hello.address))
        if not (numbers and texts and hello.processes and hello.name.isprintable() and _is_address(hello.address)):
            raise ValueError(f"this machine describes itself with wrong values: {str(fields)[:200]!r}")
        return hello


def digest_of(command: Sequence[str]) -> str:
    """A digest that is equal for equal commands. The command itself, which may hold passwords, is not sent."""
    return hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()


def exit_codes(message: dict[str, Any]) -> tuple[list[int], int]:
    """The exit codes and the free port in a message about the end of processes. Raises ValueError: it has none."""
    codes, port = message["ended"], message.get("port")
    if not isinstance(codes, list) or not _are_ints([*codes, port]):
        raise ValueError("this machine sends no exit codes")
    return codes, int(str(port))


def environment(start: Any) -> dict[str, str]:
    """The environment in a `start` message. Raises ConfigError: it has other variables, or none."""
    texts = isinstance(start, dict) and all(isinstance(value, str) and value.isprintable() for value in start.values())
    if not texts or start.keys() != VARIABLES:
        raise ConfigError("the coordinator wants to set other variables than this version of torchtitan_lite allows")
    return dict(start)


def _are_ints(values: list[Any]) -> bool:
    """Whether all are integers, 0 or more."""
    return all(type(value) is int and value >= 0 for value in values)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    return True


def free_port() -> int:
    """A port that is free on this machine now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
