"""Samples during training: the model continues the prompts of [sample]. Of pairs, it answers some held-out sources,
unless prompts are set, and the samples are recorded with their targets.

Every rank computes every forward, because each holds shards of the parameters. Rank 0 draws the tokens and logs.
"""

import contextlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand, is_prepared, problem
from torchtitan_lite.config.schema import Config, SampleConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.token_files import TokenFiles, document_ends
from torchtitan_lite.distributed.generating import generating
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.models.generation import Sampler, answers, new_tokens
from torchtitan_lite.scoring.validation import SUBSET_SEED
from torchtitan_lite.terminal import counted
from torchtitan_lite.training.session import Session, StepResult, stream

HELD_OUT = 3  # pairs
SHOWN = 120  # characters of a source on the terminal; samples.jsonl has all of it


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, as tokens."""

    config: SampleConfig
    tokenizer: Tokenizer
    texts: list[str]
    ids: list[list[int]]
    end: int  # the token that ends a document
    references: list[str]  # of held-out sources; else empty

    @classmethod
    def of(cls, config: Config, data: DataSet) -> "Prompts":
        """Encode the prompts of [sample]; none if sampling is off.

        Raises:
            ConfigError: a prompt is empty or too long for the model.
        """
        tokenizer = bpe.load(data.folder / "tokenizer.json")
        if _are_held_out(config):
            from torchtitan_lite.data.pairs import questions

            pairs = questions(open_samples(data, "val", config), HELD_OUT, SUBSET_SEED)
            sources, targets = ([tokenizer.decode(side) for side in sides] for sides in zip(*pairs, strict=True))
            return cls(config.sample, tokenizer, sources, [ids for ids, _ in pairs], data.end_token, targets)
        if problems := wrong_prompts(config, tokenizer):
            raise ConfigError("\n  ".join(problems))
        prompts = (config.sample.prompts or held_out_prompts(config, data, tokenizer)) if config.sample.every else []
        ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        if FAMILIES[config.model.family].encoder_decoder:  # the prompt is a source, and the sample its answer
            from torchtitan_lite.data.pairs import source_prefix, with_prefix

            prefix, limit = source_prefix(data.folder), config.model.max_seq_len
            sources = [with_prefix(prefix, prompt) for prompt in prompts]
            ids = [tokenizer.encode(source, add_special_tokens=False).ids for source in sources]
            ids = [tokens if tokens[-1:] == [data.end_token] else [*tokens, data.end_token] for tokens in ids]
            if long := [prompt for prompt, tokens in zip(prompts, ids, strict=True) if len(tokens) > limit]:
                raise ConfigError(f"sample.prompts: {long[0]!r} with prefix {prefix!r} is longer than {limit} tokens")
        return cls(config.sample, tokenizer, prompts, ids, data.end_token, [])


def _are_held_out(config: Config) -> bool:
    """Whether the prompts are sources of held-out pairs: none are set."""
    return config.data.objective == "pairs" and not config.sample.prompts


def held_out_prompts(config: Config, data: DataSet, tokenizer: Tokenizer) -> list[str]:
    """Two prompts in place of none: the first words of held-out documents, or "def " and "The " for the default text.

    The documents are the same in every run on the same data.
    """
    if not config.data.path and not config.data.sources:
        return ["def ", "The "]
    limit, good = config.model.max_seq_len - 2, list[str]()
    for source in data.sources[:2]:
        ends = document_ends(source.folder, source.meta, "val")
        stream = TokenFiles(source.folder, source.meta, "val")
        n = len(ends)
        usable: dict[str, None] = {}  # each once, in order
        for i in dict.fromkeys(n * k // 9 for k in (3, 6, 1, 2, 4, 5, 7, 8)):
            first, end = int(ends[i - 1]) if i else 1, int(ends[i]) - 1  # without its end token
            text = tokenizer.decode(stream.read(first, min(end, first + 48)).tolist()).lstrip()
            words = re.match(r"\S+(\s+\S+){0,4}(?=\s)", text[:48])
            text = words[0] if words else text[:12]
            text = text.rstrip("\ufffd")  # half a character
            if text and not wrong_prompt(text, tokenizer, limit):
                usable[text] = None
        good += list(usable)[: 2 if len(data.sources) == 1 else 1]
    return good or ["The "]


def wrong_prompts(config: Config, tokenizer: Tokenizer | None) -> list[str]:
    """Problems of the prompts of [sample]; none if sampling is off.

    Args:
        tokenizer: None if it does not exist yet; then only an empty prompt is a problem.
    """
    prompts = config.sample.prompts if config.sample.every else []
    return [wrong for prompt in prompts if (wrong := wrong_prompt(prompt, tokenizer, config.model.max_seq_len))]


def wrong_prompt(prompt: str, tokenizer: Tokenizer | None, limit: int) -> str:
    """The problem of one prompt for a model of `limit` positions; empty if it has none."""
    if tokenizer is None:
        n, fits = 0, bool(prompt)
    else:
        try:
            n = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
        except BaseException as error:  # the library's panics are no Exception
            return f"sample.prompts: the tokenizer can't encode {prompt[:40]!a}: {bpe.reason(error)}"
        fits = 0 < n < limit
    has = f"sample.prompts: {prompt[:40]!r} has {counted(n, 'token')}, and should have 1 to {limit - 1}: "
    return "" if fits else f"{has}model.max_seq_len = {limit}"


def sample(prompts: Prompts, s: Session, _: StepResult | None = None) -> None:
    """Continue every prompt, log the text and write it to samples.jsonl, unless the run stops. Collective."""
    step, before = s.state.step, time.perf_counter()
    if s.preemption.agreed:
        s.log.info(f"sample  step {step}  not made before the run stops; the same command makes it")
        return
    seed = stream(s.config.run.seed, step, 0, 0)
    with generating(s.model, s.config.fsdp, s.world.device):
        for i, ids in enumerate(prompts.ids):
            began = time.perf_counter()
            sampler = Sampler(prompts.config.temperature, seed=seed + i)

            def agreed(logits: Tensor, sampler: Sampler = sampler) -> int:
                """Rank 0's token, so that all ranks stop at the same end."""
                token = torch.tensor([sampler(logits)], device=s.world.device)
                dist.broadcast(token, src=0)
                return int(token)

            tokens = list(new_tokens(s.model, ids, prompts.config.max_tokens, agreed, (prompts.end,)))
            prompt = prompts.texts[i]
            if answers(s.model) or prompts.references:
                text = prompts.tokenizer.decode(tokens)
            else:
                text = prompts.tokenizer.decode([*ids, *tokens]).removeprefix(prompt)
            seconds = time.perf_counter() - began
            reference = {"reference": prompts.references[i]} if prompts.references else {}
            record = {"step": step, "prompt": prompt, "text": text, **reference, "seconds": seconds}
            s.log.record(record, "samples.jsonl")
            target = f"  (target: {_quoted(reference['reference'])})" if reference else ""
            shown = prompt if not reference or len(prompt) <= SHOWN else f"{prompt[:SHOWN]}..."
            s.log.info(f"sample  step {step}  {_quoted(shown)} -> {_quoted(text)}{target}")
    seconds = time.perf_counter() - before
    if seconds > 10:
        s.log.info(f"sample  step {step}  took {seconds:.0f} s; raise sample.every or lower sample.max_tokens")


def _quoted(text: str) -> str:
    """The text in quotes, on one line."""
    return json.dumps(text, ensure_ascii=False)


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
