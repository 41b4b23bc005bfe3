"""How a soak prints what it found: with the bound that its tries allow, and with what repeats it."""

import argparse
import inspect
import subprocess
from pathlib import Path

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
