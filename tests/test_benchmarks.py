"""The benchmarks run. What they measure is never a reason to fail."""

import re
import sys

from tests.helpers import start, succeeded


def test_the_comparison_of_speeds_runs() -> None:
    said = succeeded(start([sys.executable, "-m", "benchmarks.train", "--smoke"], timeout=300))
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| ")]
    rates = {row[0].strip("| "): row[1] for row in rows[1:]}
    assert {"torchtitan_lite", "bare FSDP2 loop", "DDP"} < rates.keys(), said
    assert all(float(re.sub(r"[ ,].*", "", rate.replace(",", ""))) > 0 for rate in rates.values())
