"""Combinations of values that make no sense, each with one that works."""

import glob
from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.config import Config, ModelConfig, RunConfig, derive


def conflicts(world_size: int, n_gpus: int, local_world_size: int) -> Callable[[Config], dict[str, str]]:
    """The rules between keys, for this world size and machine.

    Args:
        n_gpus: of this machine.
        local_world_size: the ranks of this machine.

    Returns:
        a function of a config; it returns the broken rules as {"the keys involved": "what is wrong and what works"}.
    """

    def check(config: Config) -> dict[str, str]:
        return (
            _run_conflicts(config.run, n_gpus, local_world_size)
            | _model_conflicts(config.model)
            | _length_conflicts(config)
            | _mesh_conflicts(config, world_size)
            | _path_conflicts(config)
        )

    return check


def _run_conflicts(run: RunConfig, n_gpus: int, local_world_size: int) -> dict[str, str]:
    found = {}
    if Path(run.name).name != run.name or run.name in ("", ".", ".."):
        found["run.name"] = f'run.name = "{run.name}" should be the plain name of a folder, e.g. run.name = "first"'
    if run.device == "cuda" and n_gpus == 0:
        found["run.device"] = 'run.device = "cuda", but torch sees no GPU here; run.device = "cpu" works'
    if run.device != "cpu" and 0 < n_gpus < local_world_size:
        found["run.device"] = (
            f"{local_world_size} processes on this machine, and torch sees {n_gpus} GPUs; "
            f'--nproc-per-node {n_gpus} works, and so does run.device = "cpu"'
        )
    return found


def _length_conflicts(config: Config) -> dict[str, str]:
    found, train, model, optim = {}, config.train, config.model, config.optim
    if train.seq_len > model.max_seq_len:
        found["train.seq_len model.max_seq_len"] = (
            f"train.seq_len = {train.seq_len} is longer than model.max_seq_len = {model.max_seq_len}; "
            f"model.max_seq_len = {train.seq_len} works"
        )
    if not config.tokenizer.path and 0 < model.vocab_size < config.tokenizer.vocab_size:
        found["model.vocab_size tokenizer.vocab_size"] = (
            f"model.vocab_size = {model.vocab_size} is smaller than tokenizer.vocab_size = "
            f"{config.tokenizer.vocab_size}; model.vocab_size = 0 takes the tokenizer's"
        )
    if optim.warmup_steps >= train.steps:
        found["optim.warmup_steps train.steps"] = (
            f"optim.warmup_steps = {optim.warmup_steps} leaves none of train.steps = {train.steps}; "
            f"warmup_steps = {train.steps // 10} works"
        )
    elif optim.schedule == "wsd" and optim.warmup_steps > (1 - optim.decay_ratio) * train.steps:
        found["optim.warmup_steps optim.decay_ratio train.steps"] = (
            f"optim.warmup_steps = {optim.warmup_steps} reaches into the decay, the last optim.decay_ratio = "
            f"{optim.decay_ratio} of train.steps = {train.steps}; "
            f"warmup_steps = {int((1 - optim.decay_ratio) * train.steps)} works"
        )
    if any(not 0 <= beta < 1 for beta in optim.betas):
        found["optim.betas"] = f"optim.betas = {list(optim.betas)} should be in [0, 1), e.g. [0.9, 0.95]"
    return found


def _mesh_conflicts(config: Config, world_size: int) -> dict[str, str]:
    fsdp = config.fsdp
    if fsdp.dp_shard != -1 and fsdp.dp_shard < 1:
        return {"fsdp.dp_shard": f"fsdp.dp_shard = {fsdp.dp_shard} should be -1 (all that is left) or at least 1"}
    layout = derive(config, world_size)
    if layout.dp_replicate * layout.dp_shard == world_size:
        return {}
    works = fsdp.dp_replicate if world_size % fsdp.dp_replicate == 0 else 1
    return {
        "fsdp.dp_shard fsdp.dp_replicate": f"fsdp.dp_replicate = {fsdp.dp_replicate} x fsdp.dp_shard = {fsdp.dp_shard} "
        f"does not give the world size {world_size}; "
        f"fsdp.dp_replicate = {works} with fsdp.dp_shard = {world_size // works} works"
    }


def _path_conflicts(config: Config) -> dict[str, str]:
    found, data = {}, config.data
    # what the run started from may be gone once it has a checkpoint of its own
    init_from = "" if list(config.folder.glob("checkpoints/step-*")) else config.model.init_from
    for key, path in (("tokenizer.path", config.tokenizer.path), ("model.init_from", init_from)):
        if path and not Path(path).expanduser().exists():
            found[key] = f"{key}: nothing at {path} (looked in {Path.cwd()})"
    paths = [data.path] if isinstance(data.path, str) else data.path
    missing = [p for p in paths if p and not glob.glob(str(Path(p).expanduser()), recursive=True)]
    if missing:
        found["data.path"] = f"data.path: nothing found at {', '.join(missing)} (looked in {Path.cwd()})"
    if not paths:
        found["data.path"] = 'data.path = [] names no text; data.path = "" is Python\'s standard library'
    return found


# keys that another family would silently ignore
_ONLY_FOR = {
    "gpt": ("dropout",),
    "llama": (
        *("n_kv_heads", "head_dim", "hidden_dim", "qk_norm", "qkv_bias", "rope_theta", "rope_factor"),
        *("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_seq_len"),
    ),
}


def _model_conflicts(model: ModelConfig) -> dict[str, str]:
    found = {}
    if model.dim % model.n_heads and not model.head_dim:
        works = max(d for d in range(1, model.n_heads + 1) if model.dim % d == 0)
        found["model.n_heads model.dim"] = (
            f"model.dim = {model.dim} is no multiple of model.n_heads = {model.n_heads}; n_heads = {works} works"
        )
    for family, keys in _ONLY_FOR.items():
        for key in keys:
            value, default = getattr(model, key), ModelConfig.model_fields[key].default
            if family != model.family and value != default:
                found[f"model.{key} model.family"] = (
                    f"model.{key} = {value} means nothing to model.family = {model.family}, only to {family}; "
                    f"leave it out, or model.{key} = {str(default).lower()}"
                )
    if model.family == "llama":
        if model.n_heads % model.kv_heads:
            works = max(k for k in range(1, model.kv_heads + 1) if model.n_heads % k == 0)
            found["model.n_kv_heads model.n_heads"] = (
                f"model.n_heads = {model.n_heads} is no multiple of model.n_kv_heads = {model.kv_heads}; "
                f"n_kv_heads = {works} works"
            )
        if model.dim_of_heads % 2:
            found["model.head_dim model.dim"] = (
                f"heads of width {model.dim_of_heads} can't be rotated in halves; "
                f"head_dim = {model.dim_of_heads + 1} works"
            )
        if model.rope_factor > 1 and model.rope_low_freq_factor >= model.rope_high_freq_factor:
            found["model.rope_low_freq_factor model.rope_high_freq_factor"] = (
                f"model.rope_low_freq_factor = {model.rope_low_freq_factor} should be below "
                f"model.rope_high_freq_factor = {model.rope_high_freq_factor}, e.g. 1.0 and 4.0"
            )
    return found
