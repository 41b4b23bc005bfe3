"""Weights of Hugging Face models, in and out: Llama, Qwen2, Qwen3 (family llama) and GPT-2 (family gpt).

    python -m torchtitan_lite.hf show FOLDER            the [model] section for a Hugging Face folder
    python -m torchtitan_lite.hf export RUN OUT         a run's newest checkpoint, or one step's, as such a folder

A folder holds config.json and model.safetensors, or shards of it with an index. Our layout is theirs, so this renames;
only GPT-2 stores its matrices transposed, and queries, keys and values in one. One process, the whole model in memory.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchtitan_lite import settings, storage
from torchtitan_lite.config import ModelConfig
from torchtitan_lite.errors import CheckpointError, UserError

# ours -> theirs; {} is the layer
_LLAMA = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GPT2 = {
    "tok_embeddings.weight": "transformer.wte.weight",
    "pos_embeddings.weight": "transformer.wpe.weight",
    "layers.{}.attention_norm": "transformer.h.{}.ln_1",
    "layers.{}.attention.wqkv": "transformer.h.{}.attn.c_attn",  # ours are three; see _to_gpt2
    "layers.{}.attention.wo": "transformer.h.{}.attn.c_proj",
    "layers.{}.ffn_norm": "transformer.h.{}.ln_2",
    "layers.{}.feed_forward.w1": "transformer.h.{}.mlp.c_fc",
    "layers.{}.feed_forward.w2": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "output.weight": "lm_head.weight",
}
_TRANSPOSED = (".wqkv.weight", ".wo.weight", ".w1.weight", ".w2.weight")  # GPT-2's Conv1D


def rename(name: str, table: Mapping[str, str]) -> str:
    """A tensor's name by the table, whose entries may leave out the last part (weight or bias)."""
    parts = name.split(".")
    layer = next((part for part in parts if part.isdigit()), "")
    general = ".".join("{}" if part == layer else part for part in parts) if layer else name
    for known in (general, general.rpartition(".")[0]):
        if known in table:
            return (table[known] + general[len(known) :]).replace("{}", layer)
    raise CheckpointError(f"there is no place for a tensor of the name {name}")


# --- weights ----------------------------------------------------------------------------------------------------


def to_hf(weights: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names and in its layout."""
    if family == "llama":
        return {rename(name, _LLAMA): tensor.contiguous() for name, tensor in weights.items()}
    merged = dict(weights)
    for name in [name for name in weights if ".attention.wq." in name]:
        parts = [merged.pop(name.replace(".wq.", f".{w}.")) for w in ("wq", "wk", "wv")]
        merged[name.replace(".wq.", ".wqkv.")] = torch.cat(parts)
    return {
        rename(name, _GPT2): (tensor.T if name.endswith(_TRANSPOSED) else tensor).contiguous()
        for name, tensor in merged.items()
    }


def from_hf(weights: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names and in our layout."""
    if family == "llama":
        table = {theirs: ours for ours, theirs in _LLAMA.items()}
        skipped = ("rotary_emb.inv_freq",)  # tables that old checkpoints hold
        return {rename(name, table): tensor for name, tensor in weights.items() if not name.endswith(skipped)}
    table = {theirs: ours for ours, theirs in _GPT2.items()}
    ours: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask
        prefix = "" if name.startswith(("transformer.", "lm_head.")) else "transformer."  # GPT2Model has no prefix
        renamed = rename(prefix + name, table)
        whole = tensor.T if renamed.endswith(_TRANSPOSED) else tensor
        if ".wqkv." in renamed:
            for w, part in zip(("wq", "wk", "wv"), whole.chunk(3), strict=True):
                ours[renamed.replace("wqkv", w)] = part.contiguous()
        else:
            ours[renamed] = whole.contiguous()
    return ours


# --- configs ----------------------------------------------------------------------------------------------------


# model_type: architecture, and our keys that it fixes
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"family": "llama", "qk_norm": False, "qkv_bias": False}),
    "qwen2": ("Qwen2ForCausalLM", {"family": "llama", "qk_norm": False, "qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"family": "llama", "qk_norm": True, "qkv_bias": False}),
    "gpt2": ("GPT2LMHeadModel", {"family": "gpt"}),
}


def from_hf_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Our [model] keys for a Hugging Face config.json.

    Raises:
        CheckpointError: an architecture, or a variant of one, that is not ours.
    """
    model_type = content.get("model_type")
    if model_type not in _KINDS:
        raise CheckpointError(f'model_type "{model_type}" is not among {", ".join(_KINDS)}')
    fixed = _KINDS[model_type][1]
    if model_type == "gpt2":
        if content.get("activation_function", "gelu_new") != "gelu_new":
            raise CheckpointError(f"activation_function {content['activation_function']} is not gelu_new")
        return fixed | {
            "vocab_size": content["vocab_size"],
            "dim": content["n_embd"],
            "n_layers": content["n_layer"],
            "n_heads": content["n_head"],
            "max_seq_len": content["n_positions"],
            "norm_eps": content["layer_norm_epsilon"],
            "tie_embeddings": content.get("tie_word_embeddings", True),
        }
    if content.get("mlp_bias") or (content.get("attention_bias") and model_type != "qwen2"):
        raise CheckpointError("biases of attention or feed-forward are not supported for this architecture")
    if content.get("use_sliding_window") or content.get("hidden_act", "silu") != "silu":
        raise CheckpointError("sliding windows and activations other than silu are not supported")
    return fixed | {
        "vocab_size": content["vocab_size"],
        "dim": content["hidden_size"],
        "n_layers": content["num_hidden_layers"],
        "n_heads": content["num_attention_heads"],
        "n_kv_heads": content.get("num_key_value_heads", content["num_attention_heads"]),
        "head_dim": content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"],
        "hidden_dim": content["intermediate_size"],
        "max_seq_len": content["max_position_embeddings"],
        "norm_eps": float(content["rms_norm_eps"]),
        "tie_embeddings": content.get("tie_word_embeddings", False),
        **_rope_keys(content),
    }


def _rope_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    keys = {"rope_theta": float(rope.get("rope_theta") or content.get("rope_theta") or 1e4), "rope_factor": 1.0}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "llama3":
        keys |= {
            "rope_factor": float(rope["factor"]),
            "rope_low_freq_factor": float(rope["low_freq_factor"]),
            "rope_high_freq_factor": float(rope["high_freq_factor"]),
            "rope_original_max_seq_len": rope["original_max_position_embeddings"],
        }
    elif kind != "default":
        raise CheckpointError(f"rope_type {kind} is not supported; default and llama3 are")
    return keys


def to_hf_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json of a model of ours."""
    model_type = (
        "gpt2" if config.family == "gpt" else "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    )
    common = {
        "architectures": [_KINDS[model_type][0]],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }
    if model_type == "gpt2":
        return common | {
            "n_embd": config.dim,
            "n_layer": config.n_layers,
            "n_head": config.n_heads,
            "n_positions": config.max_seq_len,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor > 1:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_max_seq_len,
        }
    return common | {
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.dim_of_heads,
        "intermediate_size": config.dim_of_ffn,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        **({"rope_scaling": rope} if config.rope_factor > 1 else {}),
    }


# --- folders ----------------------------------------------------------------------------------------------------


def open_weights(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The weights of a run (its newest checkpoint), a checkpoint, or a Hugging Face folder, under our names.

    Raises:
        CheckpointError: it is none of those, is damaged, or its config is that of another model.
    """
    folder = path.expanduser()
    here = config.model_dump()
    if (folder / "config.json").is_file():
        theirs = from_hf_config(_read_json(folder / "config.json"))
        _compare(folder, theirs, config)
        return drop_tied(from_hf(_read_shards(folder), config.family), config)
    if steps := storage.find_steps(folder / "checkpoints"):
        folder = storage.step_folder(folder / "checkpoints", steps[-1])
    if not (folder / storage.STATE).is_file():
        raise CheckpointError(
            f"model.init_from: {path} is no run with a checkpoint, no checkpoint and no Hugging Face folder"
        )
    identity = storage.read_state(folder).identity
    saved = {key: value for key, value in identity.items() if key.startswith("model.") and key != "model.dropout"}
    storage.compare(folder, saved, {key: here[key.removeprefix("model.")] for key in saved}, "model")
    try:
        return load_file(folder / storage.MODEL)
    except Exception as error:
        raise CheckpointError(f"{folder / storage.MODEL} can't be read: {error}") from None


def drop_tied(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Without the output matrix, if it is the embeddings."""
    return {name: t for name, t in weights.items() if not (config.tie_embeddings and name == "output.weight")}


def _compare(folder: Path, theirs: dict[str, Any], config: ModelConfig) -> None:
    """What a config.json says, against ours; a context of ours that is shorter is fine where positions are computed."""
    here = config.model_dump() | {
        "n_kv_heads": config.kv_heads,
        "head_dim": config.dim_of_heads,
        "hidden_dim": config.dim_of_ffn,
    }
    fixed = {key: value for key, value in theirs.items() if key != "vocab_size"}
    if config.family == "llama" and config.max_seq_len < fixed["max_seq_len"]:
        del fixed["max_seq_len"]
    saved = {f"model.{key}": value for key, value in fixed.items()}
    storage.compare(folder, saved, {key: here[key.removeprefix("model.")] for key in saved}, "model")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no object")
        return content
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from None


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name or ((folder / name).is_symlink() and not (folder / name).exists()):
            raise CheckpointError(f"{index} names {name}, which is no file of this folder")
        try:
            weights |= load_file(folder / name)
        except Exception as error:
            raise CheckpointError(f"{folder / name} can't be read: {error}") from None
    return weights


def export(source: Path, out: Path) -> None:
    """Write a run's newest checkpoint, or the checkpoint in a folder, as a Hugging Face folder in float32.

    Raises:
        CheckpointError: there is no checkpoint, or `out` is not empty.
    """
    run = source.parent.parent if (source / storage.STATE).is_file() else source
    steps = storage.find_steps(source / "checkpoints")
    folder = storage.step_folder(source / "checkpoints", steps[-1]) if steps else source
    state = storage.read_state(folder)
    values = {key.removeprefix("model."): value for key, value in state.config.items() if key.startswith("model.")}
    config = ModelConfig.model_validate(values)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; name a new folder")
    weights = load_file(folder / storage.MODEL)
    out.mkdir(parents=True, exist_ok=True)
    content = to_hf_config(config, weights["tok_embeddings.weight"].shape[0])
    (out / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if (run / "tokenizer.json").is_file():
        shutil.copyfile(run / "tokenizer.json", out / "tokenizer.json")
    save_file(to_hf(weights, config.family), out / "model.safetensors", metadata={"format": "pt"})


def _section(folder: Path) -> Iterator[str]:
    yield "[model]"
    for key, value in from_hf_config(_read_json(folder / "config.json")).items():
        yield f"{key} = {settings.show(value)}"
    yield f'init_from = "{folder}"'


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_lite.hf", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print the [model] section for a Hugging Face folder")
    show.add_argument("folder", type=Path)
    write = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    write.add_argument("source", type=Path, help="a run, or one of its checkpoints")
    write.add_argument("out", type=Path, help="a new folder")
    arguments = parser.parse_args()
    try:
        if arguments.command == "show":
            print("\n".join(_section(arguments.folder)))
        else:
            export(arguments.source, arguments.out)
            print(f"exported to {arguments.out}")
    except UserError as error:
        print(f"hf: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
