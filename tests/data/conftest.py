"""The command that prepares data, called in this process."""

from collections.abc import Callable

import pytest

from torchtitan_lite.data.prepare.__main__ import main


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that gives the message of a command line, which must be refused."""

    def message(*words: object) -> str:
        capsys.readouterr()
        assert main(list(map(str, words))) == 2
        return capsys.readouterr().err

    return message
