"""Saves a docs figure as a small SVG: with text as text, a title, a description and an opaque background."""

import html
import io
from pathlib import Path
from typing import Any

from torchtitan_lite.files import write_durably

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "torchtitan_lite", "font.sans-serif": ["DejaVu Sans", "Verdana"]}


def save(figure: Any, file: Path, title: str, note: str) -> None:
    """Write a matplotlib figure.

    Args:
        title: describes the figure.
        note: says how to read it, and the number of seeds. The description continues with the values.
    """
    import matplotlib

    curves = [(axis, line) for axis in figure.axes for line in axis.get_lines() if line.get_linestyle() != "None"]
    values = [_values(axis, line) for axis, line in curves]  # without error bars' caps
    image = io.StringIO()
    with matplotlib.rc_context(STYLE):
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(image, format="svg", facecolor="white", metadata=none)
    start, svg, rest = image.getvalue().partition("<svg ")
    tag, end, rest = rest.partition(">")
    about = f"\n <title>{html.escape(title)}</title>\n <desc>{html.escape(' '.join([note, *values]))}</desc>"
    write_durably(file, f"{start}{svg}{tag}{end}{about}{rest}".encode())


def _values(axis: Any, line: Any) -> str:
    """Describe a line's points in words; of many points, only the first, middle and last."""
    x, y = line.get_xdata(), line.get_ydata()
    some = range(len(x)) if len(x) < 6 else (0, len(x) // 2, len(x) - 1)
    label = line.get_label()
    names = [axis.get_title(), "" if label.startswith("_") else label]
    of = ", ".join(name for name in names if name) or axis.get_ylabel()
    return f"{of}: {', '.join(f'{y[i]:.4g} at {x[i]:,.4g}' for i in some)}."
