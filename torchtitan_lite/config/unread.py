"""Keys that are read only if another key, the choice, has a certain value. A value that nothing reads is never ignored.

It is an error if it is set in the same layer as the choice or in a later one. If it comes from a lower layer, e.g. a
`base` file whose optimizer another file replaces, it stays at its default, with a note.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchtitan_lite.config.families import FAMILIES, families_with
from torchtitan_lite.config.paths import is_prepared
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import format_value


@dataclass(frozen=True)
class Rule:
    """Keys that are read only if `holds`."""

    keys: tuple[str, ...]
    choice: tuple[str, ...]  # the keys that decide
    needs: str  # what would have to be set, for the message
    holds: Callable[[Config], bool]
    refuse: bool = True  # False: always a note, never an error: a feature that is switched off may keep its values


def _rule(keys: str, choice: str, needs: str, holds: Callable[[Config], bool], refuse: bool = True) -> Rule:
    """A rule from space-separated keys."""
    return Rule(tuple(keys.split()), tuple(choice.split()), needs, holds, refuse)


def _only_with(keys: str, choice: str, *values: str | bool) -> Rule:
    """Keys that are read only if another key has one of these values."""
    *others, last = (format_value(value) for value in values)
    section, key = choice.split(".")
    needs = f"{choice} = {', '.join(others)}{' or ' if others else ''}{last}"
    return _rule(keys, choice, needs, lambda config: getattr(getattr(config, section), key) in values)


RULES = (
    *(
        _only_with(f"model.{key}", "model.family", *families_with(key))
        for key in sorted({key for family in FAMILIES.values() for key in family.keys})
    ),
    _rule(
        "model.rope_low_freq_factor model.rope_high_freq_factor model.rope_original_max_seq_len",
        "model.family model.rope_factor",
        "model.rope_factor above 1",
        # families without rotary positions are covered by the rules above
        lambda c: c.model.family not in families_with("rope_factor") or c.model.rope_factor > 1,
    ),
    _rule(
        "train.global_batch_size",
        "train.batch_schedule",
        "a train.batch_schedule that begins after step 0",
        lambda c: not c.train.batch_schedule or c.train.batch_schedule[0][0] > 0,
    ),
    _only_with("optim.betas optim.eps", "optim.name", "adamw", "muon"),
    _only_with("optim.rms_scaling", "optim.name", "adamw"),
    _only_with("optim.momentum", "optim.name", "sgd"),
    _only_with(
        "optim.muon_momentum optim.muon_scale optim.muon_dtype optim.muon_cautious_decay "
        "optim.muon_embedding_lr_factor",
        *("optim.name", "muon"),
    ),
    _only_with("optim.decay_ratio", "optim.schedule", "wsd"),
    _only_with("optim.min_lr_ratio", "optim.schedule", "cosine", "linear", "wsd"),
    _only_with("optim.step_gamma optim.step_every", "optim.schedule", "step"),
    _rule("train.steps", "train.epochs", "train.epochs = 0", lambda c: not c.train.epochs),
    _rule(
        "train.max_skipped",
        "train.on_nonfinite spike.action",
        'train.on_nonfinite = "skip" or spike.action',
        lambda c: c.train.on_nonfinite == "skip" or c.spike.action in ("skip", "rewind"),
    ),
    _only_with("spike.window spike.loss_deviations spike.norm_deviations", "spike.action", *("log", "skip", "rewind")),
    _only_with("spike.rewind_steps spike.max_rewinds", "spike.action", "rewind"),
    _only_with("fsdp.forward_prefetch fsdp.backward_prefetch", "fsdp.explicit_prefetching", True),
    _rule(
        "grad_scaler.init_scale grad_scaler.growth_interval grad_scaler.min_scale",
        "fsdp.param_dtype fsdp.reduce_dtype fsdp.output_dtype fsdp.precision_overrides",
        'a dtype "float16" in [fsdp]',
        lambda c: c.fsdp.uses_float16,
    ),
    _only_with("activation_checkpointing.every", "activation_checkpointing.mode", "full", "selective"),
    _only_with("data.noise_density data.mean_span_length", "data.objective", "span_corruption"),
    _only_with(
        "data.target_len data.blind_source data.source_key data.target_key data.source_prefix",
        *("data.objective", "pairs"),
    ),
    _only_with("compile.backend", "compile.enabled", True),
    _rule("log.wandb_project", "log.trackers", 'log.trackers = ["wandb"]', lambda c: "wandb" in c.log.trackers),
    _rule("profile.memory_snapshot", "profile.steps", "profile.steps, e.g. [10, 12]", lambda c: bool(c.profile.steps)),
    # an interval of 0 may switch a feature off for this command only
    _rule("eval.samples", "eval.every", "eval.every above 0", lambda c: c.eval.every != 0, refuse=False),
    _rule("eval.tasks_from eval.tasks_every eval.task_questions", "eval.tasks", "eval.tasks", lambda c: bool(c.tasks)),
    _rule(
        "sample.prompts sample.max_tokens sample.temperature",
        "sample.every",
        "sample.every above 0",
        lambda c: c.sample.every != 0,
        refuse=False,
    ),
    _rule(
        "checkpoint.keep_every checkpoint.keep_best",
        "checkpoint.keep_latest",
        "checkpoint.keep_latest above 0 (0 keeps all)",
        lambda c: c.checkpoint.keep_latest > 0,
        refuse=False,
    ),
    _rule(
        "tokenizer.vocab_size",
        "tokenizer.path data.path data.sources",
        "a tokenizer to train",
        lambda c: not c.tokenizer.path and not _all_prepared(c),
        refuse=False,
    ),
    _rule(
        "data.text_key data.text_suffixes data.val_fraction data.cache_dir data.source_key data.target_key "
        "data.source_prefix",
        "data.path data.sources",
        "text to prepare",
        lambda c: not _all_prepared(c),
        refuse=False,
    ),
)


@dataclass(frozen=True)
class Unread:
    """A key whose value nothing reads."""

    key: str
    message: str
    rule: Rule


def unread(config: Config) -> Iterator[Unread]:
    """The keys with a non-default value that this config does not read."""
    for rule in RULES:
        if rule.holds(config):
            continue
        for key in rule.keys:
            section_name, name = key.split(".")
            section = getattr(config, section_name)
            value, default = getattr(section, name), type(section).model_fields[name].default
            if value != default:
                yield Unread(key, f"{key} = {value} has no effect without {rule.needs}", rule)


def _all_prepared(config: Config) -> bool:
    """Whether all data is already prepared. Unreadable paths are reported by rules.py."""
    data = config.data
    named = list(data.sources) if data.sources else [data.path] if isinstance(data.path, str) else []
    try:
        return any(named) and all(is_prepared(path) for path in named)
    except (OSError, RuntimeError):
        return False
