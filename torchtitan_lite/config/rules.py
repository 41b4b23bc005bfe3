"""Rules between config values. Each message names a value that works."""

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand, is_prepared, problem
from torchtitan_lite.config.schema import Config, ModelConfig, RunConfig
from torchtitan_lite.errors import ConfigError, shortened

# rules that depend on this machine's files, packages or compiler
_LOCAL_RULES = {
    *("data.path", "data.sources", "tokenizer.path", "model.init_from", "checkpoint.resume"),
    *("model.vocab_size tokenizer.vocab_size", "compile.enabled compile.backend run.device"),
    *("log.trackers tensorboard", "log.trackers wandb", "log.notify environment"),
}


def conflicts(
    world_size: int, n_gpus: int, local_world_size: int, *, elsewhere: bool = False
) -> Callable[[Config], dict[str, str]]:
    """The rules for this world size and machine.

    Args:
        n_gpus, local_world_size: GPUs and ranks of this machine.
        elsewhere: the run is for another machine, so the rules about this one are skipped.

    Returns:
        a function that returns a config's broken rules as {"the keys involved": "what is wrong and what works"}.
    """

    def check(config: Config) -> dict[str, str]:
        found = (
            _run_conflicts(config.run, n_gpus, local_world_size)
            | model_conflicts(config.model)
            | length_conflicts(config)
            | _objective_conflicts(config)
            | _mesh_conflicts(config, world_size)
            | _fsdp_conflicts(config, world_size, n_gpus)
            | _block_conflicts(config, n_gpus)
            | _path_conflicts(config)
            | _log_conflicts(config)
        )
        return {keys: message for keys, message in found.items() if not (elsewhere and keys in _LOCAL_RULES)}

    return check


def _run_conflicts(run: RunConfig, n_gpus: int, local_world_size: int) -> dict[str, str]:
    found = {}
    name = run.name
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable() or len(name.encode()) > 200:
        found["run.name"] = (
            f"run.name = {shortened(repr(name))} should be the plain name of a folder, of at most 200 bytes, "
            'e.g. run.name = "first"'
        )
    if run.device == "cuda" and n_gpus == 0:
        found["run.device"] = 'run.device = "cuda", but torch sees no GPU here; run.device = "cpu" works'
    if run.device != "cpu" and 0 < n_gpus < local_world_size:
        found["run.device"] = (
            f"{local_world_size} processes on this machine, and torch sees {n_gpus} GPUs; "
            f'--nproc-per-node {n_gpus} works, and so does run.device = "cpu"'
        )
    return found


def _log_conflicts(config: Config) -> dict[str, str]:
    found = {}
    for name in config.log.trackers:
        if importlib.util.find_spec(name) is None:
            found[f"log.trackers {name}"] = (
                f'log.trackers = ["{name}"]: {name} is not installed; run pip install -e ".[{name}]"'
            )
    if variable := config.log.notify:
        # neither text is shown: one may be the URL, the other is
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            found["log.notify"] = (
                "log.notify should be the name of an environment variable that holds the URL, e.g. "
                'log.notify = "RUN_WEBHOOK"; its value is not repeated here, because it may be the URL itself'
            )
        # only rank 0 sends
        elif os.environ.get("RANK", "0") == "0" and not re.match(
            r"https?://[^/?#\s@]+(?![^/?#]*@)", os.environ.get(variable, ""), re.IGNORECASE
        ):
            url = "a URL that begins with http:// or https:// and has no user name"
            wrong = f"does not hold {url}" if variable in os.environ else "is not set"
            found["log.notify environment"] = f"log.notify: the environment variable {variable} {wrong}"
    steps = config.profile.steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        found["profile.steps"] = f"profile.steps = {steps} should be a first and a last step, e.g. [10, 12]"
    return found


def length_conflicts(config: Config) -> dict[str, str]:
    """The broken rules about lengths, in tokens and in steps."""
    found, train, model, optim = {}, config.train, config.model, config.optim
    if train.seq_len > model.max_seq_len:
        found["train.seq_len model.max_seq_len"] = (
            f"train.seq_len = {train.seq_len} is longer than model.max_seq_len = {model.max_seq_len}; "
            f"model.max_seq_len = {train.seq_len} works"
        )
    texts = [*config.data.sources, *([config.data.path] if isinstance(config.data.path, str) else [])]
    trained = not config.tokenizer.path and not any(is_prepared(path) for path in texts if not problem(path))
    if trained and 0 < model.vocab_size < config.tokenizer.vocab_size:
        found["model.vocab_size tokenizer.vocab_size"] = (
            f"model.vocab_size = {model.vocab_size} is smaller than tokenizer.vocab_size = "
            f"{config.tokenizer.vocab_size}; model.vocab_size = 0 takes the tokenizer's"
        )
    if any(size != train.batch_size(1) for _, size in train.batch_schedule):
        for key in config.in_epochs:
            works = "train.steps" if key == "train.epochs" else f"{key} = 100"
            found[f"{key} train.batch_schedule"] = (
                f"{key} is in epochs, which need one batch size, and train.batch_schedule changes it; {works} works"
            )
    if train.epochs:
        pass  # the number of steps is not known yet: training/epochs.py checks again
    elif optim.warmup_steps >= train.steps:
        found["optim.warmup_steps train.steps"] = (
            f"optim.warmup_steps = {optim.warmup_steps} takes up all of train.steps = {train.steps}; "
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


def _objective_conflicts(config: Config) -> dict[str, str]:
    model = config.model
    if config.data.objective == "causal" and not FAMILIES[model.family].encoder_decoder and not model.mup_base_dim:
        return {}
    from torchtitan_lite.config.presets import objective_conflicts

    return objective_conflicts(config)


def _mesh_conflicts(config: Config, world_size: int) -> dict[str, str]:
    for key, value in (("dp_shard", config.fsdp.dp_shard), ("dp_replicate", config.fsdp.dp_replicate)):
        if value != -1 and value < 1:
            return {f"fsdp.{key}": f"fsdp.{key} = {value} should be -1 (all remaining ranks) or at least 1"}
    layout = derive(config, world_size)
    if layout.dp_replicate * layout.dp_shard == world_size:
        return {}
    works = layout.dp_replicate if world_size % layout.dp_replicate == 0 else 1
    return {
        "fsdp.dp_shard fsdp.dp_replicate": f"fsdp.dp_replicate = {layout.dp_replicate} x fsdp.dp_shard = "
        f"{layout.dp_shard} does not give the world size {world_size}; "
        f"fsdp.dp_replicate = {works} with fsdp.dp_shard = {world_size // works} works"
    }


def _fsdp_conflicts(config: Config, world_size: int, n_gpus: int) -> dict[str, str]:
    found, fsdp = {}, config.fsdp
    if _mesh_conflicts(config, world_size):
        return {}  # dp_shard and dp_replicate below would be wrong
    layout = derive(config, world_size)
    ranks = fsdp.reshard_after_forward
    if not isinstance(ranks, bool | str) and (layout.dp_shard % ranks or ranks >= layout.dp_shard):
        divisors = [str(n) for n in range(2, layout.dp_shard) if layout.dp_shard % n == 0]
        found["fsdp.reshard_after_forward fsdp.dp_shard"] = (
            f"fsdp.reshard_after_forward = {ranks} should divide dp_shard = {layout.dp_shard} and be less than it; "
            f"{' or '.join([*divisors, 'true'])} works"
        )
    if fsdp.grad_sync == "all_reduce_last" or fsdp.cpu_offload:
        from torchtitan_lite.config.presets import offload_conflicts

        found |= offload_conflicts(config, layout, n_gpus)
    if config.grad_scaler.min_scale > config.grad_scaler.init_scale:
        found["grad_scaler.min_scale grad_scaler.init_scale"] = (
            f"grad_scaler.min_scale = {config.grad_scaler.min_scale} is above grad_scaler.init_scale = "
            f"{config.grad_scaler.init_scale}; min_scale = 1.0 works"
        )
    return found


def _block_conflicts(config: Config, n_gpus: int) -> dict[str, str]:
    if config.activation_checkpointing.mode == "none" and not config.compile.enabled:
        return {}
    from torchtitan_lite.config.presets import block_conflicts

    return block_conflicts(config, n_gpus)


def _path_conflicts(config: Config) -> dict[str, str]:
    found, data, resume = {}, config.data, config.checkpoint.resume
    if wrong := _not_a_folder(config.run.out_dir):
        found["run.out_dir"] = f"run.out_dir: {wrong}"
    if resume not in ("auto", "never") and not re.fullmatch(r"step-[0-9]{1,18}", resume) and (wrong := problem(resume)):
        found["checkpoint.resume"] = (
            f'checkpoint.resume = "{shortened(resume)}" should be auto, never, step-N, or the path of a run or '
            f"checkpoint: {wrong}"
        )
    if config.model.init_from:
        from torchtitan_lite.config.presets import init_from_conflicts

        found |= init_from_conflicts(config)
    if config.tokenizer.path and (wrong := problem(config.tokenizer.path)):
        found["tokenizer.path"] = f"tokenizer.path: {wrong}"
    if data.cache_dir and (wrong := _not_a_folder(data.cache_dir)):
        found["data.cache_dir"] = f"data.cache_dir: {wrong}"
    paths = [data.path] if isinstance(data.path, str) else data.path
    for key, named in (("data.path", paths), ("data.sources", data.sources)):
        if missing := [why for p in named if p and (why := _missing_text(p))]:
            found[key] = f"{key}: {'; '.join(missing)} (looked in {Path.cwd()})"
    if isinstance(data.path, list) or data.sources or data.skip_samples:
        from torchtitan_lite.config.presets import rare_data_conflicts

        found |= rare_data_conflicts(data)
    return found


def _missing_text(path: str) -> str:
    """Why there is no text at a path or glob; empty if there is some."""
    wrong = problem(path)
    if not wrong.startswith("nothing at"):
        return wrong
    from torchtitan_lite.config.find_text import unfound

    return unfound(path)


def _not_a_folder(path: str) -> str:
    """Why a path can't be a folder; empty if it is one, or can become one."""
    try:
        where = expand(path)
        return f"{path} can't be written: it is not a folder" if where.exists() and not where.is_dir() else ""
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{shortened(path)}: {error.strerror or error}"


def model_conflicts(model: ModelConfig) -> dict[str, str]:
    """The broken rules between the keys of [model]."""
    found = {}
    if model.dim % model.n_heads and not model.head_dim:
        works = max(d for d in range(1, model.n_heads + 1) if model.dim % d == 0)
        found["model.n_heads model.dim"] = (
            f"model.dim = {model.dim} is not a multiple of model.n_heads = {model.n_heads}; n_heads = {works} works"
        )
    reads = FAMILIES[model.family].keys
    if "n_kv_heads" in reads and model.n_heads % model.kv_heads:
        works = max(k for k in range(1, model.kv_heads + 1) if model.n_heads % k == 0)
        found["model.n_kv_heads model.n_heads"] = (
            f"model.n_heads = {model.n_heads} is not a multiple of model.n_kv_heads = {model.kv_heads}; "
            f"n_kv_heads = {works} works"
        )
    if "rope_theta" in reads and model.dim_of_heads % 2:
        found["model.head_dim model.dim"] = (
            f"rotary positions need an even head_dim, not {model.dim_of_heads}; "
            f"head_dim = {model.dim_of_heads + 1} works"
        )
    stretched = "rope_factor" in reads and model.rope_factor > 1
    if stretched and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        found["model.rope_low_freq_factor model.rope_high_freq_factor"] = (
            f"model.rope_low_freq_factor = {model.rope_low_freq_factor} should be below "
            f"model.rope_high_freq_factor = {model.rope_high_freq_factor}, e.g. 1.0 and 4.0"
        )
    return found
