"""The command line of train.py: every key of the config is an option, and `--help` is made from the config itself."""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.config import load, paths, schema, toml
from torchtitan_lite.errors import shortened

_BARE = "\0"  # the value of an option that was given none

SHORTHANDS: dict[str, dict[str, Any]] = {
    "--explicit-prefetching": {"fsdp.explicit_prefetching": True},
    "--mixed-precision": {"fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "float32"},
    "--dcp-api": {"checkpoint.api": "dcp"},
}


@dataclass(frozen=True)
class Command:
    """What the command line asks for."""

    loaded: toml.Loaded
    print_config: bool
    check_config: bool
    inspect: bool
    dry_run: bool


def parse(
    argv: Sequence[str],
    elsewhere: bool = False,
    /,
    *,
    world_size: int,
    n_gpus: int,
    local_world_size: int = 1,
    checks: Sequence[load.Check] = (),
) -> Command:
    """The command line, checked against the world size and the GPUs of this machine, and by more `checks`.

    Args:
        elsewhere: the run is for another machine, so files and packages of this one are not asked for.

    Raises:
        ConfigError: everything that is wrong with the file and the options.
        SystemExit: with 0, after `--help`.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    given = vars(options)
    overrides: load.ConfigValues = {}
    for flag, keys in SHORTHANDS.items():
        if given[flag]:
            overrides |= {key: load.ConfigValue(value, flag) for key, value in keys.items()}
    problems = []
    known = schema.known_keys()
    for text in rest:
        key, equals, value = text.removeprefix("--").partition("=")
        if text.startswith("--") and "." in key:
            overrides[key] = load.ConfigValue(load.parse_value(key, value) if equals else "", "command line")
        elif text.startswith("--"):
            near = load.nearest(key, [flag.removeprefix("--") for flag in (*SHORTHANDS, "--config", *known)])
            problems.append(f"command line: {shortened(text)}: unknown option; the nearest known one is --{near}")
        else:
            problems.append(f"command line: {shortened(text)}: not understood; options look like --train.steps=400")
    for key in known:
        if given[key] is not None:
            if given[key] == _BARE and known[key].annotation is not bool:
                problems.append(f"command line: --{key} needs a value, {load.example(key)}")
                continue
            parsed = True if given[key] == _BARE else load.parse_value(key, given[key])
            overrides[key] = load.ConfigValue(parsed, "command line")
    loaded = load.load(
        given["config"],
        overrides,
        world_size=world_size,
        n_gpus=n_gpus,
        local_world_size=local_world_size,
        elsewhere=elsewhere,
        problems=problems,
        checks=checks,
    )
    return Command(loaded, given["print_config"], given["check_config"], given["inspect"], given["dry_run"])


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="train.py [--config FILE] [--section.key=value ...] [shorthands]",
        description="Train a Transformer with FSDP2. Start it with torchrun, or with python as a world of one. "
        "The same command again resumes the run.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=120),
    )
    parser.add_argument("--config", type=paths.argument, metavar="FILE", help="a TOML experiment, see configs/")
    parser.add_argument("--print-config", action="store_true", help="print every value with its origin, and exit")
    parser.add_argument("--check-config", action="store_true", help="check the config for this world size, and exit")
    parser.add_argument("--inspect", action="store_true", help="print the sharded model and its groups, and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="three steps in a folder that goes away: memory and time, and exit"
    )
    shorthands = parser.add_argument_group("shorthands")
    for flag, keys in SHORTHANDS.items():
        meaning = " ".join(f"--{key}={str(value).lower()}" for key, value in keys.items())
        shorthands.add_argument(flag, dest=flag, action="store_true", help=meaning)
    groups: dict[str, Any] = {}
    for key, field in schema.known_keys().items():
        section = key.split(".")[0]
        group = groups.setdefault(section, parser.add_argument_group(f"[{section}]"))
        default = schema.default_of(key)
        shown = "-" if default == "" else toml.format_value(default)
        text = f"{field.description} (default: {shown})".replace("%", "%%")
        # values stay text here; they are checked, all together, by the config
        group.add_argument(f"--{key}", dest=key, nargs="?", const=_BARE, metavar=schema.type_name(key), help=text)
    return parser
