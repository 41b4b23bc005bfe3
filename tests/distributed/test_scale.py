"""What grows with the number of ranks grows slowly: laws that benchmarks/scale.py measures on more of them."""

import json
from pathlib import Path

import pytest

from benchmarks import scale
from tests.helpers import options, ranks, succeeded

SIZES = 2, 4, 8
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def found(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    """Counts on rank 0, by the number of ranks."""
    counts = {}
    for n in SIZES:
        folder = tmp_path_factory.mktemp(f"ranks-{n}")
        keys = scale.OPTIONS | {"data.path": text, "run.out_dir": folder, "run.name": "run"}
        keys |= {"train.global_batch_size": n}
        report = folder / "counts.json"
        succeeded(ranks(n, *options(keys), entry="benchmarks.scale_rank", env={"COUNTS": str(report)}))
        counts[n] = scale.named(json.loads(report.read_text()), folder / "run")
    return counts


@pytest.mark.parametrize("what", ["start: collectives", "step: collectives", "save: collectives"])
def test_the_number_of_collectives_does_not_depend_on_the_ranks(what: str, found: dict[int, dict[str, float]]) -> None:
    assert len({found[n][what] for n in SIZES}) == 1
    assert found[2][what] > 5


@pytest.mark.parametrize(("what", "most"), [
    ("start: bytes in collectives", 256),
    ("step: bytes of the all-reduce of sums", 24),  # a loss and two times
    ("save: bytes in collectives", 1024),
    ("save: files", 1),
    ("save: bytes of manifest.json", 256),
    ("log: bytes of a line", 80),  # a loss and two times, of at most 1,024 ranks
])  # fmt: skip
def test_what_rank_0_handles_grows_linearly_and_by_this_much_for_each_rank(
    what: str, most: float, found: dict[int, dict[str, float]]
) -> None:
    """Twice the ranks add twice as much as before: nothing is quadratic. The digits of a line of the log vary."""
    per_rank = [(found[b][what] - found[a][what]) / (b - a) for a, b in ((2, 4), (4, 8))]
    assert 0 < per_rank[1] <= most, per_rank
    assert per_rank[1] < (2 if what.startswith("log") else 1.05) * per_rank[0] + 1, per_rank
