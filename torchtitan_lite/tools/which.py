"""Lists the documents that steps of a run saw: `python -m torchtitan_lite.which RUN --step N [--to M]`.

Each line is a part of a document in a sample: file with line or row, token range, and the beginning of the text. --find
TEXT lists the steps that see any part of a document containing TEXT. The run's data must be where it was in training,
or in its cache.

Samples are drawn as in training, from token files that log each read. So this works for every objective and packing.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from torchtitan_lite import commands
from torchtitan_lite.config import paths
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.data import token_files
from torchtitan_lite.data.dataset import Source
from torchtitan_lite.data.token_files import ORIGINS, PAIRS, PLACE_BITS, TokenFiles, document_ends
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.terminal import counted
from torchtitan_lite.tools.load_model import OWN_FAMILY
from torchtitan_lite.tools.past_steps import Record, read_record, require_own_step

_TOKENS = 64  # tokens of a text to show
_SHOWN = 60  # characters of a text on the terminal
_SKIPPED = 1000  # samples in a command line
_TOGETHER = 1024  # documents decoded at a time

Range = tuple[int, int]  # first and end token in a stream
Sources = Mapping[Path, "Documents"]  # by folder


@dataclass(frozen=True)
class Row:
    """A part of a document in a sample of a step.

    It has the document's tokens first, ..., end - 1, which are tokens begin, ..., stop - 1 of the stream.
    """

    step: int
    sample: int
    source: str
    document: int
    side: str  # "source" or "target" of a pair, else empty
    file: str  # empty: not known
    unit: str  # "line" or "row"
    place: int  # the line or row
    tokens: int  # length of the document, with its marks
    first: int
    end: int
    begin: int
    stop: int
    text: str  # the beginning of this part

    def line(self) -> str:
        """Format the row for the terminal."""
        where = f"{self.file} {self.unit} {self.place}" if self.file else f"document {self.document}"
        side = f" ({self.side})" if self.side else ""
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return (
            f"step {self.step}  sample {self.sample}  {self.source}: {where}{side}, "
            f"tokens {self.first:,} to {self.end:,} of {self.tokens:,}: {text!r}"
        )


class Documents(TokenFiles):
    """The documents of one split of a source; samples that are drawn from it log what they read."""

    def __init__(self, source: Source, split: str = "train") -> None:
        """
        Raises:
            DataError: the folder is damaged.
        """
        super().__init__(source.folder, source.meta, split)
        self.name, self._meta = source.name, source.meta
        self.log: list[Range] = []
        self.ends = document_ends(source.folder, source.meta, split)
        self._tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
        self.known = ORIGINS in source.meta.files  # whether the documents' origins are known
        if self.known:
            self._files = json.loads((source.folder / ORIGINS).read_bytes())
            self._origins = np.memmap(source.folder / f"{split}.origins", dtype=np.int64, mode="r")

    def read(self, first: int, end: int) -> NDArray[Any]:
        """See TokenFiles."""
        self.log.append((first, end))
        return super().read(first, end)

    def span(self, document: int) -> Range:
        """Return the range of a document's tokens in the stream, with its marks."""
        return int(self.ends[document - 1]) if document else 1, int(self.ends[document])

    def in_range(self, read: Range) -> range:
        """Return the documents in a range of the stream. Leading marks only precede a document."""
        first, end = read
        if first >= end:
            return range(0)
        low, high = np.searchsorted(self.ends, [first, end - 1], side="right").tolist()
        if first >= self.span(low)[1] - len(self._meta.marks):
            low += 1
        return range(low, min(high + 1, len(self.ends)))

    def row(self, step: int, sample: int, document: int, read: Range) -> Row:
        """Return the part of a document in a sample's range of the stream."""
        begin, stop = self.span(document)
        first, end = max(read[0], begin), min(read[1], stop)
        file, unit, place = "", "", 0
        if self.known:
            number, place = divmod(int(self._origins[document]), 1 << PLACE_BITS)
            file, unit = self._files[number]
        side = ("source", "target")[document % 2] if PAIRS in self._meta.files else ""
        ids = super().read(first, min(end, first + _TOKENS)).tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        of_document = stop - begin, first - begin, end - begin
        return Row(step, sample, self.name, document, side, file, unit, place, *of_document, first, end, text)


def rows(
    record: Record, sources: Sources, steps: Iterable[int], wanted: Mapping[Path, Set[int]] | None = None
) -> Iterator[Row]:
    """Yield the parts of documents in each sample of these steps, in order.

    Args:
        wanted: by folder of a source, the documents to yield; None: all.
    """
    for step in steps:
        made = record.steps[step]
        for samples in made.mixture.sources:
            samples._stream = sources[samples._stream.path.parent]
        for sample in made.samples:
            made.mixture.draw(np.array([sample]), made.seed)
            for folder, documents in sources.items():
                for read in documents.log:
                    for number in documents.in_range(read):
                        if wanted is None or number in wanted[folder]:
                            yield documents.row(step, sample, number, read)
                documents.log.clear()


def documents_with(source: Source, split: str, text: str) -> set[int]:
    """Return the documents of a split whose decoded text contains `text`."""
    tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
    tokens, found = enumerate(token_files.documents(source.folder, source.meta, split)), set[int]()
    while together := dict(islice(tokens, _TOGETHER)):
        texts = tokenizer.decode_batch([*together.values()], skip_special_tokens=False)
        found |= {number for number, document in zip(together, texts, strict=True) if text in document}
    return found


def _steps(options: argparse.Namespace, record: Record) -> range:
    """Return the steps of --step and --to; all steps of the run if they are not given."""
    known = min(record.steps), max(record.steps)
    first = known[0] if options.step is None else options.step
    last = next((n for n in (options.to, options.step) if n is not None), known[1])
    for name, step in (("--step", first), ("--to", last)):
        if step not in record.steps:
            require_own_step(options.run, record.attempts, step, name)
            raise ConfigError(f"{name}={step}: the run has the steps {known[0]} to {known[1]} (train.steps)")
    if last < first:
        raise ConfigError(f"--to={last} is before --step={first}")
    return range(first, last + 1)


def _run(options: argparse.Namespace) -> int:
    if options.step is None and (options.find is None or options.to is not None):
        raise ConfigError("give --step N, optionally with --to M; or --find TEXT, optionally with --step and --to")
    FAMILIES.add(options.family)
    record = read_record(options.run)
    steps = _steps(options, record)
    sources = {folder: Documents(source) for folder, source in record.sources.items()}
    notes = [
        f"{documents.path.parent} does not record where its documents came from; prepare the same text again"
        for documents in sources.values()
        if not documents.known
    ]
    if steps.start <= (begin := record.attempts[0].step) or (begin and options.step is None):
        notes.append(f"the steps up to {begin} belong to {record.attempts[0].forked_from}, the parent of this fork")
    if options.find is not None:
        wanted = {folder: documents_with(each, "train", options.find) for folder, each in record.sources.items()}
        held_out = (len(documents_with(each, "val", options.find)) for each in record.sources.values())
        notes.append(
            f"{counted(sum(map(len, wanted.values())), 'document')} containing {options.find!r} in the training split, "
            f"{sum(held_out):,} in the validation split"
        )
        found = [*rows(record, sources, steps, wanted)]
        listed = sorted({row.step for row in found})
        shown = ", ".join(map(str, listed)) or "-"
        title = f"parts of these documents are seen at {counted(len(listed), 'step')} of {len(steps):,}: {shown}"
        own = {row.sample: row.step for row in found if row.step > record.attempts[0].step}
        if options.step is None and 0 < len(own) <= _SKIPPED:
            ranges = sorted([*record.config.data.skip_samples, *([n, n + 1] for n in own)])
            title += (
                f"\nto leave these parts out, start again, or fork from a checkpoint before step {min(own.values())}, "
                f'with "--data.skip_samples={ranges}"; then search the fork, which reads further samples'
            )
    else:
        skips = {step: skipped for step in steps if (skipped := record.skipped(step))}
        notes += [f"the samples {s.start} to {s.stop - 1} were skipped before step {n}" for n, s in skips.items()]
        found, listed = [*rows(record, sources, steps)], [*steps]
        which = f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} to {steps[-1]}"
        first, end = record.steps[steps.start].samples.start, record.steps[steps[-1]].samples.stop
        title = f"{which}: samples {first} to {end - 1}, {counted(len(found), 'part')} of documents"
    for line in (*(f"note    {note}" for note in notes), title, *(row.line() for row in found)):
        print(line)
    if options.json:
        content = {
            "run": str(options.run),
            "notes": notes,
            "steps": [[n, record.steps[n].samples.start, record.steps[n].samples.stop] for n in listed],
            "documents": [asdict(row) for row in found],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


OPTIONS: commands.Options = {
    "run": {"type": paths.expand, "metavar": "RUN", "help": "the folder of a run"},
    "--step": {"type": int, "metavar": "N", "help": "the step, or the first of several"},
    "--to": {"type": int, "metavar": "M", "help": "the last step"},
    "--find": {"metavar": "TEXT", "help": "the steps that see any part of a document containing this text"},
    "--json": {"type": paths.expand, "metavar": "FILE", "help": "also write the whole list here"},
    **OWN_FAMILY,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    text = "List the documents that steps of a run saw, or the steps that see documents containing a text."
    return commands.run("which", argv, OPTIONS, _run, description=text)
