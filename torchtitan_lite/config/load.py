"""From files and the command line to a Config, with every problem at once.

A value is looked for in this order, and the last one found counts; `--print-config` shows where each came from:

  1. the default in schema.py,
  2. the named model size (`[model] size = "1M"` stands for dim, n_layers and n_heads), and FSDP1's name of a sharding
     strategy (presets.py),
  3. the files: `base = "other.toml"` (relative to the file that says it) is read first, the file on top of it,
  4. the command line: `--section.key=value`, and shorthands such as `--mixed-precision`.

Nothing here needs torch or a process group. `load` either returns a config that can run or raises one ConfigError
that lists everything it found: unknown keys, wrong types, combinations that make no sense.
"""

import difflib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import ValidationError

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.presets import contradiction, stands_for
from torchtitan_lite.config.rules import conflicts
from torchtitan_lite.config.schema import Config, default_of, known_keys
from torchtitan_lite.config.toml import Loaded, format_value
from torchtitan_lite.config.unread import unread
from torchtitan_lite.errors import ConfigError, shortened

# --- where values come from -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigValue:
    """A value as somebody wrote it, and where."""

    value: Any
    origin: str
    level: int = 1  # which layer: 1 is the command line, 0 the file, -1 its base, -2 the base of that, ...


ConfigValues = dict[str, ConfigValue]  # by "section.key"
Check = Callable[[Config], dict[str, str]]  # the broken rules of a config, as `conflicts` gives them
_DEFAULT = -(10**6)  # below any file
_LONGEST = 16 << 20  # bytes of a config; /dev/zero has no end


def read_file(path: Path, problems: list[str], chain: tuple[Path, ...] = ()) -> ConfigValues:
    """The settings of a TOML file on top of those of its `base`. What can't be read is added to `problems`."""
    try:
        path = expand(path)
        where = path.resolve()
    except (OSError, RuntimeError, ValueError, ConfigError) as error:  # a circle of links, a NUL, an unknown user
        problems.append(f"{shortened(path)}: can't be read: {error}")
        return {}
    if where in chain:
        loop = " -> ".join(str(p.name) for p in (*chain[chain.index(where) :], where))
        problems.append(f"{path}: base files form a cycle: {loop}; remove one of the `base` lines")
        return {}
    try:
        with path.open("rb") as stream:
            content = stream.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST:,} bytes")
        tree = tomli.loads(content.decode())
    except FileNotFoundError:
        here = path.parent.glob("*.toml") if os.access(path.parent, os.R_OK | os.X_OK) else ()
        near = difflib.get_close_matches(path.name, [p.name for p in here], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        said_by = f" (named as base by {chain[-1].name})" if chain else ""
        problems.append(f"{path}: no such file{said_by}{hint}")
        return {}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not TOML, not UTF-8, a number without end
        problems.append(f"{shortened(path)}: can't be read as TOML: {shortened(error)}")
        return {}
    base = tree.pop("base", None)
    if base is not None and not isinstance(base, str):
        problems.append(f'{path}: base = {base!r}: should be the name of one file, e.g. base = "debug.toml"')
        base = None
    if base and base.startswith("~"):
        below = read_file(Path(base), problems, (*chain, where))
    else:
        below = read_file(path.parent / base, problems, (*chain, where)) if base else {}
    return below | {key: ConfigValue(value, str(path), level=-len(chain)) for key, value in _leaves(tree)}


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, table in tree.items():
        if isinstance(table, dict):
            yield from ((f"{section}.{key}", value) for key, value in table.items())
        else:
            yield section, table


def parse_value(key: str, text: str) -> Any:
    """A value from the command line: TOML where it is TOML, else the text itself (`--run.name=a`)."""
    field = known_keys().get(key)
    # a table of names has str among its arguments, and is no text
    annotation = field.annotation if field is not None else None
    is_text = annotation is str or (get_origin(annotation) is not dict and str in get_args(annotation))
    if is_text and text[:1] not in ("'", '"', "["):
        return text
    if text in ("True", "False"):
        text = text.lower()
    try:
        return tomli.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        try:
            return float(text)  # .5 and 1E5 are no TOML, but what people type
        except ValueError:
            return text


# --- from settings to a config ----------------------------------------------------------------------------------


def build(
    settings: ConfigValues,
    checks: Sequence[Check],
    problems: list[str],
    notes: list[str] | None = None,
    left_out: set[str] | None = None,
) -> Config:
    """The config that the settings describe.

    A setting that is refused is named in `problems` and left out, so that the rest can still be checked: each of
    `checks` is asked about the remaining values, and only rules whose keys were all accepted speak.

    Args:
        checks: the first holds for any values (see `conflicts`); those after it build the model, and are asked only
            if nothing is wrong with [model].
        notes: gets a sentence for each setting that nothing reads (unread.py).
        left_out: gets the keys of those that were left at their default.

    Returns:
        the config; it counts only if `problems` stayed empty.
    """
    refused: set[str] = set()
    known = known_keys()
    for key, setting in settings.items():
        if key not in known:
            problems.append(_describe(key, setting, _unknown(key, known)))
            refused.add(key)
    layers = _size_layer(settings, problems, refused) | settings
    try:
        config = _validate(layers, refused)
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"][:2])
            if key not in refused:
                problems.append(_describe(key, layers[key], f"{_sentence(item)}; {example(key)}"))
            refused.add(key)
        config = _validate(layers, refused)
    for key in _unread(config, layers, refused, problems, [] if notes is None else notes):
        refused.add(key)
        if left_out is not None:
            left_out.add(key)
    config = _validate(layers, refused)
    for check in checks:
        found = _conflicting(check(config), layers, refused)
        problems += found.values()
        if any(key.startswith("model.") for keys in (*found, *refused) for key in keys.split()):
            break
    return config


def _unread(
    config: Config, settings: ConfigValues, refused: set[str], problems: list[str], notes: list[str]
) -> Iterator[str]:
    """Refuse keys that nothing reads; yield those that a layer below the choice has set: they stay at their default."""
    for found in unread(config):
        key, rule = found.key, found.rule
        if key not in settings or not refused.isdisjoint((key, *rule.choice)):
            continue
        setting = settings[key]
        chosen = max((settings[choice].level for choice in rule.choice if choice in settings), default=-math.inf)
        if not rule.refuse:
            notes.append(f"{setting.origin}: {found.message}")
        elif setting.level < chosen:
            notes.append(f"{setting.origin}: {found.message}; it stays at its default")
            yield key
        else:
            problems.append(f"{setting.origin}: {found.message}; leave it out, or set that")
            refused.add(key)


def _validate(settings: ConfigValues, refused: set[str]) -> Config:
    tree: dict[str, dict[str, Any]] = {}
    for key, setting in settings.items():
        if key not in refused:
            section, name = key.split(".")
            value = setting.value
            # TOML has arrays only; a field that wants a tuple takes one
            if isinstance(value, list) and isinstance(default_of(key), tuple):
                value = tuple(value)
            tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


def _conflicting(broken: Mapping[str, str], settings: ConfigValues, refused: set[str]) -> dict[str, str]:
    """The broken rules of a check whose keys were all accepted, with the origin that was written last."""
    found = {}
    for keys, message in broken.items():
        if refused.isdisjoint(keys.split()):
            origins = [settings[key] for key in keys.split() if key in settings]
            last = max(origins, key=lambda s: (s.level, not s.origin.startswith("size ")), default=None)
            found[keys] = f"{last.origin if last else 'default'}: {message}"
    return found


def _size_layer(settings: ConfigValues, problems: list[str], refused: set[str]) -> ConfigValues:
    """The settings that `[model] size` stands for."""
    family = settings.get("model.family", ConfigValue(default_of("model.family"), "default", _DEFAULT))
    size = settings.get("model.size", ConfigValue(default_of("model.size"), "default", _DEFAULT))
    known = FAMILIES.get(family.value) if isinstance(family.value, str) else None
    if known is None or not isinstance(size.value, str):
        return {}  # the family or the type is wrong, and is reported as such
    sizes = known.sizes
    if size.value not in sizes:
        names = ", ".join(sizes)
        problems.append(
            _describe("model.size", size, f'no such size of {family.value}; known: {names}; e.g. size = "1M"')
        )
        refused.add("model.size")
        return {}
    origin = f'size "{size.value}"'
    return {f"model.{key}": ConfigValue(value, origin, size.level) for key, value in sizes[size.value].items()}


def _strategy_layer(settings: ConfigValues, local_world_size: int, problems: list[str]) -> ConfigValues:
    """The settings that `[fsdp] sharding_strategy` stands for, where they are not set, or to their neutral value."""
    strategy = settings.get("fsdp.sharding_strategy", ConfigValue("", "default")).value
    if not isinstance(strategy, str):
        return {}  # it is reported as a wrong type
    explicit = {key.removeprefix("fsdp."): setting.value for key, setting in settings.items() if key[:5] == "fsdp."}
    for key, value in explicit.items():
        if key == "dp_shard" and value == local_world_size:
            continue  # what a hybrid strategy itself means here, be it 1
        if wrong := contradiction(strategy, key, value):
            problems.append(_describe(f"fsdp.{key}", settings[f"fsdp.{key}"], f"{wrong}; leave one of the two out"))
    origin = f'sharding_strategy "{strategy}"'
    return {
        f"fsdp.{key}": ConfigValue(value, origin, settings["fsdp.sharding_strategy"].level)
        for key, value in stands_for(strategy, explicit, local_world_size).items()
        if explicit.get(key, -1) in (-1, "default")
    }


def _describe(key: str, setting: ConfigValue, message: str) -> str:
    if setting.origin == "command line":
        return f"command line: --{key}={_shown(setting.value, str)}: {message}"
    section, _, name = key.rpartition(".")
    table = f"[{section}] " if section else ""
    return f"{setting.origin}: {table}{name} = {_shown(setting.value, repr)}: {message}"


def _shown(value: Any, write: Callable[[Any], str]) -> str:
    """A value for a message, which may be anything."""
    try:
        return shortened(write(value))
    except (ValueError, RecursionError):  # Python writes no integer of more than 4,300 digits
        return "..."


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key that somebody most likely meant: close as a whole, else close in its last part."""
    known = list(known)
    by_name = {known_key.split(".")[-1]: known_key for known_key in known}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    near = near or [by_name[match] for match in difflib.get_close_matches(key.split(".")[-1], by_name, n=1)]
    return (near or difflib.get_close_matches(key, known, n=1, cutoff=0.0))[0]


def _unknown(key: str, known: dict[str, Any]) -> str:
    near = nearest(key, known)
    return f"unknown key; the nearest known one is {near}, {example(near)}"


def example(key: str) -> str:
    """A line that works."""
    return f"e.g. {key} = {format_value(default_of(key))}"


def _sentence(item: Any) -> str:
    message = str(item["msg"]).removeprefix("Input ")
    inside = ".".join(str(part) for part in item["loc"][2:] if part not in ("str", "list[str]"))
    message = message.removeprefix("Value error, ")
    return (f"{inside} " if inside else "") + message[:1].lower() + message[1:]


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
) -> Loaded:
    """The config of an optional file and of overrides by "section.key".

    Args:
        world_size, n_gpus, local_world_size: what the rules about the mesh and the device are held against.
        elsewhere: the run is for another machine: files, packages and the compiler of this one do not matter.
        problems: what was already found (on the command line); it is reported with the rest.
        checks: more checks, which may build the model (see `build`).

    Raises:
        ConfigError: everything that is wrong, a line each, with file, value, the nearest key and what would work.
    """
    problems = list(problems)
    settings = (read_file(file, problems) if file else {}) | overrides
    if file and "run.name" not in settings:
        settings["run.name"] = ConfigValue(file.stem, "name of the file", level=0)
    settings |= _strategy_layer(settings, local_world_size, problems)
    notes: list[str] = []
    left_out: set[str] = set()
    fixed = conflicts(world_size, n_gpus, local_world_size, elsewhere=elsewhere)
    config = build(settings, [fixed, *checks], problems, notes, left_out)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"the configuration has {count}:", *problems]))
    written = {key: s.origin for key, s in (_size_layer(settings, [], set()) | settings).items()}
    return Loaded(config, written | dict.fromkeys(left_out, "default"), notes)


# --- writing ----------------------------------------------------------------------------------------------------
