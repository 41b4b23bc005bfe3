"""Loads a Config: merges layers of values, then validates once. All problems are reported in one ConfigError.

Layers from lowest to highest; `--print-config` shows the layer of each value:

  1. the defaults in sections/, then those of the model's family (families.py),
  2. the files: first `base = "other.toml"`, then the file itself,
  3. the command line: `--section.key=value`, and shorthands such as `--mixed-precision`.

If no file or option gives a key, a resume keeps the run's value, provided that it affects learning (`_kept`).
`[model] size` sets the [model] keys of its row in its layer; a sharding strategy sets [fsdp] keys that are not given.
Paths are relative to the working directory, except that `base` is first looked for next to its file.

Needs neither torch nor a process group.
"""

import ast
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchtitan_lite.config.families import FAMILIES, Family, unread
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.phases import changes
from torchtitan_lite.config.rules import broken_rules
from torchtitan_lite.config.rules.train import fitting_warmup
from torchtitan_lite.config.schema import (
    REGISTRIES,
    Config,
    Machine,
    default_of,
    flatten,
    keeps_value,
    known_keys,
    nested,
    unused_keys,
)
from torchtitan_lite.config.sections.fsdp import strategy_keys
from torchtitan_lite.config.toml import COMMAND_LINE, Loaded, format_value
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.terminal import counted

Layer = Mapping[str, Any]  # values by "section.key", unchecked
Check = Callable[[Config], dict[str, str]]  # returns the broken rules of a config, as `broken_rules` does
# called with a run's folder, `checkpoint.resume`, and the run's URL if it has one: returns the config of the checkpoint
# to resume from; {} if none
Saved = Callable[..., Layer]
_KEPT = "the run so far"


def load(
    file: Path | None,
    options: Layer,
    *,
    origin: str = COMMAND_LINE,
    world_size: int = 1,
    n_gpus: int = 0,
    local_world_size: int = 1,
    elsewhere: bool = False,
    problems: Iterable[str] = (),
    checks: Sequence[Check] = (),
    saved: Saved | None = None,
) -> Loaded:
    """Load the config of an optional file, overridden by options.

    Args:
        options: values by "section.key".
        origin: where the options come from, for messages.
        world_size, n_gpus, local_world_size: for the rules about the mesh and the device.
        elsewhere: skip checks of this machine's files, packages and compiler, as the run is for a different machine.
        problems: problems already found on the command line, reported with the rest.
        checks: additional checks, which may build the model: they run only if [model] is valid.
        saved: if given, a resume keeps the run's values of keys that are not given (see `_kept`).

    Raises:
        ConfigError: lists every problem on its own line, with file, value, nearest key and a value that works.
    """
    problems = list(problems)
    layers: list[tuple[str, Layer]] = [("name of the file", {"run.name": file.stem})] if file else []
    try:
        layers += read_file(file) if file else []
    except ConfigError as error:
        problems.append(str(error))
    layers.append((origin, options))
    given, _ = _merged(layers)
    failed_imports = dict(_import_user_parts(given))
    problems += failed_imports.values()
    before = _saved_values(given, saved) if saved else {}
    name = str(given.get("model.family", before.get("model.family", default_of("model.family"))))
    family = FAMILIES.get(name, FAMILIES.get(name.lower()))
    layers, notes = _with_size(layers, given, family) if family else (layers, [])
    kept = _kept(before, given, _merged(layers)[0])
    strategy = strategy_keys(given, local_world_size)
    values, origins = _merged([*layers, (_KEPT, kept), ("fsdp.sharding_strategy", strategy)])

    refused = {*failed_imports, *([] if family else ["model.size"])}
    validated, refused = _validated(values, origins, problems, refused)
    # code that families share would read the keys of others
    unread_keys = given.keys() & {f"model.{key}" for key in unread(validated.model.family)}
    config = _config(values, refused | unread_keys)
    if "optim.warmup_steps" not in values and not config.train.epochs:
        config = fitting_warmup(config)
    machine = Machine(world_size, n_gpus, local_world_size)
    rules = (lambda c: broken_rules(c, machine, elsewhere=elsewhere), *checks)
    problems += _broken(config, rules, refused, {key: origin for key, origin in origins.items() if key in given})
    for n in () if problems else range(2, len(config.train.phases) + 2):
        given_so_far = changes(config.train.phases, n - 1)
        phase_origins = {**origins, **dict.fromkeys(given_so_far, f"phase {n}")}
        phase, _ = _validated(
            {**values, "optim.warmup_steps": config.optim.warmup_steps, **given_so_far},  # which may be a fitted one
            *(phase_origins, problems, refused),
        )
        without_effect = [f"{key} needs {needs}" for key, needs in unused_keys(phase).items() if key in given_so_far]
        broken = [text for check in rules for text in check(phase).values()]
        problems += [f"phase {n}: {text}" for text in (*without_effect, *broken)]
    if problems:
        raise ConfigError("\n  ".join([f"the configuration has {counted(len(problems), 'problem')}:", *problems]))
    unused = unused_keys(config)
    notes += _notes(config, validated, given, origins, unused)
    origins = {key: origin for key, origin in origins.items() if key not in unread_keys}
    return Loaded(config, origins, notes, kept=[key for key in kept if key not in unused])


def defaults() -> Layer:
    """Return the values without a file or options, by "section.key"."""
    return flatten(load(None, {}, elsewhere=True).config)


# --- layers -----------------------------------------------------------------------------------------------------


def read_file(path: Path) -> list[tuple[str, Layer]]:
    """Return the layers of a TOML file with their names: those of its `base`, then its own.

    Raises:
        ConfigError: a file can't be read.
    """
    path = expand(path)
    try:
        tree = tomli.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows may write a byte order mark
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not TOML
        raise ConfigError(f"{path}: can't be read as TOML: {getattr(error, 'strerror', '') or error}") from None
    base = tree.pop("base", "")
    if not isinstance(base, str):
        raise ConfigError(f'{path}: base = {base!r}: should be the name of one file, e.g. base = "debug.toml"')
    next_to_file = path.parent / expand(base)
    use_working_directory = not next_to_file.exists() and Path(base).is_file()
    below = read_file(Path(base) if use_working_directory else next_to_file) if base else []
    tables = {name: table if isinstance(table, dict) else {"": table} for name, table in tree.items()}
    values = {f"{name}.{key}".rstrip("."): v for name, table in tables.items() for key, v in table.items()}
    if "phases" in values:  # tables of their own, since they change several sections
        values["train.phases"] = values.pop("phases")
    return [*below, (str(path), values)]


def parse_value(key: str, text: str) -> Any:
    """Parse a command-line value as TOML, else as Python (.5, True), else as text (`--run.name=a`)."""
    field = known_keys().get(key)
    annotation = field.annotation if field is not None else None
    # dict[str, ...] has str among its arguments but is not text
    is_text = annotation is str or (get_origin(annotation) is not dict and str in get_args(annotation))
    if is_text and text[:1] not in ("'", '"', "["):
        # no text: the suffix of files without one
        splits = "," in text if key in ("data.path", "data.text_key") else key == "data.text_suffixes" and not text
        return text.split(",") if splits else text
    for parse in (lambda text: tomli.loads(f"value = {text}")["value"], ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return parse(text)
    return text


def _import_user_parts(given: Layer) -> Iterator[tuple[str, str]]:
    """Import the user's "module:Name" parts. Yields the key of each failure, and the error."""
    for key, registry in REGISTRIES.items():
        names = given.get(key, [])
        for name in names.split(",") if isinstance(names, str) else names if isinstance(names, list) else []:
            try:
                registry.add(str(name).strip())
            except ConfigError as error:
                yield key, str(error)


def _merged(layers: Sequence[tuple[str, Layer]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge layers, lowest first. Returns the values and the name of each value's layer."""
    values = {key: value for _, layer in layers for key, value in layer.items()}
    return values, {key: name for name, layer in layers for key in layer}


def _saved_values(given: Layer, saved: Saved) -> Layer:
    """Return the config of the checkpoint to resume from; {} if there is none or its model family differs."""
    names = "run.out_dir", "run.name", "checkpoint.resume", "run.remote"
    out_dir, name, resume, remote = (str(given.get(key, default_of(key))) for key in names)
    before = saved(expand(out_dir) / name, resume, *([f"{remote.rstrip('/')}/{name}"] if remote else []))
    family = before.get("model.family", "")
    is_same = str(given.get("model.family", family)).lower() == family.lower()
    return before if is_same else {}  # its values may not suit a different family


def _with_size(
    layers: list[tuple[str, Layer]], given: Layer, family: Family
) -> tuple[list[tuple[str, Layer]], list[str]]:
    """Insert the family's defaults below all layers, and the keys of the size below the layer that names it.

    Returns:
        the layers, and a note on the keys of lower layers that the size replaces.
    """
    defaults = ("default of the family", family.shape(given))
    at = max((i for i, (_, layer) in enumerate(layers) if "model.size" in layer), default=None)
    if at is None:
        return [defaults, *layers], []
    size = layers[at][1]["model.size"]
    row = family.sizes.get(size, {}) if isinstance(size, str) else {}
    sized = {f"model.{key}": value for key, value in row.items() if f"model.{key}" not in layers[at][1]}
    below, _ = _merged(layers[:at])
    lost = [key for key, value in sized.items() if below.get(key, value) != value]
    notes = [f'{", ".join(lost)}: size "{size}" of {layers[at][0]} overrides the values below it'] if lost else []
    return [defaults, *layers[:at], (f'size "{size}"', sized), *layers[at:]], notes


def _kept(before: Layer, given: Layer, values: Layer) -> Layer:
    """Return the run's values of keys that are not given, where the current default or size preset differs.

    So a run continues as it began when a default changes. `keeps_value` selects the keys.

    Args:
        before: the run's values.
        values: the current values.
    """
    current = {**flatten(Config()), **values}
    resized = given.get("model.size", before.get("model.size")) != before.get("model.size")
    return {
        key: value
        for key, value in before.items()
        if key in current
        and key not in given
        and keeps_value(key)
        and value != current[key] != "epoch"  # checkpoints have steps instead of "epoch", see run/epochs.py
        and not (resized and key.startswith("model."))
    }


# --- from values to a config ------------------------------------------------------------------------------------


def _validated(
    values: Layer, origins: Mapping[str, str], problems: list[str], refused: set[str]
) -> tuple[Config, set[str]]:
    """Return the config without refused keys, so that the rest can still be checked, and all refused keys.

    Args:
        refused: the keys already refused.
    """
    wrong = dict[str, ErrorDetails | None].fromkeys(key for key in values if key not in known_keys())  # None: unknown
    try:
        config = _config(values, {*refused, *wrong})
    except ValidationError as error:
        for item in error.errors():
            wrong.setdefault(".".join(map(str, item["loc"][:2])), item)
        config = _config(values, {*refused, *wrong})
    if wrong:
        from torchtitan_lite.config import messages

        problems += [messages.problem(key, values[key], origins[key], item) for key, item in wrong.items()]
    return config, {*refused, *wrong}


def _config(values: Layer, without: set[str]) -> Config:
    return Config.model_validate(nested({key: value for key, value in values.items() if key not in without}))


def _broken(config: Config, rules: Sequence[Check], refused: set[str], sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the broken rules that no refused key takes part in, with the sources of their keys."""
    for check in rules:
        broken = {keys: text for keys, text in check(config).items() if refused.isdisjoint(keys.split())}
        for keys, text in broken.items():
            named = dict.fromkeys(source for key, source in sources.items() if key in keys.split())
            yield f"{' and '.join(named) or 'default'}: {text}"
        if any(key.startswith("model.") for keys in (*broken, *refused) for key in keys.split()):
            return


def _notes(
    config: Config, validated: Config, given: Layer, origins: Mapping[str, str], unused: Mapping[str, str]
) -> Iterator[str]:
    """Yield a note on the given keys without effect, and one on the learning rate of pretrained weights.

    A file, such as a run's config.toml, may repeat defaults.

    Args:
        validated: with the given values, also of keys that the family does not read.
        unused: what each unused key needs.
    """
    values = {key: attrgetter(key)(validated) for key in unused if key in given}
    without_effect = [
        f"{origins[key]}: {key} = {format_value(value)} needs {unused[key]}"
        for key, value in values.items()
        if value != default_of(key) or origins[key] == COMMAND_LINE
    ]
    if without_effect:
        yield f"without effect: {'; '.join(without_effect)}"
    if config.model.init_from and "optim.lr" not in origins and not config.started_from_weights:
        lr = "1e-4" if FAMILIES[config.model.family].encoder_decoder else "2e-5"
        yield (
            f"optim.lr = {config.optim.lr} is the default, for training from random weights; a pretrained "
            f"model forgets a lot at it: try --optim.name=adamw --optim.lr={lr} first (docs/models.md)"
        )
