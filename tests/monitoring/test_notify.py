"""log.notify: a webhook is told of events, never learns more, and never delays a run; the URL appears nowhere."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

import train
from tests.helpers import ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import StuckError
from torchtitan_lite.monitoring import notify
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.monitoring.notify import Notifier
from torchtitan_lite.training.session import Session

SECRET = "hook-4711-secret"
VARIABLE = "RUN_WEBHOOK"


class Hook(ThreadingHTTPServer):
    """A webhook on the loopback. Paths: /redirect answers 302, /never does not answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.released = threading.Event()
        self.asked = threading.Event()

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}{SECRET}"


class Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, json.loads(body)))
        self.server.asked.set()
        if "never" in self.path:
            self.server.released.wait()
            return
        self.send_response(302 if "redirect" in self.path else 204)
        self.send_header("Location", self.server.url("elsewhere/"))
        self.end_headers()

    do_GET = do_POST  # noqa: N815  # after a redirect

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def told(hook: Hook) -> list[tuple[str, int | None, str]]:
    for _, values in hook.posted:
        assert values.keys() == {"event", "run", "step", "time", "status"}
        assert values["run"] == "run"
        assert abs(values["time"] - time.time()) < 600
    return [(values["event"], values["step"], values["status"]) for _, values in hook.posted]


SPIKES = {"spike__action": "log", "spike__window": 4, "spike__norm_deviations": 1e-6, "spike__loss_deviations": 0}


def test_spikes_the_end_and_failures_are_told_and_the_url_is_nowhere(hook: Hook, text: Path, tmp_path: Path) -> None:
    env = {VARIABLE: hook.url()}
    command = tiny(text, tmp_path, run__name="run", train__steps=9, eval__every=0, checkpoint__every=3, **SPIKES)
    result = ranks(2, *command, f"--log.notify={VARIABLE}", env=env)
    said = succeeded(result) + result.stderr
    spikes = [(r["step"]) for r in records(tmp_path / "run") if "spike" in r]
    assert spikes, "a limit of next to no deviations"
    assert told(hook) == [*(("spike", step, "running") for step in spikes), ("completion", 9, "complete")]
    assert {path for path, _ in hook.posted} == {f"/{SECRET}"}

    hook.posted.clear()
    said += (result := ranks(1, *command, f"--log.notify={VARIABLE}", "--train.seq_len=16", env=env)).stderr
    assert result.returncode == 2
    assert told(hook) == [("failure", None, "complete")], "a refused command has not changed the run"

    hook.posted.clear()
    more = [f"--log.notify={VARIABLE}", "--train.steps=12"]
    result = ranks(2, *command, *more, env=env, fault="nan:1:11:forward")
    assert result.returncode == 1
    said += result.stdout + result.stderr
    assert [event for event in told(hook) if event[0] != "spike"] == [("failure", 11, "failed")]
    hook.posted.clear()
    result = ranks(2, *command, *more, env=env, fault="kill:1:11:forward")
    assert [event for event in told(hook) if event[0] != "spike"] == [("failure", 10, "failed")], "it is no stall"
    said += result.stdout + result.stderr
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    assert SECRET not in said


def test_a_stall_is_told_before_the_process_ends(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_abort` is called by the watchdog, which then ends the process, and by preemption after a second signal."""
    monkeypatch.setenv(VARIABLE, hook.url())
    log, world = Log(tmp_path, speaks=True), World(0, 1, torch.device("cpu"), 1)
    s: Any = SimpleNamespace(config=SimpleNamespace(folder=tmp_path), log=log, world=world)
    s.state, s.preemption, s.watchdog = TrainState(step=7), SimpleNamespace(), SimpleNamespace()
    Session.__post_init__(s)
    for ends in (s.watchdog, s.preemption):
        with log.notifying("run", VARIABLE):
            ends.on_abort("why")
            assert hook.posted, "it is delivered when on_abort returns"
    assert told(hook) == [("stall", 7, "failed"), ("failure", 7, "failed")]
    log.notify("spike", 8)  # the webhook is no longer there
    assert json.loads((tmp_path / "run.json").read_text())["reason"] == "why"


def test_a_process_that_died_is_a_failure_and_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, sent = SimpleNamespace(config=SimpleNamespace(folder=tmp_path)), list[str]()
    log, world = SimpleNamespace(notify=lambda event, *_: sent.append(event)), World(0, 2, torch.device("cpu"), 1)
    died, late = StuckError("connection reset"), StuckError("waited")
    died.follows = True
    for error in (died, late, ValueError("a bug")):
        monkeypatch.setattr("train.start.begin", Mock(side_effect=error))
        with pytest.raises(type(error)):
            train.run(cast(Any, loaded), cast(Any, None), world, cast(Any, log))
    assert sent == ["failure", "stall", "failure"]


@pytest.mark.parametrize("where", ["never", "redirect", "dead port", "no http"])
def test_a_server_that_does_not_answer_costs_nothing(
    where: str, hook: Hook, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(notify, "print_error_once", said.append)
    monkeypatch.setattr(notify, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(notify, "EXIT_S", 0.2 if where == "never" else 20.0)
    monkeypatch.setenv("http_proxy", hook.url("proxy/"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}/{SECRET}"
        url = {"dead port": dead, "no http": f"file:///{SECRET}"}.get(where) or hook.url(f"{where}/")
        monkeypatch.setenv(VARIABLE, url)
        notifier = Notifier("run", VARIABLE)
        started = time.monotonic()
        for step in range(40):  # more than wait
            notifier.send("spike", step)
        assert time.monotonic() - started < 5, "a training step does not wait"
        if where == "never":
            assert hook.asked.wait(60)
        notifier.close()
    assert time.monotonic() - started < 15
    expected = {"redirect": "HTTP 302", "dead port": "ConnectionRefusedError", "no http": "URLError"}
    found = {re.sub(r".*\((.*)\);.*", r"\1", line) for line in said}
    assert found == ({expected[where]} if where != "never" else set())
    assert {path for path, _ in hook.posted} <= {f"/{where}/{SECRET}"}, "neither a proxy nor where the redirect leads"
    assert SECRET not in "".join(said)
    hook.released.set()
    notifier._thread.join(60)  # or it would report into the next test


@pytest.mark.parametrize(
    ("value", "environment", "message"),
    [
        (f"https://hooks.example.org/{SECRET}", {}, "should be the name of an environment variable that holds the URL"),
        (VARIABLE, {}, f"the environment variable {VARIABLE} is not set"),
        (VARIABLE, {VARIABLE: f"https://user:{SECRET}@example.org/"}, "http:// or https:// and has no user name"),
        (VARIABLE, {VARIABLE: f"ftp://{SECRET}"}, "does not hold a URL that begins with http:// or https://"),
    ],
)
def test_a_mistake_does_not_show_the_url(
    value: str, environment: dict[str, str], message: str, text: Path, tmp_path: Path
) -> None:
    result = ranks(1, *tiny(text, tmp_path), f"--log.notify={value}", env=environment)
    assert result.returncode == 2
    assert message in result.stderr
    assert SECRET not in result.stdout + result.stderr
