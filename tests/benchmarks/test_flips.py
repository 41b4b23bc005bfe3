"""benchmarks/flips.py: bits do flip, at each place, and the table says what came of it."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import flips
from tests.helpers import ROOT, start, succeeded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_flip_changes_one_bit_of_one_element(dtype: torch.dtype) -> None:
    values = torch.arange(1, 25).view(4, 6).T.to(dtype)  # not contiguous
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    for bit in (0, 5, 8 * values.element_size() - 1):
        changed = values.clone()
        flips.flip(changed, bit, 31)
        difference = changed.view(words) ^ values.view(words)
        assert [int(one) & ((1 << 64) - 1 if words == torch.int64 else (1 << 8 * values.element_size()) - 1)
                for one in difference[difference != 0]] == [1 << bit]  # fmt: skip


def test_what_became_of_a_flip() -> None:
    row = {"error": "", "lines": [], "loss": 3.5, "step": 340}
    assert flips.outcome(row, 3.4999, 0.01) == "harmless (+0.000)"
    assert flips.outcome(row, 3.4, 0.01) == "**missed** (+0.100)"
    bad = {"error": "NonFiniteError: step 141: the gradient norm is not finite, though", "lines": [], "step": 141}
    assert flips.outcome(bad, 3.5, 0.01) == "not finite, at once"
    differs = "note    step 141: Computed again, it differs, so a machine computed wrong: rank 0 (vm): the sum of"
    assert flips.outcome(row | {"lines": ["SPIKE   step 141", differs]}, 3.5, 0.01) == "spike; names rank 0"
    copies = {"error": "DivergedError: step 150: copies of the model differ: rank 2", "lines": [], "step": 150}
    assert flips.outcome(copies, 3.5, 0.01) == "copies differ, 10 steps"


def test_the_page_has_the_table_that_the_command_prints() -> None:
    rows = [json.loads(line) for line in flips.RESULTS.read_text().splitlines()]
    printed = [line for line in flips.table(rows) if line.startswith("| ")]
    page = (ROOT / "docs" / "incidents.md").read_text()
    assert len(printed) > 30
    assert not [line for line in printed if line not in page]


@pytest.mark.extended
def test_a_part_of_the_matrix_runs(tmp_path: Path, text: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "benchmarks.flips", "matrix", "--results", str(results), "--text", str(text)]
    succeeded(start([*command, "--only", "2 ranks | memory | float32 | weight"]))
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == len(flips.BITS["float32"])
    assert all("memory changed by itself: rank 0 (" in row["error"] for row in found)
