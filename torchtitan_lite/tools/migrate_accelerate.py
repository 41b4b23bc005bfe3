"""Converts an Accelerate config to ours: `python -m torchtitan_lite.migrate accelerate.yaml > mine.toml`.

Every key of the YAML becomes TOML or is listed in a comment with the reason. Sources: Accelerate's documentation and
`FullyShardedDataParallelPlugin` (Accelerate 1.x), and PyTorch's FSDP2 tutorial for FSDP1's options. The result is
checked as train.py checks a config.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from torchtitan_lite import commands
from torchtitan_lite.config import load, paths
from torchtitan_lite.config.families import BLOCKS, FAMILIES
from torchtitan_lite.config.sections.fsdp import STRATEGIES
from torchtitan_lite.config.toml import format_value
from torchtitan_lite.errors import ConfigError

# --- rules for keys --------------------------------------------------------------------------------------------------

Outcome = Mapping[str, Any] | str  # our values by "section.key"; or why none is set
# by value in capitals ("" for any other value); or for all values
Rule = Mapping[str, Outcome] | Callable[[Any], Outcome] | str


def _clipping(value: Any) -> Outcome:
    """Translate gradient clipping. DeepSpeed's 0 means no clipping."""
    if value == "auto":
        return "auto takes it from the script: optim.max_norm"
    return {"optim.max_norm": float(value) or math.inf}


def _block_class(value: Any) -> Outcome:
    """Return the model family with these block classes. Blocks always are FSDP groups."""
    families = [BLOCKS[block] for block in str(value).replace(",", " ").split() if block in BLOCKS]
    if not families:
        return GROUPS
    of_pairs = {"data.objective": "pairs", "data.target_len": 128} if FAMILIES[families[0]].encoder_decoder else {}
    return {"model.family": families[0], **of_pairs}


def _switch(key: str, on: Any = True, off: Any = False) -> dict[str, Outcome]:
    return {"TRUE": {key: on}, "FALSE": {key: off}}


def _dtype(name: str) -> Outcome:
    return {"fsdp.param_dtype": name, "fsdp.reduce_dtype": name}


# the comments on keys that follow from another key's value
FOLLOWS = {
    "optim.name": "fsdp.cpu_offload needs it: muon's update needs gradients on the GPU",
    "optim.lr": "usual for adamw; the default is muon's",
    "fsdp.forward_prefetch": "FSDP1 gathers one group ahead",
    "data.objective": "for text and summary, or question and answer; for plain text: span_corruption",
    "data.target_len": "the maximum tokens of a target; adapt it to your data",
}
LAUNCHER = "an option of the launcher: see the command below"
TPU = "for TPUs"
ACCUMULATION = (
    "derived: train.global_batch_size = this x ranks x train.micro_batch_size (sequences per rank and forward pass)"
)
OWN_ROWS = "always on: each rank gets only its own rows of the model"
GROUPS = "always on: each block, the embeddings and the head are groups"
FIXED_GROUPS = "the groups are fixed: each block, the embeddings, the head"
# FSDP2 offloads all or nothing
OFFLOADED: Outcome = {"fsdp.cpu_offload": True, "optim.name": "adamw", "optim.lr": 3e-4}
OFFLOAD: Rule = {
    "CPU": OFFLOADED,
    "NONE": "off",
    "": "parameters, gradients and optimizer state can be offloaded to the host, not to a disk",
}
PREFETCH_POLICY: Rule = {
    "BACKWARD_PRE": "FSDP2 always does; explicit_prefetching = true reaches further ahead",
    "": "FSDP2 has BACKWARD_PRE only",
}
_ZERO2 = "_HYBRID_SHARD_ZERO2"
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": _ZERO2}
_STRATEGY_NAMES = {**{name: name for name in STRATEGIES}, "HYBRID_SHARD_ZERO2": _ZERO2, **_NUMBERED}
STRATEGY: dict[str, Outcome] = {theirs: {"fsdp.sharding_strategy": ours} for theirs, ours in _STRATEGY_NAMES.items()}

RULES: dict[str, Rule] = {
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "same_network"), LAUNCHER),
    **dict.fromkeys(("num_machines", "num_processes"), LAUNCHER),
    **dict.fromkeys(("downcast_bf16", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_zone"), TPU),
    "compute_environment": {"LOCAL_MACHINE": LAUNCHER, "": "start torchrun in your cloud's own way"},
    "debug": "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment checks collectives",
    "distributed_type": {
        "FSDP": "always on",
        "MULTI_GPU": STRATEGY["3"],
        "MULTI_CPU": STRATEGY["3"],
        "DEEPSPEED": "its ZeRO stage becomes a sharding strategy",
        "NO": "python train.py runs one process",
        "FALSE": "python train.py runs one process",  # YAML reads a bare no as false
        "": "not supported",
    },
    "gradient_accumulation_steps": ACCUMULATION,
    "main_training_function": "train.py is the script",
    "mixed_precision": {
        "BF16": _dtype("bfloat16"),
        "FP16": _dtype("float16"),
        "NO": _dtype("float32"),
        "FALSE": _dtype("float32"),
        "FP8": "float8 is speed.float8 here, by torchao's tensorwise recipe only",
    },
    "rdzv_backend": {
        "STATIC": LAUNCHER,
        "": "the command below is for a static rendezvous; others: docs/cluster.md",
    },
    "use_cpu": _switch("run.device", "cpu", "auto"),
    "enable_cpu_affinity": "start torchrun under numactl",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES in the environment",
    # fsdp_config
    "fsdp_version": "always FSDP2",
    "fsdp_sharding_strategy": STRATEGY,
    # Accelerate also accepts FSDP1's strategy names here
    "fsdp_reshard_after_forward": {**STRATEGY, **_switch("fsdp.reshard_after_forward")},
    "fsdp_auto_wrap_policy": {"TRANSFORMER_BASED_WRAP": GROUPS, "": FIXED_GROUPS},
    "fsdp_transformer_layer_cls_to_wrap": _block_class,
    "fsdp_transformer_cls_names_to_wrap": _block_class,
    "fsdp_min_num_params": FIXED_GROUPS,
    "fsdp_backward_prefetch": PREFETCH_POLICY,
    "fsdp_backward_prefetch_policy": PREFETCH_POLICY,
    "fsdp_forward_prefetch": {
        "TRUE": {"fsdp.explicit_prefetching": True, "fsdp.forward_prefetch": 1},
        "FALSE": {"fsdp.explicit_prefetching": False},
    },
    "fsdp_limit_all_gathers": "not needed: FSDP2 frees memory without blocking the host",
    "fsdp_use_orig_params": "always on: FSDP2 has no flat parameters",
    "fsdp_cpu_ram_efficient_loading": OWN_ROWS,
    "fsdp_sync_module_states": OWN_ROWS,
    "fsdp_offload_params": {"TRUE": OFFLOADED, "FALSE": {"fsdp.cpu_offload": False}},
    "fsdp_activation_checkpointing": _switch("activation_checkpointing.mode", "full", "none"),
    "fsdp_state_dict_type": {
        "FULL_STATE_DICT": {"checkpoint.state_dict": "full"},
        "SHARDED_STATE_DICT": {"checkpoint.state_dict": "sharded"},
        "": "checkpoints are full or sharded state dicts",
    },
    "fsdp_ignored_modules": "every parameter is sharded; optim.freeze excludes some from training",
    # deepspeed_config: ZeRO-1 and ZeRO-2 differ only in gradients between micro-batches, which is grad_sync here
    "zero_stage": {"0": STRATEGY["3"], "1": STRATEGY["2"], "2": STRATEGY["2"], "3": STRATEGY["1"]},
    "offload_param_device": OFFLOAD,
    "offload_optimizer_device": OFFLOAD,
    "gradient_clipping": _clipping,
    "zero3_init_flag": "always on: the model is built without storage and sharded before it is allocated",
    "zero3_save_16bit_model": "checkpoints hold float32; python checkpoint.py export writes a model",
    "dynamo_backend": {
        **{key: {"compile.enabled": False} for key in ("NO", "FALSE")},
        "INDUCTOR": {"compile.enabled": True},
        "AOT_EAGER": {"compile.enabled": True, "compile.backend": "aot_eager"},
        "EAGER": {"compile.enabled": True, "compile.backend": "eager"},
        "": "backends are inductor, aot_eager and eager",
    },
    "parallelism_config_dp_replicate_size": lambda value: {"fsdp.dp_replicate": int(value)},
    "parallelism_config_dp_shard_size": lambda value: {"fsdp.dp_shard": int(value)},
    **{
        f"parallelism_config_{name}_size": {"1": "off", "": f"no {name} parallelism here"}
        for name in ("tp", "cp", "sp")
    },
}

# --- the conversion ------------------------------------------------------------------------------------------------

Sets = dict[str, tuple[Any, str]]  # by "section.key": value, origin


def translate(content: Mapping[str, Any]) -> tuple[Sets, dict[str, str]]:
    """Return what an Accelerate config sets here, and why its other keys set nothing.

    Raises:
        ConfigError: a value is unknown to Accelerate, or two values contradict each other.
    """
    sets, others = Sets(), dict[str, str]()
    tables = [value for value in content.values() if isinstance(value, dict)]
    for name, value in [item for table in (content, *tables) for item in table.items()]:
        if value is None or value in tables:
            continue
        rule = RULES.get(name, RULES.get(f"fsdp_{name}", "unknown to this tool"))  # FSDP1's plugin takes both names
        if isinstance(rule, Mapping):
            outcome = rule.get(str(value).upper(), rule.get(""))
            if outcome is None:
                raise ConfigError(f"{name} = {value} is not one of {', '.join(rule)}")
        else:
            outcome = rule(value) if callable(rule) else rule
        if isinstance(outcome, str):
            others[name] = outcome
            continue
        for key, ours in outcome.items():
            if sets.get(key, (ours,))[0] != ours:
                raise ConfigError(f"{name}: {value} wants {key} = {format_value(ours)}, but {sets[key][1]} does not")
            sets[key] = ours, FOLLOWS.get(key, f"{name}: {value}")
    if "fsdp.reduce_dtype" in sets and "MULTI" in str(content.get("distributed_type")):
        sets["fsdp.reduce_dtype"] = "float32", "DDP with autocast sums in float32"
    return sets, others


def _ranks(content: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of machines, of processes, and of processes on a machine."""
    machines, processes = (int(content.get(key) or 1) for key in ("num_machines", "num_processes"))
    return machines, processes, max(processes // machines, 1)


def to_toml(content: Mapping[str, Any], source: str) -> str:
    """Return the config file, with comments on what it lacks."""
    sets, others = translate(content)
    lines = [f"# from {source}"]
    for section in dict.fromkeys(key.split(".")[0] for key in sets):
        inside = {key.split(".")[1]: value for key, value in sets.items() if key.startswith(f"{section}.")}
        lines += ["", f"[{section}]"]
        lines += [f"{f'{key} = {format_value(value)}':<40} # {origin}" for key, (value, origin) in inside.items()]
    lines += ["", "# these set nothing:", *(f"#   {name}: {reason}" for name, reason in others.items()), _LACKS]
    machines, _, per_machine = _ranks(content)
    address, port = content.get("main_process_ip") or "ADDRESS", content.get("main_process_port")
    launcher = [
        f"torchrun --nproc-per-node {per_machine}",
        *([f"--nnodes {machines} --node-rank RANK --master-addr {address}"] if machines > 1 else []),
        *([f"--master-port {port}"] if port else []),
    ]
    return "\n".join([*lines, f"# {' '.join(launcher)} train.py --config THIS_FILE --data.path=TEXT"])


_LACKS = """#
# train.py replaces your script: the model, the data and the loop. To keep the script, `accelerate to-fsdp2
# --config_file OLD --output_file NEW` changes only the keys of FSDP1 to those of FSDP2.
#
# With mixed precision, Accelerate gives FSDP2 an output_dtype, too. It is not set: here blocks return param_dtype
# anyway, and the loss stays in float32.
#
# An Accelerate config lacks the model, the text, the batch and the learning rate. For a published model,
# `python checkpoint.py import FOLDER model.toml` writes all of these but the text: put the line
# base = "model.toml" above the first section. Otherwise set [model], [train] and [optim] (docs/config.md):
# the defaults train a small model with random weights, and the default learning rate is for Muon.
#"""


def _run(file: Path) -> int:
    try:
        content = yaml.safe_load(file.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} can't be read as YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a table of keys and values, as an Accelerate config is")
    print(to_toml(content, file.name), flush=True)
    # train.py would refuse the same
    values = {key: value for key, (value, _) in translate(content)[0].items()}
    _, n, local = _ranks(content)
    load.load(None, values, origin=file.name, world_size=n, n_gpus=local, local_world_size=local, elsewhere=True)
    return 0


OPTIONS: commands.Options = {"file": {"type": paths.expand, "help": "an Accelerate config, e.g. default_config.yaml"}}


def main(argv: Sequence[str] | None = None) -> int:
    text = __doc__.splitlines()[0]
    return commands.run("migrate", argv, OPTIONS, lambda options: _run(options.file), description=text)
