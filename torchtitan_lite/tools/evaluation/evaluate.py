"""Score models on any text: `python -m torchtitan_lite.evaluate MODEL [MODEL ...] [--data TEXT ...]`.

A MODEL is a run (its newest complete checkpoint), a checkpoint, or a Hugging Face folder. Each --data is a text, as
data.path takes it, or a prepared folder; without it, each run is scored on its own held-out text, by source. Several
models are scored in windows of one length, and compared with the first one, document by document. Under torchrun the
ranks share the work.

--tasks scores tasks (docs/tasks.md), in place of the run's own text unless --data names texts as well.

An encoder-decoder is scored on the targets of pairs: those it was trained on, or prepared folders of pairs.
"""

import argparse
import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from tokenizers import Tokenizer

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.find import candidates
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import paths
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.config.sections.data import READERS
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.prepare.texts import COMMAND, find, not_read
from torchtitan_lite.data.token_files import PAIRS, read_meta
from torchtitan_lite.distributed.process_group import World, exit_process, process_group
from torchtitan_lite.errors import CheckpointError, ConfigError, DataError, UserError, run_cli
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models.generation import answers
from torchtitan_lite.monitoring import mfu
from torchtitan_lite.process import local_rank
from torchtitan_lite.scoring.find_tasks import BUILT_IN, find_each
from torchtitan_lite.scoring.likelihood import bytes_per_token, over_ranks
from torchtitan_lite.scoring.task_scores import TaskScore, figure_text, score
from torchtitan_lite.scoring.task_tokens import Encoded, Inputs, encoded, text_encoder
from torchtitan_lite.terminal import prepare_streams
from torchtitan_lite.tools.evaluation import tables
from torchtitan_lite.tools.evaluation.documents import Place, Scores, Split, score_documents, score_rows
from torchtitan_lite.tools.load_model import (
    Opened,
    best_checkpoint,
    config_of,
    data_of,
    device_of,
    open_model,
    out_of_range,
)

LONGEST = 2048  # tokens in a window of a Hugging Face model, unless --seq-len is given
SOURCES, TARGETS = 512, 150  # tokens of a source and a target, if the model was not trained on pairs here


@dataclass(frozen=True)
class Options:
    """What to score, and how. The API sets those of texts."""

    models: Sequence[Path] = ()
    data: Sequence[str] = ()
    split: Split = "val"
    text_key: str = "text"
    text_suffixes: Sequence[str] = ()
    documents: int | None = None
    seq_len: int = 0  # 0: as in training
    target_len: int = 0  # of pairs; 0: as in training
    batch_size: int = 8
    tasks: Sequence[str] = ()
    questions: int = 0
    json: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str = "float32"
    tf32: bool = False
    ema: bool = False
    best: bool = False
    tokenizer: Path | None = None
    family: str = ""  # "module:Name" of the user's own, to import

    def problems(self) -> list[str]:
        """The options that are out of range, and what works."""
        problems = out_of_range(
            self,
            documents=(self.documents is None or self.documents >= 1, "at least 1"),
            batch_size=(self.batch_size >= 1, "at least 1"),
            seq_len=(self.seq_len >= 0, "0 (as in training) or more"),
            questions=(self.questions >= 0, "0 (all) or more"),
        )
        if self.json and not (file := paths.expand(self.json).absolute()).parent.is_dir():
            problems.append(f"--json={self.json}: {file.parent} is not a folder")
        elif self.json and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            problems.append(f"--json={self.json} {'is a folder' if file.is_dir() else 'is not writable'}")
        return problems


def options_of(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.evaluate",
        description="Loss, bits per byte and perplexity of models on any text, with standard errors over documents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("models", nargs="+", type=paths.expand, metavar="MODEL", help="a run, a checkpoint or a Hugging Face folder")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    add("--data", **several, help="texts or prepared folders; none: the run's own text")
    add("--split", choices=["val", "train", "all"], default="val", help="of prepared folders")
    add("--text-key", default="text", help="the key or column of .jsonl, .csv and .parquet files")
    add("--text-suffixes", **several, help="further suffixes of plain text, e.g. .md, or own readers")
    add("--documents", type=int, default=None, help="score only the first N documents of each text")
    add("--seq-len", type=int, default=0, help="tokens in a window; 0: as in training, of the shortest")
    add("--batch-size", type=int, default=8, help="windows in a batch")
    add("--json", type=paths.expand, default=None, metavar="FILE", help="also write the figures here")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the parameters")
    add("--tf32", action="store_true", help="on a GPU, compute float32 products in TF32")
    add("--best", action="store_true", help="of each run: the checkpoint with the lowest validation loss")
    add("--ema", action="store_true", help="use the averaged weights, see optim.ema_decay")
    add("--tokenizer", type=paths.expand, default=None, help="a tokenizer.json to use instead of the models' own")
    add("--model.family", dest="family", default="", metavar="module:Name", help="of a model of your own: import it")
    add = parser.add_argument_group("tasks (docs/tasks.md)").add_argument
    add("--tasks", **several, metavar="TASK", help=f".jsonl files, or {', '.join(BUILT_IN)}")
    add("--questions", type=int, default=0, help="score N random questions of each task, always the same; 0: all")
    return Options(**vars(parser.parse_args(argv)))


# --- models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model to score, and the config and state of the run that trained it; None: a Hugging Face folder."""

    name: str
    opened: Opened
    config: Config | None = None
    state: TrainState | None = None

    def own_data(self) -> DataSet:
        """The data that the run was trained on.

        Raises:
            ConfigError: there is none, or it has changed since.
        """
        if self.config is None or self.state is None:
            raise ConfigError(
                f"{self.name} is a Hugging Face folder, which has no text of its own: give --data, or --tasks"
            )
        return data_of(self.name, self.config, self.state)

    def window(self, options: Options) -> int:
        """The tokens of a window.

        Raises:
            ConfigError: the model takes fewer.
        """
        limit = self.opened.model.config.max_seq_len
        length = options.seq_len or (self.config.train.seq_len if self.config else min(limit, LONGEST))
        if length > limit:
            raise ConfigError(f"--seq-len={length}: {self.name} takes at most {limit} tokens (max_seq_len)")
        return length


def open_one(
    path: Path, device: torch.device, dtype: torch.dtype, tokenizer: Path | None, *, ema: bool = False
) -> Model:
    """Open a model. Raises CheckpointError or DataError: see `open_model`."""
    opened = open_model(path, device, dtype, tokenizer, ema=ema)
    if (paths.expand(path) / "config.json").is_file():
        return Model(str(path), opened)
    state = storage.read_state(opened.folder, named_by_step=False)
    return Model(str(path), opened, config_of(opened.folder, state), state)


def in_common_windows(options: Options) -> Options:
    """The options, with the shortest lengths of the models in place of each model's own.

    Raises:
        UserError: there is no such model.
    """
    windows, targets = zip(*map(_lengths_of, options.models), strict=True)
    return replace(options, seq_len=options.seq_len or min(windows), target_len=min(targets))


def _lengths_of(path: Path) -> tuple[int, int]:
    """The tokens of a model's windows and targets on its own. Any checkpoint has them: a resume can't change them."""
    folder = paths.expand(path)
    if (folder / "config.json").is_file():
        model = hf.config_of(folder)
        return SOURCES if FAMILIES[model.family].encoder_decoder else min(model.max_seq_len, LONGEST), TARGETS
    for checkpoint in candidates(folder):
        with contextlib.suppress(CheckpointError):  # reported when it is opened
            config = config_of(checkpoint, storage.read_state(checkpoint, named_by_step=False))
            return config.train.seq_len, config.data.target_len or TARGETS
    return LONGEST, TARGETS


# --- scores -----------------------------------------------------------------------------------------------------


def scores_of(
    model: Model, options: Options, world: World, note: Callable[[str], None]
) -> Iterator[tuple[str, Scores]]:
    """The scores of each text. Collective.

    Args:
        note: is called with each note about a text, e.g. files that are not read.

    Raises:
        UserError: a text is missing or unusable, or does not suit the model.
    """
    of_pairs = model.config is not None and model.config.data.objective == "pairs" and not options.data
    if answers(model.opened.model) or of_pairs or any(map(_holds_pairs, options.data)):
        yield from _scores_of_pairs(model, options, world)
        return
    length = model.window(options)
    for text in [*_places(model, options)]:  # each exists, before the first is scored
        for line in text.notes:
            note(line)
        documents, beginning = text.documents(model.opened), model.opened.beginning()
        scores = score_documents(model.opened.model, documents, beginning, length, world, options.batch_size)
        if not scores.tokens.sum():
            raise ConfigError(f"{text.name} has no text to score")
        exact = text.n_bytes()
        scale = exact / scores.n_bytes.sum() if exact and scores.n_bytes.sum() else 1.0
        yield text.name, replace(scores, n_bytes=scores.n_bytes * scale)


def _places(model: Model, options: Options) -> Iterator[Place]:
    split, most = options.split, options.documents
    for name in options.text_suffixes:
        READERS.add(name)
    if not options.data:
        for source in model.own_data().sources:
            yield Place(source.name, source.folder, split, most=most)
    for name in options.data:
        if not name:
            raise DataError("an empty name is no text to score")
        if paths.is_prepared(name):
            yield Place(name, paths.expand(name), split, most=most)
        else:
            found = find(name, text_suffixes=options.text_suffixes)
            notes = tuple(not_read([found], COMMAND))
            yield Place(name, None, split, options.text_key, tuple(options.text_suffixes), most, notes)


def _holds_pairs(name: str) -> bool:
    return paths.is_prepared(name) and PAIRS in read_meta(paths.expand(name)).files


def _scores_of_pairs(model: Model, options: Options, world: World) -> Iterator[tuple[str, Scores]]:
    """The scores of rows: targets of pairs, or spans that were cut out of a text."""
    config = model.config or Config.model_validate(
        {"model": model.opened.model.config.model_dump(), "data": {"objective": "pairs", "target_len": TARGETS}}
    )
    seq_len = options.seq_len or (config.train.seq_len if model.config else SOURCES)
    objective, target_len = config.data.objective, config.data.target_len
    if options.split == "all":
        raise ConfigError("--split=all: pairs are scored on one split; val or train works")
    if options.data:
        if texts := [name for name in options.data if not paths.is_prepared(name)]:
            raise ConfigError(
                f"--data={texts[0]}: pairs are scored in prepared folders; "
                f"python -m torchtitan_lite.data.prepare {texts[0]} --source-key ... --target-key ... --out FOLDER"
            )
        sets = [DataSet.of({name: (1.0, paths.expand(name))}) for name in options.data]
        objective = "pairs" if all(map(_holds_pairs, options.data)) else objective
        target_len = (target_len or TARGETS) if objective == "pairs" else 0
    else:
        sets = [DataSet((source,)) for source in model.own_data().sources]
    if objective == "pairs":
        target_len = options.target_len or target_len
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"seq_len": seq_len}),
            "data": config.data.model_copy(update={"objective": objective, "target_len": target_len}),
        }
    )
    for data in sets:
        tokenizer = Tokenizer.from_file(str(data.folder / "tokenizer.json"))
        if tokenizer.get_vocab() != model.opened.tokenizer.get_vocab():
            raise ConfigError(f"{data.folder} was prepared with another tokenizer than that of {model.name}")
        samples = open_samples(data, options.split, config)
        n_bytes = torch.from_numpy(bytes_per_token(tokenizer, data.end_token))
        scores = score_rows(model.opened.model, samples, n_bytes, world, options.batch_size)
        yield data.sources[0].name, scores.first(options.documents)


def tasks_of(model: Model, options: Options, world: World) -> tuple[dict[str, TaskScore], list[str]]:
    """The scores of --tasks by name, and why others have none: missing, unusable, or wrong for the model. Collective.

    Raises:
        ConfigError: the model is no decoder.
    """
    if not options.tasks:
        return {}, []
    opened = model.opened
    if answers(opened.model):
        raise ConfigError(f"{opened.source} is an encoder-decoder, and tasks are for decoders: leave --tasks out")
    inputs = Inputs(opened.first_token(), opened.beginning(), model.window(options))
    encode = text_encoder(opened.tokenizer, opened.ends, "a question")
    ready: dict[int, Encoded] = {}
    errors: dict[int, UserError] = {}
    for i, task in find_each(options.tasks, model.own_data, options.questions):
        try:
            if isinstance(task, UserError):
                raise task
            ready[i] = encoded(task, encode, inputs)
        except UserError as error:
            errors[i] = error
    # a task is scored by all ranks, or by none
    n_failed = over_ranks(torch.tensor([float(i in errors) for i in range(len(options.tasks))]), world)
    failed = []
    for i in n_failed.nonzero().flatten().tolist():
        ready.pop(i, None)
        failed.append(str(errors.get(i, f"task {options.tasks[i]} can't be scored on another rank")))
    scores = {one.task.name: score(opened.model, one, world) for one in ready.values()}
    return scores, failed


# --- the command ------------------------------------------------------------------------------------------------


def evaluate(options: Options, world: World) -> list[dict[str, Any]]:
    """Score and print all models, and write --json. Returns the figures of each. Collective.

    Raises:
        UserError: an option is wrong, or a model or text is missing, unusable, or does not suit the other. A task that
            can't be scored is raised after all others are scored and written.
    """
    if problems := options.problems():
        raise ConfigError("\n  ".join(problems))
    FAMILIES.add(options.family)
    if options.best:
        options = replace(options, models=[best_checkpoint(run) for run in options.models])
    if len(options.models) > 1:
        options = in_common_windows(options)
    if world.device.type == "cuda" and world.rank == 0:
        fixes = "--dtype=bfloat16", "--tf32", "a newer GPU"
        if slow := mfu.slow_products(world.device, options.dtype, tf32=options.tf32, options=fixes):
            print(f"note    {slow}")
    results: list[dict[str, Any]] = []
    first: dict[str, Scores] = {}
    first_tasks: dict[str, TaskScore] = {}
    first_tokenizer, failed = "", list[str]()
    name_of_first = str(options.models[0])
    for path in options.models:
        model = open_one(path, world.device, getattr(torch, options.dtype), options.tokenizer, ema=options.ema)
        length = model.window(options)
        task_scores, failed_here = tasks_of(model, options, world)
        failed += failed_here
        texts: dict[str, Scores] = {}
        if options.data or not options.tasks:
            note = print if world.rank == 0 and not results else lambda _: None  # notes are printed once
            texts = tables.with_total(dict(scores_of(model, options, world, note)), first)
        rows = {name: tables.figures(scores) for name, scores in texts.items()}
        differences = tables.compared(texts, first)
        task_differences = tables.tasks_compared(task_scores, first_tasks)

        lines = [*model.opened.notes, model.opened.source, *tables.table(rows)]
        named = [name for name in texts if first and (name in differences or name != tables.TOTAL)]
        by_text = {name: tables.difference_text(row) for name, row in differences.items()}
        why = "the two were scored on different documents; --data TEXT names the same for both"
        lines += tables.minus(name_of_first, named, by_text, why)
        lines += tables.task_table(task_scores, length)
        by_task = {name: figure_text(row, "score") for name, row in task_differences.items()}
        on_both = [name for name in task_scores if name in first_tasks]
        lines += tables.minus(name_of_first, on_both, by_task, "the two were asked different questions")
        tokenizer = bpe.sha256(model.opened.tokenizer)
        first_tokenizer = first_tokenizer or tokenizer
        if (differences or task_differences) and tokenizer != first_tokenizer:
            lines.append("  (the tokenizers differ, so windows of equal length hold different amounts of text)")
        if world.rank == 0:
            print("\n".join(lines), flush=True)

        results.append({"model": str(path), "texts": rows} | ({"minus_first": differences} if differences else {}))
        if options.tasks:
            results[-1]["tasks"] = {
                name: {"kind": one.task.kind, "metric": one.task.main, **one.figures(), "seq_len": length}
                for name, one in task_scores.items()
            }
        if task_differences:
            results[-1]["tasks_minus_first"] = task_differences
        if len(results) == 1:
            first, first_tasks = texts, task_scores
    if options.json and world.rank == 0:
        text = json.dumps(_finite({"models": results}), indent=2)
        paths.expand(options.json).write_text(text + "\n", encoding="utf-8")
    if failed:
        raise ConfigError("\n  ".join(["not all tasks were scored:", *dict.fromkeys(failed)]))
    return results


def _finite(tree: Any) -> Any:
    """NaN as null: JSON has no NaN."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def main(argv: Sequence[str]) -> NoReturn:
    """The command line. Ends the process: gloo's threads must not outlive the interpreter."""
    options = options_of(argv)

    def run() -> int:
        device_of(options.device)  # before there is a process group
        with process_group(RunConfig(device=options.device, tf32=options.tf32)) as world:
            evaluate(options, world)
        return 0

    prepare_streams()
    exit_process(run_cli("evaluate", run, local_rank()))
