"""The coordinator: it knows which machines are there, and starts the processes of all of them as one world.

A world is fixed. When a machine joins, leaves or is lost, or a process fails, the processes of all machines are stopped
and start again as the next world, which resumes from the newest checkpoint:

    event                     processes get                            so that the run
    a machine joins, leaves   SIGTERM, and time to save                loses nothing
    a machine is lost         SIGTERM, SIGKILL 5 s later               repeats the steps since the last checkpoint
    a process fails           the same, and a pause before the next    the same; ends after `max_restarts` in a row
    all processes exit with 0                                          is over

The coordinator keeps no state: if it is started again, the machines come back and form the next world. They tell it the
run's id and the number of its last world, so that the run does not take this for another launch.
"""

import asyncio
import ipaddress
import time
import uuid
from dataclasses import dataclass, field

from torchtitan_lite.terminal import counted, print_line
from torchtitan_lite.tools.elastic.wire import (
    COORDINATOR_SILENCE_S,
    LEFT,
    LINE_BYTES,
    QUICK_S,
    Hello,
    exit_codes,
    free_port,
    receive,
    send,
)

_POLL_S = 0.1
_STABLE_S = 600.0  # a world that lasted so long clears the count of failures
_LOCKED_S = 600.0  # so long, processes of a machine that does not answer may hold what the others need
_LONGEST_PAUSE_S = 64.0
_STOPPED_BY_US = (0, 128 + 15)  # saved, or had not begun


@dataclass(eq=False)
class Machine:
    """A connected machine."""

    name: str
    address: str
    processes: int
    command: tuple[str, ...]
    writer: asyncio.StreamWriter
    port: int  # free on this machine, for the next world's store
    since: float = field(default_factory=time.monotonic)
    running: bool = False
    leaving: bool = False
    codes: list[int] = field(default_factory=list)  # how its processes of the last world ended


@dataclass(frozen=True)
class Limits:
    """Options of the coordinator.

    Args:
        least, most: machines in a world. More than `most` wait, and replace those that are lost.
        settle_s: how long to wait for further machines after one has joined.
        save_s: how long processes may save after SIGTERM.
        max_restarts: failures in a row, of processes and not of machines. Those within ten minutes after a machine was
            lost are not the last: its processes may live, and hold the run's lock.
    """

    least: int
    most: int
    settle_s: float
    save_s: float
    max_restarts: int


class Coordinator:
    """Serves the machines until the run is over."""

    def __init__(self, limits: Limits) -> None:
        self._id, self._limits = uuid.uuid4().hex, limits
        self._machines: list[Machine] = []
        self._world: list[Machine] = []
        self._number, self._failures, self._not_before = 0, 0, 0.0
        self._lost_at = -_LOCKED_S
        self._over = False
        self.stopping = False  # set by a signal: save, and end the run

    async def serve(self, port: int) -> int:
        """Returns the exit code of the run."""
        port = port or free_port()  # asyncio would choose one for IPv4, and another one for IPv6
        server = await asyncio.start_server(self._connected, None, port, limit=LINE_BYTES)
        _say(f"waiting for {self._limits.least} to {self._limits.most} machines on port {port}")
        code = await self._run()
        self._over = True
        for machine in self._machines:
            send(machine.writer, done=code)
        server.close()
        drained = (asyncio.wait_for(machine.writer.drain(), QUICK_S) for machine in self._machines)
        await asyncio.gather(*drained, return_exceptions=True)
        return code

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One machine, for as long as it is connected."""
        machine = None
        try:
            hello = Hello.of(await receive(reader, COORDINATOR_SILENCE_S))
            others = [other for other in self._machines if other.command != hello.command]
            if others:
                send(writer, refused=f"{others[0].name} runs another command: {' '.join(others[0].command)}")
                return
            address = writer.get_extra_info("peername")[0]
            machine = Machine(hello.name, address, hello.processes, hello.command, writer, hello.port)
            if hello.last_world > self._number and not self._world:  # this coordinator is not its first
                self._id, self._number = hello.run_id, hello.last_world
            self._machines.append(machine)
            _say(f"{machine.name} joined")
            while machine in self._machines:
                message = await receive(reader, COORDINATOR_SILENCE_S)
                send(writer, alive=True)
                machine.leaving |= "leave" in message
                if "ended" in message:
                    machine.codes, machine.port = exit_codes(message)
                    machine.running = False
        except ValueError as error:
            send(writer, refused=str(error))
        except (ConnectionError, asyncio.CancelledError):  # the last when the run is over
            pass
        finally:
            if machine is not None and machine in self._machines:
                self._machines.remove(machine)
                if not self._over:
                    _say(f"{machine.name} is {'lost' if machine.running else 'gone'}")
            writer.close()

    async def _run(self) -> int:
        while True:
            while not self._ready():
                await asyncio.sleep(_POLL_S)
            if self.stopping:
                return 0
            self._start()
            began = time.monotonic()
            while (event := self._event()) is None:
                await asyncio.sleep(_POLL_S)
            why, quickly = event
            if not why:
                _say("the run is over")
                return 0
            _say(f"stopping world {self._number}: {why}")
            await self._stop(quickly)
            codes = {machine.name: machine.codes for machine in self._world if {*machine.codes} - {*_STOPPED_BY_US}}
            if codes and not quickly:
                _say(", ".join(f"exit codes {found} on {name}" for name, found in codes.items()))
            if self.stopping:
                return 1 if codes else 0
            self._count_failure(quickly, time.monotonic() - began)
            if self._failures > self._limits.max_restarts and time.monotonic() - self._lost_at > _LOCKED_S:
                _say(f"{counted(self._failures, 'failure')} in a row: giving up (--max-restarts)")
                return 1
            self._world = []

    def _count_failure(self, quickly: bool, lasted: float) -> None:
        """After a world that lasted so many seconds: how many failed in a row, and when the next may start."""
        lost = any(machine not in self._machines for machine in self._world)
        if lasted > _STABLE_S or lost:
            self._failures = 0
        if lost:
            self._lost_at = time.monotonic()
        elif quickly and any(any(machine.codes) for machine in self._world):
            self._failures += 1
            self._not_before = time.monotonic() + min(2**self._failures, _LONGEST_PAUSE_S)

    def _ready(self) -> bool:
        """Whether a world can start. Machines that leave are let go first."""
        self._let_go()
        if self.stopping:
            return True
        now, n = time.monotonic(), len(self._machines)
        settled = n >= self._limits.most or all(now - m.since >= self._limits.settle_s for m in self._machines)
        return n >= self._limits.least and settled and now >= self._not_before

    def _let_go(self) -> None:
        """Let machines leave that are in no world."""
        for machine in [machine for machine in self._machines if machine.leaving and machine not in self._world]:
            self._machines.remove(machine)
            send(machine.writer, done=LEFT)
            _say(f"{machine.name} left")

    def _start(self) -> None:
        """Start the processes of the next world. The machine that has been here longest gets rank 0."""
        self._world = self._machines[: self._limits.most]
        self._number += 1
        size = sum(machine.processes for machine in self._world)
        first = self._world[0]
        address = first.address
        if _is_loopback(address) and not all(_is_loopback(machine.address) for machine in self._world):
            address = first.name
        rank = 0
        for number, machine in enumerate(self._world):
            env: dict[str, object] = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "GROUP_RANK": number,
                "GROUP_WORLD_SIZE": len(self._world),
            }
            env |= {"MASTER_ADDR": address, "MASTER_PORT": first.port, "TORCHELASTIC_RUN_ID": self._id}
            env |= {"TORCHELASTIC_RESTART_COUNT": self._number - 1}
            send(machine.writer, start={key: str(value) for key, value in env.items()})
            machine.running, machine.codes = True, []
            rank += machine.processes
        names = ", ".join(machine.name for machine in self._world)
        _say(f"world {self._number}: {counted(size, 'rank')} on {counted(len(self._world), 'machine')}: {names}")

    def _event(self) -> tuple[str, bool] | None:
        """Why the world has to stop, and whether it can't save any more; an empty reason if it ended by itself."""
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
        self._let_go()
        waiting = [machine for machine in self._machines if machine not in self._world]
        if waiting and len(self._world) < self._limits.most:
            settled = all(time.monotonic() - machine.since >= self._limits.settle_s for machine in waiting)
            if settled or len(self._machines) >= self._limits.most:
                return f"{', '.join(machine.name for machine in waiting)} joined", False
        return None

    async def _stop(self, quickly: bool) -> None:
        """Stop the processes of the world, and wait for their end."""
        patience: float = self._limits.save_s
        for machine in self._world:
            send(machine.writer, stop=QUICK_S if quickly else patience)
        while any(machine.running for machine in self._world if machine in self._machines):
            event = self._event()
            if not quickly and event and event[1]:  # a machine was lost meanwhile
                quickly = True
                for machine in self._world:
                    send(machine.writer, stop=QUICK_S)
            await asyncio.sleep(_POLL_S)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _say(text: str) -> None:
    print_line(f"{time.strftime('%H:%M:%S')} coordinator: {text}")
