"""The command line of train.py. Every config key is an option, and `--help` is generated from the schema."""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.commands import Options, add_options
from torchtitan_lite.config import load, paths, schema, toml

# keys shown by `--help`
_MOST_SET = {
    *("run.name", "run.out_dir", "run.device", "model.family", "model.size", "model.max_seq_len", "model.init_from"),
    *("tokenizer.path", "tokenizer.vocab_size", "data.path", "data.objective", "train.steps", "train.epochs"),
    *("train.seq_len", "train.micro_batch_size", "train.global_batch_size", "optim.name", "optim.lr"),
    *("optim.schedule", "optim.warmup_steps", "fsdp.sharding_strategy", "fsdp.reshard_after_forward"),
    *("fsdp.param_dtype", "activation_checkpointing.mode", "compile.enabled", "eval.every", "sample.every"),
    *("checkpoint.every", "checkpoint.resume", "log.trackers"),
}
MODES: Options = {
    "--config": {"type": paths.expand, "metavar": "FILE", "help": "a TOML experiment, see configs/"},
    "--print-config": {"action": "store_true", "help": "print every value with its origin, and exit"},
    "--check-config": {
        "action": "store_true",
        "help": "check the config for this world size, and prepared data, and exit",
    },
    "--inspect": {"action": "store_true", "help": "print the sharded model and its FSDP groups, and exit"},
    "--dry-run": {
        "action": "store_true",
        "help": "run three steps in a temporary folder, print memory and time, and exit",
    },
    "--retry": {
        "action": "store_true",
        "help": "start although the last attempt failed, and would again (docs/cluster.md)",
    },
    "--replay": {"type": int, "metavar": "N", "help": "re-run step N, compare it bit for bit with the log, exit"},
}
SHORTHANDS: dict[str, dict[str, Any]] = {
    "--explicit-prefetching": {"fsdp.explicit_prefetching": True},
    "--mixed-precision": {"fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "float32"},
    "--dcp-api": {"checkpoint.api": "dcp"},
}


@dataclass(frozen=True)
class Command:
    """The parsed command line."""

    loaded: toml.Loaded
    modes: dict[str, Any]  # by name, such as "check_config"

    @property
    def trains(self) -> bool:
        return all(mode is None or mode is False for mode in self.modes.values())


def parse(
    argv: Sequence[str],
    *,
    elsewhere: bool = False,
    flags: Sequence[str] = (),
    world_size: int,
    n_gpus: int,
    local_world_size: int = 1,
    checks: Sequence[load.Check] = (),
    saved: load.Saved | None = None,
) -> Command:
    """Parse the command line and check the config for this world size and machine.

    Args:
        flags: the command's other options, for hints.
        elsewhere, checks, saved: see `load.load`.

    Raises:
        ConfigError: lists every problem of the file and the options.
        SystemExit: with code 0, after `--help` or `--help-all`.
    """
    parser = _parser("--help-all" in argv)
    options, rest = parser.parse_known_args(argv)
    arguments = vars(options)
    known = schema.known_keys()
    problems, given = list[str](), {key: arguments[key] for key in known if arguments[key] is not None}
    if rest:
        from torchtitan_lite import hints

        words = [flag.removeprefix("--") for flag in (*known, *parser._option_string_actions, *flags)]
        problems = [f"command line: {text}" for text in hints.not_options(rest, words)]
        given = hints.unknown_keys(rest) | given
    values = {key: load.parse_value(key, text) for key, text in given.items()}
    for flag in filter(arguments.get, SHORTHANDS):
        twice = sorted(values.keys() & SHORTHANDS[flag].keys())
        problems += [f"command line: {flag} sets {key}; leave --{key} or {flag} out" for key in twice]
        values |= SHORTHANDS[flag]
    loaded = load.load(
        arguments["config"],
        values,
        world_size=world_size,
        n_gpus=n_gpus,
        local_world_size=local_world_size,
        elsewhere=elsewhere,
        problems=problems,
        checks=checks,
        saved=saved,
    )
    modes = {name: arguments[name] for name in ("print_config", "check_config", "inspect", "dry_run", "replay")}
    return Command(replace(loaded, retry=arguments["retry"]), modes)


@functools.cache
def _parser(shows_all: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="train.py [--config FILE] [--section.key=value ...] [shorthands]",
        description="Train a Transformer with FSDP2. Start it with torchrun, or with plain python on one rank. "
        "Run the same command again to resume.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=120),
    )
    known = schema.known_keys()
    parser.add_argument("--help-all", action="help", help=f"show all {len(known)} keys; --help shows the most used")
    add_options(parser, MODES)
    shorthands = parser.add_argument_group("shorthands")
    for flag, keys in SHORTHANDS.items():
        meaning = " ".join(f"--{key}={str(value).lower()}" for key, value in keys.items())
        shorthands.add_argument(flag, dest=flag, action="store_true", help=meaning)
    groups = {name: parser.add_argument_group(f"[{name}]") for name in schema.sections()}
    defaults = load.defaults()
    for key, field in known.items():
        default = "-" if defaults[key] == "" else toml.format_value(defaults[key])
        text = f"{field.description} (default: {default})".replace("%", "%%")
        shown = text if shows_all or key in _MOST_SET else argparse.SUPPRESS
        # values stay text: the config checks all of them together
        add_key = functools.partial(
            groups[key.split(".")[0]].add_argument, f"--{key}", metavar=schema.type_name(key), help=shown
        )
        add_key(nargs="?", const="true") if field.annotation is bool else add_key()
    return parser
