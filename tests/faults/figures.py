"""How a soak prints what it found: with the bound that its tries allow, and with what repeats it.

`python -m tests.faults.figures FILE...` adds up the pieces that `python -m tests.faults.machines --out FILE` has done.
"""

import argparse
import inspect
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers import ROOT


def none_of(tries: int, what: str) -> str:
    """0 of so many tries, and the largest rate that would give such a result in 1 of 20 soaks (Clopper and Pearson)."""
    bound = 1 - 0.05 ** (1 / tries) if tries else 1.0
    return f"0 of {tries:,} {what} (below {100 * bound:.3g} % at 95 %)"


def stamp(seed: object) -> str:
    """The seed and the commit, which together give the same choices. The moments also depend on the machine."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return f"seed {seed}, commit {found or 'unknown'}"


def some_text(folder: Path) -> Path:
    """A new folder in this one, with text for a tiny run."""
    text = folder / "text"
    text.mkdir()
    (text / "argparse.txt").write_text(inspect.getsource(argparse))
    return text


HEADER = (
    "| piece | machines | events | kinds | samples | problems | recovery: median, worst | joins and leaves that "
    "repeated steps | torchruns started again | losses within |\n|" + "---|" * 10
)


def row(piece: Mapping[str, Any]) -> str:
    """A row of a table for a piece, or for the sum of some."""
    seconds = [each["seconds"] for each in piece["recoveries"]] or [float("nan")]
    graceful = [each for each in piece["recoveries"] if each["graceful"]]
    cells = (
        piece["stamp"],
        piece["nnodes"],
        piece["events"],
        ", ".join(f"{number} {kind}" for kind, number in sorted(piece["kinds"].items())),
        f"{piece['samples']:,}",
        "; ".join(piece["problems"]) or "none",
        f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s of {len(seconds)}",
        f"{sum(each['repeated'] > 0 for each in graceful)} of {len(graceful)}",
        piece["restarts"],
        f"{piece['difference']:.1e}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def total(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of some pieces."""
    return {
        "stamp": f"all {len(pieces)}",
        "nnodes": ", ".join(sorted({piece["nnodes"] for piece in pieces})),
        "kinds": sum((Counter(piece["kinds"]) for piece in pieces), Counter()),
        "difference": max(piece["difference"] for piece in pieces),
        **{key: sum(piece[key] for piece in pieces) for key in ("events", "samples", "restarts")},
        **{key: [each for piece in pieces for each in piece[key]] for key in ("problems", "recoveries")},
    }


def main() -> None:
    """Print a row for each piece, and their sum with its bound."""
    pieces = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    print(HEADER, *map(row, pieces), sep="\n")
    every = total(pieces)
    print(row(every))
    if not every["problems"]:
        print(none_of(every["events"], "events lost or doubled a sample, or needed a person"))


if __name__ == "__main__":
    main()
