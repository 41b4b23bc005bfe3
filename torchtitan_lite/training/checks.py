"""Config checks that need the model's parameter names or a tokenizer, but no process group."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from torchtitan_lite import models
from torchtitan_lite.config.paths import expand, is_prepared, problem
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.distributed.parallelize import groups_of
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.optim.optimizer import freeze, parameter_groups
from torchtitan_lite.training.sampling import wrong_prompts


def check_patterns(config: Config) -> dict[str, str]:
    """Check parameter patterns against the model. Returns the broken rules, as `conflicts` does."""
    with torch.device("meta"):
        model = models.build(config.model, config.model.vocab_size or config.tokenizer.vocab_size)
    checks: dict[str, Callable[[], object]] = {
        "optim.freeze": lambda: freeze(model, config.optim.freeze),
        "optim.groups": lambda: parameter_groups(model, config.optim),
        "fsdp.precision_overrides": lambda: groups_of(model, config.fsdp),
    }
    found: dict[str, str] = {}
    for key, check in checks.items():
        try:
            check()
        except ConfigError as error:
            found |= {f"{key} {number}": line for number, line in enumerate(str(error).split("\n  "))}
    return found


def check_prompts(config: Config) -> dict[str, str]:
    """Check the prompts with the tokenizer, if it exists already. Returns the broken rules."""
    try:
        tokenizer = known_tokenizer(config)
    except DataError as error:
        return {"tokenizer.path": str(error)}
    return {f"sample.prompts {n}": wrong for n, wrong in enumerate(wrong_prompts(config, tokenizer))}


def known_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer of a run that samples: a configured one, or one trained earlier. None if there is none yet.

    Raises:
        DataError: `tokenizer.path` is not a tokenizer.json.
    """
    if not config.sample.every or not config.sample.prompts:
        return None
    if config.tokenizer.path:
        return bpe.load(expand(config.tokenizer.path))
    named = config.data.sources or ([config.data.path] if isinstance(config.data.path, str) else [])
    prepared = [expand(path) for path in named if path and not problem(path) and is_prepared(path)]
    with contextlib.suppress(DataError):  # a damaged folder is reported when the run opens it
        if prepared:
            return bpe.load(prepared[0] / "tokenizer.json")
        own: Path = config.folder / "tokenizer.json"  # of this run, if it has started before
        if not problem(own) and bpe.size(tokenizer := bpe.load(own)) == config.tokenizer.vocab_size:
            return tokenizer
    return None
