"""An Accelerate config is converted to ours without losing a key."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

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


def test_every_key_of_the_example_is_set_or_named(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(EXAMPLE)
    output = succeeded(python(str(file), script="-m torchtitan_lite.migrate"))
    mine = tmp_path / "mine.toml"
    mine.write_text(output)
    config = load.load(mine, {}, world_size=2).config
    assert config.fsdp.sharding_strategy == "FULL_SHARD"
    assert config.fsdp.reshard_after_forward is True
    assert (config.fsdp.param_dtype, config.fsdp.reduce_dtype) == ("bfloat16", "bfloat16")
    assert config.checkpoint.state_dict == "sharded"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"fsdp_offload_params: false": "fsdp_offload_params: true"}, ""),
        ({"debug: false": "dynamo_config: {dynamo_backend: INDUCTOR}"}, ""),  # there may be no compiler here
        (
            {"fsdp_offload_params: false": "fsdp_offload_params: true", "FULL_SHARD": "NO_SHARD"},
            "fsdp.dp_replicate = 2",
        ),
        ({"fsdp_offload_params: false": "fsdp_offload_params: true", "use_cpu: false": "use_cpu: true"}, "uses no GPU"),
        ({"mixed_precision: bf16": "mixed_precision: fp16", "BertLayer": "T5Block"}, "can't compute in float16"),
        (
            {"num_processes: 2": "num_processes: 6\nparallelism_config:\n  parallelism_config_dp_shard_size: 4"},
            "dp_shard",
        ),
    ],
)
def test_a_result_that_train_py_would_refuse_is_an_error(
    changes: dict[str, str], refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a value that only follows from others has a reason of its own."""
    text = EXAMPLE
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "accelerate.yaml").write_text(text)
    code = migrate_accelerate.main([str(tmp_path / "accelerate.yaml")])
    said = capsys.readouterr()
    assert (code, refused in said.err) == (2 if refused else 0, True)
    assert not re.search(r"(lr|name|objective|target_len) = .* # (fsdp|mixed)_", said.out)


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
