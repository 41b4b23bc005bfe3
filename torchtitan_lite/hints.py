"""Suggestions for messages: the nearest key, option or pattern, quoting, and the differences of a checkpoint."""

import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import shortened

# what torchrun sets for train.py, and options of plan, by their other names
_RANKS = {
    **dict.fromkeys(("world_size", "nproc", "gpus", "num_gpus", "ngpu", "num_processes"), "world-size"),
    **dict.fromkeys(("nproc_per_node", "gpus_per_node"), "per-node"),
}
# other names of these keys, which no comparison of spellings would find
_MEANT = {
    **_RANKS,
    **dict.fromkeys(("batch_size", "batchsize", "batch"), "train.global_batch_size"),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "iters", "max_iters"), "train.steps"),
    **dict.fromkeys(("learning_rate", "max_lr"), "optim.lr"),
    **dict.fromkeys(("wandb", "tensorboard", "tracker", "report_to"), "log.trackers"),
    **dict.fromkeys(("dtype", "precision", "bf16", "fp16"), "fsdp.param_dtype"),
    **dict.fromkeys(("block_size", "context_length", "max_length", "sequence_length"), "train.seq_len"),
    **dict.fromkeys(("output_dir", "out", "out_dir"), "run.out_dir"),
    **dict.fromkeys(("data", "dataset", "path", "text"), "data.path"),
    **dict.fromkeys(("resume", "resume_from"), "checkpoint.resume"),
    **dict.fromkeys(("init", "pretrained"), "model.init_from"),
    **dict.fromkeys(("grad_clip", "clip", "max_grad_norm"), "optim.max_norm"),
    "every": "log.every",
    "vocab_size": "tokenizer.vocab_size",
}


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key closest to a misspelled one.

    A key of another section with the same last part wins over one with nearly the same letters. Of several with the
    same last part it is that of nearly the same section, else the first: `known` has the more usual sections first.
    """
    known = list(known)
    key = key.lower()
    name = key.split(".")[-1].replace("-", "_")
    by_name: dict[str, str] = {}
    for known_key in known:
        by_name.setdefault(known_key.split(".")[-1].replace("-", "_"), known_key)
    if name in by_name and "." not in by_name[name]:
        return by_name[name]  # an option that is spelled with the other dash
    if "." not in key and _MEANT.get(name) in known:
        return _MEANT[name]
    same = [known_key for known_key in known if "." in key and known_key.endswith(f".{name}")]
    near = difflib.get_close_matches(key, same or known, n=1, cutoff=0.75) or same[:1]
    near = near or [by_name[match] for match in difflib.get_close_matches(name, by_name, n=1)]
    return (near or difflib.get_close_matches(key, known, n=1, cutoff=0.0))[0]


def unknown_keys(texts: Sequence[str]) -> list[tuple[str, str]]:
    """The options --section.key=value among the words, which the config reports with its own."""
    options = [text.removeprefix("--").partition("=") for text in texts if text.startswith("--")]
    return [(key, value) for key, _, value in options if "." in key]


def not_options(texts: Sequence[str], known: Collection[str]) -> list[str]:
    """A problem for each word of a command line that is no known option, without `unknown_keys`.

    Args:
        texts: the words, in order. A number after an unknown option is its value.
        known: all options, without their dashes.
    """
    problems, skip = [], False
    for i, text in enumerate(texts):
        if skip:
            skip = False
            continue
        key, equals, value = text.removeprefix("--").partition("=")
        if text.startswith("--"):
            follows = texts[i + 1] if i + 1 < len(texts) else ""
            skip = not equals and re.fullmatch(r"[\d.]+(e-?\d+)?", follows) is not None
            if "." not in key:
                problems.append(f"{shortened(text)}: {_unknown(key, value or (follows if skip else ''), known)}")
        elif key in known and equals:
            problems.append(f"{shortened(text)}: options begin with two dashes: --{shortened(text)}")
        elif text.endswith(".toml"):
            problems.append(f"{shortened(text)}: a config file is given as --config {shortened(text)}")
        else:
            problems.append(f"{shortened(text)}: not understood; options look like --train.steps=400")
    return problems


def _unknown(key: str, value: str, known: Collection[str]) -> str:
    name = key.lower().replace("-", "_")
    if name in _RANKS and _RANKS[name] not in known:
        return f"unknown option; torchrun sets the number of ranks: torchrun --nproc-per-node {value or 2} train.py ..."
    return f"unknown option; the nearest known one is --{nearest(key, known)}"


def option(key: str, value: Any, as_toml: str) -> str:
    """An option of the command line, quoted for a shell."""
    plain = isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value)
    if plain and value and key != "sample.prompts":
        text = ",".join(str(item) for item in value)
    else:
        text = value if isinstance(value, str) else as_toml
    return shlex.quote(f"--{key}={text}")


def pattern(wrong: str, names: Sequence[str]) -> str:
    """What a pattern of parameters that matches nothing could have meant."""
    if not names:
        return "everything is frozen"
    parts = [name.split(".") for name in names]
    prefixes = (".".join(part[:n]) + ".*" for part in parts for n in range(1, len(part)))
    near = difflib.get_close_matches(wrong, dict.fromkeys([*prefixes, *names]), n=1, cutoff=0.7)
    if near:
        return f'did you mean "{near[0]}"?'
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
    return f"names look like {', '.join(kinds[:4])}" + (f", ..., {kinds[-1]}" if len(kinds) > 4 else "")


def in_quotes(content: str, error: str) -> str:
    """The fix of a TOML error that comes from text without quotes; empty for another error.

    Args:
        error: tomli's. One that begins with "Cannot" is about the key, such as a second one of its name.
    """
    if not (at := re.search(r"at line (\d+)", error)) or error.startswith("Cannot"):
        return ""
    lines = content.split("\n")
    line = lines[int(at[1]) - 1] if int(at[1]) <= len(lines) else ""
    match = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([^\s=\"'\[{#][^\"'#]*?)\s*(#.*)?", line)
    return f'; text needs quotes: {match[1]} = "{match[2]}"' if match else ""


def choice(value: str, expected: str) -> str:
    """The nearest choice to a misspelled one, of those that a message lists in quotes; empty if none is near."""
    choices = {text.lower(): text for text in re.findall("'(.*?)'", expected)}
    near = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.7)
    return f"; the nearest is {choices[near[0]]!r}" if near else ""


def sibling(path: Path) -> str:
    """A config next to a missing one, with nearly its name."""
    siblings = path.parent.glob("*.toml") if os.access(path.parent, os.R_OK | os.X_OK) else ()
    near = difflib.get_close_matches(path.stem, [p.stem for p in siblings], n=1)
    return f"; did you mean {path.parent / near[0]}.toml?" if near else ""


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The values of a checkpoint that differ from those of this run, at most 16 of them."""
    missing = "-"
    lines = [
        f"{key} is {_cut(saved.get(key, missing))} in the checkpoint and {_cut(here.get(key, missing))} here"
        for key in sorted({*saved, *here})
        if saved.get(key, missing) != here.get(key, missing)
    ]
    return lines[:16] + ([f"and {len(lines) - 16} more"] if len(lines) > 16 else [])


def _cut(value: Any) -> str:
    return value[:12] + "..." if isinstance(value, str) and len(value) == 64 else str(value)  # a SHA-256, shortened
