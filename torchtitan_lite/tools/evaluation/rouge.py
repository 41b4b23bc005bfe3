"""ROUGE of a run's answers to held-out pairs: `python -m torchtitan_lite.rouge RUN --samples 64`.

The newest complete checkpoint answers sources of the run's own validation split, a fixed random subset. ROUGE-1,
ROUGE-2 and ROUGE-Lsum are F-measures with Porter's stemmer, by the package rouge-score, averaged over the pairs.
ROUGE-Lsum compares sentence by sentence, so each sentence is put on a line of its own: texts are cut at line ends, and
after ".", "!" and "?". References are whole targets, also where training cuts them.

The figures are appended to rouge.jsonl in the run's folder, for the report. They replace those of the same checkpoint
and options.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config import paths
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.pairs import questions
from torchtitan_lite.errors import ConfigError, run_cli, shortened
from torchtitan_lite.files import write_durably
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models.generation import answers
from torchtitan_lite.scoring.validation import SUBSET_SEED
from torchtitan_lite.tools.generate import Options, tokens_of
from torchtitan_lite.tools.load_model import (
    Opened,
    config_of,
    data_of,
    device_of,
    device_problems,
    newest_complete,
    open_model,
    out_of_range,
)
from torchtitan_lite.tools.report.runs import ROUGE as KINDS

FILE = "rouge.jsonl"
SHOWN = 3  # examples that are printed

Score = Callable[[str, str], dict[str, float]]  # the F-measures of a reference and an answer


@dataclass(frozen=True)
class Answer:
    """A pair, and the model's answer to its source."""

    source: str
    reference: str
    text: str


def scorer() -> Score:
    """ROUGE of one answer.

    Raises:
        ConfigError: rouge-score is not installed.
    """
    try:
        from rouge_score import rouge_scorer
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("rouge_score", "nltk", "absl", "six"):
            raise
        raise ConfigError(
            f'ROUGE needs the package rouge-score ({error.name} is missing): pip install "torchtitan_lite[seq2seq]" '
            '(in a clone: pip install -e ".[seq2seq]")'
        ) from None
    found: Any = rouge_scorer.RougeScorer(KINDS, use_stemmer=True)

    def score(reference: str, text: str) -> dict[str, float]:
        parts = found.score(by_sentence(reference), by_sentence(text))
        return {kind: float(parts[kind].fmeasure) for kind in KINDS}

    return score


def by_sentence(text: str) -> str:
    """The text with each sentence on a line of its own, as ROUGE-Lsum expects.

    >>> by_sentence("Go home. Is it late?  Yes")
    'Go home.\\nIs it late?\\nYes'
    """
    return "\n".join(line.strip() for line in re.split(r"(?<=[.!?])\s+|\n", text) if line.strip())


def answer(opened: Opened, config: Config, data: DataSet, n: int, options: Options) -> list[Answer]:
    """Answers to the first n pairs of the validation subset."""
    pairs = questions(open_samples(data, "val", config), n, SUBSET_SEED)
    decode = opened.tokenizer.decode
    found = []
    for number, (source, target) in enumerate(pairs, start=1):
        tokens = list(tokens_of(opened, source, options))
        found.append(Answer(decode(source), decode(target), decode(tokens)))
        if sys.stderr.isatty():
            print(f"\r{number} of {len(pairs)} pairs", end="\n" if number == len(pairs) else "", file=sys.stderr)
    return found


def record(run: Path, values: dict[str, Any]) -> None:
    """Append to rouge.jsonl, in place of an older record of the same checkpoint and options."""
    file = run / FILE
    same = ("step", "samples", "beams", "length_penalty", "max_tokens")
    kept = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                old = json.loads(line)
            except ValueError:
                continue  # torn by a kill
            if not isinstance(old, dict) or any(old.get(key) != values[key] for key in same):
                kept.append(line)
        write_durably(file, ("\n".join([*kept, json.dumps(values)]) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{file} can't be written: {error}") from None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.rouge",
        description="ROUGE-1, ROUGE-2 and ROUGE-Lsum of a run's answers to held-out pairs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=paths.argument, metavar="RUN", help="a run of pairs, or one of its checkpoints")
    add("--samples", type=int, default=64, help="number of held-out pairs")
    add("--beams", type=int, default=1, help="encoder-decoders: number of beams; 1: greedy")
    add("--length-penalty", type=float, default=1.0, help="beam search: a larger one prefers longer answers")
    add("--max-tokens", type=int, default=0, help="of an answer, at most; 0: data.target_len of the run")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    add("--out", type=paths.argument, default=None, help="write every source, reference and answer to this .jsonl file")
    args = parser.parse_args(argv)
    return run_cli("rouge", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    problems = Options(beams=args.beams, length_penalty=args.length_penalty).problems()
    problems += out_of_range(
        args,
        samples=(args.samples >= 1, "at least 1, e.g. 64"),
        max_tokens=(args.max_tokens >= 0, "0 (data.target_len of the run) or more"),
    )
    if problems := problems + device_problems(args.device):
        raise ConfigError("\n  ".join(problems))
    score = scorer()
    checkpoint, _ = newest_complete(paths.expand(args.run))
    state = storage.read_state(checkpoint, named_by_step=False)
    config = config_of(checkpoint, state)
    if config.data.objective != "pairs":
        raise ConfigError(
            f'{args.run} was trained with data.objective = "{config.data.objective}"; ROUGE compares answers with the '
            'targets of held-out pairs, which need data.objective = "pairs"'
        )
    opened = open_model(args.run, device_of(args.device), getattr(torch, args.dtype))
    for note in [*opened.notes, opened.source]:
        print(note, file=sys.stderr)
    if args.beams > 1 and not answers(opened.model):
        raise ConfigError(f"--beams is for encoder-decoders, and {args.run} holds a decoder: leave it out")
    options = Options(
        max_tokens=args.max_tokens or config.data.target_len,
        temperature=0.0,
        beams=args.beams,
        length_penalty=args.length_penalty,
    )
    began = time.perf_counter()
    found = answer(opened, config, data_of(str(args.run), config, state), args.samples, options)
    scores = [score(one.reference, one.text) for one in found]
    means = {kind: sum(values[kind] for values in scores) / len(scores) for kind in KINDS}
    values = {
        "step": state.step,
        **means,
        "samples": len(found),
        "beams": options.beams,
        "length_penalty": options.length_penalty,
        "max_tokens": options.max_tokens,
        "seconds": round(time.perf_counter() - began, 3),
    }
    record(hf.folder_of_tokenizer(checkpoint), values)
    if args.out:
        rows = (vars(one) | of_one for one, of_one in zip(found, scores, strict=True))
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        try:
            args.out.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(f"--out: {args.out} can't be written: {error}") from None
    for one in found[:SHOWN]:
        for label, text in (("source", one.source), ("reference", one.reference), ("answer", one.text)):
            print(f"{label:<9}  {shortened(' '.join(text.split()))}")
        print()
    figures = "  ".join(f"{kind} {100 * means[kind]:.2f}" for kind in KINDS)
    print(f"step {state.step}  {figures}  ({len(found)} held-out pairs)")
    return 0
