"""The documents that steps of a run saw: `python -m torchtitan_lite.which RUN --step N [--to M]`.

Each line is a part of a document in a sample: its file with line or row, which of its tokens, and how they begin.
--find TEXT gives the steps that see the documents that hold a text. The run's data must be where it was in training, or
in its cache.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from torchtitan_lite.config import paths
from torchtitan_lite.errors import ConfigError, run_cli
from torchtitan_lite.terminal import counted, prepare_streams, print_line
from torchtitan_lite.tools.incidents.record import Record, read_record, require_own_step
from torchtitan_lite.tools.incidents.seen import Documents, Part, Seen

_LINES = 200  # of documents on the terminal, if TEXT is in many
_STEPS = 100  # likewise
_SHOWN = 60  # characters of a text on the terminal


@dataclass(frozen=True)
class Row:
    """A part of a document in a sample of a step."""

    step: int
    sample: int
    part: Part

    def line(self) -> str:
        """The row for the terminal."""
        part = self.part
        where = f"{part.file} {part.unit} {part.place}" if part.file else f"document {part.document}"
        side = f" ({part.side})" if part.side else ""
        text = part.text if len(part.text) <= _SHOWN else f"{part.text[:_SHOWN]}..."
        return (
            f"step {self.step}  sample {self.sample}  {part.source}: {where}{side}, "
            f"tokens {part.first:,} to {part.end:,} of {part.tokens:,}: {text!r}"
        )


def _rows(record: Record, seen: Seen, steps: range) -> Iterator[Row]:
    for step in steps:
        for sample in record.samples[step]:
            yield from (Row(step, sample, part) for part in seen.parts(sample))


def _rows_with_text(record: Record, seen: Seen, steps: range, text: str, notes: list[str]) -> Iterator[Row]:
    """The rows of documents that hold a text."""
    documents = [source.holding(text) for source in seen.documents]
    held_out = sum(len(Documents(source, "val").holding(text)) for source in record.data.sources)
    notes.append(
        f"{counted(sum(map(len, documents)), 'document')} for training with {text!r}, and {held_out:,} that no step "
        "sees, for validation"
    )
    numbers = {source.name: set(found.tolist()) for source, found in zip(seen.documents, documents, strict=True)}
    starts = [record.samples[step].start for step in steps]
    samples = range(starts[0], record.samples[steps[-1]].stop)
    for sample in seen.samples_with(seen.sequences_with(documents), samples):
        step = steps[int(np.searchsorted(starts, sample, side="right")) - 1]
        if sample in record.samples[step]:  # else it was skipped
            yield from (Row(step, sample, part) for part in seen.parts(sample) if part.document in numbers[part.source])


def _steps(options: argparse.Namespace, record: Record) -> range:
    """The steps of --step and --to; all that the run has if they are not given."""
    first = min(record.samples) if options.step is None else options.step
    last = options.to or options.step or max(record.samples)
    for name, step in (("--step", first), ("--to", last)):
        require_own_step(options.run, record.attempts, step, name)
        if step not in record.samples:
            raise ConfigError(
                f"{name}={step}: the run has the steps {min(record.samples)} to {max(record.samples)} (train.steps)"
            )
    if last < first:
        raise ConfigError(f"--to={last} is before --step={first}")
    return range(first, last + 1)


def _run(options: argparse.Namespace) -> int:
    if options.step is None and (options.find is None or options.to is not None):
        raise ConfigError("give --step N, also with --to M; or --find TEXT, also with --step and --to")
    if options.json and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json={options.json}: {options.json.absolute().parent} is not a folder")
    record = read_record(options.run)
    steps = _steps(options, record)
    seen = Seen(record.data, record.config)
    notes = [
        f"{documents.folder} does not tell where its documents came from. Prepared again from the same text, it has "
        "the same tokens and tells it"
        for documents in seen.documents
        if not documents.known
    ]
    if options.find is not None:
        if not options.step and (other := record.attempts[0].forked_from):
            notes.append(f"the steps before {steps.start} are not of this run, which was forked from {other}")
        rows, most = [*_rows_with_text(record, seen, steps, options.find, notes)], _LINES
        listed = sorted({row.step for row in rows})
        more = f", and {len(listed) - _STEPS:,} more" if len(listed) > _STEPS else ""
        shown = ", ".join(map(str, listed[:_STEPS])) or "-"
        title = f"seen at {counted(len(listed), 'step')} of {len(steps):,}: {shown}{more}"
    else:
        skips = {step: skipped for step in steps if (skipped := record.skipped(step))}
        notes += [f"the samples {s.start} to {s.stop - 1} were skipped before step {n}" for n, s in skips.items()]
        rows, listed = [*_rows(record, seen, steps)], [*steps]
        most = len(rows)
        which = f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} to {steps[-1]}"
        first, end = record.samples[steps.start].start, record.samples[steps[-1]].stop
        title = f"{which}: samples {first} to {end - 1}, {counted(len(rows), 'part')} of documents"
    for line in (*(f"note    {note}" for note in notes), title, *(row.line() for row in rows[:most])):
        print_line(line)
    if len(rows) > most:
        print_line(f"and {len(rows) - most:,} more; --json FILE has all")
    if options.json:
        content = {
            "run": str(options.run),
            "notes": notes,
            "steps": [[step, record.samples[step].start, record.samples[step].stop] for step in listed],
            "documents": [{"step": row.step, "sample": row.sample, **asdict(row.part)} for row in rows],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.which",
        description="The documents that steps of a run saw, or the steps that see a text.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=paths.expand, metavar="RUN", help="the folder of a run")
    parser.add_argument("--step", type=int, default=None, metavar="N", help="the step, or the first of several")
    parser.add_argument("--to", type=int, default=None, metavar="M", help="the last step")
    parser.add_argument("--find", default=None, metavar="TEXT", help="the steps whose documents hold this text")
    parser.add_argument("--json", type=paths.expand, default=None, metavar="FILE", help="also write all of it here")
    options = parser.parse_args(argv)
    prepare_streams()
    return run_cli("which", lambda: _run(options))
