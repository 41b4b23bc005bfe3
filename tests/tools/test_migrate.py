"""An Accelerate config is converted to ours without losing a key."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.helpers import python, succeeded
from torchtitan_lite.config import load
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tools import migrate_accelerate
from torchtitan_lite.tools.migrate_accelerate import to_toml

# what `accelerate config` writes for FSDP, as in Accelerate's documentation
EXAMPLE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


CONVERTED = """\
# from accelerate.yaml

[fsdp]
param_dtype = "bfloat16"                 # mixed_precision: bf16
reduce_dtype = "bfloat16"                # mixed_precision: bf16
explicit_prefetching = false             # fsdp_forward_prefetch: False
cpu_offload = false                      # fsdp_offload_params: False
sharding_strategy = "FULL_SHARD"         # fsdp_sharding_strategy: FULL_SHARD

[run]
device = "auto"                          # use_cpu: False

[checkpoint]
state_dict = "sharded"                   # fsdp_state_dict_type: SHARDED_STATE_DICT

# these set nothing:
#   compute_environment: an option of the launcher: see the command below
#   debug: TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment checks collectives
#   distributed_type: always on
#   downcast_bf16: for TPUs
#   machine_rank: an option of the launcher: see the command below
#   main_training_function: train.py is the script
#   num_machines: an option of the launcher: see the command below
#   num_processes: an option of the launcher: see the command below
#   rdzv_backend: an option of the launcher: see the command below
#   same_network: an option of the launcher: see the command below
#   tpu_env: for TPUs
#   tpu_use_cluster: for TPUs
#   tpu_use_sudo: for TPUs
#   fsdp_auto_wrap_policy: always on: each block, the embeddings and the head are groups
#   fsdp_backward_prefetch_policy: FSDP2 always does; explicit_prefetching = true reaches further ahead
#   fsdp_cpu_ram_efficient_loading: always on: each rank gets only its own rows of the model
#   fsdp_sync_module_states: always on: each rank gets only its own rows of the model
#   fsdp_transformer_layer_cls_to_wrap: always on: each block, the embeddings and the head are groups
#   fsdp_use_orig_params: always on: FSDP2 has no flat parameters
#
# train.py replaces your script: the model, the data and the loop. To keep the script, `accelerate to-fsdp2
# --config_file OLD --output_file NEW` changes only the keys of FSDP1 to those of FSDP2.
#
# An Accelerate config lacks the model, the text, the batch and the learning rate. For a published model,
# `python checkpoint.py import FOLDER model.toml` writes all of these but the text: put the line
# base = "model.toml" above the first section. Otherwise set [model], [train] and [optim] (docs/config.md):
# the defaults train a small model with random weights, at Muon's learning rate.
#
# torchrun --nproc-per-node 2 train.py --config THIS_FILE --data.path=TEXT
"""
# another config, and why its keys set nothing
OTHER = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: DEEPSPEED
enable_cpu_affinity: true
gpu_ids: all
gradient_accumulation_steps: 2
mixed_precision: fp8
num_machines: 2
num_processes: 16
main_process_ip: 10.0.0.1
main_process_port: 29500
rdzv_backend: c10d
deepspeed_config:
  {zero_stage: 2, offload_param_device: nvme, gradient_clipping: auto, zero3_init_flag: true,
  zero3_save_16bit_model: true}
fsdp_config:
  {fsdp_version: 2, fsdp_transformer_layer_cls_to_wrap: T5Block, fsdp_min_num_params: 100,
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_backward_prefetch: BACKWARD_POST, fsdp_limit_all_gathers: true,
  fsdp_ignored_modules: x, fsdp_state_dict_type: LOCAL_STATE_DICT, fsdp_offload_params: null}
dynamo_config: {dynamo_backend: TENSORRT}
parallelism_config:
  {parallelism_config_tp_size: 2, parallelism_config_cp_size: 1, parallelism_config_dp_shard_size: 8}
other: 1
"""
SET = """\
# from other.yaml

[fsdp]
sharding_strategy = "SHARD_GRAD_OP"      # zero_stage: 2
dp_shard = 8                             # parallelism_config_dp_shard_size: 8

[model]
family = "t5"                            # fsdp_transformer_layer_cls_to_wrap: T5Block

[data]
objective = "pairs"                      # fsdp_transformer_layer_cls_to_wrap: T5Block
target_len = 128                         # fsdp_transformer_layer_cls_to_wrap: T5Block

"""
REASONS = """\
# these set nothing:
#   compute_environment: start torchrun in your cloud's own way
#   distributed_type: its ZeRO stage becomes a sharding strategy
#   enable_cpu_affinity: start torchrun under numactl
#   gpu_ids: set CUDA_VISIBLE_DEVICES in the environment
#   gradient_accumulation_steps: derived: train.global_batch_size = this x ranks x train.micro_batch_size \
(sequences per rank and forward pass)
#   mixed_precision: float8 is speed.float8 here, by torchao's tensorwise recipe only
#   num_machines: an option of the launcher: see the command below
#   num_processes: an option of the launcher: see the command below
#   main_process_ip: an option of the launcher: see the command below
#   main_process_port: an option of the launcher: see the command below
#   rdzv_backend: the command below is for a static rendezvous; others: docs/cluster.md
#   other: unknown to this tool
#   offload_param_device: parameters, gradients and optimizer state can be offloaded to the host, not to a disk
#   gradient_clipping: auto takes it from the script: optim.max_norm
#   zero3_init_flag: always on: the model is built without storage and sharded before it is allocated
#   zero3_save_16bit_model: checkpoints hold float32; python checkpoint.py export writes a model
#   fsdp_version: always FSDP2
#   fsdp_min_num_params: the groups are fixed: each block, the embeddings, the head
#   fsdp_auto_wrap_policy: the groups are fixed: each block, the embeddings, the head
#   fsdp_backward_prefetch: FSDP2 has BACKWARD_PRE only
#   fsdp_limit_all_gathers: not needed: FSDP2 frees memory without blocking the host
#   fsdp_ignored_modules: every parameter is sharded; optim.freeze excludes some from training
#   fsdp_state_dict_type: checkpoints are full or sharded state dicts
#   dynamo_backend: backends are inductor, aot_eager and eager
#   parallelism_config_tp_size: no tp parallelism here
#   parallelism_config_cp_size: off
#
"""
LAUNCH = "# torchrun --nproc-per-node 8 --nnodes 2 --node-rank RANK --master-addr 10.0.0.1 --master-port 29500 train.py"


def set_by(text: str) -> dict[str, object]:
    """Our keys with their values."""
    return {key: value for key, (value, _) in migrate_accelerate.translate(yaml.safe_load(text))[0].items()}


def test_every_key_of_the_example_is_set_or_named(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(EXAMPLE)
    output = succeeded(python(str(file), script="-m torchtitan_lite.migrate"))
    assert output == CONVERTED
    mine = tmp_path / "mine.toml"
    mine.write_text(output)
    config = load.load(mine, {}, world_size=2).config
    assert config.fsdp.sharding_strategy == "FULL_SHARD"
    assert config.fsdp.reshard_after_forward is True
    assert (config.fsdp.param_dtype, config.fsdp.reduce_dtype) == ("bfloat16", "bfloat16")
    assert config.checkpoint.state_dict == "sharded"


def test_what_sets_nothing_has_its_reason() -> None:
    output = to_toml(yaml.safe_load(OTHER), "other.yaml")
    assert output.startswith(SET + REASONS)
    assert output.endswith(f"\n{LAUNCH} --config THIS_FILE --data.path=TEXT")
    alone = to_toml({"distributed_type": "NO", "num_machines": 4, "num_processes": 4, "debug": None}, "x")
    assert "#   distributed_type: python train.py runs one process\n" in alone
    assert "debug" not in alone
    assert "\n# torchrun --nproc-per-node 1 --nnodes 4 --node-rank RANK --master-addr ADDRESS train.py --con" in alone
    assert "#   distributed_type: not supported\n" in to_toml({"distributed_type": "MEGATRON_LM"}, "x")
    assert "nproc-per-node 1 train.py" in to_toml({"distributed_type": False}, "x")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("!!python/object/apply:os.system [id]", "can't be read as YAML: "),
        ("a: b: c", "can't be read as YAML: "),
        ("just text", "is not a table"),
        (None, "can't be read as YAML: "),
    ],
)
def test_what_is_not_an_accelerate_config_is_an_error(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "accelerate.yaml"
    if content is not None:
        file.write_text(content)
    assert migrate_accelerate.main([str(file)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"migrate: {file} {said}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp_config: {fsdp_sharding_strategy: 1}", {"fsdp.sharding_strategy": "FULL_SHARD"}),
        ("fsdp_config: {fsdp_sharding_strategy: 5}", {"fsdp.sharding_strategy": "_HYBRID_SHARD_ZERO2"}),
        ("fsdp_config: {sharding_strategy: HYBRID_SHARD_ZERO2}", {"fsdp.sharding_strategy": "_HYBRID_SHARD_ZERO2"}),
        ("fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}", {"fsdp.reshard_after_forward": False}),
        ("fsdp_config: {fsdp_reshard_after_forward: NO_SHARD}", {"fsdp.sharding_strategy": "NO_SHARD"}),
        ("fsdp_config: {fsdp_forward_prefetch: true}", {"fsdp.explicit_prefetching": True, "fsdp.forward_prefetch": 1}),
        ("fsdp_config: {fsdp_sharding_strategy: 2}", {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}),
        ("fsdp_config: {fsdp_sharding_strategy: 3}", {"fsdp.sharding_strategy": "NO_SHARD"}),
        ("fsdp_config: {fsdp_sharding_strategy: 4}", {"fsdp.sharding_strategy": "HYBRID_SHARD"}),
        (
            "{distributed_type: MULTI_GPU, mixed_precision: bf16}",
            {"fsdp.sharding_strategy": "NO_SHARD", "fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "float32"},
        ),
        ("{use_cpu: true, fsdp_config: {offload_params: false}}", {"run.device": "cpu", "fsdp.cpu_offload": False}),
        ("deepspeed_config: {zero_stage: 1}", {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}),
        ("deepspeed_config: {zero_stage: 0}", {"fsdp.sharding_strategy": "NO_SHARD"}),
        ("deepspeed_config: {gradient_clipping: 0}", {"optim.max_norm": math.inf}),
        (
            "deepspeed_config: {offload_param_device: none, offload_optimizer_device: cpu}",
            {"fsdp.cpu_offload": True, "optim.name": "adamw", "optim.lr": 3e-4},
        ),
        ("dynamo_config: {dynamo_backend: inductor}", {"compile.enabled": True}),
        ("fsdp_config: {fsdp_activation_checkpointing: true}", {"activation_checkpointing.mode": "full"}),
        (
            "fsdp_config: {fsdp_offload_params: true}",
            {"fsdp.cpu_offload": True, "optim.name": "adamw", "optim.lr": 3e-4},
        ),
        ("{use_cpu: false, distributed_type: MULTI_CPU}", {"run.device": "auto", "fsdp.sharding_strategy": "NO_SHARD"}),
        ("dynamo_config: {dynamo_backend: EAGER}", {"compile.enabled": True, "compile.backend": "eager"}),
        ("dynamo_config: {dynamo_backend: aot_eager}", {"compile.enabled": True, "compile.backend": "aot_eager"}),
        ("dynamo_config: {dynamo_backend: no}", {"compile.enabled": False}),
        ("fsdp_config: {fsdp_activation_checkpointing: false}", {"activation_checkpointing.mode": "none"}),
        ("fsdp_config: {fsdp_state_dict_type: FULL_STATE_DICT}", {"checkpoint.state_dict": "full"}),
        ("deepspeed_config: {zero_stage: 2}", {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}),
        ("deepspeed_config: {offload_param_device: none}", {}),
        ("fsdp_config: {transformer_cls_names_to_wrap: 'A,LlamaDecoderLayer'}", {"model.family": "llama"}),
        ("mixed_precision: no", {"fsdp.param_dtype": "float32", "fsdp.reduce_dtype": "float32"}),
        ("mixed_precision: fp16", {"fsdp.param_dtype": "float16", "fsdp.reduce_dtype": "float16"}),
        ("deepspeed_config: {zero_stage: 3}", {"fsdp.sharding_strategy": "FULL_SHARD"}),
        ("deepspeed_config: {gradient_clipping: 1}", {"optim.max_norm": 1.0}),
        ("parallelism_config: {parallelism_config_dp_replicate_size: 2}", {"fsdp.dp_replicate": 2}),
    ],
)  # fmt: skip
def test_each_value_becomes_its_keys(text: str, expected: dict[str, object]) -> None:
    assert set_by(text) == expected


@pytest.mark.parametrize("key", migrate_accelerate.RULES)
def test_no_key_is_dropped_whatever_its_value(key: str) -> None:
    rule = migrate_accelerate.RULES[key]
    for value in [*(rule if isinstance(rule, Mapping) else ()), 0, 1, False, True, 29500]:
        try:
            output = to_toml({key: value}, "x")
        except ConfigError as error:
            assert key in str(error)  # noqa: PT017
            continue
        assert f"{key}: " in output, value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp_config: {fsdp_sharding_strategy: HALF}", "fsdp_sharding_strategy = HALF is not one of FULL_SHARD"),
        ("mixed_precision: int4", "mixed_precision = int4 is not one of"),
        (
            "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: NO_SHARD}",
            'wants fsdp.sharding_strategy = "NO_SHARD"',
        ),
    ],
)
def test_invalid_values_are_errors(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        set_by(text)
