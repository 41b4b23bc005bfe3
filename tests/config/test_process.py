"""A process that lacks rights or memory: one message, and no traceback."""

from pathlib import Path

import pytest

from tests.helpers import ranks, tiny, torchrun


def limited(how: str, *argv: str, n: int = 1) -> tuple[int, str]:
    """Exit code and messages of train.py in such a process (limited_process.py)."""
    result = ranks(n, *argv, entry="tests.config.limited_process", env={"LIMIT": how})
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr


def test_several_ranks_print_one_message(text: Path, tmp_path: Path) -> None:
    code, error = limited("denied", *tiny(text, tmp_path), n=2)
    assert code != 0
    assert error.count("train.py: /their/text.txt: Permission denied") == 1


def test_too_little_memory_to_build_is_a_message(text: Path, tmp_path: Path) -> None:
    code, error = limited("huge", *tiny(text, tmp_path))
    assert code == 1
    assert "train.py: out of memory: " in error
    assert "\n  try --" in error


@pytest.mark.extended
def test_torchrun_repeats_the_message_in_its_last_lines() -> None:
    result = torchrun(2, "--train.step=5")
    assert result.returncode == 1  # torchrun's own
    others, message = result.stderr.split("  traceback : train.py: the configuration has 1 problem:\n", 1)
    assert others.count("the configuration has 1 problem") == 1
    assert len(message.splitlines()) == 2
    assert "--train.step=5" in message
    assert "exitcode  : 2" in result.stderr
