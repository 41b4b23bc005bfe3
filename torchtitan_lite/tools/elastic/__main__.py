"""Train on machines that come and go.

    (umask 077; openssl rand -hex 32 > elastic.key)
    python -m torchtitan_lite.tools.elastic coordinate 29400 --nnodes 1:4 --secret-file elastic.key
    python -m torchtitan_lite.tools.elastic join --secret-file elastic.key --nproc-per-node 8 node0:29400 train.py

The first makes the run's secret. The second runs on a machine that stays, the third on each machine that trains, with
a copy of the file: docs/cluster.md.
"""

import argparse
import asyncio
import math
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite.errors import ConfigError, run_cli
from torchtitan_lite.terminal import prepare_streams
from torchtitan_lite.tools.elastic.coordinator import Coordinator, Limits
from torchtitan_lite.tools.elastic.machine import Machine, handled_signals

SECRET = "TORCHTITAN_LITE_SECRET"
_LEAST, _MOST = 32, 4096  # characters of a secret
_HOW = "make one with (umask 077; openssl rand -hex 32 > elastic.key), and copy the file to each machine"


def _secret(file: Path | None) -> bytes:
    """The run's secret, from a file or from the environment, where the processes of the run must not find it."""
    text, where = os.environ.pop(SECRET, ""), f"{SECRET} in the environment"
    if file is not None:
        where = f"--secret-file={file}"
        try:
            with file.open("rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode & 0o777
                if mode & 0o077:
                    raise ConfigError(f"{where}: others may use this file (mode {mode:04o}): chmod 600 {file}")
                text = stream.read(_MOST + 1).decode()
        except (OSError, ValueError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"{where} can't be read: {reason}; {_HOW}") from None
    elif not text:
        raise ConfigError(f"the run has no secret: {_HOW}; then add --secret-file=elastic.key, or set {SECRET}")
    if not _LEAST <= len(text.strip()) <= _MOST:
        raise ConfigError(
            f"{where}: a secret has {_LEAST} to {_MOST} characters, and this one {len(text.strip())}; {_HOW}"
        )
    return text.strip().encode(errors="surrogateescape")


def _coordinate(given: argparse.Namespace) -> int:
    if not (found := re.fullmatch(r"(\d+)(?::(\d+))?", given.nnodes)):
        raise ConfigError(f"--nnodes={given.nnodes} should be MIN:MAX, e.g. --nnodes=1:4")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes={given.nnodes}: MIN should be at least 1, and MAX at least MIN")
    if not 0 <= given.port <= 65_535:
        raise ConfigError(f"port {given.port} should be 0 (a free one) to 65535, e.g. 29400")
    if given.max_restarts < 0:
        raise ConfigError(f"--max-restarts={given.max_restarts} should be at least 0")
    limits = Limits(least, most, given.settle, given.save_timeout, given.max_restarts)
    coordinator = Coordinator(limits, _secret(given.secret_file))

    async def serve() -> int:
        def stop() -> None:
            coordinator.stopping = True

        for number in handled_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop)
        return await coordinator.serve(given.port)

    try:
        return asyncio.run(serve())
    except OSError as error:
        raise ConfigError(f"port {given.port} can't be used: {error.strerror or error}; choose another") from None


def _join(given: argparse.Namespace) -> int:
    host, _, port = given.coordinator.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host  # an IPv6 address
    if not _is_host(host) or not port.isdecimal() or not 0 < int(port) <= 65_535:
        raise ConfigError(
            f"{given.coordinator!r} should be HOST:PORT of the coordinator, e.g. node0:29400, [fd00::1]:29400"
        )
    if given.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node={given.nproc_per_node} should be at least 1")
    if not given.name or not given.name.isprintable():
        raise ConfigError(f"--name={given.name!r} should be the name of this machine, e.g. node3")
    if given.command[0].startswith("-"):
        raise ConfigError(f"{given.command[0]} is after {given.coordinator}: options of join stand before it")
    machine = Machine(given.name, given.nproc_per_node, given.command, given.patience, _secret(given.secret_file))
    return asyncio.run(machine.run(host, int(port)))


def _is_host(text: str) -> bool:
    try:
        return bool(text.encode("idna"))
    except UnicodeError:  # such as node..0
        return False


def _seconds(text: str) -> float:
    if not 0 <= (seconds := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} should be a number of seconds, 0 or more")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.tools.elastic",
        description="Train on machines that come and go: docs/cluster.md.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("coordinate", help="on one machine that stays: decides which machines train")
    one.add_argument("port", type=int, metavar="PORT", help="where the machines find it")
    one.add_argument("--nnodes", default="1:1000", metavar="MIN:MAX", help="train on so many machines (1:1000)")
    one.add_argument("--settle", type=_seconds, default=5.0, metavar="S", help="wait so long for more machines (5)")
    one.add_argument("--save-timeout", type=_seconds, default=300.0, metavar="S", help="SIGKILL after SIGTERM (300)")
    one.add_argument("--max-restarts", type=int, default=6, metavar="N", help="failures in a row, not of machines (6)")
    one.set_defaults(run=_coordinate)
    each = commands.add_parser("join", help="on each machine: trains while it is there", allow_abbrev=False)
    each.add_argument("coordinator", metavar="HOST:PORT", help="where the coordinator runs")
    each.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="processes on this machine (1)")
    each.add_argument("--name", default=socket.gethostname(), help="its name, by which others reach it")
    each.add_argument("--patience", type=_seconds, default=600.0, metavar="S", help="look for the coordinator (600)")
    each.add_argument("command", nargs=argparse.REMAINDER, metavar="train.py ...", help="the same on each machine")
    each.set_defaults(run=_join)
    for command in (one, each):
        command.add_argument("--secret-file", type=Path, metavar="FILE", help=f"of the run, mode 0600 (else {SECRET})")
    return parser


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    given = _parser().parse_args(argv)
    prepare_streams()
    if given.run is _join and not given.command:
        _parser().error("join needs a program after HOST:PORT, e.g. train.py --run.name=mine")
    return run_cli("elastic", lambda: int(given.run(given)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
