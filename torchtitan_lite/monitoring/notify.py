"""Events of a run for a webhook (`log.notify`): a failure, a loss spike, a stall, the end. Loaded only with that key.

A thread posts a JSON object with event, run, step, time and status, and nothing else of the run. The URL is read from
the environment and kept here: no message, record or file has it, and no text of an error, which may quote it.
"""

import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from torchtitan_lite.terminal import print_error_once

TIMEOUT_S = 5.0  # of a connection, and of an answer
EXIT_S = 3.0  # the most that the end of a run waits for what was not delivered yet
_MOST = 16  # events that wait
_STATUS = {"failure": "failed", "stall": "failed", "spike": "running", "completion": "complete"}


class Notifier:
    """Posts events in the background. A server that is down, slow or redirects costs the run nothing.

    Args:
        run: the run's name.
        variable: the environment variable with the URL. `config/sections/outputs.py` has checked it.
    """

    def __init__(self, run: str, variable: str) -> None:
        self._run, self._url = run, os.environ.get(variable, "")
        # no redirects, no proxies of the environment, no schemes but these
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.UnknownHandler(),
        ):
            self._opener.add_handler(handler)
        self._waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="notify", daemon=True)
        self._thread.start()

    def send(self, event: str, step: int | None, status: str = "") -> None:
        """Post an event, without waiting. Of many at once, the last are dropped."""
        values = {"event": event, "run": self._run, "step": step, "time": round(time.time(), 3)}
        if self._waiting.qsize() < _MOST:
            self._waiting.put(values | {"status": status or _STATUS[event]})

    def close(self) -> None:
        """Wait for what was not delivered yet, at most EXIT_S."""
        self._waiting.put(None)
        self._thread.join(timeout=EXIT_S)

    def _deliver(self) -> None:
        while (values := self._waiting.get()) is not None:
            headers = {"Content-Type": "application/json", "User-Agent": "torchtitan_lite"}
            try:
                request = urllib.request.Request(self._url, json.dumps(values).encode(), headers, method="POST")
                self._opener.open(request, timeout=TIMEOUT_S).close()
            except urllib.error.HTTPError as error:
                self._report(f"HTTP {error.code}")
            except Exception as error:  # whatever it is, it must not end the run
                reason = getattr(error, "reason", error)
                self._report(type(reason if isinstance(reason, Exception) else error).__name__)

    def _report(self, why: str) -> None:
        print_error_once(f"log.notify: an event was not delivered ({why}); the run does not depend on it")
