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
_MIN_LENGTH, _MAX_LENGTH = 32, 4096  # of a secret, in characters
_MAKE_ONE = "make one with (umask 077; openssl rand -hex 32 > elastic.key), and copy the file to each machine"


def _secret(file: Path | None) -> bytes:
    """The run's secret, from a file or the environment. It is removed from the environment: no process inherits it."""
    text, where = os.environ.pop(SECRET, ""), f"{SECRET} in the environment"
    if file is not None:
        where = f"--secret-file={file}"
        try:
            with file.open("rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode & 0o777
                if mode & 0o077:
                    raise ConfigError(f"{where}: others may use this file (mode {mode:04o}): chmod 600 {file}")
                text = stream.read(_MAX_LENGTH + 1).decode()
        except (OSError, ValueError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"{where} can't be read: {reason}; {_MAKE_ONE}") from None
    elif not text:
        raise ConfigError(f"the run has no secret: {_MAKE_ONE}; then add --secret-file=elastic.key, or set {SECRET}")
    text = text.strip()
    if not _MIN_LENGTH <= len(text) <= _MAX_LENGTH:
        raise ConfigError(
            f"{where}: a secret has {_MIN_LENGTH} to {_MAX_LENGTH} characters, and this one {len(text)}; {_MAKE_ONE}"
        )
    return text.encode(errors="surrogateescape")


def _coordinate(options: argparse.Namespace) -> int:
    if not (match := re.fullmatch(r"(\d+)(?::(\d+))?", options.nnodes)):
        raise ConfigError(f"--nnodes={options.nnodes} should be MIN:MAX, e.g. --nnodes=1:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes={options.nnodes}: MIN should be at least 1, and MAX at least MIN")
    if not 0 <= options.port <= 65_535:
        raise ConfigError(f"port {options.port} should be 0 (a free one) to 65535, e.g. 29400")
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts={options.max_restarts} should be at least 0")
    limits = Limits(
        least=least,
        most=most,
        settle_s=options.settle,
        save_s=options.save_timeout,
        max_restarts=options.max_restarts,
    )
    coordinator = Coordinator(limits, _secret(options.secret_file))

    async def serve() -> int:
        def stop() -> None:
            coordinator.stopping = True

        for number in handled_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop)
        return await coordinator.serve(options.port)

    try:
        return asyncio.run(serve())
    except OSError as error:
        raise ConfigError(f"port {options.port} can't be used: {error.strerror or error}; choose another") from None


def _join(options: argparse.Namespace) -> int:
    host, _, port = options.coordinator.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host  # an IPv6 address
    if not _is_host(host) or not port.isdecimal() or not 0 < int(port) <= 65_535:
        raise ConfigError(
            f"{options.coordinator!r} should be HOST:PORT of the coordinator, e.g. node0:29400, [fd00::1]:29400"
        )
    if options.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node={options.nproc_per_node} should be at least 1")
    if not options.name or not options.name.isprintable():
        raise ConfigError(f"--name={options.name!r} should be the name of this machine, e.g. node3")
    if options.command[0].startswith("-"):
        raise ConfigError(f"{options.command[0]} is after {options.coordinator}: options of join stand before it")
    machine = Machine(
        options.name, options.nproc_per_node, options.command, options.patience, _secret(options.secret_file)
    )
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


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.tools.elastic",
        description="Train on machines that come and go: docs/cluster.md.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("coordinate", help="on one machine that stays: decides which machines train")
    serve.add_argument("port", type=int, metavar="PORT", help="where the machines find it")
    serve.add_argument("--nnodes", default="1:1000", metavar="MIN:MAX", help="train on so many machines (1:1000)")
    serve.add_argument("--settle", type=_seconds, default=5.0, metavar="S", help="wait so long for more machines (5)")
    serve.add_argument("--save-timeout", type=_seconds, default=300.0, metavar="S", help="SIGKILL after SIGTERM (300)")
    serve.add_argument(
        "--max-restarts", type=int, default=6, metavar="N", help="failures in a row, not of machines (6)"
    )
    serve.set_defaults(run=_coordinate)
    join = commands.add_parser("join", help="on each machine: trains while it is there", allow_abbrev=False)
    join.add_argument("coordinator", metavar="HOST:PORT", help="where the coordinator runs")
    join.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="processes on this machine (1)")
    join.add_argument("--name", default=socket.gethostname(), help="its name, by which others reach it")
    join.add_argument("--patience", type=_seconds, default=600.0, metavar="S", help="look for the coordinator (600)")
    join.add_argument("command", nargs=argparse.REMAINDER, metavar="train.py ...", help="the same on each machine")
    join.set_defaults(run=_join)
    for command in (serve, join):
        command.add_argument("--secret-file", type=Path, metavar="FILE", help=f"of the run, mode 0600 (else {SECRET})")
    options = parser.parse_args(argv)
    prepare_streams()
    if options.run is _join and not options.command:
        parser.error("join needs a program after HOST:PORT, e.g. train.py --run.name=mine")
    return run_cli("elastic", lambda: int(options.run(options)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
