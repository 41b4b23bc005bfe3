"""Samples during training: the model continues the prompts of [sample].

With pairs and no prompts, it answers some held-out sources, and the samples are recorded with their targets. Every rank
computes every forward, because each holds shards of the parameters. Rank 0 draws the tokens and logs.
"""

import contextlib
import json
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
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.distributed.evaluating import generating
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.models.generation import Sampler, is_encoder_decoder, new_tokens
from torchtitan_lite.run.session import Session, forward_seed
from torchtitan_lite.scoring.validation import SUBSET_SEED
from torchtitan_lite.terminal import counted

HELD_OUT = 3  # pairs
SHOWN = 120  # characters of a source on the terminal; samples.jsonl has the whole source


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, as tokens."""

    config: SampleConfig
    tokenizer: Tokenizer
    texts: list[str]
    ids: list[list[int]]
    end: int  # the token that ends a document
    references: list[str]  # targets of held-out sources; else empty

    @classmethod
    def from_config(cls, config: Config, data: DataSet) -> "Prompts":
        """Encode the prompts of [sample].

        Raises:
            ConfigError: a prompt is too long for the model.
        """
        tokenizer = bpe.load(data.folder / "tokenizer.json")
        if _are_held_out(config):
            from torchtitan_lite.data.pairs import questions

            pairs = questions(open_samples(data, "val", config), HELD_OUT, SUBSET_SEED)
            sources, targets = ([tokenizer.decode(side) for side in sides] for sides in zip(*pairs, strict=True))
            return cls(config.sample, tokenizer, sources, [ids for ids, _ in pairs], data.end_token, targets)
        begin = data.sources[0].meta.marks[1:]
        if problems := wrong_prompts(config, tokenizer, begin):
            raise ConfigError("\n  ".join(problems))
        defaults = [""] if config.data.path or config.data.sources else ["def ", "The "]
        prompts = config.sample.prompts or defaults
        # an empty prompt: the token before each document
        ids = [
            bpe.begun(tokenizer.encode(prompt, add_special_tokens=False).ids, begin) or [data.end_token]
            for prompt in prompts
        ]
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
    """Return whether the prompts are held-out sources, because none are set."""
    return config.data.objective == "pairs" and not config.sample.prompts


def wrong_prompts(config: Config, tokenizer: Tokenizer, begin: tuple[int, ...] = ()) -> list[str]:
    """Return the problems of [sample] prompts, which start with the begin token if there is one."""
    problems, most = [], config.model.max_seq_len - 1
    for prompt in config.sample.prompts:
        try:
            n = len(bpe.begun(tokenizer.encode(prompt, add_special_tokens=False).ids, begin))
        except BaseException as error:  # the library's panics are no Exception
            problems.append(f"sample.prompts: the tokenizer can't encode {prompt[:40]!a}: {bpe.reason(error)}")
            continue
        if n > most:
            has = f"{prompt[:40]!r} has {counted(n, 'token')}, and should have at most {most}"
            problems.append(f"sample.prompts: {has}: model.max_seq_len = {most + 1}")
    return problems


def sample(prompts: Prompts, s: Session) -> None:
    """Continue every prompt, log the text and write it to samples.jsonl. Collective."""
    step, model, log, before = s.state.step, s.model, s.log, time.perf_counter()
    seed = forward_seed(s.config.run.seed, step, 0, 0)
    with generating(model, s.config.fsdp, s.process.device):
        for i, ids in enumerate(prompts.ids):
            began = time.perf_counter()
            sampler = Sampler(prompts.config.temperature, seed=seed + i)

            def agreed(logits: Tensor, sampler: Sampler = sampler) -> int:
                """Return rank 0's token, so that all ranks stop at the same end."""
                token = torch.tensor([sampler(logits)], device=s.process.device)
                dist.broadcast(token, src=0)
                return int(token)

            tokens = list(new_tokens(model, ids, prompts.config.max_tokens, agreed, (prompts.end,)))
            prompt = prompts.texts[i]
            if is_encoder_decoder(model) or prompts.references:
                text = prompts.tokenizer.decode(tokens)
            else:
                text = prompts.tokenizer.decode([*ids, *tokens]).removeprefix(prompts.tokenizer.decode(ids))
            seconds = time.perf_counter() - began
            reference = {"reference": prompts.references[i]} if prompts.references else {}
            record = {"step": step, "prompt": prompt, "text": text, **reference, "seconds": seconds}
            log.record(record, "samples.jsonl")
            target = f"  (target: {_quoted(reference['reference'])})" if reference else ""
            shown = prompt if not reference or len(prompt) <= SHOWN else f"{prompt[:SHOWN]}..."
            log.info(f"sample  step {step}  {_quoted(shown)} -> {_quoted(text)}{target}", cut=True)
    seconds = time.perf_counter() - before
    if seconds > 10:
        log.info(f"sample  step {step}  took {seconds:.0f} s; raise sample.every or lower sample.max_tokens")


def _quoted(text: str) -> str:
    """Quote a text, on one line."""
    return json.dumps(text, ensure_ascii=False)


def known_tokenizer(config: Config) -> Tokenizer | None:
    """Return the tokenizer of a run: a configured one, or one trained earlier. None if there is none yet.

    Raises:
        DataError: `tokenizer.path` is not a tokenizer.json.
    """
    if config.tokenizer.path:
        return bpe.load(expand(config.tokenizer.path))
    prepared = [expand(path) for path in config.data.texts if is_prepared(path)]
    with contextlib.suppress(DataError):  # a damaged folder is reported when the run opens it
        if prepared:
            return bpe.load(prepared[0] / "tokenizer.json")
        own: Path = config.folder / "tokenizer.json"  # this run's, if it has started before
        if not problem(own) and bpe.size(tokenizer := bpe.load(own)) == config.tokenizer.vocab_size:
            return tokenizer
    return None
