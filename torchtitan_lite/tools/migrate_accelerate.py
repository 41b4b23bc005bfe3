"""Converts an Accelerate config to ours: `python -m torchtitan_lite.migrate accelerate.yaml > mine.toml`.

Every key of the YAML either becomes TOML or is listed in a comment with the reason. Sources: Accelerate's documentation
and `FullyShardedDataParallelPlugin` (Accelerate 1.x), and PyTorch's FSDP2 tutorial for FSDP1's options.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.config import paths
from torchtitan_lite.config.families import BLOCKS, FAMILIES
from torchtitan_lite.config.sections.fsdp import STRATEGIES
from torchtitan_lite.config.toml import format_value
from torchtitan_lite.errors import ConfigError, run_cli
from torchtitan_lite.tools.strict_yaml import read, shown


@dataclass
class Translation:
    """The result of converting an Accelerate config."""

    sets: dict[str, tuple[Any, str]] = field(default_factory=dict)  # by "section.key": value, origin
    done_anyway: dict[str, str] = field(default_factory=dict)  # by Accelerate's key: why nothing has to be set
    no_counterpart: dict[str, str] = field(default_factory=dict)  # by Accelerate's key: the reason

    def set(self, key: str, value: Any, source: str) -> None:
        """Set one of our keys. Two keys of Accelerate, of FSDP1 and FSDP2, may map to it."""
        if key in self.sets and self.sets[key][0] != value:
            raise ConfigError(
                f"{source} wants {key} = {format_value(value)}, "
                f"and {self.sets[key][1]} {format_value(self.sets[key][0])}"
            )
        self.sets[key] = value, source


Rule = Callable[[Translation, str, Any], None]


def _set(key: str, values: Mapping[Any, Any]) -> Rule:
    """Set one of our keys by a table from their values to ours. Other values are an error."""

    def rule(t: Translation, name: str, value: Any) -> None:
        known = {str(k).upper(): v for k, v in values.items()}
        if shown(value).upper() not in known:
            raise ConfigError(f"{name} = {shown(value)} is not one of {', '.join(map(str, values))}")
        t.set(key, known[shown(value).upper()], f"{name}: {shown(value)}")

    return rule


def _anyway(reason: str) -> Rule:
    return lambda t, name, _value: t.done_anyway.__setitem__(name, reason)


def _none(reason: str) -> Rule:
    return lambda t, name, _value: t.no_counterpart.__setitem__(name, reason)


def _choice(**rules: Rule) -> Rule:
    """A rule for each value, in upper or lower case; `other` for the rest."""
    known = {value.lower(): one for value, one in rules.items()}

    def rule(t: Translation, name: str, value: Any) -> None:
        chosen = known.get(shown(value).lower(), rules.get("other"))
        if chosen is None:
            raise ConfigError(f"{name} = {shown(value)} is not one of {', '.join(rules)}")
        chosen(t, name, value)

    return rule


def _all(*rules: Rule) -> Rule:
    def rule(t: Translation, name: str, value: Any) -> None:
        for one in rules:
            one(t, name, value)

    return rule


def _count(key: str) -> Rule:
    """Set one of our keys that takes a number of ranks."""

    def rule(t: Translation, name: str, value: Any) -> None:
        n = _positive(value)
        if n is None:
            t.no_counterpart[name] = f"{shown(value)} is not a number of ranks"
        else:
            t.set(key, n, f"{name}: {n}")

    return rule


def _positive(value: Any) -> int | None:
    """A positive count, as an int or as digits; None for anything else."""
    text = shown(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0 else None


def _offload(t: Translation, name: str, value: Any) -> None:
    """FSDP2 offloads all or nothing."""
    if value == "cpu":
        t.set("fsdp.cpu_offload", True, f"{name}: cpu")
    elif value not in ("none", None):
        t.no_counterpart[name] = "parameters, gradients and optimizer state can be offloaded to the host, not to a disk"


def _clipping(t: Translation, name: str, value: Any) -> None:
    """DeepSpeed's 0 means no clipping."""
    try:
        norm = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        norm = math.nan
    if norm >= 0:
        t.set("optim.max_norm", norm or math.inf, f"{name}: {shown(value)}")
    else:
        t.no_counterpart[name] = f"{shown(value)} is not a number above 0 (or 0: no clipping)"


def _prefetch(t: Translation, name: str, value: Any) -> None:
    """FSDP1 gathers one group ahead."""
    _set("fsdp.explicit_prefetching", YES)(t, name, value)
    if t.sets["fsdp.explicit_prefetching"][0]:
        t.set("fsdp.forward_prefetch", 1, f"{name}: {shown(value)}")


def _layer(t: Translation, name: str, value: Any) -> None:
    """The classes of the blocks, which are groups always. They tell which family the model belongs to."""
    reason = "always on: each block, the embeddings and the head are groups"
    if known := [block for block in shown(value).replace(",", " ").split() if block in BLOCKS]:
        family = BLOCKS[known[0]]
        objective = ' with data.objective = "pairs" or "span_corruption"' if FAMILIES[family].encoder_decoder else ""
        reason += f'; {known[0]} is the block of model.family = "{family}"{objective} (docs/models.md)'
    t.done_anyway[name] = reason


YES = {True: True, False: False}
_LAUNCH = _anyway("an option of the launcher: see the command below")
_TPU = _none("for TPUs")
_ACCUMULATION = _none(
    "it follows: train.global_batch_size = this x ranks x train.micro_batch_size, the sequences per rank and forward"
)
_ONE_PROCESS_READS = _anyway("always on: each rank gets only its own rows of the model")
_BLOCKS = _anyway("always on: each block, the embeddings and the head are groups")
_STRATEGY_BY_NUMBER = dict(
    zip("12345", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *list(STRATEGIES)[2:4]], strict=True)
)
_STRATEGY = {
    **{name: name for name in STRATEGIES},
    "HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2",
    **_STRATEGY_BY_NUMBER,
}
_HALF = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}

TOP: dict[str, Rule] = {
    "compute_environment": _choice(LOCAL_MACHINE=_LAUNCH, other=_none("start torchrun in your cloud's own way")),
    "debug": _none("TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment checks collectives"),
    "distributed_type": _choice(
        FSDP=_anyway("always on"),
        MULTI_GPU=_set("fsdp.sharding_strategy", {"MULTI_GPU": "NO_SHARD"}),
        MULTI_CPU=_set("fsdp.sharding_strategy", {"MULTI_CPU": "NO_SHARD"}),
        DEEPSPEED=_anyway("its ZeRO stage becomes a sharding strategy"),
        NO=_anyway("python train.py runs one process"),
        other=_none("not supported"),
    ),
    "downcast_bf16": _TPU,
    "gradient_accumulation_steps": _ACCUMULATION,
    "machine_rank": _LAUNCH,
    "main_training_function": _none("train.py is the script"),
    "main_process_ip": _LAUNCH,
    "main_process_port": _LAUNCH,
    "mixed_precision": _choice(
        other=_all(_set("fsdp.param_dtype", _HALF), _set("fsdp.reduce_dtype", _HALF)),
        fp8=_none("float8 is not supported"),
    ),
    "num_machines": _LAUNCH,
    "num_processes": _LAUNCH,
    "rdzv_backend": _LAUNCH,
    "same_network": _LAUNCH,
    "tpu_env": _TPU,
    "tpu_name": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_zone": _TPU,
    "use_cpu": _set("run.device", {True: "cpu", False: "auto"}),
    "enable_cpu_affinity": _none("start torchrun under numactl"),
    "gpu_ids": _none("set CUDA_VISIBLE_DEVICES in the environment"),
}
FSDP: dict[str, Rule] = {
    "fsdp_version": _anyway("always FSDP2"),
    "fsdp_sharding_strategy": _set("fsdp.sharding_strategy", _STRATEGY),
    "fsdp_reshard_after_forward": _choice(
        **{str(value): _set("fsdp.reshard_after_forward", YES) for value in (True, False, "true", "false")},
        # Accelerate also accepts FSDP1's strategy names here
        other=_set("fsdp.sharding_strategy", _STRATEGY),
    ),
    "fsdp_auto_wrap_policy": _choice(
        TRANSFORMER_BASED_WRAP=_BLOCKS,
        other=_none("the groups are fixed: each block, the embeddings, the head"),
    ),
    "fsdp_transformer_layer_cls_to_wrap": _layer,
    "fsdp_transformer_cls_names_to_wrap": _layer,
    "fsdp_min_num_params": _none("the groups are fixed: each block, the embeddings, the head"),
    "fsdp_backward_prefetch_policy": _choice(
        BACKWARD_PRE=_anyway("FSDP2 always does; explicit_prefetching = true reaches further ahead"),
        BACKWARD_POST=_none("FSDP2 has BACKWARD_PRE only"),
        NO_PREFETCH=_none("FSDP2 has BACKWARD_PRE only"),
    ),
    "fsdp_forward_prefetch": _prefetch,
    "fsdp_limit_all_gathers": _none("not needed: FSDP2 frees memory without blocking the host"),
    "fsdp_use_orig_params": _anyway("always on: FSDP2 has no flat parameters"),
    "fsdp_cpu_ram_efficient_loading": _ONE_PROCESS_READS,
    "fsdp_sync_module_states": _ONE_PROCESS_READS,
    "fsdp_offload_params": _set("fsdp.cpu_offload", YES),
    "fsdp_activation_checkpointing": _set("activation_checkpointing.mode", {True: "full", False: "none"}),
    "fsdp_state_dict_type": _choice(
        FULL_STATE_DICT=_set("checkpoint.state_dict", {"FULL_STATE_DICT": "full"}),
        SHARDED_STATE_DICT=_set("checkpoint.state_dict", {"SHARDED_STATE_DICT": "sharded"}),
        other=_none("checkpoints are full or sharded state dicts"),
    ),
    "fsdp_ignored_modules": _none("every parameter is sharded; optim.freeze excludes some from training"),
}
FSDP["fsdp_backward_prefetch"] = FSDP["fsdp_backward_prefetch_policy"]
DEEPSPEED: dict[str, Rule] = {
    # ZeRO-1 and ZeRO-2 differ only in gradients between micro-batches, which is grad_sync here
    "zero_stage": _set(
        "fsdp.sharding_strategy", {0: "NO_SHARD", 1: "SHARD_GRAD_OP", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
    ),
    "offload_param_device": _offload,
    "offload_optimizer_device": _offload,
    "gradient_clipping": _clipping,
    "gradient_accumulation_steps": _ACCUMULATION,
    "zero3_init_flag": _anyway("always on: the model is built without storage and sharded before it is allocated"),
    "zero3_save_16bit_model": _none("checkpoints hold float32; python checkpoint.py export writes a model"),
}
DYNAMO: dict[str, Rule] = {
    "dynamo_backend": _choice(
        NO=_set("compile.enabled", {"NO": False}),
        INDUCTOR=_set("compile.enabled", {"INDUCTOR": True}),
        AOT_EAGER=_all(
            _set("compile.enabled", {"AOT_EAGER": True}), _set("compile.backend", {"AOT_EAGER": "aot_eager"})
        ),
        EAGER=_all(_set("compile.enabled", {"EAGER": True}), _set("compile.backend", {"EAGER": "eager"})),
        other=_none("backends are inductor, aot_eager and eager"),
    ),
}
PARALLELISM: dict[str, Rule] = {
    "parallelism_config_dp_replicate_size": _count("fsdp.dp_replicate"),
    "parallelism_config_dp_shard_size": _count("fsdp.dp_shard"),
    **{
        f"parallelism_config_{name}_size": _choice(
            **{"1": _anyway("off"), "other": _none(f"no {name} parallelism here")}
        )
        for name in ("tp", "cp", "sp")
    },
}
SECTIONS = {
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED,
    "dynamo_config": DYNAMO,
    "parallelism_config": PARALLELISM,
}


def translate(content: Mapping[Any, Any]) -> Translation:
    """Convert an Accelerate config.

    Raises:
        ConfigError: a value is unknown to Accelerate too, or two values contradict each other.
    """
    t = Translation()
    for name, value in content.items():
        if name in SECTIONS:
            if not isinstance(value, dict | None):
                raise ConfigError(f"{name} = {shown(value)} should be a table of keys and values")
            for inner, inner_value in (value or {}).items():
                _apply(t, SECTIONS[name], inner, inner_value)
        else:
            _apply(t, TOP, name, value)
    _reconcile(t)
    return t


def _reconcile(t: Translation) -> None:
    """Resolve combinations that Accelerate accepts and we reject: the more specific key wins."""
    strategy, source = t.sets.get("fsdp.sharding_strategy", ("", ""))
    specific = {"fsdp.reshard_after_forward", "fsdp.dp_replicate", "fsdp.dp_shard"} & t.sets.keys()
    if strategy and specific:
        del t.sets["fsdp.sharding_strategy"]
        for key, value in STRATEGIES[strategy].items():
            if not (key.startswith("dp_") and {"fsdp.dp_replicate", "fsdp.dp_shard"} & specific):
                t.sets.setdefault(f"fsdp.{key}", (value, source))
    if t.sets.get("run.device", ("", ""))[0] == "cpu" and t.sets.pop("fsdp.cpu_offload", (False, ""))[0]:
        t.no_counterpart["fsdp_offload_params"] = "on a CPU, parameters are on the host anyway"
    if t.sets.get("fsdp.cpu_offload", (False, ""))[0]:
        t.set("optim.name", "adamw", f"{t.sets['fsdp.cpu_offload'][1]} (the default, muon, needs gradients on the GPU)")
    if source.startswith("distributed_type") and "fsdp.reduce_dtype" in t.sets:
        t.sets["fsdp.reduce_dtype"] = "float32", f"{source}: DDP with autocast sums in float32"


def _apply(t: Translation, rules: Mapping[str, Rule], name: Any, value: Any) -> None:
    # FSDP1's plugin also accepts its keys without the prefix
    rule = rules.get(name) or (rules.get(f"fsdp_{name}") if isinstance(name, str) else None)
    if rule is None:
        t.no_counterpart[shown(name)] = "unknown to this tool"
    elif value is not None:
        # YAML reads a bare no as false
        is_word = name in ("mixed_precision", "distributed_type", "dynamo_backend")
        rule(t, name, "NO" if value is False and is_word else value)


def to_toml(t: Translation, content: Mapping[Any, Any], source: str) -> str:
    """The config file, with comments on what it lacks. `shown` has escaped all text of the YAML."""
    lines = [f"# from {shown(source)}", ""]
    for section in dict.fromkeys(key.split(".")[0] for key in t.sets):
        lines.append(f"[{section}]")
        inside = {key.split(".")[1]: value for key, value in t.sets.items() if key.startswith(f"{section}.")}
        lines += [f"{f'{key} = {format_value(value)}':<40} # {origin}" for key, (value, origin) in inside.items()]
        lines.append("")
    for title, names in (("nothing to set for:", t.done_anyway), ("no counterpart:", t.no_counterpart)):
        if names:
            lines += [f"# {title}", *(f"#   {name}: {reason}" for name, reason in names.items())]
    lines += [
        "# An Accelerate config lacks the model, the text, the batch and the learning rate. Set [model], [data],",
        "# [train] and [optim] (docs/config.md): the defaults train a small Llama on Python's source, at Muon's rate.",
    ]
    machines, processes = (_positive(content.get(key)) or 1 for key in ("num_machines", "num_processes"))
    nodes = f"--nnodes {machines} --node-rank RANK --master-addr ADDRESS " if machines > 1 else ""
    lines += ["#", f"# torchrun {nodes}--nproc-per-node {max(processes // machines, 1)} train.py --config THIS_FILE"]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_lite.migrate", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=paths.argument, help="an Accelerate config, e.g. default_config.yaml")
    file = parser.parse_args(argv).file
    return run_cli("migrate", lambda: _migrate(file))


def _migrate(file: Path) -> int:
    content = read(file)
    print(to_toml(translate(content), content, file.name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
