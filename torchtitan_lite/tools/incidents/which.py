"""The documents that steps of a run saw: `python -m torchtitan_lite.which RUN --step N [--to M]`.

Each line is a part of a document in a sample: its file with line or row, which of its tokens, and how they begin.
--rank-by-loss sorts by the mean loss under the checkpoint before the steps, the highest first. --find TEXT gives the
steps that see the documents that hold a text. The run's data must be where it was in training, or in its cache.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.config import paths
from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.errors import ConfigError, run_cli
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import row_nats
from torchtitan_lite.terminal import counted, prepare_streams, print_line
from torchtitan_lite.tools.incidents.record import (
    Record,
    checkpoint_before,
    read_record,
    require_own_step,
)
from torchtitan_lite.tools.incidents.seen import Documents, Part, Range, Seen
from torchtitan_lite.tools.load_model import device_of, open_model

_LINES = 200  # of documents on the terminal, if TEXT is in many
_STEPS = 100  # likewise
_ROWS = 8  # computed together
_SHOWN = 60  # characters of a text on the terminal


@dataclass(frozen=True)
class Row:
    """A part of a document in a sample of a step."""

    step: int  # 0: none
    sample: int
    part: Part
    loss: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The content of --json. What is not known is null."""
        part = self.part
        known = {"file": part.file or None, part.unit or "line": part.place or None}
        side = {"side": part.side} if part.side else {}
        loss = {} if self.loss is None else {"loss": self.loss if math.isfinite(self.loss) else None}
        return {
            **{"step": self.step or None, "sample": self.sample, "source": part.source, **known},
            **{"document": part.document, **side, "tokens": part.tokens, "first": part.first, "end": part.end},
            **{"stream": [part.begin, part.stop], **loss, "text": part.text, "document_text": part.document_text},
        }

    def line(self) -> str:
        """The row for the terminal."""
        part = self.part
        where = f"{part.file} {part.unit} {part.place}" if part.file else f"document {part.document}"
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        side = f" ({part.side})" if part.side else ""
        text = part.text if len(part.text) <= _SHOWN else f"{part.text[:_SHOWN]}..."
        return (
            f"step {self.step or '-'}  sample {self.sample}{loss}  {part.source}: {where}{side}, "
            f"tokens {part.first:,} to {part.end:,} of {part.tokens:,}: {text!r}"
        )


def _ranked(record: Record, seen: Seen, steps: range, device: torch.device, notes: list[str]) -> list[Row]:
    """The rows with their losses, the highest first."""
    folder, damaged = checkpoint_before(record.folder, record.attempts, steps.start)
    if folder is None:
        what = f"{record.folder} has no complete checkpoint before step {steps.start}"
        raise ConfigError("\n  ".join([what, *damaged]))
    opened = open_model(folder, device, torch.float32, record.data.folder / "tokenizer.json")
    notes += [*damaged, f"losses under {opened.source}"]
    rows = []
    for step in steps:
        for sample in record.samples(step):
            parts, losses = seen.parts(sample), _losses_of(opened.model, seen, sample, device)
            rows += [Row(step, sample, part, loss) for part, loss in zip(parts, losses, strict=True)]
    return sorted(rows, key=lambda row: -math.inf if math.isnan(row.loss or 0.0) else row.loss or 0.0, reverse=True)


@torch.no_grad()
def _losses_of(model: Transformer, seen: Seen, sample: int, device: torch.device) -> list[float]:
    """The mean loss of each of `Seen.parts` of a sample; NaN where nothing of it is predicted.

    In a causal sample each part has its own loss, in the context that it had in training. A sample of span corruption
    or pairs has one loss, which all of its parts share.
    """
    row, reads = seen.draw(sample)
    ranges = [read for _, read in reads]
    parts = [(i, part) for i, (documents, read) in enumerate(reads) for part in documents.parts(read)]
    targets = row.targets  # (1, S)
    if seen.causal:  # (parts, S)
        targets = torch.cat([_targets_of(part, i, row, ranges) for i, part in parts])
    nats = []
    for chunk in targets.split(_ROWS):
        tokens = row.tokens.expand(len(chunk), -1)
        positions = None if row.positions is None else row.positions.expand(len(chunk), -1)
        nats += row_nats(model, MicroBatch(tokens, chunk, positions), device).tolist()
    counts = (targets != IGNORE).sum(dim=1).tolist()
    losses = [total / n if n else math.nan for total, n in zip(nats, counts, strict=True)]
    return losses if seen.causal else losses * len(parts)


def _targets_of(part: Part, at: int, row: MicroBatch, ranges: list[Range]) -> Tensor:
    """The targets (1, S) of a causal sample, with those that are not of this part, of read `at`, masked."""
    keep = np.zeros(row.targets.shape, np.bool_)
    column = sum(end - first - 1 for first, end in ranges[:at])  # a read of n tokens gives n - 1 inputs and targets
    first, end = ranges[at]
    low, high = max(part.begin, first + 1), min(part.stop, end)
    if low < high:
        keep[0, column + low - first - 1 : column + high - first - 1] = True
    return torch.where(torch.from_numpy(keep), row.targets, IGNORE)


def _rows_with_text(record: Record, seen: Seen, steps: range, text: str, notes: list[str]) -> list[Row]:
    """The rows of documents that hold a text."""
    documents = [source.holding(text) for source in seen.documents]
    held_out = sum(len(Documents(source, "val").holding(text)) for source in record.data.sources)
    notes.append(
        f"{counted(sum(map(len, documents)), 'document')} for training with {text!r}, and {held_out:,} that no step "
        "sees, for validation"
    )
    numbers = {source.name: set(found.tolist()) for source, found in zip(seen.documents, documents, strict=True)}
    sequences, rows = seen.sequences_with(documents), list[Row]()
    for s in record.within(steps):
        for sample in seen.samples_with(sequences, range(s.start, s.start + s.size * (s.last - s.first + 1))):
            step = s.first + (sample - s.start) // s.size
            rows += [Row(step, sample, part) for part in seen.parts(sample) if part.document in numbers[part.source]]
    return rows


def _steps(options: argparse.Namespace, record: Record) -> range:
    """The steps of --step and --to; all that the run has if they are not given."""
    own = record.steps
    first = own.start if options.step is None else options.step
    last = options.to or options.step or own.stop - 1
    for name, step in (("--step", first), ("--to", last)):
        require_own_step(record.folder, record.attempts, step, name)
        if step not in own:
            raise ConfigError(f"{name}={step}: the run has the steps {own.start} to {own.stop - 1} (train.steps)")
    if last < first:
        raise ConfigError(f"--to={last} is before --step={first}")
    return range(first, last + 1)


def _require_usable(options: argparse.Namespace) -> None:
    """Raise ConfigError if the options do not go together."""
    of_steps = options.step is not None or options.find is not None
    without_step = options.step is None and (options.to is not None or options.rank_by_loss)
    if of_steps == bool(options.samples) or without_step or (options.rank_by_loss and options.find is not None):
        raise ConfigError(
            "give --step N, also with --to M and --rank-by-loss; or --find TEXT, also with --step and --to; or "
            "--samples FIRST END"
        )
    if options.samples and not 0 <= options.samples[0] < options.samples[1]:
        raise ConfigError("--samples needs the first sample and the one after the last")
    if options.json and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json={options.json}: {options.json.absolute().parent} is not a folder")


def _run(options: argparse.Namespace) -> int:
    _require_usable(options)
    record = read_record(options.run)
    steps = range(0) if options.samples else _steps(options, record)
    seen = Seen(record.data, record.config)
    notes = [
        f"{documents.folder} does not tell where its documents came from. Prepared again from the same text, it has "
        "the same tokens and tells it"
        for documents in seen.documents
        if not documents.known
    ]
    rows, listed, most = list[Row](), list(steps), None
    if options.samples:
        first, end = options.samples
        rows = [Row(0, sample, part) for sample in range(first, end) for part in seen.parts(sample)]
        title = f"samples {first} to {end - 1}: {counted(len(rows), 'part')} of documents"
    elif options.find is not None:
        if not options.step and (other := record.attempts[0].forked_from):
            notes.append(f"the steps before {steps.start} are not of this run, which was forked from {other}")
        rows = _rows_with_text(record, seen, steps, options.find, notes)
        listed, most = sorted({row.step for row in rows}), _LINES
        more = f", and {len(listed) - _STEPS:,} more" if len(listed) > _STEPS else ""
        shown = ", ".join(map(str, listed[:_STEPS])) or "-"
        title = f"seen at {counted(len(listed), 'step')} of {len(steps):,}: {shown}{more}"
    else:
        skips = [s for s in record.within(steps) if s.skipped]
        notes += [
            f"the samples {s.start - s.skipped} to {s.start - 1} were skipped before step {s.first}" for s in skips
        ]
        if options.rank_by_loss:
            rows = _ranked(record, seen, steps, device_of(options.device), notes)
        else:
            rows = [Row(n, sample, part) for n in steps for sample in record.samples(n) for part in seen.parts(sample)]
        which = f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} to {steps.stop - 1}"
        first, end = record.samples(steps.start).start, record.samples(steps.stop - 1).stop
        title = f"{which}: samples {first} to {end - 1}, {counted(len(rows), 'part')} of documents"
    for line in (*(f"note    {note}" for note in notes), title, *(row.line() for row in rows[:most])):
        print_line(line)
    if most is not None and len(rows) > most:
        print_line(f"and {len(rows) - most:,} more; --json FILE has all")
    if options.json:
        content = {
            "run": str(options.run),
            "notes": notes,
            "steps": [[step, record.samples(step).start, record.samples(step).stop] for step in listed],
            "documents": [row.as_json() for row in rows],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.which",
        description="The documents that steps of a run saw, or the steps that see a text.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=paths.expand, metavar="RUN", help="the folder of a run")
    parser.add_argument("--step", type=int, default=None, metavar="N", help="the step, or the first of several")
    parser.add_argument("--to", type=int, default=None, metavar="M", help="the last step")
    parser.add_argument(
        *("--samples",), type=int, nargs=2, metavar=("FIRST", "END"), help="instead: these samples, also skipped ones"
    )
    parser.add_argument("--rank-by-loss", action="store_true", help="sort by the loss under the checkpoint before")
    parser.add_argument("--find", default=None, metavar="TEXT", help="the steps whose documents hold this text")
    parser.add_argument("--json", type=paths.expand, default=None, metavar="FILE", help="also write all of it here")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute losses")
    return parser


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    options = _parser().parse_args(argv)
    prepare_streams()
    return run_cli("which", lambda: _run(options))
