"""Score models on any text: `python -m torchtitan_lite.evaluate MODEL [MODEL ...] [--data TEXT ...]`.

A MODEL is a run (its newest complete checkpoint), a checkpoint, or a Hugging Face folder. Each --data is a text, as in
data.path, or a prepared folder; without --data, each run is scored on its own held-out text, by source. Several models
are scored in windows of equal length and compared with the first one, document by document. Under torchrun the ranks
share the work.

--tasks scores tasks (docs/tasks.md) instead of the run's own text; with --data, it scores both.

An encoder-decoder is scored on targets: of the run's own objective (pairs or masked spans), or of the pairs in
prepared folders. So is a decoder that was trained on pairs, without --data, or that is given a folder of pairs.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from pydantic_core import to_json
from tokenizers import Tokenizer

from torchtitan_lite.checkpointing.find import config_to_resume
from torchtitan_lite.commands import SEVERAL, Options, parse
from torchtitan_lite.config import paths
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.config.sections.data import READERS
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.open_samples import open_samples
from torchtitan_lite.data.prepare.texts import TEXT_KEY, TEXT_SUFFIXES, find, ignored_notes
from torchtitan_lite.data.token_files import PAIRS, read_meta
from torchtitan_lite.distributed.exchange import values_of_ranks
from torchtitan_lite.distributed.process_group import Process, exit_process, process_group
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import ConfigError, NonFiniteError, run_cli
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models.generation import is_encoder_decoder
from torchtitan_lite.scoring import find_tasks
from torchtitan_lite.scoring.find_tasks import BUILT_IN
from torchtitan_lite.scoring.likelihood import bytes_per_token
from torchtitan_lite.scoring.task_scores import TaskScore, score
from torchtitan_lite.scoring.task_tokens import Inputs, encode_task, text_encoder
from torchtitan_lite.terminal import prepare_streams
from torchtitan_lite.tools import load_model
from torchtitan_lite.tools.evaluation import tables
from torchtitan_lite.tools.evaluation.documents import Scores, Texts, documents, score_documents, score_rows
from torchtitan_lite.tools.load_model import (
    LONGEST,
    Opened,
    best_checkpoint,
    device_of,
    open_model,
    out_of_range,
)

SOURCE_LEN, TARGET_LEN = 512, 150  # in tokens, for models whose config does not set them


OPTIONS: Options = {
    "models": {
        "nargs": "+",
        "type": paths.expand,
        "metavar": "MODEL",
        "help": "a run, a checkpoint or a Hugging Face folder",
    },
    "--data": {**SEVERAL, "help": "texts or prepared folders; if omitted, the run's own text"},
    "--split": {"choices": ["val", "train"], "default": "val", "help": "split of prepared folders"},
    "--text-key": TEXT_KEY | {"default": "text"},
    "--text-suffixes": TEXT_SUFFIXES,
    "--documents": {"type": int, "help": "score only the first N documents of each text"},
    "--seq-len": {
        "type": int,
        "default": 0,
        "help": "tokens per window; 0: the models' shortest default (train.seq_len)",
    },
    "--batch-size": {"type": int, "default": 8, "help": "windows in a batch"},
    "--json": {"type": paths.expand, "metavar": "FILE", "help": "also write the results to this file"},
    **load_model.OPTIONS,
    "--tasks": {
        **SEVERAL,
        "metavar": "TASK",
        "help": f"score tasks (docs/tasks.md): .jsonl files, or {', '.join(BUILT_IN)}",
    },
    "--questions": {
        "type": int,
        "default": 0,
        "help": "score N random questions per task, with a fixed seed; 0: all",
    },
}


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    return parse(
        "python -m torchtitan_lite.evaluate",
        argv,
        OPTIONS,
        description="Loss, bits per byte and perplexity of models on any text, with standard errors over documents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


# --- scores -----------------------------------------------------------------------------------------------------


def scores_of(
    opened: Opened, texts: Texts, process: Process, note: Callable[[str], None]
) -> Iterator[tuple[str, Scores]]:
    """Yield each text's name and scores. Collective.

    Args:
        note: called with each note about a text, e.g. on ignored files.

    Raises:
        UserError: a text is missing or unusable, or does not suit the model.
    """
    for name in texts.text_suffixes:
        READERS.add(name)
    of_pairs = opened.config is not None and opened.config.data.objective == "pairs" and not texts.data
    if is_encoder_decoder(opened.model) or of_pairs or any(map(_holds_pairs, texts.data)):
        yield from _scores_of_rows(opened, texts, process)
        return
    length, names = opened.window(texts.seq_len), {name: name for name in texts.data}
    if not names:
        names = {source.name: str(source.folder) for source in opened.own_data().sources}
    raw = [name for name in texts.data if not paths.is_prepared(name)]
    for line in ignored_notes([find(name, text_suffixes=texts.text_suffixes) for name in raw]):
        note(line)  # finding all texts before scoring reports missing ones early
    for name, place in names.items():
        found = documents(opened, place, texts)
        scores = score_documents(opened.model, found, opened.beginning(), length, process, texts.batch_size)
        if not scores.tokens.sum():
            raise ConfigError(f"{name} has no text to score")
        yield name, scores


def _holds_pairs(name: str) -> bool:
    return paths.is_prepared(name) and PAIRS in read_meta(paths.expand(name)).files


def _scores_of_rows(opened: Opened, texts: Texts, process: Process) -> Iterator[tuple[str, Scores]]:
    """Yield the scores of a model's targets: of pairs, or of an encoder-decoder's masked spans."""
    config = opened.config or Config.model_validate(
        {
            "model": opened.model.config.model_dump(),
            "train": {"seq_len": min(opened.model.config.max_seq_len, SOURCE_LEN)},
            "data": {"objective": "pairs", "target_len": TARGET_LEN},
        }
    )
    if others := [name for name in texts.data if not paths.is_prepared(name)]:
        raise ConfigError(
            f"--data={others[0]}: this model is scored on prepared folders only: python -m "
            f"torchtitan_lite.data.prepare {others[0]} --out FOLDER, for pairs with --source-key ... --target-key ..."
        )
    config = config.changed({"train.seq_len": texts.seq_len or config.train.seq_len})
    if texts.data and all(map(_holds_pairs, texts.data)):
        config = config.changed({"data.objective": "pairs", "data.target_len": config.data.target_len or TARGET_LEN})
    folders = {name: (1.0, paths.expand(name)) for name in texts.data}
    for source in (DataSet.open(folders) if folders else opened.own_data()).sources:
        tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
        if tokenizer.get_vocab() != opened.tokenizer.get_vocab():
            raise ConfigError(f"{source.folder} was not prepared with the tokenizer of {opened.source}")
        samples = open_samples(DataSet((source,)), texts.split, config)
        n_bytes = torch.from_numpy(bytes_per_token(tokenizer, source.meta.marks))
        yield source.name, score_rows(opened.model, samples, texts.documents, n_bytes, process, texts.batch_size)


# --- the command ------------------------------------------------------------------------------------------------


def evaluate(args: argparse.Namespace, process: Process) -> list[dict[str, Any]]:
    """Score all models, print the results, and write --json. Returns each model's results. Collective.

    Args:
        args: see `options_of`.

    Raises:
        UserError: an option is wrong, or a model, text or task is missing, unusable, or does not match.
        NonFiniteError: a loss is not finite.
    """
    texts = Texts(*(getattr(args, field.name) for field in fields(Texts)))
    problems = texts.problems() + out_of_range(args, questions=(args.questions >= 0, "0 (all) or more"))
    out = args.json and paths.expand(args.json).absolute()
    if out and (out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK)):
        problems.append(f"--json={args.json} can't be written: it is a folder, or its folder is missing or read-only")
    if problems:
        raise ConfigError("\n  ".join(problems))
    FAMILIES.add(args.family)
    models = [best_checkpoint(run) for run in args.models] if args.best else args.models
    if len(models) > 1 and not texts.seq_len:
        texts = replace(texts, seq_len=min(map(_window_of, models)))
    results: list[dict[str, Any]] = []
    first = None
    for path in models:
        opened = open_model(path, process.device, getattr(torch, args.dtype), args.tokenizer, ema=args.ema)
        note = print if process.rank == 0 and not results else lambda _: None  # notes are printed once
        window = opened.window(texts.seq_len)
        tasks = tasks_of(opened, args, window, process) if args.tasks else {}
        own = dict(scores_of(opened, texts, process, note)) if texts.data or not tasks else {}
        nats = [*(scores.nats for scores in own.values()), *(score.nats for score in tasks.values())]
        if not np.isfinite(np.concatenate(nats)).all():
            raise NonFiniteError(f"{opened.source} computes losses that are not finite: it diverged, or it is damaged")
        model = tables.Scored(str(path), own, tasks, window, bpe.sha256(opened.tokenizer))
        lines, result = tables.compare_with_first(model, first)
        if process.rank == 0:
            print("\n".join([*opened.notes, opened.source, *lines]), flush=True)
        results.append(result)
        first = first or model
    if out and process.rank == 0:
        out.write_bytes(to_json({"models": results}, indent=2, inf_nan_mode="null") + b"\n")
    return results


def _window_of(path: Path) -> int:
    """Return a model's default window in tokens. A run's checkpoints all have the same: a resume can't change it."""
    folder = paths.expand(path)
    if (folder / "config.json").is_file():
        model = hf.config_of(folder)
        return min(model.max_seq_len, SOURCE_LEN if FAMILIES[model.family].encoder_decoder else LONGEST)
    return int(config_to_resume(folder, "").get("train.seq_len", LONGEST))


def tasks_of(opened: Opened, args: argparse.Namespace, window: int, process: Process) -> dict[str, TaskScore]:
    """Score --tasks. Returns the scores by name. Collective.

    Args:
        window: tokens per window.

    Raises:
        ConfigError: the model is not a decoder, or the ranks have read different tasks.
        UserError: a task is missing, unusable, or does not suit the model.
    """
    if is_encoder_decoder(opened.model):
        raise ConfigError(f"{opened.source} is an encoder-decoder, and tasks are for decoders: leave --tasks out")
    inputs = Inputs(opened.first_token(), opened.beginning(), window)
    encode = text_encoder(opened.tokenizer, opened.ends, "a question")
    tasks = [encode_task(task, encode, inputs) for task in find_tasks.find(args.tasks, opened.own_data, args.questions)]
    digests = [one.task.digest for one in tasks]
    if process.world_size > 1 and any(others != digests for others in values_of_ranks(digests)):
        raise ConfigError("--tasks: the ranks have read different questions: is it the same file everywhere?")
    return {one.task.name: score(opened.model, one, process) for one in tasks}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit without Python's teardown, which gloo's threads may abort."""

    def run() -> int:
        options = options_of(argv)
        device_of(options.device)  # raises if there is no such device, before the process group starts
        with process_group(RunConfig(device=options.device)) as process:
            evaluate(options, process)
        return 0

    prepare_streams()
    exit_process(run_cli("evaluate", run, local_rank()))
