"""Converts an Accelerate config to ours: `python -m torchtitan_lite.migrate accelerate.yaml > mine.toml`.

Every key of the YAML either becomes TOML or is listed in a comment with the reason. Sources: Accelerate's documentation
and `FullyShardedDataParallelPlugin` (Accelerate 1.x), and PyTorch's FSDP2 tutorial for FSDP1's options.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchtitan_lite.config import paths
from torchtitan_lite.config.families import BLOCKS, FAMILIES
from torchtitan_lite.config.schema import default_of
from torchtitan_lite.config.sections.fsdp import STRATEGIES
from torchtitan_lite.config.toml import format_value
from torchtitan_lite.errors import ConfigError, run_cli

# --- what becomes of a key -----------------------------------------------------------------------------------------

Outcome = Mapping[str, Any] | str  # our keys, "section.key", with their values; or why none is set


@dataclass(frozen=True)
class Choice:
    """An outcome for each value, in upper or lower case. Any other value is an error, or has the outcome `other`."""

    outcomes: Mapping[Any, Outcome]
    other: Outcome | None = None


Rule = Outcome | Choice | Callable[[Any], Outcome]


def _ranks(key: str) -> Callable[[Any], Outcome]:
    return lambda value: {key: int(value)}


def _of_the_launcher(count: Any) -> Outcome:
    int(count)
    return LAUNCHER


def _clipping(value: Any) -> Outcome:
    """DeepSpeed's 0 means no clipping."""
    return (
        "auto takes it from the script: optim.max_norm"
        if value == "auto"
        else {"optim.max_norm": float(value) or math.inf}
    )


def _block_class(value: Any) -> Outcome:
    """The classes of the blocks, which always are FSDP groups. They tell which family the model belongs to."""
    families = [BLOCKS[block] for block in str(value).replace(",", " ").split() if block in BLOCKS]
    if not families:
        return GROUPS
    keys: dict[str, Any] = {"model.family": families[0]}
    if FAMILIES[families[0]].encoder_decoder:
        keys |= {"data.objective": "pairs", "data.target_len": 128}
    return keys


LAUNCHER = "an option of the launcher: see the command below"
TPU = "for TPUs"
ACCUMULATION = (
    "it follows: train.global_batch_size = this x ranks x train.micro_batch_size, the sequences per rank and forward"
)
OWN_ROWS = "always on: each rank gets only its own rows of the model"
GROUPS = "always on: each block, the embeddings and the head are groups"
ADAMW_LR = 3e-4
FIXED_GROUPS = "the groups are fixed: each block, the embeddings, the head"
# FSDP2 offloads all or nothing
OFFLOAD = Choice(
    {"cpu": {"fsdp.cpu_offload": True}, "none": "off"},
    other="parameters, gradients and optimizer state can be offloaded to the host, not to a disk",
)
PREFETCH_POLICY = Choice(
    {
        "BACKWARD_PRE": "FSDP2 always does; explicit_prefetching = true reaches further ahead",
        "BACKWARD_POST": "FSDP2 has BACKWARD_PRE only",
        "NO_PREFETCH": "FSDP2 has BACKWARD_PRE only",
    }
)
_ZERO2 = "_HYBRID_SHARD_ZERO2"
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": _ZERO2}
_STRATEGY_NAMES = {**{name: name for name in STRATEGIES}, "HYBRID_SHARD_ZERO2": _ZERO2, **_NUMBERED}
STRATEGY: dict[Any, Outcome] = {theirs: {"fsdp.sharding_strategy": ours} for theirs, ours in _STRATEGY_NAMES.items()}
NO_SHARD: Outcome = {"fsdp.sharding_strategy": "NO_SHARD"}


def _switch(key: str, on: Any = True, off: Any = False) -> Choice:
    return Choice({True: {key: on}, False: {key: off}})


def _dtype(name: str) -> Outcome:
    return {"fsdp.param_dtype": name, "fsdp.reduce_dtype": name}


TOP: dict[str, Rule] = {
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "same_network"), LAUNCHER),
    **dict.fromkeys(("num_machines", "num_processes"), _of_the_launcher),
    **dict.fromkeys(("downcast_bf16", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_zone"), TPU),
    "compute_environment": Choice({"LOCAL_MACHINE": LAUNCHER}, other="start torchrun in your cloud's own way"),
    "debug": "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment checks collectives",
    "distributed_type": Choice(
        {
            "FSDP": "always on",
            "MULTI_GPU": NO_SHARD,
            "MULTI_CPU": NO_SHARD,
            "DEEPSPEED": "its ZeRO stage becomes a sharding strategy",
            "NO": "python train.py runs one process",
        },
        other="not supported",
    ),
    "gradient_accumulation_steps": ACCUMULATION,
    "main_training_function": "train.py is the script",
    "mixed_precision": Choice(
        {
            "bf16": _dtype("bfloat16"),
            "fp16": _dtype("float16"),
            "no": _dtype("float32"),
            "fp8": "float8 is speed.float8 here, by torchao's tensorwise recipe only",
        }
    ),
    "rdzv_backend": Choice(
        {"static": LAUNCHER}, other="the command below is for a static rendezvous; others: docs/cluster.md"
    ),
    "use_cpu": _switch("run.device", "cpu", "auto"),
    "enable_cpu_affinity": "start torchrun under numactl",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES in the environment",
}
FSDP: dict[str, Rule] = {
    "fsdp_version": "always FSDP2",
    "fsdp_sharding_strategy": Choice(STRATEGY),
    # Accelerate also accepts FSDP1's strategy names here
    "fsdp_reshard_after_forward": Choice({**_switch("fsdp.reshard_after_forward").outcomes, **STRATEGY}),
    "fsdp_auto_wrap_policy": Choice({"TRANSFORMER_BASED_WRAP": GROUPS}, other=FIXED_GROUPS),
    "fsdp_transformer_layer_cls_to_wrap": _block_class,
    "fsdp_transformer_cls_names_to_wrap": _block_class,
    "fsdp_min_num_params": FIXED_GROUPS,
    "fsdp_backward_prefetch": PREFETCH_POLICY,
    "fsdp_backward_prefetch_policy": PREFETCH_POLICY,
    "fsdp_forward_prefetch": Choice(  # FSDP1 gathers one group ahead
        {
            True: {"fsdp.explicit_prefetching": True, "fsdp.forward_prefetch": 1},
            False: {"fsdp.explicit_prefetching": False},
        }
    ),
    "fsdp_limit_all_gathers": "not needed: FSDP2 frees memory without blocking the host",
    "fsdp_use_orig_params": "always on: FSDP2 has no flat parameters",
    "fsdp_cpu_ram_efficient_loading": OWN_ROWS,
    "fsdp_sync_module_states": OWN_ROWS,
    "fsdp_offload_params": _switch("fsdp.cpu_offload"),
    "fsdp_activation_checkpointing": _switch("activation_checkpointing.mode", "full", "none"),
    "fsdp_state_dict_type": Choice(
        {
            "FULL_STATE_DICT": {"checkpoint.state_dict": "full"},
            "SHARDED_STATE_DICT": {"checkpoint.state_dict": "sharded"},
        },
        other="checkpoints are full or sharded state dicts",
    ),
    "fsdp_ignored_modules": "every parameter is sharded; optim.freeze excludes some from training",
}
DEEPSPEED: dict[str, Rule] = {
    # ZeRO-1 and ZeRO-2 differ only in gradients between micro-batches, which is grad_sync here
    "zero_stage": Choice({0: NO_SHARD, 1: STRATEGY["2"], 2: STRATEGY["2"], 3: STRATEGY["1"]}),
    "offload_param_device": OFFLOAD,
    "offload_optimizer_device": OFFLOAD,
    "gradient_clipping": _clipping,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero3_init_flag": "always on: the model is built without storage and sharded before it is allocated",
    "zero3_save_16bit_model": "checkpoints hold float32; python checkpoint.py export writes a model",
}
DYNAMO: dict[str, Rule] = {
    "dynamo_backend": Choice(
        {
            "NO": {"compile.enabled": False},
            "INDUCTOR": {"compile.enabled": True},
            "AOT_EAGER": {"compile.enabled": True, "compile.backend": "aot_eager"},
            "EAGER": {"compile.enabled": True, "compile.backend": "eager"},
        },
        other="backends are inductor, aot_eager and eager",
    ),
}
PARALLELISM: dict[str, Rule] = {
    "parallelism_config_dp_replicate_size": _ranks("fsdp.dp_replicate"),
    "parallelism_config_dp_shard_size": _ranks("fsdp.dp_shard"),
    **{
        f"parallelism_config_{name}_size": Choice({1: "off"}, other=f"no {name} parallelism here")
        for name in ("tp", "cp", "sp")
    },
}
SECTIONS = {
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED,
    "dynamo_config": DYNAMO,
    "parallelism_config": PARALLELISM,
}

# --- the conversion ------------------------------------------------------------------------------------------------


@dataclass
class Translation:
    """The result of converting an Accelerate config."""

    sets: dict[str, tuple[Any, str]] = field(default_factory=dict)  # by "section.key": value, origin
    others: dict[str, str] = field(default_factory=dict)  # by Accelerate's key: why it sets nothing

    def value(self, key: str) -> Any:
        return self.sets.get(key, (None, ""))[0]

    def set(self, key: str, value: Any, source: str) -> None:
        """Set one of our keys. Two keys of Accelerate, of FSDP1 and FSDP2, may map to it."""
        if self.value(key) not in (None, value):
            raise ConfigError(
                f"{source} wants {key} = {format_value(value)}, "
                f"and {self.sets[key][1]} {format_value(self.sets[key][0])}"
            )
        self.sets[key] = value, source


def translate(content: Mapping[str, Any]) -> Translation:
    """Convert an Accelerate config.

    Raises:
        ConfigError: a value is unknown to Accelerate too, or two values contradict each other.
    """
    t = Translation()
    for name, value in content.items():
        if name not in SECTIONS:
            _apply(t, TOP, name, value)
        elif not isinstance(value, dict | None):
            raise ConfigError(f"{name} = {_shown(value)} should be a table of keys and values")
        else:
            for inner, inner_value in (value or {}).items():
                _apply(t, SECTIONS[name], inner, inner_value)
    _reconcile(t)
    return t


def _apply(t: Translation, rules: Mapping[str, Rule], name: Any, value: Any) -> None:
    rule = rules.get(name, rules.get(f"fsdp_{name}"))  # FSDP1's plugin also accepts its keys without the prefix
    if rule is None:
        t.others[_shown(name)] = "unknown to this tool"
        return
    if value is None:
        return
    outcome: Outcome | None
    if isinstance(rule, Choice):
        outcomes = {str(theirs).upper(): outcome for theirs, outcome in rule.outcomes.items()}
        if value is False and "NO" in outcomes:
            value = "NO"  # YAML reads a bare no as false
        outcome = outcomes.get(str(value).upper(), rule.other)
        if outcome is None:
            raise ConfigError(f"{name} = {_shown(value)} is not one of {', '.join(map(str, rule.outcomes))}")
    else:
        try:
            outcome = rule(value) if callable(rule) else rule
        except (TypeError, ValueError):
            raise ConfigError(f"{name} = {_shown(value)} is not a number") from None
    if isinstance(outcome, str):
        t.others[name] = outcome
    else:
        for key, ours in outcome.items():
            t.set(key, ours, f"{name}: {_shown(value)}")


def _reconcile(t: Translation) -> None:
    """Resolve combinations that Accelerate accepts and we reject: the more specific key wins."""
    strategy, source = t.sets.get("fsdp.sharding_strategy", ("", ""))
    specific = {"fsdp.reshard_after_forward", "fsdp.dp_replicate", "fsdp.dp_shard"} & t.sets.keys()
    if strategy and specific:
        del t.sets["fsdp.sharding_strategy"]
        for key, value in STRATEGIES[strategy].items():
            if not (key.startswith("dp_") and {"fsdp.dp_replicate", "fsdp.dp_shard"} & specific):
                t.sets.setdefault(f"fsdp.{key}", (value, source))
    if t.value("fsdp.cpu_offload"):
        offload = t.sets["fsdp.cpu_offload"][1]
        replicas = "HYBRID" in strategy or strategy == "NO_SHARD" or (t.value("fsdp.dp_replicate") or 1) != 1
        if t.value("run.device") == "cpu" or replicas:
            del t.sets["fsdp.cpu_offload"]
            reason = "not with replicas: docs/fsdp.md" if replicas else "on a CPU, parameters are on the host anyway"
            t.others[offload.split(":")[0]] = reason
        else:
            t.set("optim.name", "adamw", f"{offload} (the default, muon, needs gradients on the GPU)")
            t.set("optim.lr", ADAMW_LR, "a start for adamw: the default is muon's rate")
    family = FAMILIES[t.value("model.family") or default_of("model.family")]
    if family.encoder_decoder and t.value("fsdp.param_dtype") == "float16":
        for key in _dtype("float16"):
            t.sets[key] = "bfloat16", f"{t.sets[key][1]} (its feed-forward exceeds the range of float16)"
    if source.startswith("distributed_type") and "fsdp.reduce_dtype" in t.sets:
        t.sets["fsdp.reduce_dtype"] = "float32", f"{source}: DDP with autocast sums in float32"


def to_toml(t: Translation, content: Mapping[str, Any], source: str) -> str:
    """The config file, with comments on what it lacks."""
    lines = [f"# from {source}", ""]
    for section in dict.fromkeys(key.split(".")[0] for key in t.sets):
        lines.append(f"[{section}]")
        inside = {key.split(".")[1]: value for key, value in t.sets.items() if key.startswith(f"{section}.")}
        lines += [f"{f'{key} = {format_value(value)}':<40} # {origin}" for key, (value, origin) in inside.items()]
        lines.append("")
    if t.others:
        lines += ["# these set nothing:", *(f"#   {name}: {reason}" for name, reason in t.others.items())]
    return "\n".join([*lines, *_comments(t), "#", f"# {_launch_command(content, t)}"])


def _comments(t: Translation) -> list[str]:
    """What the file replaces, and what it lacks."""
    family, _ = t.sets.get("model.family", (default_of("model.family"), ""))
    pairs = "data.objective" in t.sets
    return [
        "# train.py replaces your script: the model, the data and the loop. To keep the script, `accelerate to-fsdp2",
        "# --config_file OLD --output_file NEW` changes only the keys of FSDP1 to those of FSDP2.",
        "#",
        "# An Accelerate config lacks the model, the text, the batch and the learning rate. For a published model,",
        "# `python checkpoint.py import FOLDER model.toml` writes all of these but the text: put the line",
        '# base = "model.toml" above the first section. Otherwise set [model], [train] and [optim] (docs/config.md):',
        f'# the defaults train a small "{family}" with random weights, at Muon\'s rate.',
        *(['# Pretraining of an encoder-decoder: objective = "span_corruption", without target_len.'] if pairs else []),
    ]


def _launch_command(content: Mapping[str, Any], t: Translation) -> str:
    machines, processes = (int(content.get(key) or 1) for key in ("num_machines", "num_processes"))
    words = ["torchrun"]
    if machines > 1:
        address = content.get("main_process_ip") or "ADDRESS"
        words.append(f"--nnodes {machines} --node-rank RANK --master-addr {address}")
    if port := content.get("main_process_port"):
        words.append(f"--master-port {port}")
    words.append(f"--nproc-per-node {max(processes // machines, 1)} train.py --config THIS_FILE --data.path=TEXT")
    if "data.objective" in t.sets:
        words.append("--data.source_key=SOURCE --data.target_key=TARGET")
    return " ".join(words)


def _shown(value: Any) -> str:
    """A name or value of the file, in one line."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)


def read(file: Path) -> dict[str, Any]:
    """The keys and values of an Accelerate config.

    Raises:
        ConfigError: it can't be read, or is not a YAML table.
    """
    try:
        content = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} can't be read as YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a table of keys and values, as an Accelerate config is")
    return content


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m torchtitan_lite.migrate", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=paths.expand, help="an Accelerate config, e.g. default_config.yaml")
    file: Path = parser.parse_args(argv).file

    def run() -> int:
        content = read(file)
        print(to_toml(translate(content), content, file.name))
        return 0

    return run_cli("migrate", run)
