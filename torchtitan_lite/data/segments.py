"""Segments: from which sample on a run mixes which sources, and where each source then was.

A run has one segment, until a phase or a fork changes its sources, weights or lengths: then the next one begins. Each
source continues where it was, at the sum of its samples in the segments before. A source is its text, known by the hash
of its tokens, so the name of its folder may change.

Positions count samples of one cut: the values of CUT decide how a text is cut into samples, and their order. In a new
cut, no sample can be called unread, so the source begins a new epoch.

Checkpoints save the segments, as JSON. Each has every source so far:

    {"sample": 8000, "sources": {KEY: {"name": "data/web", "weight": 0.7, "cut": [...], "start": 6400, "samples": 5000,
                                       "tokens": 1280000}}}

weight       0: not in this segment
start        samples of its cut that it has given before
samples      in an epoch of this cut
tokens       targets in an epoch
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.open_samples import open_samples

Segment = Mapping[str, Any]
CUT = (
    "run.seed",
    "train.seq_len",
    *(f"data.{key}" for key in ("packing", "objective", "noise_density", "mean_span_length", "target_len")),
)


def open_segment(
    data: DataSet, config: Config, segments: Sequence[Segment], sample: int
) -> tuple[Mixture, list[Segment]]:
    """Open the mixture of a run from this sample on.

    Args:
        segments: of the samples before; a checkpoint of version 1.0 has none, which computed all samples since 0 alike.

    Returns:
        the mixture, and the segments with its own: the last one continues if sources, weights and cut are the same.
    """
    mixture = open_samples(data, "train", config)
    segments = [each for each in segments if each["sample"] < sample]  # one without samples leaves no trace
    last: Segment = segments[-1] if segments else {"sample": 0, "sources": {}}
    hashes = [source.meta.tokens_sha256[:16] for source in data.sources]
    keys = [f"{digest}{'+' * hashes[:n].count(digest)}" for n, digest in enumerate(hashes)]  # a text may be there twice
    values, mixed = flatten(config), active(last)
    cut = [values[key] for key in CUT]
    now = [(key, source.weight, cut) for key, source in zip(keys, data.sources, strict=True)]
    if not segments or now == [(key, each["weight"], each["cut"]) for key, each in mixed.items()]:
        sample, segments = last["sample"], segments[:-1]
    sources = {key: {**each, "weight": 0} for key, each in last["sources"].items()}
    if sample > last["sample"]:
        before = Mixture([], [each["weight"] for each in mixed.values()], [])
        before.begin(last["sample"], {key: each["start"] for key, each in mixed.items()})
        for key, position in before.positions(sample).items():
            sources[key]["start"] = position
    for key, source, opened in zip(keys, data.sources, mixture.sources, strict=True):
        place = sources.pop(key, {"cut": cut, "start": 0})
        # in a new cut: the beginning of an epoch that no earlier one was
        start = place["start"] if place["cut"] == cut else -(-place["start"] // place["samples"]) * opened.n_samples
        sizes = {"samples": opened.n_samples, "tokens": round(opened.n_samples * opened.mean_tokens)}
        sources[key] = {"name": source.name, "weight": source.weight, "cut": cut, "start": start, **sizes}
    mixture.begin(sample, {key: sources[key]["start"] for key in keys})
    return mixture, [*segments, {"sample": sample, "sources": sources}]


def active(segment: Segment) -> dict[str, Any]:
    """Return the sources that a segment mixes, in the order of the mixture."""
    return {key: each for key, each in segment["sources"].items() if each["weight"]}
