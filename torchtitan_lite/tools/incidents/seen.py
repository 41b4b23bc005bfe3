"""The documents of a sample: what the loop's own loader reads while it draws the sample.

Nothing here knows how a sample is cut from the text. The token files are replaced by `Reads`, which notes each read,
and the loader draws the sample as in training. So this holds for every objective and packing.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet, Source
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.token_files import ORIGINS, PAIRS, PLACE_BITS, TokenFiles, document_ends

_SHOWN = 64  # tokens of a text that are shown
_TOGETHER = 1 << 20  # tokens decoded at a time
_SAMPLES = 1 << 16  # samples looked at at a time

Range = tuple[int, int]  # of tokens of a stream
Numbers = NDArray[np.int64]  # ascending


@dataclass(frozen=True)
class Part:
    """The tokens first, ..., end - 1 of a document, which are tokens begin, ..., stop - 1 of the stream."""

    source: str
    document: int
    side: str  # "source" or "target" of a pair, else empty
    file: str  # empty: not known
    unit: str  # "line" or "row"
    place: int  # the line or row
    tokens: int  # of the document, with the end mark
    first: int
    end: int
    begin: int
    stop: int
    text: str  # the beginning of this part


class Documents:
    """The documents of one split of a source."""

    def __init__(self, source: Source, split: str = "train") -> None:
        """
        Raises:
            DataError: the folder is damaged.
        """
        self.name, self.folder = source.name, source.folder
        self.stream = TokenFiles(source.folder, source.meta, split)
        self.ends = document_ends(source.folder, source.meta, split)
        self._tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
        self._pairs = PAIRS in source.meta.files
        self.known = ORIGINS in source.meta.files  # whether it is known where the documents came from
        if self.known:
            self._files = json.loads((source.folder / ORIGINS).read_bytes())
            self._origins = np.memmap(source.folder / f"{split}.origins", dtype=np.int64, mode="r")

    def span(self, document: int) -> Range:
        """The tokens of a document in the stream, with the end mark."""
        return int(self.ends[document - 1]) if document else 1, int(self.ends[document])

    def of(self, read: Range) -> range:
        """The documents of a range of the stream. An end mark that comes first only precedes a document."""
        first, end = read
        if first >= end:
            return range(0)
        low, high = np.searchsorted(self.ends, [first, end - 1], side="right").tolist()
        if first == self.span(low)[1] - 1:
            low += 1
        return range(low, min(high + 1, len(self.ends)))

    def parts(self, read: Range) -> Iterator[Part]:
        """The part of each document of a range of the stream."""
        for document in self.of(read):
            begin, stop = self.span(document)
            first, end = max(read[0], begin), min(read[1], stop)
            file, unit, place = "", "", 0
            if self.known:
                number, place = divmod(int(self._origins[document]), 1 << PLACE_BITS)
                file, unit = self._files[number]
            side = ("source", "target")[document % 2] if self._pairs else ""
            ids = self.stream.read(first, min(end, first + _SHOWN)).tolist()
            yield Part(
                *(self.name, document, side, file, unit, place, stop - begin, first - begin, end - begin, first, end),
                text=self._tokenizer.decode(ids, skip_special_tokens=True),
            )

    def holding(self, text: str) -> Numbers:
        """The documents whose decoded text holds `text`."""
        documents, first = list[int](), 0
        while first < len(self.ends):
            begin = self.span(first)[0]
            last = max(int(np.searchsorted(self.ends, begin + _TOGETHER, side="right")), first + 1)
            tokens = self.stream.read(begin, int(self.ends[last - 1]))
            spans = [self.span(document) for document in range(first, last)]
            ids = [tokens[a - begin : b - begin - 1].tolist() for a, b in spans]
            texts = self._tokenizer.decode_batch(ids, skip_special_tokens=False)
            documents += [first + i for i, document in enumerate(texts) if text in document]
            first = last
        return np.array(documents, np.int64)


@dataclass
class Reads:
    """Stands in for the TokenFiles of a source, and notes what is read."""

    documents: Documents
    log: list[tuple[Documents, Range]]  # of all sources
    blank: bool = False  # give zeros instead of reading

    def read(self, first: int, end: int) -> NDArray[Any]:
        """See TokenFiles."""
        self.log.append((self.documents, (first, end)))
        return np.zeros(end - first, np.uint16) if self.blank else self.documents.stream.read(first, end)


class Seen:
    """What samples of a run hold."""

    def __init__(self, data: DataSet, config: Config) -> None:
        """
        Raises:
            DataError: the data is damaged or does not suit the config.
        """
        self._mixture = open_samples(data, "train", config)
        self.documents = [Documents(source) for source in data.sources]
        self._log: list[tuple[Documents, Range]] = []
        self._reads = [Reads(documents, self._log) for documents in self.documents]
        for source, reads in zip(self._mixture.sources, self._reads, strict=True):
            source._stream = reads  # type: ignore[assignment]  # it reads in the same way
        self._seed = config.run.seed
        self._loader = Loader(
            self._mixture,
            micro_batch_size=1,
            rank=0,
            world_size=1,
            seed=self._seed,
            document_mask=config.data.document_mask,
        )

    def parts(self, sample: int) -> list[Part]:
        """The parts of documents that a sample of the run holds, in its order."""
        self._log.clear()
        self._loader.batch(sample, 1)
        return [part for documents, read in self._log for part in documents.parts(read)]

    def sequences_with(self, documents: Sequence[Numbers]) -> list[Numbers]:
        """The sequences of each source, in the order of its files, that hold one of its documents.

        Args:
            documents: of each source.
        """
        return [self._sequences_with(k, numbers) for k, numbers in enumerate(documents)]

    def _sequences_with(self, source: int, documents: Numbers) -> Numbers:
        samples, found = self._mixture.sources[source], list[int]()
        self._reads[source].blank = True
        for sequence in range(samples.n_samples if len(documents) else 0):
            self._log.clear()
            samples.draw(np.array([sequence]), None)
            ranges = [own.of(read) for own, read in self._log]
            if any(np.searchsorted(documents, r.start) < np.searchsorted(documents, r.stop) for r in ranges):
                found.append(sequence)
        self._reads[source].blank = False
        return np.array(found, np.int64)

    def samples_with(self, sequences: Sequence[Numbers], samples: range) -> list[int]:
        """Those of these samples of the run that are one of these sequences of their source."""
        found = list[int]()
        for first in range(samples.start, samples.stop, _SAMPLES):
            chunk = np.arange(first, min(first + _SAMPLES, samples.stop))
            which, numbers = self._mixture.locate(chunk)
            for k, (source, wanted) in enumerate(zip(self._mixture.sources, sequences, strict=True)):
                mine = which == k
                found += chunk[mine][np.isin(source.indices(numbers[mine], self._seed), wanted)].tolist()
        return sorted(found)
