"""A failing run prints the reason, exits with an error, and keeps its files."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers import HANGS_S, ROOT, checkpoint, limited, losses, ranks, succeeded, tensors, tiny
from torchtitan_lite.checkpointing import storage


def test_nan_on_one_rank_stops_the_run_before_it_is_saved(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="nan", checkpoint__every=2, eval__every=0, log__every=4)
    result = ranks(2, *command, fault="nan:1:3:forward:99")
    assert result.returncode != 0
    assert result.stderr.count("step 3: the loss is not finite on rank 1. The update was withheld") == 1
    assert storage.find_steps(tmp_path / "nan/checkpoints") == [2]
    assert not losses(tmp_path / "nan"), "step 4, one late, must not be logged"
    assert checkpoint(tmp_path / "nan", 2).is_dir()


def test_a_second_run_in_one_folder_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run/.lock"):
        result = ranks(1, *tiny(text, tmp_path, run__name="run"))
    assert result.returncode == 1, "the same command may work later"
    assert "run is being used by another process" in result.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.extended
def test_ctrl_c_saves_and_exits(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "train.py", *tiny(text, tmp_path, run__name="run", train__steps=100_000)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0, errors
    assert "(SIGINT); the same command resumes" in rest
    assert "saved   " in rest
    assert "Traceback" not in errors


@pytest.mark.extended
def test_a_vocabulary_that_does_not_fit_names_both_numbers(text: Path, tmp_path: Path) -> None:
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="first", train__steps=3)))
    own = tmp_path / "first/tokenizer.json"
    command = tiny(text, tmp_path, run__name="second", train__steps=3, tokenizer__path=own)
    result = ranks(1, *command, "--model.vocab_size=400")
    assert result.returncode == 2
    assert "model.vocab_size = 400 is smaller than the tokenizer's 517 entries" in result.stderr
    succeeded(ranks(1, *command, "--model.vocab_size=600"))
    assert tensors(checkpoint(tmp_path / "second", 3))["output.weight"].shape == (600, 32)


def test_bad_text_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"caf\xe9\n" * 2000)
    result = ranks(1, *tiny(tmp_path / "text.txt", tmp_path))
    assert result.returncode == 2
    assert "text.txt: line 1: byte 0xe9 is not utf-8" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.extended
def test_an_out_of_memory_error_names_an_option(text: Path, tmp_path: Path) -> None:
    """16 GB of address space, and logits that take 39."""
    arguments = tiny(text, tmp_path, run__name="run", train__micro_batch_size=1024, model__vocab_size=300_000)
    arguments.append("--speed.chunked_loss=false")  # which would never have them all
    result = limited("AS", 16 * 10**9, arguments, tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "out of memory: " in result.stderr
    assert "try --train.micro_batch_size=512: the same global batch in more micro-batches" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_reported(text: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        there = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        result = ranks(1, *tiny(text, tmp_path, run__name="run"), env=there)
    assert result.returncode == 1
    assert f"the ranks can't meet at 127.0.0.1:{there['MASTER_PORT']}" in result.stderr
    assert "choose another MASTER_PORT" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unwritable_folder_is_an_error(text: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    result = ranks(1, *tiny(text, tmp_path / "runs"))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "can't be written" in result.stderr
