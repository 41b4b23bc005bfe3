"""The coordinator: it knows which machines are connected, and starts the processes of all of them as one world.

A world is fixed. When a machine joins, leaves or is lost, or a process fails, the processes of all machines are stopped
and start again as the next world, which resumes from the newest checkpoint:

    event                     processes get                            so that the run
    a machine joins, leaves   SIGTERM, and time to save                loses nothing
    a machine is lost         SIGTERM, SIGKILL 5 s later               repeats the steps since the last checkpoint
    a process fails           the same, and a pause before the next    the same; ends after `max_restarts` in a row
    all processes exit with 0                                          is complete

The coordinator keeps no state: if it is started again, the machines come back and form the next world. The run's id,
by which a run tells the next world from another launch, follows from the secret. So it is the same whichever machine
comes first, and even if all were lost.
"""

import asyncio
import ipaddress
import time
from collections import deque
from dataclasses import dataclass, field

from torchtitan_lite.terminal import counted, print_line
from torchtitan_lite.tools.elastic.wire import (
    COORDINATOR_SILENCE_S,
    LEFT,
    QUICK_S,
    Connection,
    Hello,
    exit_codes,
    free_port,
    mac,
)

_POLL_S = 0.1
_GRACE_S = 30.0  # after SIGKILL: how long the kernel may take to free the memory of a large process
_STABLE_S = 600.0  # training time without a failure, after which the count of failures starts again
_LOCKED_S = 600.0  # how long processes of a machine that does not answer may hold the lock of the run
_LONGEST_PAUSE_S = 64.0
_STRANGERS = 64  # connections that have not yet proved to hold the secret
_STRANGERS_LOGGED_S = 60.0  # between two lines about them
_TERMINATED = 128 + 15  # the exit code of our SIGTERM, if the process had not set its own handler yet
_STOPPED_BY_US = (0, _TERMINATED)  # 0: it has saved
_WRONG_COMMAND = 2  # the exit code of a user error, and of Python if its program does not exist


@dataclass(eq=False)
class Machine:
    name: str
    address: str
    processes: int
    command: str  # its digest
    connection: Connection
    port: int  # free on this machine, for the next world's store
    since: float = field(default_factory=time.monotonic)
    running: bool = False
    leaving: bool = False
    codes: list[int] = field(default_factory=list)  # exit codes of its processes in the last world


@dataclass(frozen=True)
class Limits:
    """Options of the coordinator.

    Args:
        least, most: machines in a world. More than `most` wait, and replace those that are lost.
        settle_s: how long to wait for further machines after one has joined.
        save_s: how long processes may save after SIGTERM.
        max_restarts: failures in a row, of processes and not of machines: with less than ten minutes of training
            between two. Those within ten minutes after a machine was lost are not the last: its processes may live, and
            hold the run's lock.
    """

    least: int
    most: int
    settle_s: float
    save_s: float
    max_restarts: int


class Coordinator:
    """Serves the machines until the run is over."""

    def __init__(self, limits: Limits, secret: bytes) -> None:
        self._limits, self._secret, self._id = limits, secret, mac(secret, b"run id").hex()
        self._strangers: list[asyncio.StreamWriter] = []
        self._strangers_logged = -_STRANGERS_LOGGED_S
        self._machines: list[Machine] = []
        self._world: list[Machine] = []
        self._number, self._failures, self._trained_s, self._not_before = 0, 0, 0.0, 0.0
        self._begun = False  # whether an earlier world ran long enough to show that the command is right
        self._events: deque[str] = deque(maxlen=20)  # since the last world began
        self._lost_at = -_LOCKED_S
        self._over = False
        self.stopping = False  # set by a signal: save, and end the run

    async def serve(self, port: int) -> int:
        """Returns the exit code of the run."""
        port = port or free_port()  # asyncio would choose one for IPv4, and another one for IPv6
        server = await asyncio.start_server(self._connected, None, port, backlog=_STRANGERS // 2)
        _log(f"waiting for {self._limits.least} to {self._limits.most} machines on port {port}")
        code = await self._run()
        self._over = True
        for machine in self._machines:
            machine.connection.send(done=code)
        server.close()
        drained = (asyncio.wait_for(machine.connection.writer.drain(), QUICK_S) for machine in self._machines)
        await asyncio.gather(*drained, return_exceptions=True)
        return code

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, for as long as it lasts."""
        machine = None
        try:
            connection = await self._proven(reader, writer)
            try:
                machine = self._machine(connection, Hello.of(await connection.receive(COORDINATOR_SILENCE_S)))
                while machine in self._machines:
                    message = await connection.receive(COORDINATOR_SILENCE_S)
                    connection.send(alive=True)
                    machine.leaving |= "leave" in message
                    if "ended" in message:
                        machine.codes, machine.port = exit_codes(message)
                        machine.running = bool(message.get("running"))
                        if problem := message.get("problem"):
                            self._log_event(f"{machine.name} can't start its processes: {problem}")
            except ValueError as error:
                connection.send(refused=str(error))
        except (OSError, asyncio.CancelledError):  # the last when the run is over
            pass
        finally:
            if machine is not None and machine in self._machines:
                self._machines.remove(machine)
                if not self._over:
                    self._log_event(f"{machine.name} is {'lost' if machine.running else 'gone'}")
            writer.close()

    async def _proven(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection:
        """The connection, once it has proved to hold the secret.

        Connections without proof are limited. A new one replaces the oldest: a machine needs its place only briefly.
        """
        self._strangers.append(writer)
        if len(self._strangers) > _STRANGERS:
            self._strangers.pop(0).transport.abort()
        try:
            return await Connection.proven(reader, writer, self._secret, b"coordinator")
        except OSError as error:
            if time.monotonic() - self._strangers_logged >= _STRANGERS_LOGGED_S:
                self._strangers_logged = time.monotonic()
                address = (writer.get_extra_info("peername") or "?")[0]
                _log(f"a connection from {address} did not prove to hold the secret: {error}")
            raise
        finally:
            if writer in self._strangers:
                self._strangers.remove(writer)

    def _machine(self, connection: Connection, hello: Hello) -> Machine:
        """Add a machine. Raises ValueError: it gives another command."""
        others = [other for other in self._machines if other.command != hello.command]
        if others:
            raise ValueError(f"{others[0].name} runs another command; give the same on each machine")
        machine = Machine(hello.name, hello.address, hello.processes, hello.command, connection, hello.port)
        self._number = max(self._number, hello.last_world)  # this coordinator may not be its first
        self._begun |= hello.last_world > 0
        self._machines.append(machine)
        self._log_event(f"{machine.name} joined")
        return machine

    async def _run(self) -> int:
        while True:
            while not self._ready():
                await asyncio.sleep(_POLL_S)
            if self.stopping:
                return 0
            self._start()
            began = time.monotonic()
            while (reason := self._reason_to_stop()) is None:
                await asyncio.sleep(_POLL_S)
            why, quickly = reason
            if not why:
                _log("the run is over")
                return 0
            _log(f"stopping world {self._number}: {why}")
            await self._stop(quickly)
            codes = {machine.name: machine.codes for machine in self._world if {*machine.codes} - {*_STOPPED_BY_US}}
            lost = any(machine not in self._machines for machine in self._world)
            if codes and not quickly:
                self._log_event(", ".join(f"exit codes {ended} on {name}" for name, ended in codes.items()))
            elif quickly and not lost:
                self._events.append(why)
            if self.stopping:
                return 1 if codes else 0
            if not self._begun and not lost and any(_WRONG_COMMAND in ended for ended in codes.values()):
                _log(f"exit code {_WRONG_COMMAND}: the command is wrong, and is not started again")
                return _WRONG_COMMAND
            # it has not begun if another machine joined while all processes still imported torch
            self._begun |= lost or any({*machine.codes} != {_TERMINATED} for machine in self._world)
            self._count_failure(lost, quickly, time.monotonic() - began)
            if self._failures > self._limits.max_restarts and time.monotonic() - self._lost_at > _LOCKED_S:
                _log(f"{counted(self._failures, 'failure')} in a row: giving up (--max-restarts)")
                return 1
            self._world = []

    def _count_failure(self, lost: bool, quickly: bool, lasted: float) -> None:
        """After a world of `lasted` seconds, count the failures in a row, and set when the next world may start."""
        self._trained_s += lasted
        if self._trained_s > _STABLE_S:
            self._failures = 0
        if lost:
            if not self._failures:  # otherwise machines that come and go would excuse every failure
                self._lost_at = time.monotonic()
        elif quickly:
            self._failures, self._trained_s = self._failures + 1, 0.0
            self._not_before = time.monotonic() + min(2**self._failures, _LONGEST_PAUSE_S)

    def _ready(self) -> bool:
        """Whether a world can start, or the run has to stop."""
        self._release_leaving()
        if self.stopping:
            return True
        now, n = time.monotonic(), len(self._machines)
        settled = n >= self._limits.most or all(now - m.since >= self._limits.settle_s for m in self._machines)
        return n >= self._limits.least and settled and now >= self._not_before

    def _release_leaving(self) -> None:
        """Let go the leaving machines that are in no world."""
        for machine in [machine for machine in self._machines if machine.leaving and machine not in self._world]:
            self._machines.remove(machine)
            machine.connection.send(done=LEFT)
            self._log_event(f"{machine.name} left")

    def _start(self) -> None:
        """Start the processes of the next world. The machine that has been here longest gets rank 0."""
        self._world = self._machines[: self._limits.most]
        self._number += 1
        size = sum(machine.processes for machine in self._world)
        first = self._world[0]
        address = first.address
        if _is_loopback(address) and not all(_is_loopback(machine.address) for machine in self._world):
            address = first.name
        names = ", ".join(machine.name for machine in self._world)
        text = f"world {self._number}: {counted(size, 'rank')} on {counted(len(self._world), 'machine')}: {names}"
        why = f"{text} ({', '.join(self._events)})"[:2000]  # a thousand names would not fit into a message
        self._events.clear()
        rank = 0
        for number, machine in enumerate(self._world):
            env = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "GROUP_RANK": number,
                "GROUP_WORLD_SIZE": len(self._world),
                "MASTER_ADDR": address,
                "MASTER_PORT": first.port,
                "TORCHELASTIC_RUN_ID": self._id,
                "TORCHELASTIC_RESTART_COUNT": self._number,
            }
            machine.connection.send(start={key: str(value) for key, value in env.items()}, why=why)
            machine.running, machine.codes = True, []
            rank += machine.processes
        _log(text)

    def _reason_to_stop(self) -> tuple[str, bool] | None:
        """Why the world has to stop, and whether it can no longer save; None if it has not.

        The reason is empty if the world has ended by itself.
        """
        for machine in self._world:
            if machine not in self._machines:
                return f"{machine.name} is lost", True
            if any(machine.codes):
                return f"exit codes {machine.codes} on {machine.name}", True
        if not any(machine.running for machine in self._world):
            return "", False
        if self.stopping:
            return "the coordinator was asked to stop", False
        for machine in self._world:
            if machine.leaving:
                return f"{machine.name} leaves", False
        self._release_leaving()
        waiting = [machine for machine in self._machines if machine not in self._world]
        if waiting and len(self._world) < self._limits.most:
            settled = all(time.monotonic() - machine.since >= self._limits.settle_s for machine in waiting)
            if settled or len(self._machines) >= self._limits.most:
                return f"{', '.join(machine.name for machine in waiting)} joined", False
        return None

    async def _stop(self, quickly: bool) -> None:
        """Stop the processes of the world, and wait for their end. Machines where they do not end are lost."""
        end = self._send_stop(QUICK_S if quickly else self._limits.save_s)
        while stuck := [machine for machine in self._world if machine.running and machine in self._machines]:
            reason = self._reason_to_stop()
            if not quickly and reason and reason[1]:  # a machine was lost meanwhile
                quickly, end = True, self._send_stop(QUICK_S)
            if time.monotonic() > end:
                for machine in stuck:
                    self._machines.remove(machine)
                    machine.connection.writer.transport.abort()
                    self._log_event(f"{machine.name} is lost: its processes do not end")
            await asyncio.sleep(_POLL_S)

    def _send_stop(self, seconds: float) -> float:
        """Returns the time by which all must have stopped, of the monotonic clock."""
        for machine in self._world:
            machine.connection.send(stop=seconds)
        return time.monotonic() + seconds + _GRACE_S

    def _log_event(self, text: str) -> None:
        """Print an event. The next world logs it, too."""
        _log(text)
        self._events.append(text)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _log(text: str) -> None:
    print_line(f"{time.strftime('%H:%M:%S')} coordinator: {text}")
