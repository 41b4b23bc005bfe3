"""The documents that steps of a run saw: `python -m torchtitan_lite.which RUN --step N [--to M]`.

Each line is a part of a document in a sample: its file with line or row, which of its tokens, and how they begin.
--rank-by-loss sorts by the mean loss under the checkpoint before the steps, the highest first. --find TEXT gives the
steps that see the documents that hold a text. The run's data must be where it was in training, or in its cache.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config import paths
from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.errors import ConfigError, OutputError, run_cli
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import row_nats
from torchtitan_lite.terminal import counted, prepare_streams, print_line
from torchtitan_lite.tools.incidents.record import Record, checkpoint_before, read_record
from torchtitan_lite.tools.incidents.seen import Documents, Part, Range, Seen
from torchtitan_lite.tools.load_model import open_model

_LINES = 200  # of documents on the terminal, if TEXT is in many
_ROWS = 8  # computed together
_SHOWN = 60  # characters of a text on the terminal
_MOST_LISTED, _MOST_SEARCHED = 10**6, 10**9  # samples: a minute's work


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
        where = f"{_plain(part.file)} {part.unit} {part.place}" if part.file else f"document {part.document}"
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        side = f" ({part.side})" if part.side else ""
        text = part.text if len(part.text) <= _SHOWN else f"{part.text[:_SHOWN]}..."
        return (
            f"step {self.step or '-'}  sample {self.sample}{loss}  {_plain(part.source)}: {where}{side}, "
            f"tokens {part.first:,} to {part.end:,} of {part.tokens:,}: {text!r}"
        )


def _plain(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _ranked(record: Record, seen: Seen, steps: range, device: torch.device, notes: list[str]) -> list[Row]:
    """The rows with their losses, the highest first."""
    folder, damaged = checkpoint_before(record.folder, steps.start)
    if folder is None:
        kept = ", ".join(map(str, storage.find_steps(record.folder / "checkpoints")[:8])) or "none"
        what = f"{record.folder} has no complete checkpoint before step {steps.start} (steps with one: {kept})"
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
    rows, reads = seen.draw(sample)
    at = [i for i, (documents, read) in enumerate(reads) for _ in documents.parts(read)]  # the read of each part
    parts = [part for documents, read in reads for part in documents.parts(read)]
    ranges = [read for _, read in reads]
    targets = rows.targets
    if seen.causal:  # (parts, T)
        targets = torch.cat([_targets_of(part, i, rows, ranges) for part, i in zip(parts, at, strict=True)])
    nats = []
    for chunk in targets.split(_ROWS):
        positions = None if rows.positions is None else rows.positions.repeat(len(chunk), 1)
        batch = MicroBatch(rows.tokens.repeat(len(chunk), 1), chunk, positions)
        nats += row_nats(model, batch, device).tolist()
    counts = (targets != IGNORE).sum(dim=1).tolist()
    losses = [total / n if n else math.nan for total, n in zip(nats, counts, strict=True)]
    return losses if seen.causal else losses * len(parts)


def _targets_of(part: Part, at: int, rows: MicroBatch, ranges: list[Range]) -> Tensor:
    """The targets (1, T) of a causal sample, with those that are not of this part, of read `at`, masked."""
    keep = np.zeros(rows.targets.numel(), np.bool_)
    column = sum(end - first - 1 for first, end in ranges[:at])  # a read of n tokens gives n - 1 inputs and targets
    first, end = ranges[at]
    low, high = max(part.begin, first + 1), min(part.stop, end)
    if low < high:
        keep[column + low - first - 1 : column + high - first - 1] = True
    return torch.where(torch.from_numpy(keep).view_as(rows.targets), rows.targets, IGNORE)


def _rows_with_text(record: Record, seen: Seen, steps: range, text: str, notes: list[str]) -> list[Row]:
    """The rows of documents that hold a text."""
    documents = {number: source.holding(text) for number, source in enumerate(seen.documents)}
    held_out = sum(len(Documents(source, "val").holding(text)) for source in record.data.sources)
    notes.append(
        f"{counted(sum(map(len, documents.values())), 'document')} for training with {text!r}, and {held_out:,} that "
        "no step sees, for validation"
    )
    rows = []
    held = {
        (source.name, int(number))
        for source, numbers in zip(seen.documents, documents.values(), strict=True)
        for number in numbers
    }
    for segment in record.within(steps):
        first, last = max(segment.first, steps.start), min(segment.last, steps.stop - 1)
        samples = range(record.samples(first).start, record.samples(last).stop)
        for sample in seen.samples_with(documents, samples):
            step = first + (sample - samples.start) // segment.size
            rows += [Row(step, sample, part) for part in seen.parts(sample) if (part.source, part.document) in held]
    return rows


def _steps(options: argparse.Namespace, record: Record) -> range:
    last = record.n_steps
    first = options.step or 1
    end = options.to or (options.step or last)
    for name, step in (("step", options.step), ("to", options.to)):
        if step is not None and not 1 <= step <= last:
            raise ConfigError(f"--{name}={step}: the run has the steps 1 to {last} (train.steps)")
    if end < first:
        raise ConfigError(f"--to={end} is before --step={first}")
    return range(first, end + 1)


def _require_few(n_samples: int, options: argparse.Namespace) -> None:
    """Raise ConfigError if there are too many samples to look at."""
    most, what = (_MOST_LISTED, "to list") if options.find is None else (_MOST_SEARCHED, "to search")
    if n_samples > most:
        fewer = "--samples" if options.samples else "--step and --to"
        raise ConfigError(
            f"{n_samples:,} samples are too many {what} at once; {fewer} of at most {most:,} samples work"
        )


def _run(options: argparse.Namespace) -> int:
    if options.step is None and options.find is None and options.samples is None:
        raise ConfigError("needs --step N or --find TEXT, e.g. which runs/default --step 120")
    if options.to is not None and options.step is None:
        raise ConfigError(f"--to={options.to} needs --step, where the steps begin")
    if options.rank_by_loss and (options.step is None or options.find is not None):
        raise ConfigError("--rank-by-loss is for the documents of --step, without --find")
    if options.find is not None and not options.find:
        raise ConfigError("--find needs a text, e.g. --find 'def main'")
    if options.json and not paths.expand(options.json).absolute().parent.is_dir():
        raise ConfigError(f"--json={options.json}: {paths.expand(options.json).absolute().parent} is not a folder")
    first, end = options.samples or (0, 1)
    if options.samples and (options.step is not None or options.find is not None or not 0 <= first < end):
        raise ConfigError("--samples needs the first sample and the one after the last, without --step and --find")
    record = read_record(options.run)
    steps = range(0) if options.samples else _steps(options, record)
    _require_few(end - first if options.samples else record.n_samples(steps), options)
    seen = Seen(record.data, record.config)
    notes = [_unknown(documents) for documents in seen.documents if not documents.known]
    notes += [
        f"the samples {gap.start} to {gap.stop - 1} were skipped before step {step}"
        for step in (steps if options.find is None else ())
        if (gap := record.skipped(step))
    ]
    if options.samples:
        rows = [Row(0, sample, part) for sample in range(first, end) for part in seen.parts(sample)]
    elif options.find is not None:
        rows = _rows_with_text(record, seen, steps, options.find, notes)
    elif options.rank_by_loss:
        cuda = options.device != "cpu" and torch.cuda.is_available()
        rows = _ranked(record, seen, steps, torch.device("cuda" if cuda else "cpu"), notes)
    else:
        rows = [Row(n, sample, part) for n in steps for sample in record.samples(n) for part in seen.parts(sample)]
    _print(options, record, steps, rows, notes)
    if options.json:
        _write(options, record, steps, rows, notes)
    return 0


def _unknown(documents: Documents) -> str:
    return (
        f"{documents.folder} does not tell where its documents came from. Prepared again from the same text, it has "
        "the same tokens and tells it; runs that use it resume as before"
    )


def _print(options: argparse.Namespace, record: Record, steps: range, rows: list[Row], notes: list[str]) -> None:
    for note in notes:
        print_line(f"note    {note}")
    if options.samples:
        print_line(
            f"samples {options.samples[0]} to {options.samples[1] - 1}: {counted(len(rows), 'part')} of documents"
        )
    elif options.find is None:
        first, end = record.samples(steps.start).start, record.samples(steps.stop - 1).stop
        which = f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} to {steps.stop - 1}"
        print_line(f"{which}: samples {first} to {end - 1}, {counted(len(rows), 'part')} of documents")
    else:
        at = sorted({row.step for row in rows})
        listed = ", ".join(map(str, at[:100])) + (f", and {len(at) - 100:,} more" if len(at) > 100 else "")
        print_line(f"seen at {counted(len(at), 'step')} of {len(steps):,}: {listed or '-'}")
    shown = rows if options.find is None else rows[:_LINES]
    for row in shown:
        print_line(row.line())
    if len(shown) < len(rows):
        print_line(f"and {len(rows) - len(shown):,} more; --json FILE has all")


def _write(options: argparse.Namespace, record: Record, steps: range, rows: list[Row], notes: list[str]) -> None:
    listed: Iterable[int] = steps if options.find is None else sorted({row.step for row in rows})
    content = {
        "run": str(options.run),
        "notes": notes,
        "steps": [[step, record.samples(step).start, record.samples(step).stop] for step in listed],
        "documents": [row.as_json() for row in rows],
    }
    try:
        paths.expand(options.json).write_text(
            json.dumps(content, indent=1) + "\n", encoding="utf-8", errors="backslashreplace"
        )
    except OSError as error:
        raise OutputError(f"--json={options.json}: {error.strerror or error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.which",
        description="The documents that steps of a run saw, or the steps that see a text.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=paths.argument, metavar="RUN", help="the folder of a run")
    parser.add_argument("--step", type=int, default=None, metavar="N", help="the step, or the first of several")
    parser.add_argument("--to", type=int, default=None, metavar="M", help="the last step")
    parser.add_argument(
        *("--samples",), type=int, nargs=2, metavar=("FIRST", "END"), help="instead: these samples, also skipped ones"
    )
    parser.add_argument("--rank-by-loss", action="store_true", help="sort by the loss under the checkpoint before")
    parser.add_argument("--find", default=None, metavar="TEXT", help="the steps whose documents hold this text")
    parser.add_argument("--json", type=paths.argument, default=None, metavar="FILE", help="also write all of it here")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute losses")
    return parser


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    options = _parser().parse_args(argv)
    prepare_streams()
    return run_cli("which", lambda: _run(options))
