"""Computes ROUGE of a run's answers to held-out pairs, with the package rouge-score (extra `seq2seq`).

    python examples/rouge.py runs/t5_wikihow --samples 256 --beams 4

The newest complete checkpoint answers a fixed random subset of the run's validation split. ROUGE-1, ROUGE-2 and
ROUGE-Lsum are means of F-measures with Porter's stemmer. ROUGE-Lsum compares line by line, so each sentence gets its
own line. References are whole targets, even if training cuts them.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rouge_score.rouge_scorer import RougeScorer

from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.data.pairs import questions
from torchtitan_lite.errors import ConfigError, run_cli
from torchtitan_lite.models.generation import is_encoder_decoder
from torchtitan_lite.scoring.validation import SUBSET_SEED
from torchtitan_lite.tools.generate import Options, tokens_of
from torchtitan_lite.tools.load_model import device_of, open_model

KINDS = "rouge1", "rouge2", "rougeLsum"


def by_sentence(text: str) -> str:
    """Put each sentence on its own line."""
    return "\n".join(line.strip() for line in re.split(r"(?<=[.!?])\s+|\n", text) if line.strip())


def scores_of_pairs(run: Path, samples: int, beams: int, max_tokens: int) -> Iterator[dict[str, str | float]]:
    """Yield source, reference, answer and scores of each pair."""
    opened = open_model(run, device_of("auto"), torch.float32)
    config, scorer = opened.config, RougeScorer(KINDS, use_stemmer=True)
    if config is None or config.data.objective != "pairs":
        raise ConfigError(f'{run} was not trained with data.objective = "pairs": it has no held-out pairs')
    if beams > 1 and not is_encoder_decoder(opened.model):
        raise ConfigError(f"--beams is for encoder-decoders, and {run} holds a decoder: leave it out")
    options = Options(max_tokens=max_tokens or config.data.target_len, temperature=0.0, beams=beams)
    for source, target in questions(open_samples(opened.own_data(), "val", config), samples, SUBSET_SEED):
        texts = (opened.tokenizer.decode(list(ids)) for ids in (source, target, tokens_of(opened, source, options)))
        asked, reference, answer = texts
        scores = scorer.score(by_sentence(reference), by_sentence(answer))
        figures = {kind: float(scores[kind].fmeasure) for kind in KINDS}
        yield {"source": asked, "reference": reference, "answer": answer, **figures}


def print_scores(args: argparse.Namespace) -> int:
    rows = []
    for row in scores_of_pairs(args.run, args.samples, args.beams, args.max_tokens):
        print(json.dumps(row))
        rows.append(row)
    means = (f"{kind} {100 * sum(float(row[kind]) for row in rows) / len(rows):.2f}" for kind in KINDS)
    print("  ".join(means), f" ({len(rows)} held-out pairs)")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="ROUGE of a run's answers to held-out pairs.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run of pairs, or one of its checkpoints")
    parser.add_argument("--samples", type=int, default=64, help="number of held-out pairs")
    parser.add_argument("--beams", type=int, default=1, help="encoder-decoders: number of beams; 1: greedy")
    parser.add_argument("--max-tokens", type=int, default=0, help="of an answer; 0: data.target_len of the run")
    return run_cli("rouge", lambda: print_scores(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
