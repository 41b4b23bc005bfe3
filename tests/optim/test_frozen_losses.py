"""The first losses of each optimizer are those of frozen_losses.json. After an intended change, write it anew."""

import json
from pathlib import Path

import pytest

from tests.frozen_losses import FILE
from tests.helpers import ranks, succeeded


def test_the_first_losses_of_each_optimizer_are_the_frozen_ones(tmp_path: Path) -> None:
    """To 1e-3, on any CPU: another order of sums changes them by 1e-5 or less."""
    out = tmp_path / "losses.json"
    succeeded(ranks(1, str(out), entry="tests.frozen_losses"))
    found, expected = (json.loads(file.read_text()) for file in (out, FILE))
    assert expected["losses"].keys() == {"adamw", "sgd", "muon"}
    for name, losses in expected["losses"].items():
        assert len(losses) == 20
        assert losses[-1] < losses[0] - 0.3, "it learns"
        assert found["losses"][name] == pytest.approx(losses, abs=1e-3), f"{name}: python -m tests.frozen_losses"
