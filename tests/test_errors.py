"""`run_cli`: errors of the input and the machine are messages with an exit code, and bugs keep their traceback."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from torchtitan_lite import errors
from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import UserError, run_cli
from torchtitan_lite.run import out_of_memory


def _raise(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


UID = f"this process runs as uid {os.geteuid()}; give it access, or choose another path"


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (PermissionError(13, "Permission denied", "/a/b"), 2, f"x: /a/b: Permission denied: {UID}"),
        (PermissionError(1, "Operation not permitted", b"/a"), 2, f"x: /a: Operation not permitted: {UID}"),
        (OSError(36, "File name too long", "a" * 5000), 2, f"x: {'a' * 200}... (5,000 characters): File name too long"),
        (OSError(18, "Invalid cross-device link", "/a", None, "/b"), 2, "x: /a -> /b: Invalid cross-device link"),
        (OSError(24, "Too many"), 2, "x: Too many: too many files are open; raise the limit with ulimit -n"),
        (OSError(28, "No space", "/a"), 1, "x: /a: No space: free some space, or choose another disk"),
        (OSError(122, "Quota", "/a"), 1, "x: /a: Quota: free some space, or choose another disk"),
        *((OSError(number, "Input/output error"), 1, "x: Input/output error") for number in (5, 116, 30, 19, 110)),
        (TimeoutError(), 2, "x: TimeoutError"),
        (
            UnicodeDecodeError("utf-8", b"a\xe9", 1, 2, "no"),
            2,
            "x: 'utf-8' codec can't decode byte 0xe9 in position 1: no",
        ),
        (MemoryError(), 2, "x: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "x: out of memory: CUDA out of memory"),
        (RuntimeError("you tried to allocate 5 bytes\nmore"), 2, "x: out of memory: you tried to allocate 5 bytes"),
        (UserError("this and that"), 2, "x: this and that"),
        (errors.SaveError("late"), 1, "x: late"),
        (KeyboardInterrupt(), 130, "x: stopped"),
    ],
)
def test_an_input_error_is_a_message_without_a_traceback(
    error: BaseException, code: int, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/no/such/error")
    assert (run_cli("x", _raise(error)), capsys.readouterr().err) == (code, f"{expected}\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BrokenPipeError(32, "Broken pipe"), ""),
        (OSError(28, "No space"), "x: No space: free some space, or choose another disk\n"),
    ],
)
def test_an_error_of_stdout_itself_is_told_once(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a closed pipe never."""
    monkeypatch.setattr(sys, "stdout", Mock(flush=Mock(side_effect=[None, error, error])))
    assert (
        [run_cli("x", *end) for end in ((_raise(KeyboardInterrupt()), 1), (lambda: 5, 1), (lambda: 5, 0))],
        capsys.readouterr().err,
        sys.stdout,
    ) == ([130, 5, 1], said, None), "else Python flushes it at its end, and says that it can't"


def test_torchrun_learns_which_error_came_first_and_ends_if_a_restart_would_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    happened: list[object] = []
    monkeypatch.setattr("time.sleep", happened.append)
    monkeypatch.setattr("time.time", lambda: 1000.9)
    monkeypatch.setattr("os.kill", lambda *args: happened.append(args))
    ending = "ending torchrun, because a restart would fail in the same way; torchrun's traceback follows\n"
    launcher = (os.getppid(), signal.SIGTERM)
    late = type("Late", (errors.StuckError,), {"secondary": True})("a")
    for rank, error, restarts, said, when, done in (
        (0, UserError("a"), "0", f"x: a\n{ending}", "1000", [launcher]),
        (0, UserError("a"), "3", "x: a\n", "1000", []),
        (2, errors.SpikeError("a"), "0", f"[local rank 2] x: a\n{ending}", "1000", [10, launcher]),
        (1, late, "0", "[local rank 1] x: a\n", "1060", [10]),
    ):
        monkeypatch.setattr(
            os,
            "environ",
            {
                **{"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_MAX_RESTARTS": "3"},
                **{"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/error.json", "TORCHTITAN_LITE_FAILED": "/no/such/list"},
            },
        )
        happened.clear()
        run_cli("x", _raise(error), rank)
        assert (capsys.readouterr().err, happened) == (said, done)
        assert json.loads((tmp_path / "error.json").read_text()) == {
            "message": {"message": said.splitlines()[0], "extraInfo": {"timestamp": when}}
        }


@pytest.mark.parametrize(
    ("where", "noted"), [("", True), (" on elsewhere", False), (f" on {os.uname().nodename}", True)]
)
@pytest.mark.parametrize("secondary", [False, True])
def test_only_the_machine_whose_process_died_is_noted(
    where: str, noted: bool, secondary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_FAILED", str(tmp_path / "nodes"))
    errors.report(f"x: a process died{where}: rank 3", secondary=secondary)
    assert (tmp_path / "nodes").exists() == noted


@pytest.mark.parametrize(("values", "expected"), [
    ({"train": {"micro_batch_size": 7}}, "try --train.micro_batch_size=3: the same global batch in more micro-batches, "
     "with the same result"),
    ({}, "try --activation_checkpointing.mode=full: about a third more computation, much less memory"),
    ({"activation_checkpointing": {"mode": "full"}}, "try --mixed-precision: activations of half the size"),
    ({"activation_checkpointing": {"mode": "full"}, "fsdp": {"param_dtype": "bfloat16"}}, "try more ranks (each holds "
     "a smaller shard), a shorter --train.seq_len, or a smaller model"),
])  # fmt: skip
def test_too_little_memory_has_an_advice(values: dict[str, dict[str, object]], expected: str) -> None:
    config = Config.model_validate({"train": {"micro_batch_size": 1}, **values})
    for error, what in (
        (MemoryError(), "the host"),
        (RuntimeError("you tried to allocate 5\nx"), "you tried to allocate 5"),
    ):
        with pytest.raises(errors.NoMemoryError) as caught, out_of_memory.with_advice(config):
            raise error
        assert str(caught.value) == f"out of memory: {what}\n  {expected}"
    with pytest.raises(RuntimeError, match="^other$"), out_of_memory.with_advice(config):
        raise RuntimeError("other")


@pytest.mark.parametrize(
    "error",
    [KeyError("a"), TypeError(), AttributeError("a"), ValueError("a"), ValueError("\n"), ValueError("\udc80")],
)
def test_a_bug_keeps_its_traceback(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in torchrun's summary; and its machine is noted."""
    monkeypatch.setattr(
        os,
        "environ",
        {
            "TORCHTITAN_LITE_FAILED": f"{tmp_path}/nodes",
            "SLURMD_NODENAME": "node7",
            "TORCHELASTIC_ERROR_FILE": f"{tmp_path}/error",
        },
    )
    (tmp_path / "nodes").write_text("node3\n")
    with pytest.raises(type(error)):
        run_cli("x", _raise(error))
    assert [
        (tmp_path / "nodes").read_text(),
        b"Traceback" in json.loads((tmp_path / "error").read_text())["message"]["message"].encode(),
        errors.text_of(error)
        in ("'a'", "a", "TypeError()", "ValueError('\\n')", "\udc80"),  # never empty in a run's record
    ] == ["node3\nnode7\n", True, True]
