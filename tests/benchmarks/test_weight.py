"""The README's shares of what a step and a save execute are true: `python -m benchmarks.weight`."""

import re

import pytest

from benchmarks.weight import executed, shares
from tests.fake_cuda import library
from tests.helpers import ROOT


@pytest.mark.extended
@pytest.mark.skipif(bool(library.unavailable()), reason=library.unavailable())
def test_the_recipe_has_the_shares_of_a_step_and_of_a_save_that_the_readme_says() -> None:
    section = (ROOT / "README.md").read_text().split("\n## The recipe\n")[1]
    said = [int(number) for number in re.findall(r"(\d+) %", section)]
    assert len(said) == 3
    found = [100 * share for share in shares(ROOT, executed(ROOT)).values()]
    assert found == [pytest.approx(number, abs=2) for number in said], found
    assert min(found) > 79
