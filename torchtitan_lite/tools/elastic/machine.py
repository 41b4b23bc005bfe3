"""One machine of the run: it starts and stops processes as the coordinator tells it to, until the run is over."""

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.terminal import print_error
from torchtitan_lite.tools.elastic.wire import (
    ALIVE_S,
    LEFT,
    MACHINE_SILENCE_S,
    QUICK_S,
    Connection,
    Hello,
    digest_of,
    environment,
    free_port,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_POLL_S = 0.1
_SAME_REQUEST_S = 2.0  # signals within two seconds are one: a scheduler may send several
WORLD = "TORCHTITAN_LITE_WORLD"  # which machines, and why: training/start.py logs it
NOT_STARTED = 71  # the exit code of a process that can't be started: EX_OSERR of sysexits.h


def handled_signals() -> list[signal.Signals]:
    """SIGNALS, without SIGHUP if nohup has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (number == signal.SIGHUP and ignored)]


class Processes:
    """The processes of this machine in one world. If one can't be started, the others are killed: see `problem`."""

    def __init__(self, command: Sequence[str], count: int, env: dict[str, str]) -> None:
        first = int(env["RANK"])
        # without the variables of a torchrun that started this process, such as the store of its agent
        own = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
        env = {"OMP_NUM_THREADS": "1", **own, **env}
        self.problem = ""  # why a process could not be started
        self._kill_at = math.inf
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        parent = os.getpid()

        def die_with_parent() -> None:
            """Called before exec: this machine may be lost while the process imports torch, which takes seconds."""
            if prctl is not None:
                prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                if os.getppid() != parent:
                    os._exit(1)

        self._all: list[subprocess.Popen[bytes]] = []
        try:
            for i in range(count):
                process = subprocess.Popen(
                    [sys.executable, "-u", *command],
                    env=env | {"RANK": str(first + i), "LOCAL_RANK": str(i), "LOCAL_WORLD_SIZE": str(count)},
                    preexec_fn=die_with_parent,
                    process_group=0,  # Ctrl-C in this terminal goes to this process only, which tells the coordinator
                )
                self._all.append(process)
        except (OSError, ValueError, MemoryError, subprocess.SubprocessError) as error:
            self.problem = f"{len(self._all)} of {count} started: {error or type(error).__name__}"
            self.stop(0)

    def stop(self, seconds: float) -> None:
        """Send SIGTERM now, and SIGKILL after `seconds`."""
        if self._kill_at == math.inf:
            self._signal(signal.SIGTERM)
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def codes(self) -> tuple[list[int], bool]:
        """The exit codes so far, as in a shell, and whether a process runs. If one has failed, stop the others."""
        codes = [process.poll() for process in self._all]
        if any(codes):
            self.stop(QUICK_S)
        if time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
        ended = [code if code >= 0 else 128 - code for code in codes if code is not None]
        return ended + [NOT_STARTED] * bool(self.problem), len(ended) < len(codes)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._all:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


class Machine:
    """Stays in contact with the coordinator until the run is over.

    Args:
        name: of this machine, in messages and as an address for the others.
        secret: of the run. The coordinator must prove that it holds the same.
        patience_s: how long to look for a coordinator that does not answer.
    """

    def __init__(self, name: str, count: int, command: Sequence[str], patience_s: float, secret: bytes) -> None:
        self._name, self._count, self._command, self._patience_s = name, count, list(command), patience_s
        self._secret = secret
        self._processes: Processes | None = None
        self._signalled_at = 0.0  # when a signal asked this machine to leave; 0: never
        self._sent_leave = False
        self._sent_codes: list[int] = []
        self._last_world = 0  # the number of the world that was started last
        self._contact = False  # whether this connection has brought a message of the coordinator

    async def run(self, host: str, port: int) -> int:
        """Returns the exit code."""
        for number in handled_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        # Ctrl-Z would stop this process, but not those that it has started
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        since, reported = time.monotonic(), ""
        while True:
            self._contact, problem = False, "it closes the connection"
            try:
                connection = asyncio.open_connection(host, port)
                code = await self._follow(*await asyncio.wait_for(connection, MACHINE_SILENCE_S))
                await self._end_processes()
                if code is not None:
                    return code
            except (OSError, TimeoutError) as error:
                problem = str(error) or "timed out"
            if self._signalled_at:
                return LEFT
            if self._contact:
                since, reported, problem = time.monotonic(), "", "it is gone"
            if time.monotonic() - since > self._patience_s:
                raise ConfigError(
                    f"no coordinator of this run answers at {host}:{port} ({problem}); start one there with the same "
                    f"secret: python -m torchtitan_lite.tools.elastic coordinate {port}"
                )
            if problem != reported:
                print_error(f"{self._name}: looking for the coordinator at {host}:{port} ({problem})")
                reported = problem
            await asyncio.sleep(1)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """Do what the coordinator tells. Returns the exit code, or None if the connection is lost.

        Raises:
            ConnectionError: this is not the coordinator of this run.
            ConfigError: the coordinator refuses this machine.
        """
        self._sent_leave, reporting = False, None
        try:
            connection = await Connection.proven(reader, writer, self._secret, b"machine")
            address = str(writer.get_extra_info("sockname")[0])
            hello = Hello(
                self._name, self._count, digest_of(self._command), address, free_port(), last_world=self._last_world
            )
            connection.send(join=asdict(hello))
            reporting = asyncio.create_task(self._report(connection))
            while True:
                try:
                    message = await connection.receive(MACHINE_SILENCE_S)
                except ConnectionError:
                    return None
                self._contact = True
                if "start" in message:
                    self._start(environment(message["start"]), str(message.get("why")))
                if "stop" in message and self._processes:
                    self._processes.stop(message["stop"])
                if "refused" in message:
                    raise ConfigError(f"the coordinator refuses this machine: {message['refused']}")
                if "done" in message:
                    return int(message["done"])
        finally:
            if reporting:
                reporting.cancel()
            writer.close()

    def _start(self, env: dict[str, str], why: str) -> None:
        self._last_world = int(env["TORCHELASTIC_RESTART_COUNT"])
        why = "".join(c if c.isprintable() else "?" for c in why)
        self._processes, self._sent_codes = Processes(self._command, self._count, {WORLD: why} | env), []
        if self._processes.problem:
            print_error(f"{self._name}: can't start the processes: {self._processes.problem}")

    async def _report(self, connection: Connection) -> None:
        """Report to the coordinator that this machine is alive, that it leaves, and how its processes ended."""
        last_alive = 0.0
        while True:
            if self._signalled_at and not self._sent_leave:
                self._sent_leave = True
                connection.send(leave=True)
            if self._processes:
                codes, running = self._processes.codes()
                if not running or (any(codes) and not self._sent_codes):  # the coordinator stops the other machines
                    problem = "" if self._sent_codes else self._processes.problem
                    connection.send(ended=codes, running=running, port=free_port(), problem=problem)
                    self._sent_codes = codes
                if not running:
                    self._processes = None
            if time.monotonic() - last_alive >= ALIVE_S:
                last_alive = time.monotonic()
                connection.send(alive=True)
            await asyncio.sleep(_POLL_S)

    async def _end_processes(self) -> None:
        if self._processes:
            self._processes.stop(QUICK_S)
            killed = time.monotonic() + QUICK_S
            while self._processes.codes()[1]:
                if time.monotonic() > killed + QUICK_S:
                    print_error(f"{self._name}: waiting for processes that SIGKILL does not end, see ps: state D?")
                    killed = math.inf
                await asyncio.sleep(_POLL_S)
            self._processes = None

    def _signalled(self, number: int) -> None:
        now = time.monotonic()
        if not self._signalled_at:
            self._signalled_at = now
            print_error(f"{self._name}: {signal.Signals(number).name}: this machine leaves after the next save")
        elif now - self._signalled_at > _SAME_REQUEST_S:
            os._exit(128 + number)  # its processes are killed with it
