"""Marks on the curves of the report: where a resume changed values, and where a loss spike was skipped or rewound."""

import html
from typing import Any

from torchtitan_lite.terminal import counted
from torchtitan_lite.tools.report.runs import Run

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
# a change of these keys does not touch the curves
_NOT_MARKED = "log.", "profile.", "checkpoint.", "sample.", "run.", "data.cache_dir"
_MOST = 50  # marks of spikes of a run: more would cover the curves


def marks(runs: list[Run]) -> list[dict[str, Any]]:
    """Lines across a figure: the step, a text, and the colour of the run."""
    found = []
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)] if len(runs) > 1 else "#888888"
        texts = []
        for step, changed in run.changes:
            names = [key.split(".")[-1] for key in changed if not key.startswith(_NOT_MARKED)]
            if names:
                texts.append((step, ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")))
        done = {"skip": "spike skipped", "rewind": "spike"}
        texts += [(r["step"], done.get(str(r["spike"].get("action")), "spike")) for r in run.spikes[:_MOST]]
        texts += [(r["step"], f"rewound from step {r['rewound_from']}") for r in run.rewinds[:_MOST]]
        found += [{"x": step, "text": html.escape(text), "color": colour} for step, text in texts]
    return found


def spike_notes(run: Run) -> list[str]:
    """How many spikes there were, and where the run went back."""
    notes = []
    if run.spikes:
        notes.append(
            f"{run.name}: {counted(len(run.spikes), 'loss spike')}, the first at step {run.spikes[0]['step']}."
        )
    if run.rewinds:
        last = run.rewinds[-1]  # marks of earlier ones may have been abandoned, too
        notes.append(
            f"{run.name}: {counted(last['rewind'], 'rewind')}, the last from step {last['rewound_from']} to "
            f"{last['step'] - 1}; what was abandoned is in spikes.jsonl."
        )
    return notes
