"""An Accelerate config is converted to ours without losing a key."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml
from hypothesis import given, strategies
from hypothesis import settings as bounds

from tests.helpers import python, succeeded
from torchtitan_lite.config import load
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tools import migrate_accelerate, strict_yaml

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
    return migrate_accelerate.to_toml(migrate_accelerate.translate(content), content, name)


def translated(text: str) -> migrate_accelerate.Translation:
    return migrate_accelerate.translate(yaml.safe_load(text))


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
    assert result.stderr.startswith("migrate: ")
    assert "Traceback" not in result.stderr


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
            "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false}",
            {"fsdp.reshard_after_forward": False, "fsdp.dp_replicate": 1},
        ),
        (
            "{distributed_type: MULTI_GPU, mixed_precision: bf16}",
            {"fsdp.sharding_strategy": "NO_SHARD", "fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "float32"},
        ),
        ("{use_cpu: true, fsdp_config: {fsdp_offload_params: true}}", {"run.device": "cpu"}),
        ("{use_cpu: true, fsdp_config: {offload_params: false}}", {"run.device": "cpu", "fsdp.cpu_offload": False}),
        ("deepspeed_config: {zero_stage: 1}", {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}),
        ("deepspeed_config: {zero_stage: 0}", {"fsdp.sharding_strategy": "NO_SHARD"}),
        ("deepspeed_config: {gradient_clipping: 0}", {"optim.max_norm": math.inf}),
        (
            "deepspeed_config: {offload_param_device: none, offload_optimizer_device: cpu}",
            {"fsdp.cpu_offload": True, "optim.name": "adamw"},
        ),
        ("dynamo_config: {dynamo_backend: inductor}", {"compile.enabled": True}),
        ("fsdp_config: {fsdp_activation_checkpointing: true}", {"activation_checkpointing.mode": "full"}),
        ("fsdp_config: {fsdp_offload_params: true}", {"fsdp.cpu_offload": True, "optim.name": "adamw"}),
        ("mixed_precision: no", {"fsdp.param_dtype": "float32", "fsdp.reduce_dtype": "float32"}),
        ("mixed_precision: fp16", {"fsdp.param_dtype": "float16", "fsdp.reduce_dtype": "float16"}),
        ("deepspeed_config: {zero_stage: 3}", {"fsdp.sharding_strategy": "FULL_SHARD"}),
        ("deepspeed_config: {gradient_clipping: 1}", {"optim.max_norm": 1.0}),
        ("parallelism_config: {parallelism_config_dp_replicate_size: 2}", {"fsdp.dp_replicate": 2}),
    ],
)  # fmt: skip
def test_each_value_becomes_its_keys(text: str, expected: dict[str, object]) -> None:
    assert {key: value for key, (value, _) in translated(text).sets.items()} == expected


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("T5Block", {"model.family": "t5", "data.objective": "pairs", "data.target_len": 128}),
        ("Embedding, LlamaDecoderLayer", {"model.family": "llama"}),
        ("BertLayer", {}),
    ],
)
def test_the_class_of_a_block_sets_our_family(blocks: str, expected: dict[str, object]) -> None:
    t = translated(f"fsdp_config: {{fsdp_transformer_layer_cls_to_wrap: '{blocks}'}}")
    assert {key: value for key, (value, _) in t.sets.items()} == expected


def test_a_job_of_t5_becomes_one_of_t5(tmp_path: Path) -> None:
    content = yaml.safe_load(EXAMPLE.replace("BertLayer", "T5Block"))
    output = converted(content)
    (tmp_path / "model.toml").write_text('[model]\nsize = "t5-small"\n[data]\nobjective = "span_corruption"\n')
    for base, size in (("", "1M"), ('base = "model.toml"\n', "t5-small")):  # as checkpoint.py import writes it
        (tmp_path / "mine.toml").write_text(base + output)
        config = load.load(tmp_path / "mine.toml", {}, world_size=2).config
        assert (config.model.family, config.model.size, config.data.objective) == ("t5", size, "pairs")
    assert output.endswith(
        "train.py --config THIS_FILE --data.path=TEXT --data.source_key=SOURCE --data.target_key=TARGET"
    )
    assert "train.py replaces your script" in output
    assert "accelerate to-fsdp2" in output
    assert 'a small "t5" with random weights' in output
    assert "llama" not in output.lower()


@pytest.mark.parametrize(
    ("content", "command"),
    [
        ("{num_machines: 2, num_processes: 16}", "--node-rank RANK --master-addr ADDRESS --nproc-per-node 8"),
        (
            "{num_machines: 2, num_processes: 2, main_process_ip: 10.0.0.1, main_process_port: 29501}",
            "--nnodes 2 --node-rank RANK --master-addr 10.0.0.1 --master-port 29501 --nproc-per-node 1",
        ),
        ("{num_machines: 2, main_process_ip: a; reboot}", "--master-addr ADDRESS --nproc-per-node 1"),
        ("{num_processes: 4, main_process_port: '29501'}", "torchrun --master-port 29501 --nproc-per-node 4"),
        ("{num_processes: two, main_process_port: 65536}", "torchrun --nproc-per-node 1"),
    ],
)
def test_the_launch_command_has_the_options_of_the_launcher(content: str, command: str) -> None:
    output = converted(yaml.safe_load(content))
    assert f"{command} train.py --config THIS_FILE" in output.splitlines()[-1]


KEYS = [("", migrate_accelerate.TOP), *migrate_accelerate.SECTIONS.items()]


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, rules in KEYS for key in rules])
def test_no_key_is_dropped_whatever_its_value(section: str, key: str) -> None:
    rule = dict(KEYS)[section][key]
    known = list(rule.outcomes) if isinstance(rule, migrate_accelerate.Choice) else []
    for value in [*known, "cpu", "x", 0, 1, False, True, 29500]:
        try:
            output = converted({section: {key: value}} if section else {key: value})
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
        ("deepspeed_config: {gradient_clipping: auto}", "gradient_clipping", "auto is not a number"),
        ("deepspeed_config: {offload_param_device: nvme}", "offload_param_device", "not to a disk"),
        ("gradient_accumulation_steps: 4", "gradient_accumulation_steps", "train.global_batch_size = this x ranks x"),
        ("wild_key: 3", "wild_key", "unknown to this tool"),
        ("main_process_port: 0", "main_process_port", "0 is not a port; torchrun --standalone takes a free one"),
        ("rdzv_backend: c10d", "rdzv_backend", "docs/cluster.md"),
        ("parallelism_config: {parallelism_config_cp_size: 2}", "parallelism_config_cp_size", "no cp parallelism here"),
    ],
)
def test_keys_without_a_counterpart_are_listed_with_the_reason(text: str, key: str, reason: str) -> None:
    t = translated(text)
    assert reason in t.no_counterpart[key]
    assert not t.sets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp_config: {fsdp_sharding_strategy: HALF}", "fsdp_sharding_strategy = HALF is not one of FULL_SHARD"),
        ("mixed_precision: int4", "mixed_precision = int4 is not one of"),
        (
            "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: NO_SHARD}",
            'wants fsdp.sharding_strategy = "NO_SHARD"',
        ),
        ("fsdp_config: FULL_SHARD", "fsdp_config = FULL_SHARD should be a table"),
    ],
)
def test_invalid_values_are_errors(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        translated(text)


# --- hostile files: whatever is in them, the output is TOML, and sets only what the tables know ------------------

KNOWN = {
    *("fsdp.sharding_strategy", "fsdp.reshard_after_forward", "fsdp.dp_replicate", "fsdp.dp_shard"),
    *("fsdp.explicit_prefetching", "fsdp.forward_prefetch", "fsdp.cpu_offload", "fsdp.param_dtype"),
    *("fsdp.reduce_dtype", "run.device", "activation_checkpointing.mode", "checkpoint.state_dict"),
    *("optim.max_norm", "optim.name", "compile.enabled", "compile.backend"),
}


def keys_of(output: str) -> set[str]:
    return {f"{section}.{key}" for section, table in tomli.loads(output).items() for key in table}


def migrated(content: str | bytes, tmp_path: Path) -> str:
    """The output for a file of this content."""
    file = tmp_path / "accelerate.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return converted(strict_yaml.read(file))


LINE_BREAKS = ["\n", "\r\n", "\x0b", "\x85", "\u2028", "\0", "\x7f"]


@pytest.mark.parametrize("line_break", LINE_BREAKS, ids=ascii)
@pytest.mark.parametrize("place", ["key", "inner key", "value", "list", "file"])
def test_no_text_of_the_file_becomes_toml(place: str, line_break: str) -> None:
    evil = f"x{line_break}[checkpoint]{line_break}keep_latest = 1 #"
    contents: dict[str, dict[Any, Any]] = {
        "key": {evil: 1},
        "inner key": {"fsdp_config": {evil: 1}},
        "value": {"deepspeed_config": {"gradient_clipping": evil}},
        "list": {"parallelism_config": {"parallelism_config_dp_shard_size": [evil]}},
        "file": {},
    }
    output = converted(contents[place], evil if place == "file" else "x.yaml")
    assert keys_of(output) == set()
    assert output.isascii()
    assert all(line == "" or line.startswith("#") for line in output.split("\n"))


scalars = strategies.one_of(
    strategies.text(max_size=20),
    strategies.sampled_from([*LINE_BREAKS, "\n[a]\nb = 1", "\ud800", "auto", "NO", "true", "cpu", "1", "\u00b2"]),
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.dates(),
)
values_ = scalars | strategies.lists(scalars, max_size=3) | strategies.dictionaries(scalars, scalars, max_size=3)


def tables(rules: dict[str, Any]) -> strategies.SearchStrategy[dict[Any, Any]]:
    return strategies.dictionaries(strategies.sampled_from(sorted(rules)) | scalars, values_, max_size=4)


contents = strategies.builds(
    lambda top, inner: top | inner,
    tables(migrate_accelerate.TOP),
    strategies.fixed_dictionaries(
        {}, optional={name: tables(rules) for name, rules in migrate_accelerate.SECTIONS.items()}
    ),
)


@bounds(deadline=None)
@given(contents, strategies.text(max_size=9))
@pytest.mark.extended
def test_any_content_gives_toml_with_known_keys_or_a_message(content: dict[Any, Any], name: str) -> None:
    message = ""
    try:
        output = converted(content, name)
    except ConfigError as error:
        output, message = "", str(error)
    assert message.isprintable()
    assert keys_of(output) <= KNOWN
    assert output.isascii()
    tree, found = tomli.loads(output), list[str]()
    given = {key: tree[key.split(".")[0]][key.split(".")[1]] for key in keys_of(output)}
    load._validated(given, dict.fromkeys(given, "test"), found)
    assert not found, "each value is one that its key takes"


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("{a: " * 100_000, "nested too deeply"),
        (BOMB, "line 2: *a is an alias"),
        ("a: &a {k: 1}\nb: {<<: *a}\n", "line 2: *a is an alias"),
        ("a: &a [*a]", "*a is an alias"),
        (b"a: \xff\xfe", "can't be read as YAML"),
        ("debug: true\ndebug: false\n", "line 2: debug is set twice"),
        ("fsdp_config: {fsdp_version: 1, fsdp_version: 2}", "fsdp_version is set twice"),
        ("- debug: true", "is not a table"),
        ("just text", "is not a table"),
        ("a: b: c", "can't be read as YAML"),
        ("!!python/object/apply:os.system [id]", "os.system is a tag"),
        (b"", "is not a table"),
        ("num_processes: 1" + "0" * 5000, "can't be read as YAML"),
        ("debug: 2024-13-45", "can't be read as YAML"),
        ("debug: !!int x", "!!int is a tag".replace("!!", "tag:yaml.org,2002:")),
        ("? [a, b]\n: 1", "can't be read as YAML"),
        ("a: 1\n---\nb: 2", "can't be read as YAML"),
        ("a: \x00", "can't be read as YAML"),
        (b"# " + b"x" * (1 << 20), "larger than 1,048,576 bytes"),
    ],
    ids=lambda value: ascii(value)[:30],
)
@pytest.mark.extended
def test_hostile_files_are_errors(content: str | bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        migrated(content, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *(f"parallelism_config: {{parallelism_config_dp_shard_size: {n}}}" for n in (2.7, "true", -3, 10**20 - 1)),
        *(f"deepspeed_config: {{gradient_clipping: {n}}}" for n in (".nan", -1, [1], "0x" + "f" * 5000)),
        *("debug: 2024-01-02", "? 0x" + "f" * 5000 + "\n: 1", "num_processes: \u00b2"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_values_that_mean_nothing_set_nothing(text: str, tmp_path: Path) -> None:
    output = migrated(text, tmp_path)
    assert not keys_of(output)
    assert "--nproc-per-node 1 " in output
