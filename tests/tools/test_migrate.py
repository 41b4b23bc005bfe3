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
