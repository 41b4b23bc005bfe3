"""Machines that join, leave and die: `python -m torchtitan_lite.tools.elastic`, with programs that need no torch.

tests/faults/machines.py does it to real runs, many times.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import AsyncMock, Mock, patch

import pytest

from tests.forkserver import free_port
from tests.helpers import HANGS_S, ROOT, python, succeeded
from tests.tools.elastic_machines import ELASTIC, SECRET, Machines, until
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tools.elastic import __main__, coordinator, wire
from torchtitan_lite.tools.elastic import machine as member

# A process of the run: it writes down its world, and runs until it is told to end.
PROGRAM = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
env = os.environ
me = f"{int(env['TORCHELASTIC_RESTART_COUNT']) - 1}.{env['RANK']}"  # it counts from 1
if "TORCHTITAN_LITE_SECRET" in env or "TORCHELASTIC_USE_AGENT_STORE" in env:
    sys.exit("the secret is for machines only, and this store is of a torchrun that started the machine")
def terminated(*_):
    time.sleep(0.5)  # as a save does
    (folder / f"{me}.saved").touch()
    sys.exit(1 if (folder / "full").exists() else 0)
signal.signal(signal.SIGTERM, terminated)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
later = ("MASTER_PORT", "TORCHELASTIC_RUN_ID")
(folder / f"{me}.why").write_text(env["TORCHTITAN_LITE_WORLD"])
staged = folder / f".{me}"
staged.write_text(" ".join([env[name] for name in names] + [str(os.getpid())] + [env[name] for name in later]))
staged.rename(folder / me)
while True:
    for code in folder.glob(f"exit-{me}-*"):
        sys.exit(int(code.name.split("-")[2]))
    if (folder / "done").exists():
        sys.exit(0)
    time.sleep(0.02)
"""
HELLO: dict[str, Any] = {
    **{"name": "x", "processes": 1, "command": "x", "address": "127.0.0.1", "port": 1, "last_world": 0}
}


Start = Callable[..., Machines]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Start]:
    """Starts a coordinator with options; all processes are ended."""
    (tmp_path / "program.py").write_text(PROGRAM)
    made = []

    def start(*options: str) -> Machines:
        command = [str(tmp_path / "program.py"), str(tmp_path)]
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # as in a shell that torchrun has started
        made.append(Machines(tmp_path, command, "--settle", "0.2", *options, env=env))
        return made[0]

    yield start
    for machines in made:
        machines.close()


def world(folder: Path, number: int, size: int) -> list[list[str]]:
    """The processes of a world, once all run: the environment of each."""
    files = [folder / f"{number}.{rank}" for rank in range(size)]
    until(lambda: all(file.exists() for file in files), f"{size} ranks of world {number}")
    found = [file.read_text().split() for file in files]
    assert {words[1] for words in found} == {str(size)}, found
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_machine_is_lost_and_comes_back(started: Start, tmp_path: Path) -> None:
    machines = started("--nnodes", "1:2")
    machines.join("a", "--nproc-per-node", "2")
    alone = world(tmp_path, 0, 2)
    assert [words[:7] for words in alone] == [
        ["0", "2", "0", "2", "0", "127.0.0.1", "1"],
        ["1", "2", "1", "2", "0", "127.0.0.1", "1"],
    ]
    machines.join("b")
    both = world(tmp_path, 1, 3)
    assert [words[4] for words in both] == ["0", "0", "1"], "the machine that has been here longest has rank 0"
    assert len({words[8] for words in both}) == 1, "one store"
    assert sorted(tmp_path.glob("0.*.saved")) == [tmp_path / "0.0.saved", tmp_path / "0.1.saved"]

    machines.kill("a")  # with rank 0 and the store
    until(lambda: not any(is_alive(int(words[7])) for words in both), "the processes of both are gone")
    assert world(tmp_path, 2, 1)[0][:5] == ["0", "1", "0", "1", "0"]
    machines.join("a", "--nproc-per-node", "2")
    assert [words[4] for words in world(tmp_path, 3, 3)] == ["0", "1", "1"]

    (tmp_path / "done").touch()
    assert machines.codes() == {"coordinator": 0, "a": 0, "b": 0}
    said = machines.said()
    for text in ("a joined", "world 2: 3 ranks on 2 machines: a, b", "a is lost", "the run is over"):
        assert text in said
    # which the run logs
    assert (tmp_path / "1.0.why").read_text() == "world 2: 3 ranks on 2 machines: a, b (b joined)"
    assert (tmp_path / "2.0.why").read_text() == "world 3: 1 rank on 1 machine: b (a is lost)"


def test_a_machine_leaves_on_a_signal_and_a_spare_one_takes_its_place(started: Start, tmp_path: Path) -> None:
    machines = started("--nnodes", "2:2")
    for name in "abcd":
        machines.join(name)
        until(lambda: f"{name} joined" in machines.said(), name)  # noqa: B023
    world(tmp_path, 0, 2)
    assert machines.leave("d") == 75
    assert machines.worlds() == 1, "the world does not notice that a spare machine leaves"
    machines.alive["a"].send_signal(signal.SIGTERM)  # a launcher may send it twice
    until(lambda: "leaves after the next save" in machines.said("a"), "the first signal")
    assert machines.leave("a") == 75
    assert len(list(tmp_path.glob("0.*.saved"))) == 2, "all had time to save"
    world(tmp_path, 1, 2)
    assert "world 2: 2 ranks on 2 machines: b, c" in machines.said()
    machines.coordinator.send_signal(signal.SIGINT)  # which ends the run
    assert machines.codes() == {"coordinator": 0, "b": 0, "c": 0}
    assert len(list(tmp_path.glob("1.*.saved"))) == 2


def test_a_process_that_fails_restarts_all_a_few_times(started: Start, tmp_path: Path) -> None:
    machines = started("--nnodes", "2", "--max-restarts", "1")
    machines.join("a")
    machines.join("b")
    world(tmp_path, 0, 2)
    (tmp_path / "exit-0.1-3").touch()
    world(tmp_path, 1, 2)
    (tmp_path / "exit-1.0-4").touch()
    assert machines.codes() == {"coordinator": 1, "a": 1, "b": 1}
    assert "exit codes [3] on" in machines.said()
    assert "2 failures in a row: giving up (--max-restarts)" in machines.said()


def test_a_restarted_coordinator_knows_the_run_even_if_only_a_spare_is_left(started: Start, tmp_path: Path) -> None:
    """Another id would begin another world."""
    machines = started("--nnodes", "1:1")
    machines.join("a")
    (before,) = world(tmp_path, 0, 1)
    machines.coordinator.kill()
    machines.coordinator.wait(HANGS_S)
    until((tmp_path / "0.0.saved").exists, "a saves: it is still there")
    machines.coordinate()
    (again,) = world(tmp_path, 1, 1)
    assert "looking for the coordinator at" in machines.said("a")
    machines.join("b")
    until(lambda: "b joined" in machines.said(), "b")
    machines.coordinator.kill()
    machines.coordinator.wait(HANGS_S)
    machines.kill("a")
    (tmp_path / "0.0").unlink()
    machines.coordinate()
    (spare,) = world(tmp_path, 0, 1)  # the first one that this coordinator and b know: a restart count of 1
    assert before[9] == again[9] == spare[9]
    (tmp_path / "done").touch()
    assert machines.codes() == {"coordinator": 0, "b": 0}


def test_a_last_save_that_fails_is_an_error(started: Start, tmp_path: Path) -> None:
    machines = started()
    machines.join("a")
    world(tmp_path, 0, 1)
    (tmp_path / "full").touch()
    machines.coordinator.send_signal(signal.SIGTERM)
    assert machines.codes() == {"coordinator": 1, "a": 1}
    assert "exit codes [1] on a" in machines.said()


HOSTILE = [
    *({**HELLO, key: wrong} for key, wrong in {"processes": "2", "name": [1], "command": 1, "port": None}.items()),
    *({**HELLO, key: wrong} for key, wrong in {"processes": 0, "name": "a\nb", "last_world": 1.5, "since": 0}.items()),
    {**HELLO, "address": "node0"},
]
AFTER: list[dict[str, Any]] = [{"ended": None, "port": 1}, {"ended": ["x"], "port": 1}, {"ended": [0]}]


async def joined(port: int, hello: dict[str, Any], secret: str = SECRET) -> wire.Connection:
    """A connection of a machine that says this of itself."""
    streams = await asyncio.open_connection("127.0.0.1", port)
    connection = await wire.Connection.proven(*streams, secret.encode(), b"machine")
    connection.send(join=hello)
    return connection


async def until_closed(connection: wire.Connection) -> list[dict[str, Any]]:
    """All messages that still come."""
    found = []
    with contextlib.suppress(ConnectionError):
        while True:
            found.append(await connection.receive(HANGS_S))
    return found


def test_no_message_ends_the_coordinator(started: Start, tmp_path: Path) -> None:
    machines = started("--nnodes", "1:1")
    machines.join("a")
    alone = world(tmp_path, 0, 1)

    async def send_all() -> None:
        for hello in [*HOSTILE, HELLO]:
            ((message, *_),) = [await until_closed(await joined(machines.port, hello))]
            assert message.keys() == {"refused"}, (hello, message)
            assert str(tmp_path) not in str(message), "nothing about the command"
        for message in AFTER:
            connection = await joined(machines.port, HELLO | {"command": wire.digest_of(machines.command)})
            connection.send(**message)
            assert "refused" in (await until_closed(connection))[-1]
        for content in (b"[" * 60_000, b"[]", b"\xff"):
            connection = await joined(machines.port, HELLO | {"command": wire.digest_of(machines.command)})
            proof = wire.mac(connection._key, b"machine", (1).to_bytes(8, "big"), content)
            connection.writer.write(len(content).to_bytes(4, "big") + proof + content)
            await until_closed(connection)

    asyncio.run(send_all())
    assert world(tmp_path, 0, 1) == alone
    (tmp_path / "done").touch()
    assert machines.codes() == {"coordinator": 0, "a": 0}
    assert machines.worlds() == 1
    assert "Traceback" not in machines.said()


class Recorder:
    """What is used of a StreamWriter; it keeps what was written."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self.said = writer, bytearray()

    def write(self, data: bytes) -> None:
        self.said += data
        self._writer.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def test_a_stranger_at_the_port_changes_nothing(started: Start, tmp_path: Path) -> None:
    machines = started("--nnodes", "1:1")
    machines.join("a")
    alone = world(tmp_path, 0, 1)
    here = "127.0.0.1", machines.port

    async def answer(said: bytes) -> bytes:
        """What the coordinator answers to these bytes."""
        reader, writer = await asyncio.open_connection(*here)
        writer.write(said)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""

    async def attack() -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        assert await answer(b"GET / HTTP/1.1\r\n\r\n") == b""
        assert await answer(json.dumps({"join": HELLO}).encode() + b"\n") == b"", "the former protocol"
        assert await answer(b"\xff" * (16 << 20)) == b"", "a line without an end"
        assert len(await answer(wire.VERSION + bytes(32) + bytes(32) + bytes(1000))) == 64, "no proof"

        # its own challenge and proof, sent back
        reader, writer = await asyncio.open_connection(*here)
        writer.write(wire.VERSION + bytes(32))
        nonce, proof = await reader.readexactly(32), await reader.readexactly(32)
        assert len(await answer(wire.VERSION + nonce + proof)) == 64
        writer.write(proof)
        assert await reader.read() == b""

        # a machine with another secret, and what a real one once said
        with pytest.raises(ConnectionError, match="it has another secret"):
            await joined(machines.port, HELLO, secret="x" * 64)
        reader, writer = await asyncio.open_connection(*here)
        recorder: Any = Recorder(writer)
        connection = await wire.Connection.proven(reader, recorder, SECRET.encode(), b"machine")
        connection.send(join=HELLO | {"processes": 0})
        assert "refused" in await connection.receive(HANGS_S)
        assert len(await answer(bytes(recorder.said))) == 64, "a proof is for one session"
        connection = await joined(machines.port, HELLO | {"command": wire.digest_of(machines.command), "name": "spy"})
        recorder = connection.writer = Recorder(connection.writer)  # type: ignore[assignment]
        connection.send(alive=True)
        assert "alive" in await connection.receive(HANGS_S)
        connection.writer.write(bytes(recorder.said))  # the same message again: one message, one place
        assert await until_closed(connection) == []
        return [await asyncio.open_connection(*here) for _ in range(200)]  # they say nothing

    async def attack_and_hold() -> None:
        silent = await attack()
        before = machines.said().count("joined")
        machines.join("b")
        await asyncio.to_thread(until, lambda: machines.said().count("joined") > before, "b has a place")
        with contextlib.suppress(ConnectionError):  # the oldest have given way, long before HANDSHAKE_S
            assert await asyncio.wait_for(silent[0][0].read(), wire.HANDSHAKE_S / 3) == b""
        for _, writer in silent:
            writer.close()

    asyncio.run(attack_and_hold())
    assert is_alive(int(alone[0][7]))
    (tmp_path / "done").touch()
    assert machines.codes() == {"coordinator": 0, "a": 0, "b": 0}
    assert machines.worlds() == 1
    said = machines.said()
    assert "Traceback" not in said
    assert said.count("did not prove to hold the secret") == 1, "strangers can't fill the log"
    assert SECRET not in said


def test_a_stranger_who_answers_for_the_coordinator_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANGS_S)
        port = server.getsockname()[1]
        machines = Machines(tmp_path, [str(tmp_path / "program.py"), str(tmp_path)], "--settle=0.2", port=port)
        machines.join("a")
        start = dict.fromkeys(wire.VARIABLES, "1") | {"LD_PRELOAD": "/x.so"}
        lies: list[Any] = [{"done": 0}, {"refused": "no"}, {"start": start, "why": ""}]
        for lie in [*(json.dumps(lie).encode() + b"\n" + bytes(100) for lie in lies), b"", bytes(1 << 20)]:
            with server.accept()[0] as connection:
                first = connection.recv(4096)  # VERSION and a nonce
                with contextlib.suppress(ConnectionError):
                    connection.sendall(lie or first[-32:] + first[-32:])  # "": its own challenge
                    while connection.recv(4096):
                        pass
        assert machines.alive["a"].poll() is None
    try:
        machines.coordinate()
        world(tmp_path, 0, 1)
        (tmp_path / "done").touch()
        assert machines.codes() == {"coordinator": 0, "a": 0}
        assert "it has another secret" in machines.said("a")
        assert not list(tmp_path.glob("exit*"))
    finally:
        machines.close()


async def pair() -> tuple[wire.Connection, wire.Connection]:
    """Both ends of a connection: the machine's and the coordinator's."""
    other: asyncio.Future[wire.Connection] = asyncio.get_running_loop().create_future()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other.set_result(await wire.Connection.proven(reader, writer, SECRET.encode(), b"coordinator"))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    streams = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    machine = await wire.Connection.proven(*streams, SECRET.encode(), b"machine")
    return machine, await other


def frames_of(connection: wire.Connection, n: int) -> list[bytes]:
    """The bytes of the next n messages of a side, which are not sent."""
    frames = Mock(is_closing=lambda: False)
    with patch.object(connection, "writer", frames):
        for i in range(n):
            connection.send(number=i)
    return [call.args[0] for call in frames.write.call_args_list]


@pytest.mark.parametrize(
    ("attack", "accepted"),
    [
        *(("none", 3), ("flipped bit", 0), ("other length", 0), ("swapped", 0), ("first dropped", 0)),
        *(("first repeated", 1), ("own message sent back", 0), ("of another session", 0)),
    ],
)
def test_a_message_is_accepted_only_as_it_was_sent(attack: str, accepted: int) -> None:
    """From its sender, in its session, at its place, with its content."""

    async def receive() -> list[dict[str, Any]]:
        machine, there = await pair()
        first, second, third = frames_of(machine, 3)
        frames = {
            "none": [first, second, third],
            "flipped bit": [first[:-2] + bytes([first[-2] ^ 1]) + first[-1:], second],
            "other length": [(int.from_bytes(first[:4], "big") - 1).to_bytes(4, "big") + first[4:], second],
            "swapped": [second, first],
            "first dropped": [second, third],
            "first repeated": [first, first],
            "own message sent back": frames_of(there, 1),
            "of another session": frames_of((await pair())[0], 1),
        }[attack]
        machine.writer.write(b"".join(frames))
        machine.writer.close()
        return await until_closed(there)

    assert asyncio.run(receive()) == [{"number": i} for i in range(accepted)]


def test_a_message_may_hold_any_letters() -> None:
    async def sent() -> dict[str, Any]:
        one, other = await pair()
        one.send(name="K\u00f6ln \u2603")
        return await other.receive(HANGS_S)

    assert asyncio.run(sent()) == {"name": "K\u00f6ln \u2603"}


def test_a_machine_looks_for_the_coordinator_for_as_long_after_each_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers at 100, 200 and 300 seconds, and then no more."""
    waiting = member.Machine("x", 1, ["program"], 150, b"secret")
    now = 0.0

    async def follow(*_: Any) -> None:
        nonlocal now
        now += 100
        waiting._contact = now <= 300
        if not waiting._contact:
            raise ConnectionRefusedError

    monkeypatch.setattr(waiting, "_follow", follow)
    monkeypatch.setattr(member, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(asyncio, "open_connection", AsyncMock(return_value=(None, None)))
    monkeypatch.setattr(asyncio, "sleep", AsyncMock())
    with pytest.raises(ConfigError, match="no coordinator of this run answers"):
        asyncio.run(waiting.run("127.0.0.1", 1))
    assert now == 500


@pytest.mark.parametrize(("limit", "accepted"), [(13, True), (12, False)])
def test_a_message_longer_than_the_limit_is_not_read(
    limit: int, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def receive() -> list[dict[str, Any]]:
        machine, there = await pair()
        machine.send(number=0)  # 13 bytes
        machine.writer.close()
        return await until_closed(there)

    monkeypatch.setattr(wire, "MESSAGE_BYTES", limit)
    assert asyncio.run(receive()) == ([{"number": 0}] if accepted else [])


@pytest.mark.parametrize("me", [b"machine", b"coordinator"])
def test_a_side_that_proves_nothing_is_not_waited_for(me: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.05)

    async def meet() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            streams = await asyncio.open_connection(*silent.getsockname())
            with pytest.raises(ConnectionError, match="it does not prove to hold the secret"):
                await wire.Connection.proven(*streams, SECRET.encode(), me)
            streams[1].close()

    asyncio.run(meet())


class FakeMachine:
    """A machine whose processes end as the test says, and which sends everything but `alive`."""

    def __init__(self, connection: wire.Connection) -> None:
        self.connection = connection

    @classmethod
    async def at(cls, port: int, name: str) -> Self:
        return cls(await joined(port, HELLO | {"name": name}))

    async def told(self, what: str) -> Any:
        """The next message of this kind."""
        while what not in (message := await self.connection.receive(HANGS_S)):
            pass
        return message[what]

    def ended(self, *codes: int, running: bool = False) -> None:
        self.connection.send(ended=codes, running=running, port=1, problem="")


def coordinated(
    play: Callable[[coordinator.Coordinator, int], Coroutine[Any, Any, None]], most: int, max_restarts: int = 0
) -> int:
    """The exit code of a coordinator in this process, while `play` runs."""

    async def both() -> int:
        limits = coordinator.Limits(1, most, settle_s=0, save_s=0, max_restarts=max_restarts)
        served, port = coordinator.Coordinator(limits, SECRET.encode()), free_port()
        serving = asyncio.create_task(served.serve(port))
        while not serving.done():
            with contextlib.suppress(ConnectionRefusedError):
                await play(served, port)
                break
            await asyncio.sleep(0.01)
        return await serving

    return asyncio.run(both())


def test_a_process_that_does_not_end_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one that waits for a file system: SIGKILL ends it only when that answers."""
    monkeypatch.setattr(coordinator, "_GRACE_S", 0.3)

    async def play(served: coordinator.Coordinator, port: int) -> None:
        a = await FakeMachine.at(port, "a")
        assert (await a.told("start"))["RANK"] == "0"
        b = await FakeMachine.at(port, "b")
        await a.told("stop")
        assert (await b.told("start"))["WORLD_SIZE"] == "1", "a's processes still run"
        with pytest.raises(ConnectionError):
            await a.told("start")
        c = await FakeMachine.at(port, "c")
        await b.told("stop")
        b.ended(0)
        await asyncio.gather(b.told("start"), c.told("start"))
        b.ended(1, running=True)  # one process failed, another does not end: the others need not wait for it
        await c.told("stop")
        c.ended(143)
        await c.told("start")
        c.ended(0)
        assert await c.told("done") == 0

    monkeypatch.setattr(coordinator, "QUICK_S", 0.1)
    assert coordinated(play, most=2) == 0
    said = capsys.readouterr().out
    assert "a is lost: its processes do not end" in said
    assert "b is lost: its processes do not end" in said


def test_machines_that_are_lost_do_not_excuse_failures_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coordinator, "_LONGEST_PAUSE_S", 0)

    async def play(served: coordinator.Coordinator, port: int) -> None:
        a = await FakeMachine.at(port, "a")
        for _ in range(2):
            b = await FakeMachine.at(port, "b")
            while (await a.told("start"))["WORLD_SIZE"] != "2":  # alone before b came
                await a.told("stop")
                a.ended(0)
            a.ended(1)
            await b.told("stop")
            b.ended(143)
            await asyncio.gather(a.told("start"), b.told("start"))
            b.connection.writer.close()
            await a.told("stop")
            a.ended(143)
        await a.told("start")
        a.ended(1)
        assert await a.told("done") == 1

    assert coordinated(play, most=2, max_restarts=2) == 1
    assert "3 failures in a row: giving up (--max-restarts)" in capsys.readouterr().out

    served = coordinator.Coordinator(coordinator.Limits(1, 2, 0, 0, 2), SECRET.encode())
    for _ in range(9):  # with 11 minutes of training between two failures, in several worlds
        served._count_failure(lost=True, quickly=True, lasted=400)
        served._count_failure(lost=False, quickly=True, lasted=260)
        assert served._failures == 1


def test_names_of_many_machines_fit_into_a_message() -> None:
    async def play(served: coordinator.Coordinator, port: int) -> None:
        a = await FakeMachine.at(port, "a" * 60_000)
        await a.told("start")
        a.ended(0)
        assert await a.told("done") == 0

    assert coordinated(play, most=1) == 0


NO_SECOND_FORK = """
import subprocess, sys
from torchtitan_lite.tools.elastic import __main__
popen, started = subprocess.Popen, []
def limited(*args, **kwargs):
    if started:
        raise BlockingIOError(11, "Resource temporarily unavailable")  # RLIMIT_NPROC; root has none
    started.append(popen(*args, **kwargs))
    return started[0]
subprocess.Popen = limited
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_a_process_that_cannot_be_started_is_a_failure(started: Start, tmp_path: Path) -> None:
    machines = started("--max-restarts", "0")
    machines.join("a", "--nproc-per-node", "3", entry=[sys.executable, "-c", NO_SECOND_FORK])
    assert machines.codes() == {"coordinator": 1, "a": 1}
    why = "can't start its processes: 1 of 3 started: [Errno 11] Resource temporarily unavailable"
    assert machines.said().count(f"a {why}") == 1
    assert "1 failure in a row: giving up (--max-restarts)" in machines.said()
    assert machines.said("a").count("a: can't start the processes: 1 of 3 started") == 1
    assert "world 2: " not in machines.said()
    pids = [int(file.read_text().split()[7]) for file in tmp_path.glob("0.?")]
    assert not any(map(is_alive, pids)), "those that were started are not left alone"


def test_a_wrong_command_is_found_by_the_first_world_that_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    """Machines that come one by one stop the first worlds while their processes still import torch."""

    async def play(served: coordinator.Coordinator, port: int) -> None:
        a = await FakeMachine.at(port, "a")
        await a.told("start")
        b = await FakeMachine.at(port, "b")
        await a.told("stop")
        a.ended(143)
        await asyncio.gather(a.told("start"), b.told("start"))
        a.ended(2)
        await b.told("stop")
        b.ended(143)
        assert await a.told("done") == 2

    assert coordinated(play, most=2, max_restarts=1) == 2
    assert "the command is wrong, and is not started again" in capsys.readouterr().out


def test_ipv6_addresses_are_understood(started: Start, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    machines = started()
    machines.host = "[::1]"
    machines.join("a")
    assert world(tmp_path, 0, 1)[0][5] == "::1"


def test_a_coordinator_sets_no_other_variables() -> None:
    start = dict.fromkeys(wire.VARIABLES, "1")
    assert wire.environment(start) == start
    for wrong in (start | {"LD_PRELOAD": "/x.so"}, start | {"RANK": 1}, start | {"RANK": "\0"}, {"RANK": "1"}, None):
        with pytest.raises(ConfigError, match="other variables"):
            wire.environment(wrong)


def test_a_port_of_another_service_is_not_asked_in_a_loop(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANGS_S)
        where = f"127.0.0.1:{server.getsockname()[1]}"
        command = [*ELASTIC, "join", "--patience=1", where, "train.py"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"TORCHTITAN_LITE_SECRET": SECRET}, stderr=subprocess.PIPE, text=True
        )
        connections = 0
        while process.poll() is None:
            server.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                server.accept()[0].close()
                connections += 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 2, said
    assert 2 <= connections <= 4
    assert f"no coordinator of this run answers at {where} (it closes the connection)" in said
    assert said.count("looking for the coordinator") == 1


def test_a_coordinator_under_nohup_survives_the_terminal(tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as out:
        process = subprocess.Popen(
            [*ELASTIC, "coordinate", "0"],
            cwd=ROOT,
            env=os.environ | {"TORCHTITAN_LITE_SECRET": SECRET},
            stdout=out,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
    try:
        until(lambda: "on port" in (tmp_path / "said").read_text(), "the coordinator listens")
        process.send_signal(signal.SIGHUP)
        port = int((tmp_path / "said").read_text().split()[-1])

        async def refused() -> list[dict[str, Any]]:
            return await until_closed(await joined(port, {}))

        (message,) = asyncio.run(refused())
        assert "another version" in message["refused"], "it is still there"
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 0
    finally:
        process.kill()


@pytest.mark.extended  # as long as a machine waits for an answer
def test_a_machine_leaves_even_if_the_coordinator_does_not_answer(started: Start, tmp_path: Path) -> None:
    machines = started()
    machines.join("a")
    world(tmp_path, 0, 1)
    machines.coordinator.send_signal(signal.SIGSTOP)
    assert machines.leave("a") == 75
    assert (tmp_path / "0.0.saved").exists()


@pytest.mark.extended  # half a minute
def test_a_machine_that_does_not_answer_is_lost(started: Start, tmp_path: Path) -> None:
    """Like one without power or network: its connections stay open. When it answers again, it comes back."""
    machines = started("--nnodes", "1:2")
    for name in "ab":
        machines.join(name)
    both = world(tmp_path, 0, 2)
    machines.alive["b"].send_signal(signal.SIGSTOP)
    world(tmp_path, 1, 1)
    machines.alive["b"].send_signal(signal.SIGCONT)
    world(tmp_path, 2, 2)
    until(lambda: not any(is_alive(int(words[7])) for words in both), "its old process is gone")


@pytest.mark.extended
def test_machines_that_are_killed_and_come_back_lose_nothing() -> None:
    """A small part of `python -m tests.faults.machines`, with real runs."""
    said = succeeded(python("6", "3", script="-m tests.faults.machines"))
    assert " events lost or doubled one (below " in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("join node0 train.py", "should be HOST:PORT"),
        ("join [::1] train.py", "should be HOST:PORT"),
        ("join node..0:1 train.py", "'node..0:1' should be HOST:PORT"),
        ("join --nproc-per-node=0 node0:1 train.py", "--nproc-per-node=0 should be at least 1"),
        ("join node0:1 -x train.py", "-x is after node0:1: options of join stand before it"),
        ("join --name=a\nb node0:1 train.py", "should be the name of this machine"),
        ("coordinate 0 --nnodes=3:2", "--nnodes=3:2: MIN should be at least 1, and MAX at least MIN"),
        ("coordinate 0 --nnodes=0", "--nnodes=0: MIN should be at least 1, and MAX at least MIN"),
        ("coordinate 0 --nnodes=many", "--nnodes=many should be MIN:MAX"),
        ("coordinate 99999999", "port 99999999 should be 0 (a free one) to 65535"),
        ("coordinate 0 --max-restarts=-1", "--max-restarts=-1 should be at least 0"),
        # by argparse
        ("join node0:1", "join needs a program"),
        ("coordinate 0 --settle=nan", "nan should be a number of seconds, 0 or more"),
        ("coordinate 0 --settle=inf", "inf should be a number of seconds, 0 or more"),
        ("coordinate 0 --save-timeout=-5", "-5 should be a number of seconds, 0 or more"),
        ("coordinate 0 --settle=x", "invalid _seconds value"),
    ],
)
def test_mistakes_in_the_command_are_explained(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_SECRET", SECRET)
    with pytest.raises(SystemExit, match="2"):
        sys.exit(__main__.main(words.split(" ")))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("secret", "content", "mode", "message"),
    [
        ("", None, 0, "the run has no secret: make one with (umask 077;"),
        ("x" * 31, None, 0, "a secret has 32 to 4096 characters, and this one 31"),
        ("x" * 4097, None, 0, "a secret has 32 to 4096 characters, and this one 4097"),
        ("", b"", 0, "can't be read: No such file"),
        ("", SECRET.encode(), 0o640, "others may use this file (mode 0640): chmod 600 "),
        ("", SECRET.encode(), 0o602, "others may use this file (mode 0602): chmod 600 "),
        ("", b"x" * 31 + b"\n", 0o600, "a secret has 32 to 4096 characters, and this one 31"),
        ("", b"x" * 5000, 0o600, "a secret has 32 to 4096 characters, and this one 4097"),
        ("", b"\xff" * 64, 0o600, "can't be read: it is no text"),
    ],
    ids=ascii,
)
def test_a_secret_that_does_not_keep_strangers_out_is_refused(
    secret: str,
    content: bytes | None,
    mode: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_SECRET", secret)
    file = tmp_path / "elastic.key"
    if mode:
        file.write_bytes(content or b"")
        file.chmod(mode)
    words = [] if content is None else [f"--secret-file={file}"]
    assert __main__.main(["coordinate", "0", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not secret or secret not in error


def test_a_refused_machine_learns_why_and_does_not_disturb_the_run(
    started: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    machines = started()
    machines.join("a")
    alone = world(tmp_path, 0, 1)
    port, other = machines.port, free_port()

    def refused(*words: str, secret: str = SECRET) -> str:
        monkeypatch.setenv("TORCHTITAN_LITE_SECRET", secret)
        assert __main__.main(words) == 2
        return capsys.readouterr().err

    error = refused("join", f"127.0.0.1:{port}", "other.py")
    assert "a runs another command; give the same on each machine" in error
    assert "program.py" not in error
    error = refused("join", "--patience=0", f"127.0.0.1:{other}", "x")
    assert f"no coordinator of this run answers at 127.0.0.1:{other}" in error
    error = refused("join", "--patience=0", f"127.0.0.1:{port}", "x", secret="y" * 32)
    assert "(it has another secret, or is no coordinator)" in error
    assert "y" * 32 not in error
    assert f"port {port} can't be used" in refused("coordinate", str(port))
    file = tmp_path / "elastic.key"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    error = refused("join", f"--secret-file={file}", f"127.0.0.1:{port}", "x", secret="")
    assert "a runs another command" in error, "the file has the secret of this run"
    assert world(tmp_path, 0, 1) == alone
    assert machines.worlds() == 1
