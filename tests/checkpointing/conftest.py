"""Two runs of 4 steps with checkpoints at 2 and 4. Tests only read them, or change a copy."""

from pathlib import Path

import pytest

from tests.helpers import ranks, succeeded, tiny


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On one rank."""
    folder = tmp_path_factory.mktemp("finished")
    succeeded(ranks(1, *tiny(text, folder, run__name="run", train__steps=4, checkpoint__every=2)))
    return folder / "run"


@pytest.fixture(scope="session")
def sharded(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharded on two ranks, with tied embeddings."""
    folder = tmp_path_factory.mktemp("sharded")
    more = {"checkpoint__state_dict": "sharded", "model__tie_embeddings": True}
    succeeded(ranks(2, *tiny(text, folder, run__name="run", train__steps=4, checkpoint__every=2, **more)))
    return folder / "run"
