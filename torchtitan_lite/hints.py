"""Suggestions for messages: the nearest key, option or pattern, and a checkpoint's differences."""

import difflib
import itertools
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

# other names of options of `plan`; for train.py, torchrun sets these values
_RANKS = {
    **dict.fromkeys(("world_size", "nproc", "gpus", "num_gpus", "ngpu", "num_processes"), "world-size"),
    **dict.fromkeys(("nproc_per_node", "gpus_per_node"), "per-node"),
}
# other names of keys that a comparison of spellings would not find
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
    """Return the known key closest to a misspelled one.

    A key with the same last part wins over a similar spelling. Among several with the same last part, the one with the
    most similar section wins, else the first: `known` lists the more usual sections first.
    """
    known, key = list(known), key.lower()
    name = key.split(".")[-1].replace("-", "_")
    if key == name and _MEANT.get(name) in known:
        return _MEANT[name]
    same = [known_key for known_key in known if known_key.split(".")[-1].replace("-", "_") == name]
    near = difflib.get_close_matches(key, same, n=1, cutoff=0.75) or same[:1]
    return (near or difflib.get_close_matches(key, known, n=1, cutoff=0.0))[0]


def unknown_keys(words: Sequence[str]) -> dict[str, str]:
    """Return the options --section.key=value among the words. The config reports those that it does not know."""
    options = [word.removeprefix("--").partition("=") for word in words if word.startswith("--")]
    return {key: value for key, _, value in options if "." in key}


def not_options(words: Sequence[str], known: Collection[str]) -> Iterator[str]:
    """Yield a problem for each word of a command line that is not a known option, except `unknown_keys`.

    Args:
        words: in order. A word after an unknown option without "=" is its value.
        known: all options, without their dashes.
    """
    for before, word in itertools.pairwise(["", *words]):
        key = word.removeprefix("--").partition("=")[0]
        if word.startswith("--"):
            if key.lower().replace("-", "_") in _RANKS and "world-size" not in known:
                yield f"{word}: unknown option; torchrun sets the number of ranks: torchrun --nproc-per-node 2 ..."
            elif "." not in key:
                yield f"{word}: unknown option; the nearest known one is --{nearest(key, known)}"
        elif word.endswith(".toml") and "=" not in word:
            yield f"{word}: a config file is given as --config {word}"
        elif not before.startswith("--") or "=" in before:
            yield f"{word}: not understood; options look like --train.steps=400"


def option(key: str, value: Any, as_toml: str) -> str:
    """Return a command-line option, quoted for a shell."""
    plain = isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value)
    if plain and value and key != "sample.prompts":
        text = ",".join(str(item) for item in value)
    else:
        text = value if isinstance(value, str) else as_toml
    return shlex.quote(f"--{key}={text}")


def pattern(wrong: str, names: Sequence[str]) -> str:
    """Suggest the pattern or parameter nearest to a pattern that matches nothing."""
    parts = [name.split(".") for name in names]
    prefixes = (".".join(part[:n]) + ".*" for part in parts for n in range(1, len(part)))
    near = difflib.get_close_matches(wrong, dict.fromkeys([*prefixes, *names]), n=1, cutoff=0.0)
    return f'the nearest is "{near[0]}"' if near else "everything is frozen"


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List the values that differ between a checkpoint and this run, at most 16."""
    missing = "-"
    lines = [
        f"{key} is {_cut(saved.get(key, missing))} in the checkpoint and {_cut(here.get(key, missing))} here"
        for key in sorted({*saved, *here})
        if saved.get(key, missing) != here.get(key, missing)
    ]
    return lines[:16] + ([f"and {len(lines) - 16} more"] if len(lines) > 16 else [])


def _cut(value: Any) -> str:
    return value[:12] + "..." if isinstance(value, str) and len(value) == 64 else str(value)  # a SHA-256, shortened
