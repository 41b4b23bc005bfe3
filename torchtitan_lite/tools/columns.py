"""Formats tables for the terminal."""

from collections.abc import Collection, Sequence


def columns(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return one aligned line per row. The columns numbered in `right` are right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
