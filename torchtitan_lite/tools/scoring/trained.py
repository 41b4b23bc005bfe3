"""What a checkpoint was trained with: its config, and its data while that is still the same."""

from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import Config, known_keys
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.errors import CheckpointError, ConfigError

_SECTIONS = "model", "data", "tokenizer", "train"


def config_of(folder: Path, state: TrainState) -> Config:
    """The model, data and lengths in a checkpoint's state. Keys that this version no longer has are ignored.

    Raises:
        CheckpointError: it holds none, or one that can't be read.
    """
    if not state.config:
        raise CheckpointError(f"{folder} does not hold the config that it was trained with")
    tree: dict[str, dict[str, Any]] = {}
    for key in known_keys() & state.config.keys():
        section, name = key.split(".", 1)
        if section in _SECTIONS:
            tree.setdefault(section, {})[name] = state.config[key]
    try:
        return Config.model_validate(tree)
    except ValueError as error:
        raise CheckpointError(f"{folder}: the config that it was trained with can't be read: {error}") from None


def data_of(name: str, config: Config, state: TrainState) -> DataSet:
    """The data of a run, prepared again if it is no longer in the cache.

    Raises:
        ConfigError: it has changed since the checkpoint was saved.
    """
    data = prepare_all(config.data, config.tokenizer, lambda _: None)
    require_same_data(name, data, state)
    return data


def require_same_data(name: str, data: DataSet, state: TrainState) -> None:
    """Raise ConfigError if this is not the data that a run was trained on."""
    here = {"tokenizer": data.tokenizer_sha256, **data.identity()}
    if changed := [key for key, value in here.items() if state.identity.get(key, value) != value]:
        raise ConfigError(
            f"the data of {name} has changed since it was trained ({', '.join(changed)}); restore that text "
            "(evaluate can score another one: --data TEXT)"
        )
