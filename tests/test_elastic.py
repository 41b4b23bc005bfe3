"""Machines that join, leave and die: `python -m torchtitan_lite.tools.elastic`, with programs that need no torch.

tests/faults/machines.py does it to real runs, many times.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic_machines import ELASTIC, Machines, until
from tests.forkserver import free_port
from tests.helpers import HANGS_S, ROOT, python, succeeded
from torchtitan_lite.tools.elastic import __main__

# A process of the run: it writes down its world, and runs until it is told to end.
PROGRAM = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
env = os.environ
me = f"{env['TORCHELASTIC_RESTART_COUNT']}.{env['RANK']}"
def terminated(*_):
    time.sleep(0.5)  # as a save does
    (folder / f"{me}.saved").touch()
    sys.exit(1 if (folder / "full").exists() else 0)
signal.signal(signal.SIGTERM, terminated)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
later = ("MASTER_PORT", "TORCHELASTIC_RUN_ID")
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
HELLO: dict[str, Any] = {"name": "x", "processes": 1, "command": ["x"], "port": 1, "run_id": "", "last_world": 0}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    """Starts a coordinator with options; all processes are ended."""
    (tmp_path / "program.py").write_text(PROGRAM)
    made = []

    def start(*options: str) -> Machines:
        command = [str(tmp_path / "program.py"), str(tmp_path)]
        made.append(Machines(tmp_path, command, "--settle", "0.2", *options))
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


def test_a_machine_is_lost_and_comes_back(started: Callable[..., Machines], tmp_path: Path) -> None:
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


def test_a_machine_leaves_on_a_signal_and_a_spare_one_takes_its_place(
    started: Callable[..., Machines], tmp_path: Path
) -> None:
    machines = started("--nnodes", "2:2")
    machines.join("a")
    until(lambda: "a joined" in machines.said(), "a")
    machines.join("b")
    world(tmp_path, 0, 2)
    machines.join("c")
    until(lambda: "c joined" in machines.said(), "c")
    machines.alive["a"].send_signal(signal.SIGTERM)
    assert machines.alive.pop("a").wait(HANGS_S) == 75
    assert len(list(tmp_path.glob("0.*.saved"))) == 2, "all had time to save"
    world(tmp_path, 1, 2)
    assert "world 2: 2 ranks on 2 machines: b, c" in machines.said()
    machines.coordinator.send_signal(signal.SIGINT)  # which ends the run
    assert machines.codes() == {"coordinator": 0, "b": 0, "c": 0}
    assert len(list(tmp_path.glob("1.*.saved"))) == 2


def test_a_process_that_fails_restarts_all_a_few_times(started: Callable[..., Machines], tmp_path: Path) -> None:
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


def test_the_coordinator_is_killed_and_started_again(started: Callable[..., Machines], tmp_path: Path) -> None:
    machines = started("--nnodes", "2")
    for name in "ab":
        machines.join(name)
    before = world(tmp_path, 0, 2)
    machines.coordinator.kill()
    machines.coordinator.wait(HANGS_S)
    until(lambda: len(list(tmp_path.glob("0.*.saved"))) == 2, "all save: the machines are still there")
    machines.coordinate()
    after = world(tmp_path, 1, 2)
    assert {words[9] for words in before} == {words[9] for words in after}, (
        "another launch would carry out 'never' again"
    )
    (tmp_path / "done").touch()
    assert machines.codes() == {"coordinator": 0, "a": 0, "b": 0}
    assert "looking for the coordinator at" in machines.said("a")


def test_a_spare_machine_leaves_and_the_world_does_not_notice(started: Callable[..., Machines], tmp_path: Path) -> None:
    machines = started("--nnodes", "1:1")
    machines.join("a")
    world(tmp_path, 0, 1)
    machines.join("b")
    until(lambda: "b joined" in machines.said(), "b")
    machines.alive["b"].send_signal(signal.SIGTERM)
    assert machines.alive.pop("b").wait(HANGS_S) == 75
    (tmp_path / "done").touch()
    assert machines.codes() == {"coordinator": 0, "a": 0}
    assert machines.worlds() == 1
    assert "gone" not in machines.said()


def test_a_last_save_that_fails_is_an_error(started: Callable[..., Machines], tmp_path: Path) -> None:
    machines = started()
    machines.join("a")
    world(tmp_path, 0, 1)
    (tmp_path / "full").touch()
    machines.coordinator.send_signal(signal.SIGTERM)
    assert machines.codes() == {"coordinator": 1, "a": 1}
    assert "exit codes [1] on a" in machines.said()


HOSTILE = [
    *({**HELLO, key: wrong} for key, wrong in {"processes": "2", "name": [1], "command": "x", "port": None}.items()),
    *({**HELLO, key: wrong} for key, wrong in {"processes": 0, "name": "a\nb", "last_world": 1.5, "since": 0}.items()),
]
AFTER = [b'{"ended": null, "port": 1}', b'{"ended": ["x"], "port": 1}', b"[" * 60_000, b'{"ended": [0]}']


def test_no_line_ends_the_coordinator(started: Callable[..., Machines], tmp_path: Path) -> None:
    machines = started("--nnodes", "1:1")
    machines.join("a")
    alone = world(tmp_path, 0, 1)
    mine = HELLO | {"command": machines.command}
    for lines in [*([json.dumps({"join": hello}).encode()] for hello in HOSTILE), *([b"", line] for line in AFTER)]:
        first = lines[0] or json.dumps({"join": mine}).encode()
        with socket.create_connection(("127.0.0.1", machines.port)) as connection:
            connection.settimeout(HANGS_S)
            connection.sendall(b"\n".join([first, *lines[1:], b""]))
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
    assert world(tmp_path, 0, 1) == alone
    (tmp_path / "done").touch()
    assert machines.codes() == {"coordinator": 0, "a": 0}
    assert machines.worlds() == 1
    assert "Traceback" not in machines.said()


def test_a_port_of_another_service_is_not_asked_in_a_loop(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANGS_S)
        where = f"127.0.0.1:{server.getsockname()[1]}"
        command = [*ELASTIC, "join", "--patience=1", where, "train.py"]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
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
    assert f"no coordinator answers at {where} (it closes the connection)" in said
    assert said.count("looking for the coordinator") == 1


def test_a_coordinator_under_nohup_survives_the_terminal(tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as out:
        process = subprocess.Popen(
            [*ELASTIC, "coordinate", "0"],
            cwd=ROOT,
            stdout=out,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
    try:
        until(lambda: "on port" in (tmp_path / "said").read_text(), "the coordinator listens")
        process.send_signal(signal.SIGHUP)
        port = int((tmp_path / "said").read_text().split()[-1])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(HANGS_S)
            connection.sendall(b"{}\n")
            assert b"another version" in connection.recv(4096), "it is still there"
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 0
    finally:
        process.kill()


@pytest.mark.extended  # as long as a machine waits for an answer
def test_a_machine_leaves_even_if_the_coordinator_does_not_answer(
    started: Callable[..., Machines], tmp_path: Path
) -> None:
    machines = started()
    machines.join("a")
    world(tmp_path, 0, 1)
    machines.coordinator.send_signal(signal.SIGSTOP)
    machines.alive["a"].send_signal(signal.SIGTERM)
    assert machines.alive.pop("a").wait(HANGS_S) == 75
    assert (tmp_path / "0.0.saved").exists()


@pytest.mark.extended  # half a minute
def test_a_machine_that_does_not_answer_is_lost(started: Callable[..., Machines], tmp_path: Path) -> None:
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
    said = succeeded(python("6", "3", "--forked", script="-m tests.faults.machines"))
    assert "none lost or doubled" in said.splitlines()[-1]


def test_mistakes_are_explained(
    started: Callable[..., Machines], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = started()
    machines.join("a")
    world(tmp_path, 0, 1)

    def refused(*words: str) -> str:
        assert __main__.main(words) == 2
        return capsys.readouterr().err

    port, other = machines.port, free_port()
    assert "a runs another command: " in refused("join", f"127.0.0.1:{port}", "other.py")
    assert f"no coordinator answers at 127.0.0.1:{other}" in refused("join", "--patience=0", f"127.0.0.1:{other}", "x")
    assert "should be HOST:PORT" in refused("join", "node0", "train.py")
    assert "--nproc-per-node=0 should be at least 1" in refused("join", "--nproc-per-node=0", "node0:1", "train.py")
    with pytest.raises(SystemExit):
        __main__.main(["join", "node0:1"])
    assert "join needs a program" in capsys.readouterr().err
    assert f"port {port} can't be used" in refused("coordinate", str(port))
    assert "--nnodes=3:2: MIN should be at least 1, and MAX at least MIN" in refused("coordinate", "0", "--nnodes=3:2")
    assert "--nnodes=many should be MIN:MAX" in refused("coordinate", "0", "--nnodes=many")
    assert "port 99999999 should be 0 (a free one) to 65535" in refused("coordinate", "99999999")
    assert "-x is after node0:1: options of join stand before it" in refused("join", "node0:1", "-x", "train.py")
    assert "should be the name of this machine" in refused("join", "--name=a\nb", "node0:1", "train.py")
    assert "--max-restarts=-1 should be at least 0" in refused("coordinate", "0", "--max-restarts=-1")
    for option in ("--settle=nan", "--save-timeout=-5", "--settle=inf", "--settle=x"):
        with pytest.raises(SystemExit):
            __main__.main(["coordinate", "0", option])
    assert "nan should be a number of seconds, 0 or more" in capsys.readouterr().err
    with pytest.raises(ConnectionError):
        _ = send_rubbish(port)
    assert world(tmp_path, 0, 1), "and the run was not disturbed"
    assert machines.worlds() == 1


def send_rubbish(port: int) -> bytes:
    """What the coordinator answers to something that is not a machine: nothing."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        if answer := connection.recv(100):
            return answer
        raise ConnectionError
