"""[tokenizer] and [data]: texts and prepared data, and the training objective."""

import functools
import json
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveFloat

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import is_prepared, not_downloaded, problem, unfound
from torchtitan_lite.config.registry import Registry
from torchtitan_lite.config.section import (
    FORK,
    IS_PATH,
    Machine,
    PathText,
    Resume,
    Rules,
    Section,
    SizeOrZero,
    UsedIf,
    used_with,
)

if TYPE_CHECKING:
    from torchtitan_lite.config.schema import Config


_PREPARING = UsedIf("data.path data.sources", "text to prepare", lambda c: not c.data.is_prepared)
_TRAINING_TOKENIZER = UsedIf(
    "tokenizer.path data.path data.sources",
    "a tokenizer to train",
    lambda c: not c.tokenizer.path and not c.data.is_prepared,
)
_SPANS = used_with("data.objective", "span_corruption")
_PAIRS = used_with("data.objective", "pairs")


@dataclass(frozen=True)
class Reader:
    """A reader of texts: plain data, like an optimizer."""

    suffix: str  # of its files, e.g. ".csv"
    read: str  # "module:function", which is called with a stream and the Corpus (data/prepare/documents.py)

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        read: Callable[..., Any] = pkgutil.resolve_name(self.read)
        return read


JSON_LINES = ".json", ".ndjson", ".jsonlines"  # read as .jsonl, unless data.text_suffixes names them
_BUILT_IN = {
    suffix: Reader(suffix, f"torchtitan_lite.data.prepare.documents:read_{name}")
    for suffix, name in {
        **{f".{name}": name for name in ("txt", "jsonl", "csv", "tsv", "parquet")},
        **dict.fromkeys(JSON_LINES, "jsonl"),
        "no suffix": "without_suffix",
    }.items()
}
READERS = Registry("data.text_suffixes", "docs/extending.md", Reader, _BUILT_IN)


class TokenizerConfig(Section):
    on_resume: ClassVar[Resume] = Resume(
        "kept", "refused if the tokenizer changes (compared by hash)", changes="nothing"
    )

    path: PathText = ""
    """a tokenizer.json to use, or a folder that holds one; empty: train one on the text"""
    end_token: str = ""
    """with path: the token that ends a document; empty: <|endoftext|>, <|end_of_text|>, </s> or <eos>. Prepared data \
keeps its own"""
    begin_token: str = ""
    """with path: the token that begins each document and prompt, as in the pretraining of Llama, Mistral and Gemma \
(`checkpoint.py import` sets it); empty: none, the end token before a document begins it. Prepared data keeps its own"""
    vocab_size: Annotated[int, _TRAINING_TOKENIZER] = Field(default=4096, ge=257, le=2**31 - 1)
    """without path: vocabulary size of the trained byte-level BPE (256 bytes, 1 end token, merges)"""


class DataConfig(Section):
    on_resume: ClassVar[Resume] = Resume(
        "kept",
        "a fork if the data changes (compared by the hash of all tokens; in a mixture, by hash and weight of each "
        "named source)",
        changes="nothing",
    )

    path: Annotated[str | list[str], IS_PATH] = Field(default="", examples=["my_text"])
    """a prepared folder (docs/data.md), or your text: files, folders or globs; empty: Python's standard library"""
    sources: Annotated[dict[str, PositiveFloat], IS_PATH] = Field(
        default={}, examples=[{"data/web": 0.7, "data/code": 0.3}]
    )
    """instead of path: a mixture of prepared folders or texts, with weights: [data.sources] "data/web" = 0.7"""
    text_key: Annotated[str | list[str], _PREPARING] = "text"
    """the key of a .jsonl line, or the column of a .csv, .tsv or .parquet file, that holds the text, e.g. "data.text" \
for the key "text" of the object "data"; a list is tried in order"""
    text_suffixes: Annotated[list[str], _PREPARING] = []
    """more suffixes to read: [".md", ".py"] as plain text, like .txt; "" for files without a suffix; or your own \
readers (docs/extending.md)"""
    on_error: Annotated[Literal["stop", "skip"], _PREPARING] = "stop"
    """skip: leave out unusable text, and list it in skipped.log of the cached folder; stop: refuse it"""
    val_fraction: Annotated[float, _PREPARING] = Field(default=0.05, gt=0, lt=1)
    """fraction of the documents held out for validation, chosen by hash"""
    packing: Annotated[Literal["concat", "best_fit"], FORK] = "concat"
    """concat: cut sequences from the concatenated documents; best_fit: put several whole documents into each sequence \
and pad the rest"""
    document_mask: Annotated[bool, FORK] = False
    """restrict attention to the document, and restart positions with each document"""
    objective: Annotated[Literal["causal", "span_corruption", "pairs"], FORK] = "causal"
    """causal: predict the next token; span_corruption: T5's pretraining, the encoder reads text with gaps and the \
decoder fills them; pairs: a source and its target"""
    noise_density: Annotated[float, FORK, _SPANS] = Field(default=0.15, gt=0, le=0.5)
    """span_corruption: fraction of the tokens to replace"""
    mean_span_length: Annotated[float, FORK, _SPANS] = Field(default=3.0, ge=1)
    """span_corruption: mean length of a replaced span, in tokens"""
    target_len: Annotated[SizeOrZero, FORK, _PAIRS] = 0
    """pairs: maximum tokens of a target (train.seq_len: of a source); span_corruption derives it from train.seq_len"""
    blind_source: Annotated[bool, FORK, _PAIRS] = False
    """pairs: leave every source empty, as a baseline without inputs"""
    source_key: Annotated[str, _PAIRS, _PREPARING] = ""
    """pairs, if path is a .jsonl, .csv or .parquet file: the key or column of the source"""
    target_key: Annotated[str, _PAIRS, _PREPARING] = ""
    """likewise, of the target"""
    source_prefix: Annotated[str, _PAIRS, _PREPARING] = ""
    """likewise, a text to put before each source, e.g. "summarize: \""""
    cache_dir: Annotated[PathText, _PREPARING] = ""
    """cache folder for prepared text; empty: $XDG_CACHE_HOME/torchtitan_lite or ~/.cache/torchtitan_lite"""
    skip_samples: Annotated[list[list[int]], FORK] = Field(default=[], examples=[[[800, 960]]])
    """ranges of the run's samples to skip: with [[800, 960]] no step sees the samples 800 to 959"""

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


def rules(config: "Config", machine: Machine) -> Rules:
    """Yield the broken rules of objectives and of lists in [data]."""
    data, train, model = config.data, config.train, config.model
    encoder_decoder = FAMILIES[model.family].encoder_decoder
    if data.objective == "causal" and encoder_decoder:
        yield (
            "model.family data.objective",
            f'model.family = "{model.family}" is an encoder-decoder, which does not learn from data.objective = '
            '"causal"; "span_corruption" works on text, and "pairs" on sources with targets',
        )
    if data.objective == "span_corruption":
        if not encoder_decoder:
            others = " or ".join(f'"{name}"' for name, family in FAMILIES.items() if family.encoder_decoder)
            yield (
                "model.family data.objective",
                f'data.objective = "span_corruption" needs an encoder-decoder, and model.family = "{model.family}" is '
                f'a decoder; data.objective = "causal" works{f", or model.family = {others}" if others else ""}',
            )
        needed = span_lengths(train.seq_len, data.noise_density, data.mean_span_length).inputs
        if needed > train.seq_len:
            yield (
                "train.seq_len data.objective",
                f"train.seq_len = {train.seq_len} has no room for a kept token, a sentinel and the end mark of "
                f'data.objective = "span_corruption"; train.seq_len = {needed} works',
            )
    if data.objective == "pairs":
        yield from _pair_rules(config)
    for key, off in (("packing", "concat"), ("document_mask", False)):
        value = getattr(data, key)
        if value != off and data.objective != "causal":
            yield (
                f"data.{key} data.objective",
                f'data.{key} = {json.dumps(value)} is for data.objective = "causal", not "{data.objective}"; '
                f"leave it out",
            )
    bounds = [bound for pair in data.skip_samples for bound in pair]
    if any(len(pair) != 2 or not 0 <= pair[0] < pair[1] for pair in data.skip_samples) or bounds != sorted(bounds):
        yield (
            "data.skip_samples",
            f"data.skip_samples = {data.skip_samples} should be pairs of a first sample and the one after "
            "the last, ascending and without overlap, e.g. [[800, 960], [2400, 2480]]",
        )
    if data.sources and data.path:
        yield (
            "data.path data.sources",
            "data.path and data.sources are both set; leave data.path out, or name it in data.sources with a weight",
        )


def _pair_rules(config: "Config") -> Rules:
    """Yield the broken rules of pairs."""
    data, train, model = config.data, config.train, config.model
    if not data.target_len:
        yield (
            "data.target_len data.objective",
            'data.objective = "pairs" needs data.target_len, the maximum tokens of a target, e.g. data.target_len = 32 '
            "(train.seq_len is that of a source)",
        )
    keys = [data.source_key, data.target_key]
    if (any(keys) or data.source_prefix) and (not all(keys) or keys[0] == keys[1]):
        yield (
            "data.source_key data.target_key",
            f"data.source_key = {data.source_key!r} and data.target_key = {data.target_key!r} should name the columns "
            'or keys of a source and of its target, e.g. data.source_key = "text" and data.target_key = "headline"',
        )
    is_decoder = not FAMILIES[model.family].encoder_decoder
    if is_decoder and train.seq_len <= model.max_seq_len < config.input_len:
        yield (
            "train.seq_len data.target_len model.max_seq_len",
            f"a source of train.seq_len = {train.seq_len} and a target of data.target_len = {data.target_len} tokens "
            f"are longer than model.max_seq_len = {model.max_seq_len}; model.max_seq_len = {config.input_len} works",
        )


def local_rules(config: "Config", machine: Machine) -> Rules:
    """Yield the broken rules of texts, prepared folders and tokenizers."""
    data, model, tokenizer = config.data, config.model, config.tokenizer
    prepared = [path for path in data.texts if is_prepared(path)]
    if not (tokenizer.path or prepared or model.init_from) and 0 < model.vocab_size < tokenizer.vocab_size:
        yield (
            "model.vocab_size tokenizer.vocab_size",
            f"model.vocab_size = {model.vocab_size} is smaller than tokenizer.vocab_size = "
            f"{tokenizer.vocab_size}; model.vocab_size = 0 takes the tokenizer's",
        )
    if tokenizer.path and (wrong := problem(tokenizer.path)):
        yield "tokenizer.path", f"tokenizer.path: {wrong}{not_downloaded(tokenizer.path)}"
    if missing := [why for path in data.texts if (why := unfound(path))]:
        key = "data.sources" if data.sources else "data.path"
        yield key, f"{key}: {'; '.join(missing)}"
    if prepared and isinstance(data.path, list):
        yield (
            "data.path",
            f"data.path: {prepared[0]} is a prepared folder, which can't be in a list; use "
            f'path = "{prepared[0]}", or mix it with [data.sources] "{prepared[0]}" = 1.0',
        )
