"""Runs of train.py as forked ranks: torch is imported once, so that a run of the tests takes a second, not ten.

Apart from that they are what torchrun starts: the same environment variables, a store on a free port, signals, and an
end for all as soon as one has failed. One server is enough for all workers of a test run: whoever starts it puts its
address into os.environ[ADDRESS]. It forks a process for each connection, which reads a request in a line and answers in
one. The workers themselves are forked in the same way (`worker`).
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "TORCHTITAN_LITE_FORKSERVER"
HANGS_S = 900.0  # the default of every time limit: it only ends what hangs, also on a busy, slow machine
ROOT = Path(__file__).parent.parent
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_held: list[socket.socket] = []


def free_port() -> int:
    """A port for a store that starts later.

    It stays bound until this process and those that it forks have ended, so the kernel gives it to nobody else. Stores
    set SO_REUSEADDR: they can listen on a port that is bound but has no listener, if its owner has set it too. The
    owner sets it after binding, which would otherwise accept the port of another owner.
    """
    _held.append(socket.socket())
    _held[-1].bind(("", 0))
    _held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port: int = _held[-1].getsockname()[1]
    return port


class Ranks:
    """The processes of one run, forked from this one.

    Args:
        n: how many; 1 is what plain python would start, without a launcher's variables.
        entry: the module whose `main(argv)` each of them is; or the path of a script, or `-m` and
            a module, as the command line of python has them.
        fault: of tests/faults/worker.py.
        out, err: files to which the ranks append what they say.
    """

    def __init__(
        self,
        n: int,
        argv: Sequence[str],
        out: Path,
        err: Path,
        env: Mapping[str, str] | None = None,
        entry: str = "train",
        fault: str = "",
    ) -> None:
        given = {"OMP_NUM_THREADS": "1"} | dict(env or {})
        together = {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.codes: dict[int, int] = {}
        self.pids = []
        for rank in range(n):
            launched = together | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if n > 1 else {}
            self.pids.append(_fork(given | launched, argv, out, err, entry, fault))

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in range(len(self.pids)) if rank not in self.codes]

    def send(self, number: signal.Signals, ranks: Sequence[int] = ()) -> None:
        """To all, or these, that have not ended."""
        for rank in self.running():
            if not ranks or rank in ranks:
                os.kill(self.pids[rank], number)

    def kill(self, ranks: Sequence[int]) -> None:
        """SIGKILL, then wait for the rest: they notice, or are ended as torchrun ends them."""
        self.send(signal.SIGKILL, ranks)
        self.end(1.0)

    def end(self, seconds: float) -> None:
        """Wait for all, and SIGKILL those that have not ended within so many seconds."""
        if not self.wait(seconds):
            self.send(signal.SIGKILL)
            assert self.wait(HANGS_S)

    def wait(self, seconds: float, ranks: Sequence[int] = ()) -> bool:
        """Whether all, or these, have ended within so many seconds."""
        end = time.monotonic() + seconds
        while {*self.running()} & {*(ranks or range(len(self.pids)))}:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def finish(self, seconds: float) -> None:
        """Wait for all; when one fails, or the time is over, end the others as torchrun does."""
        end = time.monotonic() + seconds
        while self.running() and not any(self.codes.values()) and time.monotonic() < end:
            time.sleep(0.02)
        left = self.running()
        self.send(signal.SIGTERM)
        # torchrun waits for 30 s; but the ranks after the first sleep for 10 between recording an error and printing it
        if 0 in left:
            self.wait(15.0, [0])
        self.end(2.0 if 0 in left else 5.0)


def _fork(env: Mapping[str, str], argv: Sequence[str], out: Path, err: Path, entry: str, fault: str) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        for name in _OF_LAUNCHERS:
            os.environ.pop(name, None)
        os.environ.update(env)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for number, path in ((1, out), (2, err)):
            with path.open("a") as stream:
                os.dup2(stream.fileno(), number)
        from torchtitan_lite.distributed.process_group import exit_process

        if fault:
            from tests.faults import worker

            worker.install(fault)
        sys.argv = [entry, *argv]
        if entry.endswith(".py"):
            runpy.run_path(entry, run_name="__main__")
            exit_process(0)
        if entry.startswith("-m "):
            runpy.run_module(entry.removeprefix("-m "), run_name="__main__", alter_sys=True)
            exit_process(0)
        code = importlib.import_module(entry).main(argv)
        exit_process(code)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Server:
    """The process that has torch, from the tests' side.

    Args:
        address: of one that another process of this test run has started; "" starts one, which ends with this process.
    """

    def __init__(self, address: str = "") -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.address = address
        if address:
            return
        # bound here, so that nobody has to wait until it is; a name in Linux's abstract space is no file to delete
        self.address = f"torchtitan-lite-{os.getpid()}-{os.urandom(8).hex()}"
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"\0{self.address}")
            listening.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forkserver", str(listening.fileno())],
                cwd=ROOT, env=os.environ | env,
                stdin=subprocess.PIPE, pass_fds=[listening.fileno()], start_new_session=True,
            )  # fmt: skip

    def run(
        self, n: int, argv: Sequence[str], env: Mapping[str, str], entry: str, fault: str, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """A module's `main` on n ranks, and what they said. Of several ranks the return code is 1 if one failed."""
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as connection:
            out, err = Path(folder) / "out", Path(folder) / "err"
            request = {"n": n, "argv": argv, "out": str(out), "err": str(err), "env": env}
            request |= {"entry": entry, "fault": fault, "timeout": timeout}
            connection.connect(f"\0{self.address}")
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                answer = stream.readline()
            assert answer, "the server of forked ranks has ended"
            codes = json.loads(answer)
            said = [path.read_text() if path.exists() else "" for path in (out, err)]
        return subprocess.CompletedProcess(argv, codes[0] if n == 1 else int(any(codes)), *said)

    def close(self) -> None:
        """End the server that was started here."""
        if self._process is not None:
            self._process.communicate()


def _serve(connection: socket.socket) -> NoReturn:
    """Answer one request, in a process of its own; or become a worker of pytest-xdist, with the streams that come."""
    first, streams, *_ = socket.recv_fds(connection, 1, 3)
    if streams:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.argv = ["-c"]
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # what `python -c` of execnet does
        os._exit(0)
    with connection, connection.makefile("rw") as lines:
        request: dict[str, Any] = json.loads(first.decode() + lines.readline())
        files = Path(request["out"]), Path(request["err"])
        more = {name: request[name] for name in ("env", "entry", "fault")}
        ranks = Ranks(request["n"], request["argv"], *files, **more)
        ranks.finish(request["timeout"])
        lines.write(json.dumps([ranks.codes.get(rank, -9) for rank in range(request["n"])]) + "\n")
        lines.flush()
    os._exit(0)


def worker() -> None:
    """What pytest-xdist starts as a worker: it hands its streams to the server, which has torch, and waits."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{os.environ[ADDRESS]}")
        socket.send_fds(connection, [b" "], [0, 1, 2])
        connection.recv(1)  # nothing comes: the worker has ended


def main() -> None:
    """Serve until the input ends, which is when whoever started this does."""
    # what is imported now, no run and no worker has to import
    for name in ("pytest", "s3fs", "numpy.ma", "torch._dynamo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    import torchtitan_lite
    from torchtitan_lite.config import cli
    from torchtitan_lite.distributed import normal_values
    from torchtitan_lite.tools.estimate import simulate

    for module in pkgutil.walk_packages(torchtitan_lite.__path__, "torchtitan_lite."):
        # not the commands, which python -m would warn of, and not what needs a GPU
        if module.name.count(".") > 1 and not module.name.endswith(("__main__", "loss_kernel")):
            importlib.import_module(module.name)
    importlib.import_module("train")

    # a tenth of each run: what it would compute first, and torch's caches in a step; in a world that no run has
    normal_values._quantiles()
    if not sys.modules["torch"].version.cuda:  # else backward passes start threads, after which no fork can have any
        with contextlib.suppress(Exception):  # which the tests of steps will show
            simulate.simulate(
                cli.parse(
                    ["--model.dim=32", "--model.n_heads=2", "--train.seq_len=32", "--train.global_batch_size=7"],
                    world_size=7,
                    n_gpus=0,
                ).loaded.config,
                *(7, 517),
                on_gpu=False,
            )
    gc.collect()
    gc.freeze()
    listening = socket.socket(fileno=int(sys.argv[1]))
    os.environ[ADDRESS] = listening.getsockname()[1:].decode()
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            _serve(connection)
        connection.close()
        _reap()
    if _reap():  # a test run that was interrupted leaves no ranks behind
        os.killpg(0, signal.SIGKILL)


def _reap() -> bool:
    """Forget the children that have ended. Returns whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def client(script: str, *arguments: str) -> int:
    """What `python script arguments` would do."""
    result = Server(os.environ[ADDRESS]).run(1, arguments, dict(os.environ), script, "", HANGS_S)
    print(result.stdout, end="")
    print(result.stderr, end="", file=sys.stderr)
    return result.returncode


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        main()
    elif sys.argv[1] == "-u":  # execnet adds options
        worker()
    else:
        sys.exit(client(*sys.argv[1:]))
