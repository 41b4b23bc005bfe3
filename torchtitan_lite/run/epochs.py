"""Converts epochs to steps, once, when the data is open: `train.epochs`, and "epoch" as an interval.

An epoch has (number of samples / batch size) steps, rounded up, so every sample is seen at least once. N epochs have N
times the steps of one, rounded up. Samples continue across the ends of epochs: if the division has a remainder, the
last batch of an epoch has the first samples of the next one. None of this depends on the world size. A rule refuses
epochs with more than one batch size (train.batch_schedule).

An epoch of a mixture has the number of samples of all sources together. If weights differ from the sizes, some sources
are repeated and others not finished; the start prints each source's epochs.
"""

from dataclasses import replace
from fractions import Fraction

from torchtitan_lite.config.rules.train import fitting_warmup, warmup_rules
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.errors import ConfigError


def in_steps(config: Config, epoch: int) -> Config:
    """Return the config with steps instead of epochs. `train.epochs` stays.

    Args:
        epoch: the steps of one epoch.
    """
    changes = dict.fromkeys(config.in_epochs, epoch)
    if changes.pop("train.epochs", 0):
        # Fraction: 0.1 is a tenth, not the binary fraction next to it
        changes["train.steps"] = int(-(-Fraction(repr(config.train.epochs)) * epoch // 1))
    return config.changed(changes)


def resolved(loaded: Loaded, data: DataSet) -> Loaded:
    """Convert the loaded config to steps, for this data. The config as given is kept for writing.

    With data.packing = "best_fit", this builds the packing index, which all later uses of the data need too.

    Raises:
        ConfigError: the steps do not suit another key.
        DataError: see `open_samples`.
    """
    config, n_samples = loaded.config, open_samples(data, "train", loaded.config).n_samples
    if not config.in_epochs:
        return loaded
    size = config.train.batch_size(1)
    epoch = -(-n_samples // size)
    found = in_steps(config, epoch)
    if "optim.warmup_steps" not in loaded.origins:
        found = fitting_warmup(found)
    if config.train.epochs and (wrong := dict(warmup_rules(found.optim, found.train.steps))):
        steps = f"{found.train.steps:,} step{'s' * (found.train.steps > 1)}"
        what = (
            f"train.epochs = {config.train.epochs:g} is {steps}: an epoch is {n_samples:,} samples in batches of {size}"
        )
        raise ConfigError("\n  ".join([what, *wrong.values()]))
    return replace(loaded, config=found, written=config)


def planned(loaded: Loaded, data: DataSet | None) -> Config:
    """Return the config for a plan: in steps, or with 0 steps if their number needs data not prepared here.

    Without data, every interval of "epoch" stays.
    """
    if data:
        return resolved(loaded, data).config
    return loaded.config.changed({"train.steps": 0} if loaded.config.train.epochs else {})
