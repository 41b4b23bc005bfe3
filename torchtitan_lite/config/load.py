"""Loads a Config from files and the command line. All problems are reported in one ConfigError.

Later layers override earlier ones; `--print-config` shows the origin of each value:

  1. the defaults in sections/; on a resume, the run's value of a key that decides what it learns (`_kept`),
  2. the files: first `base = "other.toml"`, then the file itself,
  3. the command line: `--section.key=value`, and shorthands such as `--mixed-precision`.

`[model] size` sets [model] keys in its layer: numbers of a lower one are dropped, with a note. A sharding strategy sets
[fsdp] keys. Paths are relative to the working directory; `base` is looked for next to its file first.

This needs neither torch nor a process group.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import ValidationError

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.schema import (
    Config,
    conflicts,
    default_of,
    keeps_value,
    known_keys,
    resume_rule,
    usage_rules,
)
from torchtitan_lite.config.section import Machine
from torchtitan_lite.config.sections.fsdp import contradiction, strategy_keys
from torchtitan_lite.config.sections.model import rate_note
from torchtitan_lite.config.sections.optim import fitting_warmup
from torchtitan_lite.config.toml import Loaded, format_value
from torchtitan_lite.errors import ConfigError, shortened
from torchtitan_lite.terminal import counted

# --- where values come from -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigValue:
    """An unchecked value and its origin."""

    value: Any
    origin: str
    level: int = 1  # layer: 1 is the command line, 0 the file, -1 its base, -2 the base's base, ...


ConfigValues = dict[str, ConfigValue]  # by "section.key"
Check = Callable[[Config], dict[str, str]]  # returns the broken rules of a config, as `conflicts` does
# the config of the checkpoint from which a run's folder and `checkpoint.resume` resume, by "section.key"; {} if none
Saved = Callable[[Path, str], Mapping[str, Any]]
_DEFAULT = -(10**6)  # a level below any file
_KEPT = "the run so far"  # the origin of its values
_OWN = {  # where a registry takes entries of the user
    "model.family": "docs/own_model.md adds one of your own; ",
    "optim.name": "docs/extending.md adds one of your own; ",
}
_LONGEST = 16 << 20  # bytes of a config file; /dev/zero is endless


def read_file(path: Path, problems: list[str], chain: tuple[Path, ...] = ()) -> ConfigValues:
    """The values of a TOML file over those of its `base`. Errors are added to `problems`."""
    try:
        path = expand(path)
        where = path.resolve()
    except (OSError, RuntimeError, ValueError, ConfigError) as error:  # a loop of links, a NUL, an unknown user
        problems.append(f"{shortened(path)}: can't be read: {error}")
        return {}
    if where in chain:
        loop = " -> ".join(str(p.name) for p in (*chain[chain.index(where) :], where))
        problems.append(f"{path}: base files form a cycle: {loop}; remove one of the `base` lines")
        return {}
    content = b""
    try:
        with path.open("rb") as stream:
            content = stream.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST:,} bytes")
        tree = tomli.loads(content.decode("utf-8-sig"))  # editors on Windows may write a byte order mark
    except FileNotFoundError:
        from torchtitan_lite.hints import sibling

        referrer = f" (named as base by {chain[-1].name})" if chain else ""
        problems.append(f"{path}: no such file{referrer}{sibling(path)}")
        return {}
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        wrong = f"byte {error.object[error.start]:#04x} in line {line} is not UTF-8"
        problems.append(f"{shortened(path)}: {wrong}; save the file as UTF-8")
        return {}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not TOML, too many digits
        from torchtitan_lite.hints import in_quotes

        fix = in_quotes(content.decode(errors="replace"), str(error))
        problems.append(f"{shortened(path)}: can't be read as TOML: {shortened(error)}{fix}")
        return {}
    base = tree.pop("base", None)
    if base is not None and not isinstance(base, str):
        problems.append(f'{path}: base = {base!r}: should be the name of one file, e.g. base = "debug.toml"')
        base = None
    inherited: ConfigValues = {}
    if base:
        beside = Path(base) if base[0] == "~" else path.parent / base
        chosen = beside if beside.exists() or not Path(base).is_file() else Path(base)
        inherited = read_file(chosen, problems, (*chain, where))
    values: dict[str, Any] = {}
    for section, table in tree.items():
        if isinstance(table, dict):
            values |= {f"{section}.{key}": value for key, value in table.items()}
        else:
            values[section] = table
    return inherited | {key: ConfigValue(value, str(path), level=-len(chain)) for key, value in values.items()}


def parse_value(key: str, text: str) -> Any:
    """Parse a value of the command line as TOML; if it is not TOML, it is a string (`--run.name=a`)."""
    field = known_keys().get(key)
    # a dict[str, ...] has str among its arguments, but is not text
    annotation = field.annotation if field is not None else None
    is_text = annotation is str or (get_origin(annotation) is not dict and str in get_args(annotation))
    if is_text and text[:1] not in ("'", '"', "["):
        return _several(text) if key == "data.path" and "," in text else text
    if text in ("True", "False"):
        text = text.lower()
    try:
        return tomli.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        try:
            return float(text)  # .5 and 1E5 are common, but not TOML
        except ValueError:
            return text


def _several(text: str) -> str | list[str]:
    """The paths that a text separates by commas, unless there is a text at all of it."""
    from torchtitan_lite.config.find_text import unfound

    parts = [part.strip() for part in text.split(",") if part.strip()]
    return parts if unfound(text) else text


# --- from values to a config ------------------------------------------------------------------------------------


def build(
    values: ConfigValues,
    checks: Sequence[Check],
    problems: list[str],
    notes: list[str],
    left_out: set[str],
    kept: ConfigValues,
) -> Config:
    """Build the config.

    A refused value is added to `problems` and dropped, so the rest can still be checked. A rule is reported only if
    all of its keys were accepted.

    Args:
        checks: the first accepts any values (see `conflicts`); the others build the model, and run only if [model] is
            valid.
        notes: gets a sentence for each value that is not used (`UsedIf`), or that contradicts the size.
        left_out: gets the keys that were reset to their default.
        kept: the run's values of keys that are not given.

    Returns:
        the config, valid only if `problems` is still empty.
    """
    refused: set[str] = set()
    known = known_keys()
    for key, value in values.items():
        if key not in known:
            problems.append(_describe(key, value, _unknown(key, known, value.origin)))
            refused.add(key)
    layers = _with_size(values, problems, refused, notes) | kept
    try:
        config = _validate(layers, refused)
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"][:2])
            if key not in refused:
                page = _OWN.get(key, "") if item["type"] == "literal_error" else ""
                message = f"{_sentence(item)}; {page}{example(key, layers[key].origin)}"
                problems.append(_describe(key, layers[key], message))
            refused.add(key)
        config = _validate(layers, refused)
    for key in _unused(config, layers, refused, problems, notes):
        refused.add(key)
        left_out.add(key)
    config = _validate(layers, refused)
    if "optim.warmup_steps" not in layers and not config.train.epochs:
        config = fitting_warmup(config)
    for check in checks:
        broken = _accepted(check(config), layers, refused)
        problems += broken.values()
        if any(key.startswith("model.") for keys in (*broken, *refused) for key in keys.split()):
            break
    return config


def _unused(
    config: Config, values: ConfigValues, refused: set[str], problems: list[str], notes: list[str]
) -> Iterator[str]:
    """Refuse keys that are not used. Yield those set in a layer below the choice: they are reset to their default."""
    for key, rule in usage_rules():
        choices = rule.decided_by.split()
        if key not in values or not refused.isdisjoint((key, *choices)):
            continue
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value == default_of(key) or rule.holds(config):
            continue
        if values[key].origin == _KEPT:
            if resume_rule(key).rule == "allowed":
                yield key
            continue  # a checkpoint is compared with the others, used or not
        level = values[key].level
        message = f"{values[key].origin}: {key} = {value} has no effect without {rule.needs}"
        if not rule.refuse:
            notes.append(message)
        elif level < max((values[choice].level for choice in choices if choice in values), default=-math.inf):
            notes.append(f"{message}; it stays at its default")
            yield key
        else:
            problems.append(f"{message}; leave it out, or set that")
            refused.add(key)


def _validate(values: ConfigValues, refused: set[str]) -> Config:
    tree: dict[str, dict[str, Any]] = {}
    for key, entry in values.items():
        if key not in refused:
            section, name = key.split(".")
            value = entry.value
            if isinstance(value, list) and isinstance(default_of(key), tuple):  # TOML has no tuples
                value = tuple(value)
            tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree, context="layers")


def _accepted(broken: Mapping[str, str], values: ConfigValues, refused: set[str]) -> dict[str, str]:
    """The broken rules whose keys were all accepted, each with the origins of its values."""
    accepted = {}
    for keys, message in broken.items():
        if refused.isdisjoint(keys.split()):
            given = sorted((values[key] for key in keys.split() if key in values), key=lambda v: v.level)
            origins = dict.fromkeys(value.origin for value in given if not value.origin.startswith("size "))
            accepted[keys] = f"{' and '.join(origins) or 'default'}: {message}"
    return accepted


def _with_size(values: ConfigValues, problems: list[str], refused: set[str], notes: list[str]) -> ConfigValues:
    """The values over the [model] keys of `[model] size`, which replace values of lower layers."""
    layer = _size_layer(values, problems, refused)
    if "model.size" in values:  # the default contradicts nothing
        notes += _size_notes(values, layer)
    return layer | {key: value for key, value in values.items() if key not in layer or value.level >= layer[key].level}


def _kept(values: ConfigValues, saved: Saved) -> ConfigValues:
    """The run's values of keys that are not given, where today's default, or number of the size, is another.

    A run continues as it began, although a default has changed. `keeps_value` says which keys.
    """
    names = "run.out_dir", "run.name", "checkpoint.resume"
    out_dir, name, resume = (values[key].value if key in values else default_of(key) for key in names)
    try:
        before = saved(expand(out_dir) / name, resume)
    except (ConfigError, OSError, TypeError, ValueError):  # such a name is refused elsewhere
        return {}
    layers = _with_size(values, [], set(), [])
    named = [key for key in ("model.family", "model.size") if key in values]
    others = {key for key in named if str(values[key].value).lower() != str(before.get(key)).lower()}
    if "model.family" in others:  # nothing of it may suit this one, its objective for example
        return {}
    kept: ConfigValues = {}
    for key, value in before.items():
        if not keeps_value(key) or (others and key.startswith("model.")):
            continue
        entry = layers.get(key)
        is_given = key in values and entry is values[key]
        if is_given:
            continue
        today = json.loads(json.dumps(entry.value if entry else default_of(key)))
        if value != today and today != "epoch":  # checkpoints have the steps of "epoch", see training/epochs.py
            kept[key] = ConfigValue(value, _KEPT, _DEFAULT)
    return kept


def _size_layer(values: ConfigValues, problems: list[str], refused: set[str]) -> ConfigValues:
    """The [model] keys of `[model] size`."""
    family = values.get("model.family", ConfigValue(default_of("model.family"), "default", _DEFAULT))
    size = values.get("model.size", ConfigValue(default_of("model.size"), "default", _DEFAULT))
    known = FAMILIES.get(family.value.lower()) if isinstance(family.value, str) else None
    if known is None or not isinstance(size.value, str):
        return {}  # an unknown family or a wrong type is reported elsewhere
    sizes = known.sizes
    if size.value not in sizes:
        names = ", ".join(sizes)
        problems.append(
            _describe("model.size", size, f'no such size of {family.value}; known: {names}; e.g. size = "1M"')
        )
        refused.add("model.size")
        return {}
    origin = f'size "{size.value}"'
    layer = {f"model.{key}": ConfigValue(value, origin, size.level) for key, value in sizes[size.value].items()}
    sized = {key for key, value in layer.items() if type(value.value) is int}
    if size.level == _DEFAULT and sized & values.keys():  # another shape: without the switches of the default's
        return {key: value for key, value in layer.items() if not isinstance(value.value, bool)}
    return layer


def _size_notes(numbers: ConfigValues, size: ConfigValues) -> Iterator[str]:
    """Which numbers of [model] contradict a size, and which of the two applies: that of the higher layer."""
    others = [key for key in size if key in numbers and numbers[key].value != size[key].value]
    for dropped in (False, True):
        if keys := [key for key in others if (numbers[key].level < size[key].level) == dropped]:
            wins, loses = (size, numbers) if dropped else (numbers, size)
            yield f"{', '.join(keys)}: {wins[keys[0]].origin} applies, not {loses[keys[0]].origin}"


def _strategy_layer(values: ConfigValues, local_world_size: int, problems: list[str]) -> ConfigValues:
    """The [fsdp] keys of `[fsdp] sharding_strategy` that are not set, or are set to -1 or "default"."""
    named = values.get("fsdp.sharding_strategy", ConfigValue("", "default"))
    if not isinstance(named.value, str):
        return {}  # reported elsewhere
    strategy = named.value.upper()
    explicit = {key.removeprefix("fsdp."): value.value for key, value in values.items() if key.startswith("fsdp.")}
    for key, value in explicit.items():
        if why := contradiction(strategy, key, value, local_world_size):
            problems.append(_describe(f"fsdp.{key}", values[f"fsdp.{key}"], f"{why}; leave one of the two out"))
    return {
        f"fsdp.{key}": replace(named, value=value, origin=f'sharding_strategy "{strategy}"')
        for key, value in strategy_keys(strategy, explicit, local_world_size).items()
    }


def _describe(key: str, value: ConfigValue, message: str) -> str:
    if value.origin == "command line":
        return f"command line: --{key}={_shown(value.value, str)}: {message}"
    section, _, name = key.rpartition(".")
    table = f"[{section}] " if section else ""
    return f"{value.origin}: {table}{name} = {_shown(value.value, repr)}: {message}"


def _shown(value: Any, write: Callable[[Any], str]) -> str:
    """Any value, for a message."""
    try:
        return shortened(write(value))
    except (ValueError, RecursionError):  # Python does not print integers of more than 4,300 digits
        return "..."


def _unknown(key: str, known: dict[str, Any], origin: str) -> str:
    from torchtitan_lite.hints import nearest

    near = nearest(key, known)
    return f"unknown key; the nearest known one is {near}, {example(near, origin)}"


def example(key: str, origin: str = "command line") -> str:
    """A valid assignment to a key, as TOML or as an option for a shell."""
    from torchtitan_lite import hints

    examples = known_keys()[key].examples
    value = examples[0] if examples else default_of(key)  # an empty default shows nothing
    as_toml = format_value(value)
    return f"e.g. {hints.option(key, value, as_toml) if origin == 'command line' else f'{key} = {as_toml}'}"


def _sentence(item: Any) -> str:
    """What is wrong with a value. A part of it is named, and shown."""
    from torchtitan_lite import hints

    message = str(item["msg"]).removeprefix("Input ").removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if item["type"] == "literal_error":
        message += hints.choice(str(item["input"]), item["ctx"]["expected"])
    key, inside = ".".join(item["loc"][:2]), [part for part in item["loc"][2:] if part not in ("str", "list[str]")]
    if not inside:
        return message
    part = shortened(key + "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in inside))
    if item["type"] == "missing":
        return f"{part} is missing"
    if item["type"] == "extra_forbidden":
        fields = get_args(known_keys()[key].annotation)[0].model_fields
        return f"{part}: unknown key; the nearest known one is {hints.nearest(str(inside[-1]), fields)}"
    return f"{part} = {_shown(item['input'], repr)} {message}"


def load(
    file: Path | None,
    overrides: ConfigValues,
    *,
    world_size: int = 1,
    n_gpus: int = 0,
    local_world_size: int = 1,
    elsewhere: bool = False,
    problems: Iterable[str] = (),
    checks: Sequence[Check] = (),
    saved: Saved | None = None,
) -> Loaded:
    """Load the config of an optional file, with overrides by "section.key".

    Args:
        world_size, n_gpus, local_world_size: for the rules about the mesh and the device.
        elsewhere: the run is for another machine, so this one's files, packages and compiler are not checked.
        problems: problems already found on the command line, reported with the rest.
        checks: further checks, which may build the model (see `build`).
        saved: if given, a run that resumes keeps its values of keys that are not given (see `_kept`).

    Raises:
        ConfigError: lists every problem on its own line, with file, value, nearest key and what works.
    """
    problems = list(problems)
    values = (read_file(file, problems) if file else {}) | overrides
    if file and "run.name" not in values:
        values["run.name"] = ConfigValue(file.stem, "name of the file", level=0)
    kept = _kept(values, saved) if saved else {}
    values |= _strategy_layer(values, local_world_size, problems)
    notes: list[str] = []
    left_out: set[str] = set()
    rules = conflicts(Machine(world_size, n_gpus, local_world_size), elsewhere=elsewhere)
    config = build(values, [rules, *checks], problems, notes, left_out, kept)
    if problems:
        raise ConfigError("\n  ".join([f"the configuration has {counted(len(problems), 'problem')}:", *problems]))
    if config.model.init_from and "optim.lr" not in values:
        notes += rate_note(config)
    origins = {key: value.origin for key, value in (_with_size(values, [], set(), []) | kept).items()}
    unused = {key for key, rule in usage_rules() if not rule.holds(config)}
    used = [key for key in kept if key not in unused]
    return Loaded(config, origins | dict.fromkeys(left_out, "default"), notes, kept=used)
