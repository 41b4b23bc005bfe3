"""The documents of a sample: what the loop's own loader reads while it draws the sample.

Nothing here knows how a sample is cut from the text. The token files are replaced by `Reads`, which notes each read,
and the loader draws the sample as in training. So this holds for every objective and packing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet, Source
from torchtitan_lite.data.loader import Loader, MicroBatch
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.prepare.writer import PLACE_BITS, origins_name, read_origins
from torchtitan_lite.data.samples import Samples
from torchtitan_lite.data.token_files import PAIRS, TokenFiles, document_ends
from torchtitan_lite.errors import DataError

_SHOWN = 64  # tokens of a text that are shown
_TOGETHER = 1 << 20  # tokens decoded at a time
_SEQUENCES = 1 << 16  # sequences looked at at a time

Range = tuple[int, int]  # of tokens of a stream


class Reads:
    """Stands in for the TokenFiles of a source, and notes what is read."""

    def __init__(self, stream: Any, *, blank: bool = False) -> None:
        """
        Args:
            blank: give zeros instead of reading.
        """
        self._stream, self._blank = stream, blank
        self.ranges: list[Range] = []
        self.note: Callable[[Range], object] = self.ranges.append

    def read(self, first: int, end: int) -> NDArray[Any]:
        """See TokenFiles."""
        self.note((first, end))
        return np.zeros(end - first, np.uint16) if self._blank else self._stream.read(first, end)


@dataclass(frozen=True)
class Part:
    """The tokens first, ..., end - 1 of a document, which are tokens begin, ..., stop - 1 of the stream."""

    source: str
    document: int
    side: str  # "source" or "target" of a pair, else empty
    file: str  # empty: not known
    unit: str  # "line" or "row"
    place: int  # the line or row; 0: not known
    tokens: int  # of the document, with the end mark
    first: int
    end: int
    begin: int
    stop: int
    text: str  # the beginning of this part
    document_text: str  # the beginning of the document


class Documents:
    """The documents of one split of a source."""

    def __init__(self, source: Source, split: str = "train") -> None:
        """
        Raises:
            DataError: the folder is damaged.
        """
        self.name, self.folder, self.split = source.name, source.folder, split
        self.stream = TokenFiles(source.folder, source.meta, split)
        self.ends = document_ends(source.folder, source.meta, split)
        self._tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
        self._pairs = PAIRS in source.meta.files
        self._files = read_origins(source.folder)
        self._origins: NDArray[np.int64] = np.empty(0, np.int64)
        if self._files is not None:
            file = source.folder / origins_name(split)
            self._origins = np.memmap(file, dtype=np.int64, mode="r")
            if len(self._origins) != len(self.ends):
                raise DataError(f"{file} has {len(self._origins):,} documents, but {split}.idx has {len(self.ends):,}")

    @property
    def known(self) -> bool:
        """Whether it is known where the documents came from."""
        return self._files is not None

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
            if self._files is not None:
                number, place = divmod(int(self._origins[document]), 1 << PLACE_BITS)
                file, unit = self._files[number]
            side = ("source", "target")[document % 2] if self._pairs else ""
            yield Part(
                *(self.name, document, side, file, unit, place, stop - begin, first - begin, end - begin, first, end),
                text=self._text(first, end),
                document_text=self._text(begin, stop),
            )

    def _text(self, first: int, end: int) -> str:
        ids = self.stream.read(first, min(end, first + _SHOWN)).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def holding(self, text: str) -> NDArray[np.int64]:
        """The documents whose decoded text holds `text`, ascending."""
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


class Seen:
    """What samples of a run hold."""

    def __init__(self, data: DataSet, config: Config) -> None:
        """
        Raises:
            DataError: the data is damaged or does not suit the config.
        """
        self.mixture = open_samples(data, "train", config)
        self.documents = [Documents(source) for source in data.sources]
        self.reads = [Reads(source._stream) for source in self.mixture.sources]
        for source, reads in zip(self.mixture.sources, self.reads, strict=True):
            source._stream = reads  # type: ignore[assignment]  # it reads in the same way
        self._loader = Loader(
            self.mixture,
            micro_batch_size=1,
            rank=0,
            world_size=1,
            seed=config.run.seed,
            document_mask=config.data.document_mask,
        )
        self._seed = config.run.seed
        self.causal = config.data.objective == "causal"
        self._sequences: dict[int, NDArray[np.int64]] = {}  # by source, of `samples_with`

    def draw(self, sample: int) -> tuple[MicroBatch, list[tuple[Documents, Range]]]:
        """A sample of the run as a batch of one row, and what was read for it, in order."""
        log: list[tuple[Documents, Range]] = []
        for documents, reads in zip(self.documents, self.reads, strict=True):
            reads.note = lambda read, documents=documents: log.append((documents, read))  # type: ignore[misc]
        return self._loader.batch(sample, 1).micro_batches[0], log

    def parts(self, sample: int) -> list[Part]:
        """The parts of documents that a sample of the run holds, in its order."""
        return [part for documents, read in self.draw(sample)[1] for part in documents.parts(read)]

    def samples_with(self, documents: dict[int, NDArray[np.int64]], samples: range) -> list[int]:
        """Those of these samples that hold one of these documents.

        Args:
            documents: by number of their source; the same in each call.
        """
        mixture, found = self.mixture, list[int]()
        if not self._sequences:
            self._sequences = {k: self._sequences_with(mixture.sources[k], k, each) for k, each in documents.items()}
        for first in range(samples.start, samples.stop, _SEQUENCES):
            chunk = np.arange(first, min(first + _SEQUENCES, samples.stop))
            which, numbers = mixture.interleave.locate(chunk)
            for source, holding in self._sequences.items():
                mine = which == source
                indices = mixture.sources[source].indices(numbers[mine], self._seed)
                found += chunk[mine][np.isin(indices, holding)].tolist()
        return sorted(found)

    def _sequences_with(self, samples: Samples, source: int, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences of a source, in the order of its files, that hold one of these documents."""
        own_documents, sequences = self.documents[source], list[int]()
        if not len(documents):
            return documents
        stream, reads = samples._stream, Reads(None, blank=True)
        samples._stream = reads  # type: ignore[assignment]
        try:
            for sequence in range(samples.n_samples):
                reads.ranges.clear()
                samples.draw(np.array([sequence]), None)
                ranges = [own_documents.of(read) for read in reads.ranges]
                if any(np.searchsorted(documents, r.start) < np.searchsorted(documents, r.stop) for r in ranges):
                    sequences.append(sequence)
        finally:
            samples._stream = stream
        return np.array(sequences, np.int64)
