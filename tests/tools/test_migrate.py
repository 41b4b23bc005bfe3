"""An Accelerate config is converted to ours without losing a key."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import python, succeeded
from torchtitan_lite.config import load
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tools import migrate_accelerate

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


def converted(content: dict[Any, Any], name: str = "x") -> str:
    """The output."""
    return migrate_accelerate.to_toml(content, name)


def set_by(text: str) -> dict[str, object]:
    """Our keys with their values."""
    return {key: value for key, (value, _) in migrate_accelerate.translate(yaml.safe_load(text))[0].items()}


def test_every_key_of_the_example_is_set_or_named(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(EXAMPLE)
    output = succeeded(python(str(file), script="-m torchtitan_lite.migrate"))
    for line in EXAMPLE.split():
        key = line.removesuffix(":")
        if line.endswith(":") and key != "fsdp_config":
            assert f"{key}: " in output, key
    assert "unknown to this tool" not in output
    mine = tmp_path / "mine.toml"
    mine.write_text(output)
    fsdp = load.load(mine, {}, world_size=2).config.fsdp
    assert fsdp.sharding_strategy == "FULL_SHARD"
    assert fsdp.reshard_after_forward is True
    assert (fsdp.param_dtype, fsdp.reduce_dtype) == ("bfloat16", "bfloat16")
    assert load.load(mine, {}, world_size=2).config.checkpoint.state_dict == "sharded"
    assert "torchrun --nproc-per-node 2 train.py" in output
    assert "lacks the model, the text, the batch and the learning rate" in output
    file.write_text("!!python/object/apply:os.system [id]")
    result = python(str(file), script="-m torchtitan_lite.migrate")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"migrate: {file} can't be read as YAML: ")
    assert "Traceback" not in result.stderr


def test_what_is_not_an_accelerate_config_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "accelerate.yaml"
    for content, said in (
        ("a: b: c", "can't be read as YAML"),
        ("just text", "is not a table"),
        (None, "can't be read"),
    ):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        assert migrate_accelerate.main([str(file)]) == 2
        assert said in capsys.readouterr().err


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
        ("mixed_precision: no", {"fsdp.param_dtype": "float32", "fsdp.reduce_dtype": "float32"}),
        ("mixed_precision: fp16", {"fsdp.param_dtype": "float16", "fsdp.reduce_dtype": "float16"}),
        ("deepspeed_config: {zero_stage: 3}", {"fsdp.sharding_strategy": "FULL_SHARD"}),
        ("deepspeed_config: {gradient_clipping: 1}", {"optim.max_norm": 1.0}),
        ("parallelism_config: {parallelism_config_dp_replicate_size: 2}", {"fsdp.dp_replicate": 2}),
    ],
)  # fmt: skip
def test_each_value_becomes_its_keys(text: str, expected: dict[str, object]) -> None:
    assert set_by(text) == expected


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("T5Block", {"model.family": "t5", "data.objective": "pairs", "data.target_len": 128}),
        ("Embedding, LlamaDecoderLayer", {"model.family": "llama"}),
        ("BertLayer", {}),
    ],
)
def test_the_class_of_a_block_sets_our_family(blocks: str, expected: dict[str, object]) -> None:
    assert set_by(f"fsdp_config: {{fsdp_transformer_layer_cls_to_wrap: '{blocks}'}}") == expected


def test_a_job_of_t5_becomes_one_of_t5(tmp_path: Path) -> None:
    content = yaml.safe_load(EXAMPLE.replace("BertLayer", "T5Block"))
    output = converted(content)
    (tmp_path / "model.toml").write_text('[model]\nsize = "t5-small"\n[data]\nobjective = "span_corruption"\n')
    for base, size in (("", "1M"), ('base = "model.toml"\n', "t5-small")):  # as checkpoint.py import writes it
        (tmp_path / "mine.toml").write_text(base + output)
        config = load.load(tmp_path / "mine.toml", {}, world_size=2).config
        assert (config.model.family, config.model.size, config.data.objective) == ("t5", size, "pairs")
    assert "train.py replaces your script" in output
    assert "accelerate to-fsdp2" in output
    assert "llama" not in output.lower()


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (
            "{num_machines: 2, num_processes: 16}",
            "--nproc-per-node 8 --nnodes 2 --node-rank RANK --master-addr ADDRESS",
        ),
        (
            "{num_machines: 2, num_processes: 2, main_process_ip: 10.0.0.1, main_process_port: 29501}",
            "--nproc-per-node 1 --nnodes 2 --node-rank RANK --master-addr 10.0.0.1 --master-port 29501",
        ),
        ("{num_processes: 4, main_process_port: 29501}", "torchrun --nproc-per-node 4 --master-port 29501"),
        ("{main_process_port: 0}", "torchrun --nproc-per-node 1"),
    ],
)
def test_the_launch_command_has_the_options_of_the_launcher(content: str, command: str) -> None:
    output = converted(yaml.safe_load(content))
    assert f"{command} train.py --config THIS_FILE" in output.splitlines()[-1]


@pytest.mark.parametrize("key", migrate_accelerate.RULES)
def test_no_key_is_dropped_whatever_its_value(key: str) -> None:
    rule = migrate_accelerate.RULES[key]
    for value in [*(rule if isinstance(rule, Mapping) else ()), 0, 1, False, True, 29500]:
        try:
            output = converted({key: value})
        except ConfigError as error:
            assert key in str(error)  # noqa: PT017
            continue
        assert f"{key}: " in output, value


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("fsdp_config: {fsdp_backward_prefetch: BACKWARD_POST}", "fsdp_backward_prefetch", "BACKWARD_PRE only"),
        ("fsdp_config: {limit_all_gathers: true}", "limit_all_gathers", "not needed"),
        ("fsdp_config: {fsdp_min_num_params: 100}", "fsdp_min_num_params", "the groups are fixed"),
        ("mixed_precision: fp8", "mixed_precision", "float8"),
        ("deepspeed_config: {gradient_clipping: auto}", "gradient_clipping", "from the script"),
        ("deepspeed_config: {offload_param_device: nvme}", "offload_param_device", "not to a disk"),
        ("gradient_accumulation_steps: 4", "gradient_accumulation_steps", "train.global_batch_size = this x ranks x"),
        ("wild_key: 3", "wild_key", "unknown to this tool"),
        ("rdzv_backend: c10d", "rdzv_backend", "docs/cluster.md"),
        ("parallelism_config: {parallelism_config_cp_size: 2}", "parallelism_config_cp_size", "no cp parallelism here"),
    ],
)
def test_keys_without_a_counterpart_are_listed_with_the_reason(text: str, key: str, reason: str) -> None:
    sets, others = migrate_accelerate.translate(yaml.safe_load(text))
    assert reason in others[key]
    assert not sets


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
