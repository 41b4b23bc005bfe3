"""Generates text with a trained model: `python -m torchtitan_lite.generate RUN --prompt "def "`.

An encoder-decoder answers a source: `python -m torchtitan_lite.generate RUN --source "summarize: ..." --beams 4`.

RUN is a run (its newest complete checkpoint), a checkpoint, or a Hugging Face folder such as an export. Generated text
is streamed to stdout; everything else goes to stderr.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from torchtitan_lite import commands
from torchtitan_lite.config import paths
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.data.pairs import encode_prompt
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.generation import Sampler, beam_search, is_encoder_decoder, new_tokens, pieces
from torchtitan_lite.tools import load_model
from torchtitan_lite.tools.load_model import Opened, best_checkpoint, device_of, open_model, out_of_range

MOST_BEAMS = 1000


def encode(opened: Opened, prompt: str) -> list[int]:
    """Return the tokens of a prompt: see data.pairs.encode_prompt."""
    return encode_prompt(opened.tokenizer, prompt, opened.model.config, opened.prefix, opened.begin, opened.beginning())


OPTIONS: commands.Options = {
    "run": {"type": paths.expand, "metavar": "RUN", "help": "a run, one of its checkpoints, or a Hugging Face folder"},
    "--prompt --source": {
        "help": 'the beginning of the text, or ""; a single document, even if it contains an end token; '
        "encoder-decoders: the text to answer, e.g. to summarize"
    },
    "--beams": {"type": int, "default": 1, "help": "encoder-decoders: number of beams; replaces sampling"},
    "--length-penalty": {"type": float, "default": 1.0, "help": "beam search: larger values prefer longer answers"},
    "--interactive": {"action": "store_true", "help": "ask for prompts, until an empty line"},
    "--max-tokens": {"type": int, "default": 200, "help": "maximum number of new tokens"},
    "--temperature": {"type": float, "default": 0.8, "help": "0: always the likeliest token"},
    "--top-k": {"type": int, "default": 0, "help": "draw from this many likeliest tokens; 0: all"},
    "--top-p": {"type": float, "default": 1.0, "help": "draw from the likeliest tokens with this total probability"},
    "--seed": {"type": int, "default": 0, "help": "the same seed gives the same text"},
    **load_model.OPTIONS,
}


@dataclass(frozen=True)
class Options:
    """How to continue a prompt or answer a source."""

    max_tokens: int = 200
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    beams: int = 1  # above 1: beam search instead of sampling
    length_penalty: float = 1.0

    @functools.cached_property
    def sampler(self) -> Sampler:
        """One sampler for all prompts of a conversation."""
        return Sampler(self.temperature, self.top_k, self.top_p, self.seed)

    def problems(self) -> list[str]:
        """Return a message for each option that is out of range."""
        return out_of_range(
            self,
            beams=(1 <= self.beams <= MOST_BEAMS, f"1 to {MOST_BEAMS}, e.g. 4"),
            length_penalty=(-10 <= self.length_penalty <= 10, "between -10 and 10, e.g. 1.0"),
            max_tokens=(self.max_tokens >= 1, "at least 1"),
            temperature=(0 <= self.temperature < float("inf"), "0 (always the likeliest token) or more, e.g. 0.8"),
            top_k=(self.top_k >= 0, "0 (all) or more, e.g. 50"),
            top_p=(0 < self.top_p <= 1, "above 0 and at most 1, e.g. 0.95"),
            seed=(0 <= self.seed < 2**63, "0 or more and have at most 63 bits, e.g. 0"),
        )


def answer(opened: Opened, prompt: str, options: Options) -> None:
    """Print the prompt and stream the model's continuation; of an encoder-decoder, only the answer.

    Raises:
        ConfigError: see `encode`.
    """
    ids, continues = encode(opened, prompt), not is_encoder_decoder(opened.model)
    print(prompt if continues else "", end="", flush=True)
    for text in pieces(opened.tokenizer, ids if continues else [], tokens_of(opened, ids, options)):
        print(text, end="", flush=True)
    print(flush=True)


def tokens_of(opened: Opened, ids: list[int], options: Options) -> Iterable[int]:
    """Yield the tokens that continue a prompt or answer a source."""
    model, ends = opened.model, opened.ends
    if options.beams > 1:
        return beam_search(model, ids, options.max_tokens, options.beams, ends, options.length_penalty)
    return new_tokens(model, ids, options.max_tokens, options.sampler, ends)


def converse(opened: Opened, options: Options) -> None:
    """Answer each line of input independently, until an empty line or the end of the input."""
    with contextlib.suppress(EOFError):
        while prompt := input("prompt> " if sys.stdin.isatty() else ""):
            answer(opened, prompt, options)


def main(argv: Sequence[str] | None = None) -> int:
    return commands.run(
        "generate",
        argv,
        OPTIONS,
        _run,
        description="Text from a trained model, streamed to the terminal.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def _run(args: argparse.Namespace) -> int:
    options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
    problems = options.problems()
    if args.prompt is None and not args.interactive:
        problems.append('nothing to continue; e.g. --prompt "def ", --source "summarize: ..." or --interactive')
    if problems:
        raise ConfigError("\n  ".join(problems))
    FAMILIES.add(args.family)
    run = best_checkpoint(args.run) if args.best else args.run
    opened = open_model(run, device_of(args.device), getattr(torch, args.dtype), args.tokenizer, ema=args.ema)
    for note in [*opened.notes, opened.source]:
        print(note, file=sys.stderr)
    if args.beams > 1 and not is_encoder_decoder(opened.model):
        raise ConfigError(f"--beams is for encoder-decoders, and {args.run} holds a decoder: leave it out")
    if args.prompt is not None:
        answer(opened, args.prompt, options)
    if args.interactive:
        converse(opened, options)
    return 0
