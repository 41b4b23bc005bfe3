"""Values and rules that only some configs need, loaded for those: FSDP1's sharding strategies, objectives other than
causal, sizes and rules of encoder-decoders, other spellings, `init_from`, and what torch.compile and offloading need.

The strategies are [fsdp] keys (source: the migration guide in PyTorch's FSDP2 tutorial). A strategy sets keys
that are not set explicitly; an explicit key that contradicts it is an error. As in FSDP1, a hybrid strategy shards
within one machine, unless dp_replicate or dp_shard is set.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tomli

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import is_prepared, problem
from torchtitan_lite.errors import ConfigError, shortened

STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"reshard_after_forward": True, "dp_replicate": 1},
    "SHARD_GRAD_OP": {"reshard_after_forward": False, "dp_replicate": 1},
    "HYBRID_SHARD": {"reshard_after_forward": True},
    "_HYBRID_SHARD_ZERO2": {"reshard_after_forward": False},
    "NO_SHARD": {"reshard_after_forward": False, "dp_shard": 1},
}


def strategy_keys(strategy: str, explicit: Mapping[str, Any], local_world_size: int) -> dict[str, Any]:
    """The [fsdp] keys of a strategy, given the explicit ones; empty for an unknown strategy."""
    keys = dict(STRATEGIES.get(strategy, {}))
    if "HYBRID" in strategy and explicit.get("dp_shard", -1) == -1 and explicit.get("dp_replicate", -1) == -1:
        keys["dp_shard"] = local_world_size
    return keys


def contradiction(strategy: str, key: str, value: Any) -> str:
    """How an explicit [fsdp] key contradicts a strategy; empty if it does not."""
    wanted = STRATEGIES.get(strategy, {})
    if key in wanted and value not in (wanted[key], "default" if key == "reshard_after_forward" else -1):
        return f'sharding_strategy = "{strategy}" means {key} = {str(wanted[key]).lower()}'
    if key == "dp_replicate" and "HYBRID" in strategy and value == 1:
        return f'sharding_strategy = "{strategy}" needs replicas; without them use "FULL_SHARD" or "SHARD_GRAD_OP"'
    if key == "dp_shard" and "HYBRID" in strategy and value == 1:
        return f'sharding_strategy = "{strategy}" needs shards; without them use "NO_SHARD"'
    return ""


def _t5(dim: int, n_layers: int, n_heads: int, hidden_dim: int, head_dim: int = 64, *, v1_0: bool = False) -> Any:
    names = "dim", "n_layers", "n_heads", "hidden_dim", "head_dim"
    sizes = dict(zip(names, (dim, n_layers, n_heads, hidden_dim, head_dim), strict=True)) | {"norm_eps": 1e-6}
    return sizes | ({"gated": False, "tie_embeddings": True, "scale_output": True} if v1_0 else {})


T5: dict[str, dict[str, Any]] = {
    # blocks of each stack; dim, layers, heads, hidden
    "1M": _t5(128, 2, 4, 256, 32),
    "3M": _t5(192, 3, 6, 512, 32),
    "10M": _t5(320, 4, 5, 832),
    "t5-small": _t5(512, 6, 8, 2048, v1_0=True),
    "t5-base": _t5(768, 12, 12, 3072, v1_0=True),
    "t5-large": _t5(1024, 24, 16, 4096, v1_0=True),
    "t5-3b": _t5(1024, 24, 32, 16384, 128, v1_0=True),
    "t5-11b": _t5(1024, 24, 128, 65536, 128, v1_0=True),
    "t5-v1_1-small": _t5(512, 8, 6, 1024),
    "t5-v1_1-base": _t5(768, 12, 12, 2048),
    "t5-v1_1-large": _t5(1024, 24, 16, 2816),
    "t5-v1_1-xl": _t5(2048, 24, 32, 5120),
    "t5-v1_1-xxl": _t5(4096, 24, 64, 10240),
}


class SpanLengths(NamedTuple):
    """The lengths of a sample of span corruption, in tokens."""

    raw: int  # of the text
    noise: int  # replaced tokens of it
    spans: int
    inputs: int  # the kept tokens, a sentinel for each span, and the end mark: at most seq_len
    targets: int  # the replaced tokens, a sentinel before each span, and the end mark


@functools.cache
def span_lengths(seq_len: int, noise_density: float, mean_span_length: float) -> SpanLengths:
    """The longest text whose inputs fit into seq_len tokens (T5's compute_input_and_target_lengths).

    >>> span_lengths(512, 0.15, 3.0)
    SpanLengths(raw=568, noise=85, spans=28, inputs=512, targets=114)
    """

    def of(raw: int) -> SpanLengths:
        noise = min(max(round(raw * noise_density), 1), raw - 1)
        spans = min(max(round(noise / mean_span_length), 1), noise, raw - noise)
        return SpanLengths(raw, noise, spans, raw - noise + spans + 1, noise + spans + 1)

    raw = max(seq_len - 1, 2)
    while of(raw + 1).inputs <= seq_len:
        raw += 1
    halves = noise_density == 0.5 and of(raw).targets > of(raw).inputs  # as T5: equal lengths for a density of 0.5
    return of(raw - halves)


def objective_conflicts(config: Any) -> dict[str, str]:
    """The broken rules between an objective and other keys of a schema.Config."""
    data, train, model = config.data, config.train, config.model
    encoder_decoder = FAMILIES[model.family].encoder_decoder
    found = _encoder_decoder_conflicts(config) if encoder_decoder else {}
    if encoder_decoder and data.objective == "causal":
        found["model.family data.objective"] = (
            f'model.family = "{model.family}" is an encoder-decoder, which does not learn from data.objective = '
            '"causal"; "span_corruption" works on text, and "pairs" on sources with targets'
        )
    if data.objective == "span_corruption":
        if not encoder_decoder:
            others = " or ".join(f'"{name}"' for name, family in FAMILIES.items() if family.encoder_decoder)
            found["model.family data.objective"] = (
                f'data.objective = "span_corruption" needs an encoder-decoder, and model.family = "{model.family}" is '
                f'a decoder; data.objective = "causal" works{f", or model.family = {others}" if others else ""}'
            )
        needed = span_lengths(train.seq_len, data.noise_density, data.mean_span_length).inputs
        if needed > train.seq_len:
            found["train.seq_len data.objective"] = (
                f"train.seq_len = {train.seq_len} has no room for a kept token, a sentinel and the end mark of "
                f'data.objective = "span_corruption"; train.seq_len = {needed} works'
            )
    if data.objective == "pairs" and not data.target_len:
        found["data.target_len data.objective"] = (
            'data.objective = "pairs" needs data.target_len, the maximum tokens of a target, e.g. data.target_len = 32 '
            "(train.seq_len is that of a source)"
        )
    found |= _pair_key_conflicts(data) | (_mup_conflicts(config) if model.mup_base_dim else {})
    if data.objective == "pairs" and not encoder_decoder and train.seq_len <= model.max_seq_len < config.input_len:
        found["train.seq_len data.target_len model.max_seq_len"] = (
            f"a source of train.seq_len = {train.seq_len} and a target of data.target_len = {data.target_len} tokens "
            f"are longer than model.max_seq_len = {model.max_seq_len}; model.max_seq_len = {config.input_len} works"
        )
    for key, off in (("packing", "concat"), ("document_mask", False)):
        value = getattr(data, key)
        if value != off and data.objective != "causal":
            found[f"data.{key} data.objective"] = (
                f'data.{key} = {json.dumps(value)} is for data.objective = "causal", not "{data.objective}"; '
                f"leave it out"
            )
    return found


def _mup_conflicts(config: Any) -> dict[str, str]:
    base, found = config.model.mup_base_dim, {}
    if config.model.tie_embeddings:
        found["model.mup_base_dim model.tie_embeddings"] = (
            f"model.mup_base_dim = {base} gives embeddings and output matrix different initial values and rates, and "
            "model.tie_embeddings = true makes them one matrix; model.tie_embeddings = false works"
        )
    if config.optim.name == "sgd" or config.optim.rms_scaling:
        other = 'optim.name = "sgd"' if config.optim.name == "sgd" else "optim.rms_scaling = true"
        found["model.mup_base_dim optim.name optim.rms_scaling"] = (
            f"model.mup_base_dim = {base} scales the rates of Adam and Muon, whose updates have a fixed size, and "
            f'those of {other} do not; optim.name = "muon" or "adamw" works'
        )
    return found


def _pair_key_conflicts(data: Any) -> dict[str, str]:
    """The broken rules between the keys of text with pairs."""
    if data.objective != "pairs" or not (data.source_key or data.target_key or data.source_prefix):
        return {}
    if not data.source_key or not data.target_key:
        wrong = "name the columns or keys of a source and its target: both are needed"
    elif data.source_key == data.target_key:
        wrong = "are equal, but name two columns or keys"
    else:
        return {}
    keys = f"data.source_key = {data.source_key!r} and data.target_key = {data.target_key!r}"
    example = 'data.source_key = "text" and data.target_key = "headline"'
    return {"data.source_key data.target_key": f"{keys} {wrong}, e.g. {example}"}


def _encoder_decoder_conflicts(config: Any) -> dict[str, str]:
    """The broken rules of an encoder-decoder alone."""
    found, model = {}, config.model
    if config.fsdp.uses_float16:
        found["fsdp.param_dtype model.family"] = (
            f'model.family = "{model.family}" can\'t compute in float16: the outputs of its feed-forward exceed 65504, '
            'the largest float16 number, in published models; "bfloat16" works in its place as param_dtype, '
            "reduce_dtype and output_dtype"
        )
    if model.tie_embeddings and not model.scale_output and not model.init_from:
        found["model.tie_embeddings model.scale_output"] = (
            "model.tie_embeddings = true needs model.scale_output = true, or the initial logits are too large by "
            f"a factor of {model.dim**0.5:.0f}; scale_output = true works, and so does tie_embeddings = false"
        )
    if config.data.target_len > model.max_seq_len:
        found["data.target_len model.max_seq_len"] = (
            f"data.target_len = {config.data.target_len} is longer than model.max_seq_len = {model.max_seq_len}; "
            f"model.max_seq_len = {config.data.target_len} works"
        )
    return found


_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def strategy_layer(
    values: Mapping[str, Any], local_world_size: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What a strategy sets: value and origin by "section.key"; and why explicit keys contradict it.

    Args:
        values: load.ConfigValue by "section.key".
    """
    strategy = values["fsdp.sharding_strategy"].value
    if not isinstance(strategy, str):
        return {}, {}  # reported elsewhere
    strategy = strategy.upper()
    explicit = {key.removeprefix("fsdp."): value.value for key, value in values.items() if key[:5] == "fsdp."}
    wrong = {
        f"fsdp.{key}": f"{why}; leave one of the two out"
        for key, value in explicit.items()
        # the default of a hybrid strategy, even if it is 1
        if not (key == "dp_shard" and value == local_world_size) and (why := contradiction(strategy, key, value))
    }
    origin = f'sharding_strategy "{strategy}"'
    found = {
        f"fsdp.{key}": {"value": value, "origin": origin}
        for key, value in strategy_keys(strategy, explicit, local_world_size).items()
        if explicit.get(key, -1) in (-1, "default")
    }
    return found, wrong


def spelled(annotation: Any, value: Any, *, commas: bool = True) -> Any:
    """What a text means where it is not valid as it is: case does not matter in a choice, dtypes have short names, and
    a list may be one value or values separated by commas.

    Args:
        commas: whether they separate; not in free text.
    """
    if (kind := get_origin(annotation)) in (list, tuple):
        if isinstance(value, str):
            value = _items(get_args(annotation)[0], value) if commas else [value]
        elif isinstance(value, int | float | dict):
            value = [value]
        if not isinstance(value, list):
            return value
        return kind([spelled(get_args(annotation)[0], item) for item in value])
    if not isinstance(value, str):
        return value
    kinds = [annotation, *get_args(annotation)]  # of a Literal, or of a union with one
    choices = {c.lower(): c for k in kinds if get_origin(k) is Literal for c in get_args(k) if isinstance(c, str)}
    return choices.get(value.lower(), choices.get(_SHORT_NAMES.get(value.lower(), value), value))


def _items(annotation: Any, text: str) -> list[Any]:
    """The items of a list that is written without its brackets."""
    if annotation is str or get_origin(annotation) is Literal:
        # a comma in brackets belongs to a pattern: layers.[0,1].*
        return [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|[^,])+", text)]
    try:
        return list(tomli.loads(f"value = [{text}]")["value"])
    except (ValueError, RecursionError):
        pass
    try:
        return [float(part) for part in text.split(",")]  # .9,.95 is common, but not TOML
    except ValueError:
        return [text]


def against(key: str, annotation: Any, shorthand: Any, given: str, value: Any) -> list[str]:
    """The problem of an option with another value than a shorthand gives to the same key; [] if it is the same."""
    if spelled(annotation, value) == shorthand.value:
        return []
    means = f"{shorthand.origin} means {key} = {json.dumps(shorthand.value)}"
    return [f"command line: --{key}={given}: {means}; leave one of the two out"]


def with_size(values: dict[str, Any], default: str) -> dict[str, Any]:
    """The keys of a size, and over them those that are given. `default` is the default family."""
    size, family = values["size"], str(values.get("family", default)).lower()
    sizes = FAMILIES[family].named_sizes() if family in FAMILIES else {}
    if sizes and size not in sizes and "dim" not in values:
        raise ValueError(f"no size {size!r} of {family}; known: {', '.join(sizes)}")
    return {**sizes.get(size, {}), **values}


def size_notes(numbers: Mapping[str, Any], size: Mapping[str, Any]) -> Iterator[str]:
    """Which numbers of [model] contradict a size, and which of the two applies: that of the higher layer."""
    others = [key for key in size if key in numbers and numbers[key].value != size[key].value]
    for dropped in (False, True):
        if keys := [key for key in others if (numbers[key].level < size[key].level) == dropped]:
            wins, loses = (size, numbers) if dropped else (numbers, size)
            yield f"{', '.join(keys)}: {wins[keys[0]].origin} applies, not {loses[keys[0]].origin}"


def init_from_conflicts(config: Any) -> dict[str, str]:
    """The broken rule of `model.init_from`: nothing is there. It may be gone once the run has started from it."""
    wrong = "" if started_from(config) else problem(config.model.init_from)
    return {"model.init_from": f"model.init_from: {wrong}"} if wrong else {}


def rate_note(config: Any) -> list[str]:
    """A note on the default rate for a run that is about to start from `model.init_from`."""
    if started_from(config):
        return []
    lr = "1e-4" if FAMILIES[config.model.family].encoder_decoder else "2e-5"
    return [
        f"optim.lr = {config.optim.lr} is the default, for training from random weights; a model that is already "
        f"trained forgets much at this rate: --optim.name=adamw --optim.lr={lr} is a start (docs/models.md)"
    ]


def started_from(config: Any) -> bool:
    """Whether the run has a checkpoint, and has started from `model.init_from`, which may be gone since."""
    try:
        before = tomli.loads((config.folder / "config.toml").read_text(encoding="utf-8")).get("model", {})
        resumes = any(config.folder.glob("checkpoints/step-*"))
        return resumes and bool(before.get("init_from") == config.model.init_from)
    except (ConfigError, OSError, ValueError, AttributeError):
        return False


def offload_conflicts(config: Any, layout: Any, n_gpus: int) -> dict[str, str]:
    """The broken rules of `fsdp.cpu_offload` and `fsdp.grad_sync = "all_reduce_last"`."""
    found, fsdp = {}, config.fsdp
    if fsdp.grad_sync == "all_reduce_last" and (layout.dp_replicate == 1 or layout.dp_shard == 1):
        found["fsdp.grad_sync fsdp.dp_replicate fsdp.dp_shard"] = (
            f'fsdp.grad_sync = "all_reduce_last" needs replicas of a sharded model, but dp_replicate = '
            f'{layout.dp_replicate} and dp_shard = {layout.dp_shard}; "every" or "last" works'
        )
    if fsdp.cpu_offload and (config.run.device == "cpu" or n_gpus == 0):
        found["fsdp.cpu_offload run.device"] = (
            "fsdp.cpu_offload = true moves parameters between a GPU and the host, but this run uses no GPU; "
            "fsdp.cpu_offload = false works"
        )
    if fsdp.cpu_offload and config.optim.name == "muon":
        found["fsdp.cpu_offload optim.name"] = (
            'optim.name = "muon" exchanges gradients between GPUs, which fsdp.cpu_offload = true keeps on the host; '
            'fsdp.cpu_offload = false works, or optim.name = "adamw"'
        )
    return found


def block_conflicts(config: Any, n_gpus: int) -> dict[str, str]:
    """The broken rules of activation checkpointing and torch.compile."""
    found: dict[str, str] = {}
    checkpointing = config.activation_checkpointing
    n_blocks = sum(config.model.stacks)
    if checkpointing.mode != "none" and checkpointing.every > max(n_blocks - 1, 1):
        found["activation_checkpointing.every model.n_layers"] = (
            f"activation_checkpointing.every = {checkpointing.every} applies only to the first of {n_blocks} "
            f"blocks; every = {max(n_blocks - 1, 1)} works"
        )
    if not config.compile.enabled or config.compile.backend != "inductor":
        return found
    if missing := missing_for_inductor(config.run.device, n_gpus):
        found["compile.enabled compile.backend run.device"] = (
            f"compile.enabled = true needs {missing}, which is missing; install it, or set compile.enabled = false"
        )
    return found


def rare_data_conflicts(data: Any) -> dict[str, str]:
    """The broken rules of a list of texts, of a mixture, and of ranges of samples."""
    found = {}
    bounds = [bound for pair in data.skip_samples for bound in (pair if len(pair) == 2 else (1, 0))]
    rising = all(a < b for a, b in zip(bounds[::2], bounds[1::2], strict=True))
    if bounds != sorted(bounds) or not rising or any(not 0 <= bound < 1 << 53 for bound in bounds):
        found["data.skip_samples"] = (
            f"data.skip_samples = {shortened(data.skip_samples)} should be pairs of a first sample and the one after "
            "the last, ascending and without overlap, e.g. [[800, 960], [2400, 2480]]"
        )
    if not data.path and isinstance(data.path, list):
        found["data.path"] = 'data.path = [] names no text; data.path = "" is Python\'s standard library'
    prepared = [p for p in data.path if not problem(p) and is_prepared(p)] if isinstance(data.path, list) else []
    if prepared:
        found["data.path"] = (
            f"data.path: {prepared[0]} is a prepared folder, which can't be in a list; use "
            f'path = "{prepared[0]}", or mix it with [data.sources] "{prepared[0]}" = 1.0'
        )
    if data.sources and data.path:
        found["data.path data.sources"] = (
            "data.path and data.sources are both set; leave data.path out, or name it in data.sources with a weight"
        )
    return found


def missing_for_inductor(device: str, n_gpus: int) -> str:
    """What torch.compile's inductor backend lacks on this machine; empty if nothing."""
    if device != "cpu" and n_gpus:
        return "" if importlib.util.find_spec("triton") else "the package triton"
    named = os.environ.get("CXX", "")
    if not shutil.which(named or "g++"):  # what torch looks for
        return f"the C++ compiler {named} (of $CXX)" if named else "the C++ compiler g++ (or another one in $CXX)"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else f"Python's headers ({headers}; python3-dev or similar)"
