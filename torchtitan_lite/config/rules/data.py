"""Rules of the objectives and the lists in [data]."""

import json

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, Machine, Rules
from torchtitan_lite.config.sections.data import span_lengths


def rules(config: Config, machine: Machine) -> Rules:
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
    for key, value, off in (("packing", data.packing, "concat"), ("document_mask", data.document_mask, False)):
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


def _pair_rules(config: Config) -> Rules:
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
            "data.source_key data.target_key data.source_prefix",
            f"data.source_key = {data.source_key!r} and data.target_key = {data.target_key!r} should name the columns "
            'or keys of a source and of its target, e.g. data.source_key = "text" and data.target_key = "headline"',
        )
    if not FAMILIES[model.family].encoder_decoder and train.seq_len <= model.max_seq_len < config.input_len:
        yield (
            "train.seq_len data.target_len model.max_seq_len",
            f"a source of train.seq_len = {train.seq_len} and a target of data.target_len = {data.target_len} tokens "
            f"are longer than model.max_seq_len = {model.max_seq_len}; model.max_seq_len = {config.input_len} works",
        )
