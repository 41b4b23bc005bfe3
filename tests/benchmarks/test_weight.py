"""The README's share of what a step runs is true: `python -m benchmarks.weight`."""

import re

import pytest

from benchmarks.weight import of_step, recipe
from tests.helpers import ROOT


@pytest.mark.extended
@pytest.mark.parametrize("replaced", [False, True])
def test_the_recipe_has_the_share_of_a_step_that_the_readme_says(replaced: bool) -> None:
    executed, files = of_step(ROOT, replaced=replaced), recipe(ROOT)
    assert all((ROOT / file).is_file() for file in files)
    share = 100 * sum(count for file, count in executed.items() if file in files) / sum(executed.values())
    said = re.search(r"contain (\d+) % of the lines.{0,80}? or (\d+) % with", (ROOT / "README.md").read_text(), re.S)
    assert said
    assert share == pytest.approx(int(said[1 + replaced]), abs=1)
    assert replaced or share > 79
