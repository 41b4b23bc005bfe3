"""Samples during training: the model continues the prompts of [sample].

Every rank computes every forward, because each holds shards of the parameters. Rank 0 draws the tokens and logs.
"""

import json
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from torchtitan_lite.config.schema import Config, SampleConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.parallelize import reshard
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.generation import Sampler, new_tokens
from torchtitan_lite.monitoring.metrics import Log


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, as tokens."""

    config: SampleConfig
    tokenizer: Tokenizer
    ids: list[list[int]]
    end: int  # the token that ends a document

    @classmethod
    def of(cls, config: Config, data: DataSet) -> "Prompts":
        """Encode the prompts of [sample]; none if sampling is off.

        Raises:
            ConfigError: a prompt is empty or too long for the model.
        """
        tokenizer = bpe.load(data.folder / "tokenizer.json")
        wanted = config.sample.prompts if config.sample.every else []
        if wrong := wrong_prompts(config, tokenizer):
            raise ConfigError("\n  ".join(wrong))
        ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in wanted]
        return cls(config.sample, tokenizer, ids, data.end_token)


def wrong_prompts(config: Config, tokenizer: Tokenizer | None) -> list[str]:
    """Problems of the prompts of [sample]; none if sampling is off.

    Args:
        tokenizer: None if it does not exist yet; then only an empty prompt is a problem.
    """
    found, limit = [], config.model.max_seq_len
    for prompt in config.sample.prompts if config.sample.every else []:
        if tokenizer is None:
            n, fits = 0, bool(prompt)
        else:
            try:
                n = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
            except BaseException as error:  # the library's panics are no Exception
                found.append(f"sample.prompts: the tokenizer can't encode {prompt[:40]!a}: {bpe.reason(error)}")
                continue
            fits = 0 < n < limit
        if not fits:
            found.append(
                f"sample.prompts: {prompt[:40]!r} has {n} tokens, and should have 1 to {limit - 1}: "
                f"model.max_seq_len = {limit}"
            )
    return found


def sample(model: Transformer, prompts: Prompts, step: int, seed: int, world: World, log: Log) -> None:
    """Continue every prompt, log the text and write it to samples.jsonl. Collective."""
    before = time.perf_counter()
    model.eval()
    # compiled blocks would be recompiled for each length
    with torch.compiler.set_stance("force_eager"):
        for i, ids in enumerate(prompts.ids):
            began = time.perf_counter()
            sampler = Sampler(prompts.config.temperature, seed=seed + i)

            def agreed(logits: Tensor, sampler: Sampler = sampler) -> int:
                """Rank 0's token, so that all ranks stop at the same end."""
                token = torch.tensor([sampler(logits)], device=world.device)
                dist.broadcast(token, src=0)
                return int(token)

            tokens = list(new_tokens(model, ids, prompts.config.max_tokens, agreed, (prompts.end,)))
            prompt = prompts.config.prompts[i]
            text = prompts.tokenizer.decode([*ids, *tokens]).removeprefix(prompt)
            seconds = time.perf_counter() - began
            log.record({"step": step, "prompt": prompt, "text": text, "seconds": seconds}, "samples.jsonl")
            log.info(f"sample  step {step}  {_quoted(prompt)} -> {_quoted(text)}")
    model.train()
    reshard(model)
    seconds = time.perf_counter() - before
    if seconds > 10:
        log.info(f"sample  step {step}  took {seconds:.0f} s; raise sample.every or lower sample.max_tokens")


def _quoted(text: str) -> str:
    """The text in quotes, on one line."""
    return json.dumps(text, ensure_ascii=False)
