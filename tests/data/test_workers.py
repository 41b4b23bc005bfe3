"""Worker processes: the same files with any number of them, none left over, and a dead one reported."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.test_prepare import TEXTS, contents, succeeds, write
from tests.helpers import HANGS_S, ROOT
from torchtitan_lite.data.prepare import plan, readers, worker, writer
from torchtitan_lite.data.prepare.__main__ import main


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_no_byte(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 1000)
    source = write(tmp_path / "in/a.jsonl", [*TEXTS, "</s>", "<|endoftext|>"])
    (tmp_path / "in/b.jsonl").write_text('no json\n{"text": ""}\n{"text": "good"}\n')
    command = [source.parent, "--tokenizer", "bytes", "--on-error", "skip"]
    succeeds(*command, "--out", tmp_path / "straight")
    succeeds(*command, "--out", tmp_path / "out", "--workers", workers)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_killed_worker_is_reported_and_the_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS * 50)
    command = ["--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1]
    succeeds(source, "--out", tmp_path / "straight", "--tokenizer", "bytes")
    honest = worker.Worker.encode

    def killed_at_the_second(self: worker.Worker, chunk: readers.Chunk) -> worker.Result:
        if chunk.number == 1:
            self._process.kill()
            self._process.wait()
        return honest(self, chunk)

    monkeypatch.setattr(worker.Worker, "encode", killed_at_the_second)
    monkeypatch.setattr(writer, "COMMIT_EVERY_S", 0.0)
    assert main(list(map(str, [source, *command]))) == 1
    assert (
        "ended with exit code -9 (killed, perhaps for lack of memory: try fewer --workers)" in capsys.readouterr().err
    )
    assert json.loads((tmp_path / "out.partial/progress.json").read_text())["chunk"] == 1
    monkeypatch.setattr(worker.Worker, "encode", honest)
    succeeds(source, *command)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


# a script without a `__main__` guard, which stops at the first result
STOPPED = """
import sys, time
from torchtitan_lite.data.prepare import __main__ as command, worker, writer
started = []
class Noted(worker.Worker):
    def __init__(self, job):
        super().__init__(job)
        started.append(self._process.pid)
def stop(*_):
    print(*started, flush=True)
    while True:
        time.sleep(0.01)  # not signal.pause(), which a signal just before it would not end
worker.Worker, writer.Writer.add = Noted, stop
sys.exit(command.main(sys.argv[1:]))
"""


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_the_command(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STOPPED)
    source = write(tmp_path / "a.jsonl", TEXTS)
    command = [sys.executable, tmp_path / "script.py", source, "--out", tmp_path / "out", "--tokenizer", "bytes"]
    with subprocess.Popen(
        [*map(str, command), "--workers", "2"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process, contextlib.ExitStack() as stack:  # fmt: skip
        stack.callback(process.kill)  # it would be waited for
        assert process.stdout is not None
        listed = next(line for line in process.stdout if line[0].isdigit())  # after "data    preparing ..."
        workers = [int(word) for word in listed.split()]
        assert len(workers) == 2
        assert all(map(_is_running, workers))
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as Ctrl-C does
        else:
            process.send_signal(number)
        out, error = process.communicate(timeout=HANGS_S)
    assert out == "", "the script was run again by a worker"
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert ("run the same command again to resume" in error) == (number == signal.SIGINT)
    ends = time.monotonic() + HANGS_S
    while any(map(_is_running, workers)):
        assert time.monotonic() < ends, "a worker is still running"
        time.sleep(0.01)
