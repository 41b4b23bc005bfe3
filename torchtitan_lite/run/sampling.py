"""Samples during training: the model continues the prompts of [sample].

With pairs and no prompts, it answers some held-out sources, and the samples are recorded with their targets. Every rank
computes every forward, because each holds shards of the parameters. Rank 0 draws the tokens and logs.
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
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.data.pairs import encode_prompt, questions, source_prefix
from torchtitan_lite.distributed.evaluating import generating
from torchtitan_lite.models.generation import Sampler, is_encoder_decoder, new_tokens
from torchtitan_lite.run.console import cut
from torchtitan_lite.run.session import Session, forward_seed
from torchtitan_lite.scoring.validation import SUBSET_SEED

HELD_OUT = 3  # pairs


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
            ConfigError: see encode_prompt.
        """
        tokenizer = bpe.load(data.folder / "tokenizer.json")
        if config.data.objective == "pairs" and not config.sample.prompts:
            pairs = questions(open_samples(data, "val", config), HELD_OUT, SUBSET_SEED)
            sources, targets = ([tokenizer.decode(side) for side in sides] for sides in zip(*pairs, strict=True))
            return cls(config.sample, tokenizer, sources, [ids for ids, _ in pairs], data.end_token, targets)
        # an empty prompt is the beginning of a document
        prompts = config.sample.prompts or ([""] if config.data.path or config.data.sources else ["def ", "The "])
        prefix, begin, mark = source_prefix(data.folder), data.sources[0].meta.marks[1:], [data.end_token]
        ids = [encode_prompt(tokenizer, prompt, config.model, prefix, begin, mark) for prompt in prompts]
        return cls(config.sample, tokenizer, prompts, ids, data.end_token, [])


def sample(prompts: Prompts, s: Session) -> None:
    """Continue every prompt, log the text and write it to samples.jsonl. Collective."""
    step, model, log = s.state.step, s.model, s.log
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
            log.info(f"sample  step {step}  {_quoted(prompt)} -> {_quoted(text)}{target}", cut)


def _quoted(text: str) -> str:
    """Quote a text, on one line."""
    return json.dumps(text, ensure_ascii=False)
