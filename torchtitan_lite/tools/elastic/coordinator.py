"""The coordinator: it knows which machines are there, and starts the processes of all of them as one world.

A world is fixed. When a machine joins, leaves or is lost, or a process fails, the processes of all machines are stopped
and start again as the next world, which resumes from the newest checkpoint:

    event                     processes get                            so that the run
    a machine joins, leaves   SIGTERM, and time to save                loses nothing
    a machine is lost         SIGTERM, SIGKILL 5 s later               repeats the steps since the last checkpoint
    a process fails           the same, and a pause before the next    the same; ends after `max_restarts` in a row
    all processes exit with 0                                          is over

The coordinator keeps no state: if it is started again, the machines come back and form the next world.
"""

import asyncio
import ipaddress
import time
from dataclasses import dataclass, field

from torchtitan_lite.terminal import counted, print_line
from torchtitan_lite.tools.elastic.wire import (
    COORDINATOR_SILENCE_S,
    LEFT,
    QUICK_S,
    free_port,
    receive,
    send,
)

_POLL_S = 0.1
_STABLE_S = 600.0  # a world that lasted so long clears the count of failures


@dataclass(eq=False)
class Machine:
    """A connected machine."""

    name: str
    address: str
    processes: int
    command: list[str]
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
        max_restarts: failures in a row, of processes and not of machines.
    """

    least: int
    most: int
    settle_s: float
    save_s: float
    max_restarts: int


class Coordinator:
    """Serves the machines until the run is over."""

    def __init__(self, run_id: str, limits: Limits) -> None:
        self._id, self._limits = run_id, limits
        self._machines: list[Machine] = []
        self._world: list[Machine] = []
        self._number, self._failures, self._not_before = 0, 0, 0.0
        self.stopping = False  # set by a signal: save, and end the run

    async def serve(self, port: int) -> int:
        """Returns the exit code of the run."""
        port = port or free_port()  # asyncio would choose one for IPv4, and another one for IPv6
        server = await asyncio.start_server(self._connected, None, port)
        _say(f"waiting for {self._limits.least} to {self._limits.most} machines on port {port}")
        code = await self._run()
        for machine in self._machines:
            send(machine.writer, done=code)
        server.close()
        await asyncio.gather(*(machine.writer.drain() for machine in self._machines), return_exceptions=True)
        return code

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One machine, for as long as it is connected."""
        machine = None
        try:
            hello = (await receive(reader, COORDINATOR_SILENCE_S))["join"]
            machine = Machine(**hello, address=writer.get_extra_info("peername")[0], writer=writer)
            others = [other for other in self._machines if other.command != machine.command]
            if others:
                send(writer, refused=f"{others[0].name} runs another command: {' '.join(others[0].command)}")
                return
            self._machines.append(machine)
            _say(f"{machine.name} joined")
            while machine in self._machines:
                message = await receive(reader, COORDINATOR_SILENCE_S)
                send(writer, alive=True)
                machine.leaving |= "leave" in message
                if "ended" in message:
                    machine.codes, machine.port = message["ended"], message["port"]
                    machine.running = False
        except (ConnectionError, KeyError, TypeError, asyncio.CancelledError):  # the last when the run is over
            if machine in self._machines:
                _say(f"{machine.name} is lost" if machine.running else f"{machine.name} is gone")
                self._machines.remove(machine)
        finally:
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
            failed = [machine.name for machine in self._world if any(machine.codes)]
            lost = [machine for machine in self._world if machine not in self._machines]
            if time.monotonic() - began > _STABLE_S or lost:
                self._failures = 0
            if quickly and failed and not lost:
                self._failures += 1
                if self._failures > self._limits.max_restarts:
                    _say(f"{counted(self._failures, 'failure')} in a row: giving up (--max-restarts)")
                    return 1
                self._not_before = time.monotonic() + 2**self._failures
            self._world = []

    def _ready(self) -> bool:
        """Whether a world can start. Machines that leave are let go first."""
        for machine in [machine for machine in self._machines if machine.leaving]:
            self._machines.remove(machine)
            send(machine.writer, done=LEFT)
            _say(f"{machine.name} left")
        if self.stopping:
            return True
        now, n = time.monotonic(), len(self._machines)
        settled = n >= self._limits.most or all(now - m.since >= self._limits.settle_s for m in self._machines)
        return n >= self._limits.least and settled and now >= self._not_before

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
        for machine in self._machines:
            if machine.leaving:
                return f"{machine.name} leaves", False
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
