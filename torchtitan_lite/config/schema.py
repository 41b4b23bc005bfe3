"""The config of a run: all sections, and what follows from the metadata of their keys.

Each section of the TOML file is a frozen class in sections/; the string under a field is its help text. docs/config.md
is generated from them. rules/ has the rules between keys. A builder gets its own section, never the whole config.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli
from pydantic.fields import FieldInfo

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.phases import changes
from torchtitan_lite.config.registry import Registry
from torchtitan_lite.config.section import IS_PATH, Bits, Frozen, Resume, Section, UsedIf, used_with
from torchtitan_lite.config.sections.data import READERS, DataConfig, TokenizerConfig, span_lengths
from torchtitan_lite.config.sections.fsdp import FsdpConfig, GradScalerConfig, PrecisionOverride
from torchtitan_lite.config.sections.log import METRICS, TRACKERS, LogConfig
from torchtitan_lite.config.sections.model import ModelConfig
from torchtitan_lite.config.sections.optim import OPTIMIZERS, OptimConfig, ParameterGroup
from torchtitan_lite.config.sections.outputs import CheckpointConfig, EvalConfig, ProfileConfig, SampleConfig
from torchtitan_lite.config.sections.run import RunConfig
from torchtitan_lite.config.sections.speed import ActivationCheckpointingConfig, CompileConfig, SpeedConfig
from torchtitan_lite.config.sections.train import SpikeConfig, TrainConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FsdpConfig",
    "GradScalerConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParameterGroup",
    "PrecisionOverride",
    "ProfileConfig",
    "RunConfig",
    "SampleConfig",
    "SpeedConfig",
    "SpikeConfig",
    "TokenizerConfig",
    "TrainConfig",
]


class Config(Frozen):
    """The config of one run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    spike: SpikeConfig = SpikeConfig()
    optim: OptimConfig = OptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    compile: CompileConfig = CompileConfig()
    speed: SpeedConfig = SpeedConfig()
    grad_scaler: GradScalerConfig = GradScalerConfig()
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()

    def changed(self, values: Mapping[str, Any]) -> "Config":
        """Return the config with other values, by "section.key". They are not checked."""
        parts = {section: getattr(self, section).model_copy(update=keys) for section, keys in nested(values).items()}
        return self.model_copy(update=parts)

    @property
    def url(self) -> str:
        """The URL of the run in object storage; empty: none."""
        return self.run.remote and f"{self.run.remote.rstrip('/')}/{self.run.name}"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return expand(self.run.out_dir) / self.run.name

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has saved a checkpoint. The weights or checkpoint that it started from may then be gone."""
        return any(self.folder.glob("checkpoints/step-*"))

    @property
    def started_from_weights(self) -> bool:
        """Whether the run has a checkpoint and started from `model.init_from`."""
        try:
            before = tomli.loads((self.folder / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return self.has_checkpoint and bool(before.get("model", {}).get("init_from") == self.model.init_from)

    def phase(self, n: int) -> "Config":
        """Return the config after the first n of train.phases have begun."""
        return Config.model_validate(nested(flatten(self) | changes(self.train.phases, n))) if n else self

    @property
    def in_epochs(self) -> list[str]:
        """The keys given in epochs, which run/epochs.py converts to steps."""
        values: dict[str, object] = {
            "eval.every": self.eval.every,
            "eval.tasks_every": self.eval.tasks_every,
            "sample.every": self.sample.every,
            "checkpoint.every": self.checkpoint.every,
            "optim.step_every": self.optim.step_every if self.optim.schedule == "step" else 0,
            "train.epochs": "epoch" if self.train.epochs else 0,
        }
        return [key for key, value in values.items() if value == "epoch"]

    @property
    def tasks(self) -> list[str]:
        """The names in [eval] tasks, "auto" resolved."""
        has_text = self.data.path or self.data.sources or FAMILIES[self.model.family].encoder_decoder
        return ["brackets" if name == "auto" else name for name in self.eval.tasks if name != "auto" or not has_text]

    @property
    def input_len(self) -> int:
        """Tokens per row that the model reads: the encoder's, or a decoder's source and target."""
        pairs = self.data.objective == "pairs" and not FAMILIES[self.model.family].encoder_decoder
        return self.train.seq_len + (self.data.target_len if pairs else 0)

    @property
    def target_len(self) -> int:
        """Targets per row: the decoder's length."""
        if self.data.objective == "span_corruption":
            return span_lengths(self.train.seq_len, self.data.noise_density, self.data.mean_span_length).targets
        encoder_decoder = FAMILIES[self.model.family].encoder_decoder
        return self.data.target_len if self.data.objective == "pairs" and encoder_decoder else self.input_len


# --- keys -------------------------------------------------------------------------------------------------------


@functools.cache
def sections() -> dict[str, type[Section]]:
    """Return the class of each section."""
    return {name: type(field.default) for name, field in Config.model_fields.items()}


@functools.cache
def known_keys() -> dict[str, FieldInfo]:
    """Return the pydantic field of each "section.key", in file order."""
    return {
        f"{name}.{key}": field for name, section in sections().items() for key, field in section.model_fields.items()
    }


def nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return values by "section.key" as a table for each section."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def flatten(config: Config) -> dict[str, Any]:
    """Return every value by "section.key", as JSON types."""
    tree = config.model_dump(mode="json")
    return {f"{section}.{key}": value for section, table in tree.items() for key, value in table.items()}


REGISTRIES: dict[str, Registry[Any]] = {
    entries.key: entries for entries in (FAMILIES, OPTIMIZERS, TRACKERS, METRICS, READERS)
}


def type_name(key: str) -> str:
    """Return the metavar of "section.key" in `--help`."""
    annotation = known_keys()[key].annotation
    if key in REGISTRIES and annotation is str:
        return "|".join(REGISTRIES[key])
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return getattr(annotation, "__name__", "VALUE").upper() if isinstance(annotation, type) else "VALUE"


def default_of(key: str) -> Any:
    """Return the default of "section.key"."""
    return known_keys()[key].default


def resume_rule(key: str) -> Resume:
    """Return what a resume does if the value of "section.key" differs."""
    default = sections()[key.split(".")[0]].on_resume
    return next((item for item in known_keys()[key].metadata if isinstance(item, Resume)), default)


def keeps_value(key: str) -> bool:
    """Return whether a resume that does not set "section.key" keeps the run's value. Paths are never kept."""
    return IS_PATH not in known_keys()[key].metadata and resume_rule(key).rule != "allowed"


@functools.cache
def bitwise_keys() -> dict[str, str]:
    """Return, by "section.key", the name under which checkpoints record the value or its meaning (see `Bits`)."""
    return {
        key: item.name or key.split(".")[1]
        for key, field in known_keys().items()
        for item in field.metadata
        if isinstance(item, Bits)
    }


def usage_rules() -> list[tuple[str, UsedIf]]:
    """Return each conditional key with its condition: first those of a family or an optimizer, then the others."""
    of_families = [
        (f"model.{key}", used_with("model.family", *names))
        for key in ModelConfig.model_fields
        if (names := [name for name, family in FAMILIES.items() if key in family.reads])
    ]
    of_optimizers = [
        (f"optim.{key}", used_with("optim.name", *names))
        for key in OptimConfig.model_fields
        if (names := [name for name, optimizer in OPTIMIZERS.items() if key in optimizer.keys])
    ]
    others = [(key, item) for key, field in known_keys().items() for item in field.metadata if isinstance(item, UsedIf)]
    return [*of_families, *of_optimizers, *others]


def unused_keys(config: Config) -> dict[str, str]:
    """Return what each key without effect in a config needs, by "section.key"."""
    unused: dict[str, str] = {}
    for key, rule in usage_rules():
        if not rule.holds(config):
            unused.setdefault(key, rule.needs)
    return unused


# --- rules between keys (rules/) --------------------------------------------------------------------------------

# "the keys involved", and the message: what is wrong and what works
Rules = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Machine:
    """The ranks and GPUs that a config runs on."""

    world_size: int = 1
    n_gpus: int = 0  # on this machine
    local_world_size: int = 1  # ranks on this machine
