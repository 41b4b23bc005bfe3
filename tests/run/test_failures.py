"""A failing run prints the reason, exits with an error, and keeps its files."""

import contextlib
import re
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.helpers import losses, ranks, refused, succeeded, tiny
from torchtitan_lite import errors
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.errors import ConfigError, StuckError, run_cli
from torchtitan_lite.run import attempts


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nan:1:3:forward:99", "the loss is not finite on rank 1"),
        (
            "nan_grad:1:3",
            "the gradient norm is not finite, though the loss of every rank is. In backward, the first gradient that "
            "is not finite is that of layers.1",
        ),
    ],
)
def test_nan_on_one_rank_stops_the_run_before_it_is_saved(fault: str, said: str, text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="nan", checkpoint__every=2, eval__every=0, log__every=4)
    result = ranks(2, *command, fault=fault)
    assert result.returncode != 0
    assert result.stderr.count(f"step 3: {said}. The update was withheld") == 1
    assert storage.find_steps(tmp_path / "nan/checkpoints") == [2]
    assert not losses(tmp_path / "nan"), "step 4, one late, must not be logged"
    run = attempts.newest_status(tmp_path / "nan")
    assert (run["status"], run["repeats"]) == ("failed", True)


def test_a_failure_that_would_repeat_does_not_repeat(text: Path, tmp_path: Path) -> None:
    """The same config and commit are refused, whatever the number of ranks; a change or --retry is not."""
    command = [
        word
        for word in tiny(text, tmp_path, run__name="nan", train__epochs=1, eval__every=0)
        if not word.startswith("--train.steps")
    ]
    assert ranks(1, *command, fault="nan:0:3:forward:99").returncode == errors.EXIT_WOULD_REPEAT
    history = (tmp_path / "nan/attempts.jsonl").read_text()
    for n, mode in ((2, []), (1, []), (1, ["--check-config"])):
        refused(
            ranks(n, *command, *mode),
            "the last attempt had the same config and code, and failed: step 3: the loss is not",
            "add --retry to try again",
            code=errors.EXIT_WOULD_REPEAT if n == 1 else 1,
        )
    assert (tmp_path / "nan/attempts.jsonl").read_text() == history
    for changed in ("--optim.lr=1e-4", "--retry"):
        succeeded(ranks(1, *command, "--check-config", changed))
    (commit,) = re.findall('"commit": "(.*?)"', history)
    (tmp_path / "nan/attempts.jsonl").write_text(history.replace(commit, "0" * 40))
    succeeded(ranks(1, *command, "--check-config"))


@pytest.mark.parametrize(("holder", "job", "is_refused"), [
    (f"process 7 on {socket.gethostname()}", "none", True),
    ("process 7 on node3, job 12", "13", True),
    ("process 7 on node3", "mine-0", True),
    ("process 7 on node3, job mine", "mine-2", False),  # a process that is still ending
    ("process 7 on node3", "none", False),  # may be another machine of this job
    (f"process 7 on {socket.gethostname()}, job mine", "none", False),
])  # fmt: skip
def test_a_check_refuses_a_run_that_another_job_holds(
    holder: str, job: str, is_refused: bool, text: Path, tmp_path: Path
) -> None:
    """A lock whose holder has ended means nothing."""
    command = [*tiny(text, tmp_path, run__name="run"), "--check-config"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock-holder").write_text(holder)
    with FileLock(tmp_path / "run/.lock"):
        result = ranks(1, *command, env={"TORCHELASTIC_RUN_ID": job})
    assert (result.returncode, f"run is being used by {holder}; wait for it" in result.stderr) == (
        2 * is_refused,
        is_refused,
    )
    succeeded(ranks(1, *command, env={"TORCHELASTIC_RUN_ID": job}))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"too short", "at least 2 are needed"), (b"caf\xe9\n" * 2000, "text.txt: line 1: byte 0xe9 is not utf-8")],
)
def test_refused_data_leaves_no_run_folder_and_keeps_one_that_is_there(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/metrics.jsonl").write_text("")
    for name in ("new", "there"):
        refused(ranks(1, *tiny(tmp_path / "text.txt", tmp_path, run__name=name)), problem)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there/metrics.jsonl").exists()


def test_a_port_in_use_is_reported(text: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        there = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        result = ranks(1, *tiny(text, tmp_path, run__name="run"), env=there)
    refused(
        result,
        f"the ranks can't connect at 127.0.0.1:{there['MASTER_PORT']}",
        "choose another MASTER_PORT",
        code=1,
    )


def torchruns_last_lines(files: dict[int, Path]) -> str:
    """What torchrun prints last, given the error files of its ranks; a missing file is that of a killed rank."""
    failures = {r: ProcessFailure(r, 123, 1 if f.is_file() else -9, str(f)) for r, f in files.items()}
    return ChildFailedError("train.py", failures).format_msg().partition("Root Cause (first observed failure):")[2]


def test_an_unwritable_folder_is_an_error(text: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    refused(ranks(1, *tiny(text, tmp_path / "runs"), env=env), "can't be written")
    assert re.search("traceback : train.py: .* can't be written", torchruns_last_lines({0: tmp_path / "error.json"}))


def test_a_full_disk_at_the_start_may_be_tried_again(text: Path, tmp_path: Path) -> None:
    (tmp_path / "run/stacks").mkdir(parents=True)
    (tmp_path / "run/stacks/rank-0.txt").symlink_to("/dev/full")
    refused(ranks(1, *tiny(text, tmp_path, run__name="run")), "stacks/rank-0.txt: No space left on device", code=1)


def test_torchrun_repeats_the_error_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {rank: tmp_path / f"error-{rank}.json" for rank in range(2)}

    def fail(rank: int, main: Callable[[], int]) -> str:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[rank]))
        with contextlib.suppress(ZeroDivisionError):
            assert run_cli("train.py", main) in (1, 2)
        return torchruns_last_lines({rank: files[rank]})

    stuck = StuckError("rank 1 died")
    stuck.secondary = True
    fail(0, Mock(side_effect=stuck))
    killed = torchruns_last_lines(files)
    assert "rank      : 1" in killed
    assert "exitcode  : -9" in killed
    assert "traceback : train.py: two lines\n  with a fix\n" in fail(
        1, Mock(side_effect=ConfigError("two lines\nwith a fix"))
    )
    last = fail(1, lambda: 1 // 0)
    assert "Traceback (most recent call last):" in last
    assert "ZeroDivisionError: integer division or modulo by zero" in last
    assert sorted(tmp_path.iterdir()) == sorted(files.values())
