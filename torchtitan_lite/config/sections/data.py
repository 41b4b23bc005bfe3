"""[tokenizer] and [data]: texts and prepared data, and the training objective."""

import functools
import operator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveFloat

from torchtitan_lite.config.paths import is_prepared
from torchtitan_lite.config.registry import Registry
from torchtitan_lite.config.section import (
    FORK,
    IS_PATH,
    PathText,
    Resume,
    Section,
    SizeOrZero,
    UsedIf,
    used_with,
)

_PREPARING = UsedIf("data.is_prepared", "text to prepare", operator.not_)
_TRAINING_TOKENIZER = UsedIf(
    "tokenizer.path data.is_prepared",
    "a tokenizer to train",
    lambda *given: not any(given),
)
_SPANS = used_with("data.objective", "span_corruption")
_PAIRS = used_with("data.objective", "pairs")


@dataclass(frozen=True)
class Reader:
    """A reader of texts: plain data, like an optimizer."""

    suffix: str  # of its files, e.g. ".csv"
    read: str  # "module:function", which is called with a stream and the Corpus (data/prepare/documents.py)


JSON_LINES = ".json", ".ndjson", ".jsonlines"  # read as .jsonl, unless data.text_suffixes names them
READERS = Registry(
    "data.text_suffixes",
    "docs/extending.md",
    Reader,
    {
        suffix: Reader(suffix, f"torchtitan_lite.data.prepare.documents:read_{name}")
        for suffix, name in {
            **{f".{name}": name for name in ("txt", "jsonl", "csv", "tsv", "parquet")},
            **dict.fromkeys(JSON_LINES, "jsonl"),
            "no suffix": "without_suffix",
        }.items()
    },
)


class TokenizerConfig(Section):
    on_resume: ClassVar[Resume] = Resume("refused", "if the tokenizer changes (compared by hash)", changes="content")

    path: PathText = ""
    """a tokenizer.json, or a folder that holds one; empty: train one on the text"""
    end_token: str = ""
    """with path: the token that ends a document; empty: <|endoftext|>, <|end_of_text|>, </s> or <eos>. Prepared \
data keeps its own"""
    begin_token: str = ""
    """with path: the token that begins each document and prompt, as for Llama and Gemma (`checkpoint.py import` \
sets it). Prepared data keeps its own"""
    vocab_size: Annotated[int, _TRAINING_TOKENIZER] = Field(default=4096, ge=257, le=2**31 - 1)
    """without path: size of the trained byte-level BPE"""


class DataConfig(Section):
    on_resume: ClassVar[Resume] = Resume(
        "fork",
        "if the data changes (compared by the hash of all tokens; in a mixture, by hash and weight of each named "
        "source)",
        changes="content",
    )

    path: Annotated[str | list[str], IS_PATH] = Field(default="", examples=["my_text"])
    """a prepared folder (docs/data.md), or your text: files, folders or globs; empty: Python's standard library"""
    sources: Annotated[dict[str, PositiveFloat], IS_PATH] = Field(
        default={}, examples=[{"data/web": 0.7, "data/code": 0.3}]
    )
    """instead of path: a mixture of prepared folders or texts, with weights: [data.sources] "data/web" = 0.7"""
    text_key: Annotated[str | list[str], _PREPARING] = "text"
    """the key of a .jsonl line, or the column of a table, that holds the text; "data.text" is the key "text" of \
the object "data"; a list is tried in order"""
    text_suffixes: Annotated[list[str], _PREPARING] = []
    """more suffixes to read as plain text, e.g. [".md", ".py"]; "" for files without one; or your own readers \
(docs/extending.md)"""
    on_error: Annotated[Literal["stop", "skip"], _PREPARING] = "stop"
    """skip: leave out unusable text, and list it in skipped.log; stop: refuse it"""
    val_fraction: Annotated[float, _PREPARING] = Field(default=0.05, gt=0, lt=1)
    """fraction of the documents held out for validation, by hash"""
    packing: Annotated[Literal["concat", "best_fit"], FORK] = "concat"
    """concat: cut sequences from the concatenated documents; best_fit: put whole documents into each sequence, and \
pad the rest"""
    document_mask: Annotated[bool, FORK] = False
    """attend within the document only, and restart positions with each"""
    objective: Annotated[Literal["causal", "span_corruption", "pairs"], FORK] = "causal"
    """causal: predict the next token; span_corruption: the encoder reads text with gaps, and the decoder fills \
them (T5); pairs: a source and its target"""
    noise_density: Annotated[float, FORK, _SPANS] = Field(default=0.15, gt=0, le=0.5)
    """span_corruption: fraction of the tokens to replace"""
    mean_span_length: Annotated[float, FORK, _SPANS] = Field(default=3.0, ge=1)
    """span_corruption: mean tokens of a replaced span"""
    target_len: Annotated[SizeOrZero, FORK, _PAIRS] = Field(default=0, examples=[32])
    """pairs: maximum tokens of a target (train.seq_len: of a source)"""
    blind_source: Annotated[bool, FORK, _PAIRS] = False
    """pairs: leave every source empty, as a baseline"""
    source_key: Annotated[str, _PAIRS, _PREPARING] = ""
    """pairs, if path is a .jsonl file or a table: the key or column of the source"""
    target_key: Annotated[str, _PAIRS, _PREPARING] = ""
    """likewise, of the target"""
    source_prefix: Annotated[str, _PAIRS, _PREPARING] = ""
    """likewise, text to put before each source, e.g. "summarize: \""""
    cache_dir: Annotated[PathText, _PREPARING] = ""
    """cache of prepared text; empty: $XDG_CACHE_HOME/torchtitan_lite or ~/.cache/torchtitan_lite"""
    skip_samples: Annotated[list[list[int]], FORK] = Field(default=[], examples=[[[800, 960]]])
    """samples of the run to skip: with [[800, 960]] no step sees 800 to 959"""

    @property
    def texts(self) -> list[str]:
        """The entries of `path` or `sources`; empty: the default text."""
        return [*self.sources, *([self.path] if self.path and isinstance(self.path, str) else self.path)]

    @property
    def is_prepared(self) -> bool:
        """Whether all data is in prepared folders."""
        return bool(self.texts) and all(map(is_prepared, self.texts))

    def position(self, first: int, size: int) -> int:
        """Move a batch starting at `first` past every skipped range that it overlaps."""
        for begin, end in self.skip_samples:
            first = end if begin - size < first < end else first
        return first


class SpanLengths(NamedTuple):
    """The lengths of a span-corruption sample, in tokens."""

    raw: int  # the text
    noise: int  # its replaced tokens
    spans: int  # number of replaced spans
    inputs: int  # the kept tokens, a sentinel for each span, and the end mark: at most seq_len
    targets: int  # the replaced tokens, a sentinel before each span, and the end mark


@functools.cache
def span_lengths(seq_len: int, noise_density: float, mean_span_length: float) -> SpanLengths:
    """Return the lengths of the longest text whose inputs fit into seq_len tokens.

    As T5's compute_input_and_target_lengths.

    >>> span_lengths(512, 0.15, 3.0)
    SpanLengths(raw=568, noise=85, spans=28, inputs=512, targets=114)
    """

    def lengths(raw: int) -> SpanLengths:
        noise = min(max(round(raw * noise_density), 1), raw - 1)
        spans = min(max(round(noise / mean_span_length), 1), noise, raw - noise)
        return SpanLengths(raw, noise, spans, raw - noise + spans + 1, noise + spans + 1)

    raw = max(seq_len - 1, 2)
    while lengths(raw + 1).inputs <= seq_len:
        raw += 1
    halves = noise_density == 0.5 and lengths(raw).targets > lengths(raw).inputs  # as T5: equal at a density of 0.5
    return lengths(raw - halves)
