"""Hugging Face's config.json and names, recorded: what each model is exported as, and what each key of theirs means.

Nothing else holds: the messages on models that theirs can't be, and on their values that are refused or not read; read
their diffs. What is exported and the usual keys, names and shapes are those of transformers in test_parity.py and
test_t5.py.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers import meta_model
from tests.recorded import assert_recorded
from torchtitan_lite.config import load
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.registry import is_module_name
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.huggingface import configs, names, stacks
from torchtitan_lite.huggingface.weights import find_weights

HERE, MODEL = Path(__file__).parent, "model.safetensors"


# --- ours to theirs ---------------------------------------------------------------------------------------------

ROPE = {"rope_factor": 8.0, "rope_low_freq_factor": 2.0, "rope_high_freq_factor": 5.0, "rope_original_max_seq_len": 32}
WITH_HEADS = {"n_heads": 6, "n_kv_heads": 3, "head_dim": 10, "max_seq_len": 70, "norm_eps": 1e-4}
EXPORTED: list[dict[str, Any]] = [
    *({"family": name} for name in FAMILIES if not is_module_name(name)),
    {"family": "gpt", "tie_embeddings": False, "dropout": 0.25, "max_seq_len": 70},
    {"family": "llama", "qk_norm": False, "tie_embeddings": True, "rope_theta": 5e5, "hidden_dim": 100} | WITH_HEADS,
    {"family": "llama", "qk_norm": False} | ROPE,
    {
        "family": "llama",
        "qk_norm": False,
        "qkv_bias": True,
        "n_layers": 3,
        "window": 9,
        "layer_pattern": ["full", "window"],
    },
    {"family": "llama", "qk_norm": True, "window": 9, "layer_pattern": ["window"], "n_kv_heads": 1} | ROPE,
    {"family": "llama", "qk_norm": True, "qkv_bias": True},
    {"family": "llama", "qk_norm": False, "window": 8},
    {"family": "llama", "qk_norm": False, "window": 2000},
    {"family": "llama", "qk_norm": False, "layer_pattern": ["nope"]},
    {"family": "llama", "qk_norm": False, "layer_pattern": ["full"], "mup_base_dim": 64, "induction_head": True},
    {"family": "mistral", "window": 0, "rope_theta": 1e6} | WITH_HEADS,
    {"family": "smollm3", "n_layers": 5, "layer_pattern": ["nope", "full"], "tie_embeddings": True} | WITH_HEADS,
    {"family": "smollm3", "layer_pattern": ["full"]},
    *({"family": family, "n_layers": 3} for family in ("smollm3", "olmo3")),  # a part of their patterns
    {"family": "smollm3", "layer_pattern": ["window", "nope"]},
    {"family": "olmo2", "rope_theta": 7e5} | WITH_HEADS,
    {"family": "olmo3", "window": 0, "n_layers": 5} | WITH_HEADS,
    {"family": "olmo3", "layer_pattern": ["full"]},
    {"family": "olmo_hybrid", "layer_pattern": ["delta", "nope"], "n_layers": 3, "n_kv_heads": 4},
    {"family": "olmo_hybrid", "layer_pattern": ["delta"]},
    {"family": "olmo_hybrid", "layer_pattern": ["full"]},
    {"family": "olmo_hybrid", "layer_pattern": ["delta", "full", "nope"]},
    {
        "family": "gemma3",
        "tie_embeddings": False,
        "window": 9,
        "window_rope_theta": 3e4,
        "rope_theta": 2e6,
        "n_layers": 4,
    },
    {"family": "gemma3", "window": 0, "layer_pattern": ["full", "window"]} | WITH_HEADS,
    {"family": "qwen3_moe", "norm_topk_prob": False, "n_experts": 5, "experts_per_token": 3} | WITH_HEADS,
    {"family": "qwen3_moe", "router_bias": True},
    {"family": "olmoe", "norm_topk_prob": True, "n_experts": 3, "n_layers": 2, "tie_embeddings": True},
    {
        "family": "t5",
        "gated": False,
        "tie_embeddings": True,
        "scale_output": True,
        "n_decoder_layers": 3,
        "dropout": 0.1,
    },
    {"family": "t5", "tie_embeddings": True},
    {"family": "t5", "scale_output": True},
]


def model(values: dict[str, Any]) -> ModelConfig:
    """Of the family's default shape, but for these values."""
    objective = "span_corruption" if FAMILIES[values["family"]].encoder_decoder else "causal"
    given = {"model.family": values["family"], "data.objective": objective}
    return load.load(None, given, elsewhere=True).config.model.model_copy(update=values)


def changed(values: dict[str, Any]) -> dict[str, Any]:
    """Without what every model has by default."""
    return {key: value for key, value in values.items() if value != ModelConfig.model_fields[key].default}


def test_each_model_is_exported_as_this_and_comes_back(tmp_path: Path) -> None:
    """Also as `model.init_from` of the config that trained it, which may spell the same layers differently."""
    found: dict[str, Any] = {}
    for values in EXPORTED:
        name = ", ".join(f"{key} {value}" for key, value in values.items())
        try:
            theirs = configs.to_hf_config(model(values), 97)
        except CheckpointError as error:
            found[name] = str(error)
        else:
            found[name] = {"theirs": str(theirs), "ours": str(changed(configs.from_hf_config(theirs)))}
            (tmp_path / "config.json").write_text(json.dumps(theirs))
            save_file({"lm_head.weight": torch.ones(1)} if not model(values).tie_embeddings else {}, tmp_path / MODEL)
            assert {  # a window beyond max_seq_len is none, and positions that are computed may end earlier
                find_weights(tmp_path, model(values | more))[0]
                for more in (
                    {"window": 500} if values.get("window") == 0 else {},
                    {"dropout": 0.5} | ({} if values["family"] == "gpt" else {"max_seq_len": 8}),
                    {},
                )
            } == {tmp_path}
    assert_recorded(found, HERE / "recorded_exports.json")


# --- theirs to ours ---------------------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 9, "hidden_size": 24, "num_hidden_layers": 5}
LLAMA |= {"num_attention_heads": 6, "intermediate_size": 20}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
SMALLEST: dict[str, dict[str, Any]] = {
    **{name: LLAMA | {"model_type": name} for name in configs.KINDS},
    "olmo_hybrid": LLAMA | {"model_type": "olmo_hybrid", "rope_theta": 3e4},
    "qwen3_moe": LLAMA | {"model_type": "qwen3_moe"},
    "gemma3_text": LLAMA | {"model_type": "gemma3_text", "query_pre_attn_scalar": 256},
    "gpt2": {"model_type": "gpt2", "vocab_size": 9, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 70},
    "t5": {"model_type": "t5", "vocab_size": 9, "d_model": 24, "num_heads": 3, "num_layers": 2, "d_kv": 5, "d_ff": 20},
}
MORE: list[dict[str, Any]] = [
    *(
        {"rope_scaling": rope}
        for rope in (
            LLAMA3,
            {**LLAMA3, "rope_theta": 7e4},
            {**LLAMA3, "factor": 1.0},
            {"type": "llama3"},
            {"type": "linear"},
        )
    ),
    {"rope_parameters": {"rope_theta": 7e4}, "rope_scaling": LLAMA3},
    {"rope_parameters": {"partial_rotary_factor": 0.5}},
    *({"rope_parameters": rope} for rope in (LLAMA3, {"rope_theta": 7e4}, {"rope_theta": None}, {"factor": 2.0}, 3)),
    {"rope_parameters": {"rope_theta": 7.0, **dict.fromkeys(configs.SCALED)}, "rope_theta": 8.0},
    {"rope_parameters": {FULL: {"rope_theta": 7e4}, SLIDING: {"rope_theta": 7e4}}},
    {"rope_parameters": {FULL: LLAMA3 | {"rope_theta": 7e4}, SLIDING: {"rope_theta": 3e4}}},
    {"rope_parameters": {FULL: {"rope_theta": 5e5}}, "rope_scaling": LLAMA3},
    {"rope_parameters": {SLIDING: LLAMA3}},
    {"sliding_window": 11, "use_sliding_window": True},
    {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 2},
    {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 2},
    *({"layer_types": kinds} for kinds in ([FULL] * 5, [SLIDING, FULL] * 3, [LINEAR, FULL] * 3, [LINEAR] * 5, [FULL])),
    {"layer_types": [SLIDING, FULL, FULL, SLIDING, FULL], "use_sliding_window": True, "sliding_window": 6},
    {"layer_types": [SLIDING, LINEAR, FULL, FULL, FULL]},
    {"no_rope_layers": [0, 1, 0, 1, 0]},
    {"no_rope_layers": [2]},
    {"no_rope_layer_interval": 2},
    {"_sliding_window_pattern": 2},
    {"sliding_window_pattern": 3, "sliding_window": 7},
    {"num_local_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True},
    {"num_key_value_heads": 2, "head_dim": 10, "query_pre_attn_scalar": 10},
    {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "max_position_embeddings": 77},
    {"num_decoder_layers": 4, "feed_forward_proj": "gated-gelu"},
    {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
    {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True},
    {"feed_forward_proj": "gated-gelu", "is_gated_act": False},
    {"feed_forward_proj": "gated-gelu", "is_gated_act": None},
    {"feed_forward_proj": "gated-silu"},
    {"tie_word_embeddings": False, "scale_decoder_outputs": True},
    {"scale_decoder_outputs": False},
    {"layer_norm_epsilon": 1e-3, "n_inner": 96},
    {"n_inner": 95},
    {"hidden_act": "gelu"},
    {"activation_function": "relu", "hidden_activation": "gelu"},
    {"num_hidden_layers": 10**9, "num_attention_heads": 0, "hidden_size": "x"},
    {"rms_norm_eps": "small", "layer_norm_epsilon": math.nan},
    {"partial_rotary_factor": 0.5},
    # neutral values: they read as if they were not there
    *({"rope_scaling": {"type": kind, "factor": 1.0}} for kind in ("linear", "dynamic", "yarn")),
    {"rope_scaling": {"type": "yarn", "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None}},
    {"rope_scaling": {"type": "yarn", "factor": 1.0, "attention_factor": 1.5}},
    {"rope_scaling": {"type": "linear", "factor": 1.0}, "rope_parameters": {FULL: {"rope_theta": 5e5}}},
    {"rope_parameters": {"rope_type": "linear", "factor": 1, "rope_theta": 7e4, "partial_rotary_factor": 1.0}},
    {"partial_rotary_factor": 1.0, "attention_bias": None, "quantization_config": None, "hidden_dropout": 0.0},
    {
        "use_mrope": False,
        "num_nextn_predict_layers": 0,
        "logit_scale": None,
        "made_up": None,
        "made_up_too": [],
        "as_well": {},
    },
    {"made_up": 0},
    *({"num_hidden_layers": n} for n in (1, 2, 3, 4, 8)),
    {"model_type": "mamba"},
    {"model_type": ["llama"]},
    {"quantization_config": {"bits": [4] * 99}},
    {"linear_num_key_heads": 6, "linear_key_head_dim": 3, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4},
]


def read(content: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return configs.from_hf_config(content)
    except CheckpointError as error:
        text = str(error).removeprefix("config.json: ")
        # of several keys without support any may be named
        return re.sub(
            r"^rope_(factor|low_\w+|high_\w+|original_\w+) = [\d.]+ is not .*", "rope_ is not supported", text
        )


def difference(found: dict[str, Any] | str, usual: dict[str, Any]) -> str:
    """What is read, where it differs from what is usual."""
    if isinstance(found, str):
        return found
    keys = {key: value for key, value in found.items() if usual.get(key) != value}
    return ", ".join(
        [*(f"{key} {value}" for key, value in keys.items()), *(f"no {key}" for key in sorted(usual.keys() - found))]
    )


def test_what_each_key_of_theirs_means() -> None:
    """In the smallest file of each model type, other values of each key that it reads or that has to have one value."""
    usual = {kind: configs.from_hf_config(content) for kind, content in SMALLEST.items()}
    found: dict[str, Any] = {kind: str(keys) for kind, keys in usual.items()}
    found |= {"not read": " ".join(sorted(configs.UNREAD)), "neutral": str(configs._NEUTRAL)}
    widths = {"n_embd": 8, "head_dim": 8, "hidden_size": 24, "num_attention_heads": 6, "feed_forward_proj": ""}
    for kind, content in SMALLEST.items():
        reads, fixed = configs.KINDS[kind].keys, configs.KINDS[kind].fixed(widths)
        rows = [{key: value} for key in reads for value in (*["missing"] * (key in content), None, 12, "x")]
        rows += [{key: value} for key in fixed for value in (None, 12, False)]
        for row in (*rows, *MORE):
            wanted = {key: value for key, value in {**content, **row}.items() if value != "missing"}
            said = re.sub(r"= .{40,} is not known for.*", "is not known", difference(read(wanted), usual[kind]))
            outcomes = found.setdefault(str(row).strip("{}"), {})
            outcomes[said] = f"{outcomes[said]} {kind}" if said in outcomes else kind
    assert_recorded(found, HERE / "recorded_imports.json")


@pytest.mark.parametrize("model_type", configs.KINDS)
def test_a_key_that_is_missing_has_the_default_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    given = {key: value for key, value in SMALLEST[model_type].items() if key != "model_type"}
    complete = json.loads(transformers.AutoConfig.for_model(model_type, **given).to_json_string(use_diff=False))
    assert configs.from_hf_config(SMALLEST[model_type]) == configs.from_hf_config(complete)


# --- tensors ----------------------------------------------------------------------------------------------------


FOREIGN: list[tuple[str, tuple[int, ...], str]] = [  # masks and rotary tables of old files are left out
    *((f"h.0.attn.{name}", shape, "gpt") for name, shape in (("masked_bias", ()), ("bias", (1, 1, 5, 5)))),
    *((f"h.0.attn.c_attn.{name}", shape, "gpt") for name, shape in (("bias", (3,)), ("weight", (2, 3)))),
    ("h.0.rotary_emb.inv_freq", (2,), "llama"),
    *(("model.x", (2,), family) for family in ("gpt", "llama", "t5")),
    *((f"module.{stack}.embed_tokens.weight", (2, 2), "t5") for stack in ("encoder", "decoder")),
    *((f"model.layers.0.self_attn.q_proj.{part}.weight", (2, 2), "llama") for part in ("lora_A", "base_layer")),
    ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (2, 2), "t5"),
    ("model.layers.0.mlp.experts.0.up_proj.weight", (2, 3), "olmoe"),  # one of two: its shape is that of one
    ("model.layers.0.linear_attn.q_conv1d.weight", (6, 1, 4), "olmo_hybrid"),
]


def shape_of(values: dict[str, Any]) -> ModelConfig:
    return model(values | ({"n_experts": 2} if "moe" in values["family"] else {}))


def test_the_name_and_shape_of_each_tensor() -> None:
    """Ours of two layers, theirs, and back."""
    shapes: list[dict[str, Any]] = [
        *({"family": name, "n_layers": 2} for name in sorted({kind.ours["family"] for kind in configs.KINDS.values()})),
        {"family": "gpt", "n_layers": 1, "tie_embeddings": False},
        {"family": "llama", "n_layers": 1, "qkv_bias": True, "qk_norm": False, "n_kv_heads": 1, "tie_embeddings": True},
        {"family": "olmo_hybrid", "n_layers": 2, "layer_pattern": ["nope", "delta"]},
        {"family": "t5", "n_layers": 1, "n_decoder_layers": 2, "gated": False, "tie_embeddings": False},
    ]
    found: dict[str, Any] = {}
    for name, shape, family in FOREIGN:
        try:
            read_as = stacks.stack_experts(
                names.from_hf({name: torch.ones(shape)}, shape_of({"family": family, "n_layers": 2}))
            )
            found[f"{family} {name} {shape}"] = {ours: str(tensor.shape) for ours, tensor in read_as.items()}
        except CheckpointError as error:
            found[f"{family} {name} {shape}"] = str(error)
    for values in shapes:
        ours = meta_model(shape_of(values), 97).state_dict()
        each, family = stacks.unstack_experts(ours), values["family"]
        theirs = {
            name: names.to_hf(parts, each.__getitem__, family)
            for name, parts in names.hf_names(each, shape_of(values)).items()
        }
        found[str(values)] = [
            f"{name} {list(theirs[name].shape)}: {', '.join(parts)}"
            for name, parts in names.hf_names(each, shape_of(values)).items()
        ]
        back = stacks.stack_experts(names.from_hf(theirs, shape_of(values)))
        assert {name: back[name].shape for name in back} == {name: tensor.shape for name, tensor in ours.items()}
    assert_recorded(found, HERE / "recorded_names.json")
