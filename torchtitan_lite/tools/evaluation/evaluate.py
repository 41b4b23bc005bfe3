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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from tokenizers import Tokenizer

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config import paths
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.objectives import open_samples
from torchtitan_lite.data.token_files import PAIRS, read_meta
from torchtitan_lite.distributed.process_group import World, exit_process, local_rank, print_once, process_group
from torchtitan_lite.errors import CheckpointError, ConfigError, run_cli
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models.generation import answers
from torchtitan_lite.scoring.likelihood import bytes_per_token
from torchtitan_lite.scoring.statistics import ratio, ratio_difference
from torchtitan_lite.scoring.task_scores import TaskScore
from torchtitan_lite.scoring.task_tokens import Inputs
from torchtitan_lite.terminal import prepare_streams
from torchtitan_lite.tools.evaluation import tasks
from torchtitan_lite.tools.evaluation.documents import Place, Scores, place, score_documents, score_rows
from torchtitan_lite.tools.opening import Opened, config_of, data_of, newest_complete, open_model

_LONGEST = 2048  # tokens in a window of a Hugging Face model, unless --seq-len is given
_SOURCES, _TARGETS = 512, 150  # tokens of a source and a target, if the model was not trained on pairs here
TOTAL = "(total)"  # no name of a text: an unlikely file


@dataclass(frozen=True)
class Model:
    """A model to score, and the config and state of the run that trained it; None: a Hugging Face folder."""

    name: str
    opened: Opened
    config: Config | None = None
    state: storage.TrainState | None = None

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


def open_one(
    path: Path, device: torch.device, dtype: torch.dtype, tokenizer: Path | None, *, ema: bool = False
) -> Model:
    """Open a model. Raises CheckpointError or DataError: see `open_model`."""
    opened = open_model(path, device, dtype, tokenizer, ema=ema)
    if (paths.expand(path) / "config.json").is_file():
        return Model(str(path), opened)
    state = storage.read_state(opened.folder, named_by_step=False)
    return Model(str(path), opened, config_of(opened.folder, state), state)


def scores_of(model: Model, given: argparse.Namespace, world: World) -> Iterator[tuple[str, Scores]]:
    """The scores of each text. Collective.

    Raises:
        UserError: a text is missing or unusable, or does not suit the model.
    """
    of_pairs = model.config is not None and model.config.data.objective == "pairs" and not given.data
    if answers(model.opened.model) or of_pairs or any(map(_holds_pairs, given.data)):
        yield from _of_pairs(model, given, world)
        return
    length = _length(model, given)
    for where in _places(model, given):
        if where.notes and world.rank == 0 and model.name == str(given.models[0]):
            print(*where.notes, sep="\n")
        documents, prefix = where.documents(model.opened), _prefix(model)
        found = score_documents(model.opened.model, documents, prefix, length, world, given.batch_size)
        if not found.tokens.sum():
            raise ConfigError(f"{where.name} has no text to score")
        exact = where.n_bytes()
        scale = exact / found.n_bytes.sum() if exact and found.n_bytes.sum() else 1.0
        yield where.name, replace(found, n_bytes=found.n_bytes * scale)


def _lengths_of(path: Path) -> tuple[int, int]:
    """The tokens of a model's windows and targets on its own. Any checkpoint has them: a resume can't change them."""
    folder = paths.expand(path)
    if (folder / "config.json").is_file():
        model = hf.config_of(folder)
        return _SOURCES if FAMILIES[model.family].encoder_decoder else min(model.max_seq_len, _LONGEST), _TARGETS
    for checkpoint in storage.checkpoints_of(folder)[::-1] or [newest_complete(folder)[0]]:
        with contextlib.suppress(CheckpointError):  # reported when it is opened
            config = config_of(checkpoint, storage.read_state(checkpoint, named_by_step=False))
            return config.train.seq_len, config.data.target_len or _TARGETS
    return _LONGEST, _TARGETS


def in_common_windows(given: argparse.Namespace) -> argparse.Namespace:
    """The options, with the shortest lengths of the models in place of each model's own.

    Raises:
        UserError: there is no such model.
    """
    windows, targets = zip(*map(_lengths_of, given.models), strict=True)
    return argparse.Namespace(**vars(given) | {"seq_len": given.seq_len or min(windows), "target_len": min(targets)})


def _length(model: Model, given: argparse.Namespace) -> int:
    """The tokens of a window."""
    limit = model.opened.model.config.max_seq_len
    length: int = given.seq_len or (model.config.train.seq_len if model.config else min(limit, _LONGEST))
    if length > limit:
        raise ConfigError(f"--seq-len={length}: {model.name} takes at most {limit} tokens (max_seq_len)")
    return length


def _places(model: Model, given: argparse.Namespace) -> list[Place]:
    if given.data:
        how = given.text_key, given.text_suffixes, given.split, given.documents
        return [place(name, *how) for name in given.data]
    sources = model.own_data().sources
    return [Place(source.name, source.folder, given.split, most=given.documents) for source in sources]


def _holds_pairs(name: str) -> bool:
    return paths.is_prepared(name) and PAIRS in read_meta(paths.expand(name)).files


def _prefix(model: Model) -> list[int]:
    """What precedes a document: of a run, the end token, as in training; else the token that the tokenizer puts first,
    or the end token."""
    size = model.opened.model.tok_embeddings.num_embeddings
    return _first_token(model) or [end for end in model.opened.ends[:1] if end < size]


def _first_token(model: Model) -> list[int]:
    """Of a run, the end token; of a Hugging Face folder, the token that the tokenizer puts first, if any."""
    if model.config:
        return list(model.opened.ends[:1])
    encode = model.opened.tokenizer.encode
    with_special, without = (encode("a", add_special_tokens=flag).ids for flag in (True, False))
    return [int(with_special[0])] if with_special[:1] != without[:1] else []


def _of_pairs(model: Model, given: argparse.Namespace, world: World) -> Iterator[tuple[str, Scores]]:
    config = model.config or Config.model_validate(
        {"model": model.opened.model.config.model_dump(), "data": {"objective": "pairs", "target_len": _TARGETS}}
    )
    lengths = {"seq_len": given.seq_len or (config.train.seq_len if model.config else _SOURCES)}
    config = config.model_copy(update={"train": config.train.model_copy(update=lengths)})
    if given.split == "all":
        raise ConfigError("--split=all: pairs are scored on one split; val or train works")
    if given.data:
        if texts := [name for name in given.data if not paths.is_prepared(name)]:
            raise ConfigError(
                f"--data={texts[0]}: pairs are scored in prepared folders; "
                f"python -m torchtitan_lite.data.prepare {texts[0]} --source-key ... --target-key ... --out FOLDER"
            )
        sets = [DataSet.of({name: (1.0, paths.expand(name))}) for name in given.data]
        objective = "pairs" if all(map(_holds_pairs, given.data)) else config.data.objective
        target_len = given.target_len or config.data.target_len or _TARGETS
        changes = {"objective": objective, "target_len": target_len if objective == "pairs" else 0}
        config = config.model_copy(update={"data": config.data.model_copy(update=changes)})
    else:
        sets = [DataSet((source,)) for source in model.own_data().sources]
        if given.target_len and config.data.objective == "pairs":
            config = config.model_copy(update={"data": config.data.model_copy(update={"target_len": given.target_len})})
    for data in sets:
        tokenizer = Tokenizer.from_file(str(data.folder / "tokenizer.json"))
        if tokenizer.get_vocab() != model.opened.tokenizer.get_vocab():
            raise ConfigError(f"{data.folder} was prepared with another tokenizer than that of {model.name}")
        samples = open_samples(data, given.split, config)
        n_bytes = torch.from_numpy(bytes_per_token(tokenizer, data.end_token))
        found = score_rows(model.opened.model, samples, n_bytes, world, given.batch_size)
        yield data.sources[0].name, found.first(given.documents)


# --- what is printed --------------------------------------------------------------------------------------------


def figures(scores: Scores) -> dict[str, float]:
    """The figures of a row. Undefined ones are NaN."""
    loss, loss_stderr = ratio(scores.nats, scores.tokens)
    bits, bits_stderr = ratio(scores.nats / math.log(2), scores.n_bytes)
    return {
        "documents": len(scores),
        "seq_len": scores.seq_len,
        "tokens": int(scores.tokens.sum()),
        "bytes": round(float(scores.n_bytes.sum())),
        "loss": loss,
        "loss_stderr": loss_stderr,
        "bits_per_byte": bits,
        "bits_per_byte_stderr": bits_stderr,
        "perplexity": math.exp(min(loss, 700.0)),
    }


def difference(scores: Scores, first: Scores) -> dict[str, float]:
    """A model minus the first one, on the same documents: the errors of both are correlated, that of this is small."""
    bits = (scores.nats / math.log(2), scores.n_bytes), (first.nats / math.log(2), first.n_bytes)
    found = dict(zip(("bits_per_byte", "bits_per_byte_stderr"), ratio_difference(*bits), strict=True))
    if (scores.tokens == first.tokens).all():
        nats = (scores.nats, scores.tokens), (first.nats, first.tokens)
        found |= dict(zip(("loss", "loss_stderr"), ratio_difference(*nats), strict=True))
    return found


def with_total(found: dict[str, Scores], first: dict[str, Scores]) -> dict[str, Scores]:
    """The scores of each text and, of several, of all: in the order of the first model, which may name them in another
    order."""
    known = [name for name in first if name != TOTAL]
    parts = [found[name] for name in (known if set(known) == set(found) else found)]
    return found | ({TOTAL: sum(parts[1:], parts[0])} if len(parts) > 1 else {})


def compared(found: dict[str, Scores], first: dict[str, Scores]) -> dict[str, dict[str, float]]:
    """The difference to the first model on each text of which both were scored on the same documents, whatever the
    texts are called: one text may be prepared in two folders."""
    same = {
        name: difference(scores, other)
        for name, scores in found.items()
        if (other := next(filter(scores.of_the_same, first.values()), None)) is not None
    }
    if len(same) < len(found):
        same.pop(TOTAL, None)  # of other documents
    return same


def _plus_minus(value: float, stderr: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" + (f" +- {stderr:.{digits}f}" if math.isfinite(stderr) else "")


def table(rows: dict[str, dict[str, float]]) -> list[str]:
    """One line for each text, under a head."""
    width = max(len(name) for name in (*rows, "text"))
    lines = [
        f"  {'text':<{width}}  {'documents':>9}  {'window':>6}  {'tokens':>11}  {'nats/token':>20}  {'bits/byte':>20}  "
        "perplexity"
    ]
    for name, row in rows.items():
        loss, bits = (_plus_minus(row[key], row[f"{key}_stderr"]) for key in ("loss", "bits_per_byte"))
        lines.append(
            f"  {name:<{width}}  {row['documents']:>9,}  {row['seq_len']:>6}  {row['tokens']:>11,}  {loss:>20}  "
            f"{bits:>20}  "
            f"{row['perplexity']:,.2f}"
        )
    return lines


def difference_lines(rows: dict[str, dict[str, float]], first: str) -> list[str]:
    """The comparison with the first model, one line for each text."""
    lines = []
    for name, row in rows.items():
        parts = [
            f"{_plus_minus(row[key], row[f'{key}_stderr'])} {unit}"
            for key, unit in (("loss", "nats/token"), ("bits_per_byte", "bits/byte"))
            if key in row and math.isfinite(row[key])
        ]
        lines.append(f"  minus {first}, {name}: {', '.join(parts)}")
    return lines


def _finite(tree: Any) -> Any:
    """NaN as null: JSON has no NaN."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# --- the command line -------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.evaluate",
        description="Loss, bits per byte and perplexity of models on any text, with standard errors over documents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "models", nargs="+", type=paths.argument, metavar="MODEL", help="a run, a checkpoint or a Hugging Face folder"
    )
    parser.add_argument(
        "--data", nargs="+", action="extend", default=[], help="texts or prepared folders; none: the run's own text"
    )
    parser.add_argument("--split", choices=["val", "train", "all"], default="val", help="of prepared folders")
    parser.add_argument("--text-key", default="text", help="the key or column of .jsonl, .csv and .parquet files")
    parser.add_argument(
        "--text-suffixes", nargs="+", action="extend", default=[], help="further suffixes of plain text, e.g. .md"
    )
    parser.add_argument("--documents", type=int, default=None, help="score only the first N documents of each text")
    parser.add_argument("--seq-len", type=int, default=0, help="tokens in a window; 0: as in training, of the shortest")
    parser.add_argument("--batch-size", type=int, default=8, help="windows in a batch")
    parser.add_argument("--json", type=paths.argument, default=None, metavar="FILE", help="also write the figures here")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the parameters")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights, see optim.ema_decay")
    parser.add_argument(
        "--tokenizer", type=paths.argument, default=None, help="a tokenizer.json to use instead of the models' own"
    )
    parser.set_defaults(target_len=0)  # of pairs; 0: as in training
    tasks.add_options(parser)
    return parser


def _problems(given: argparse.Namespace) -> list[str]:
    found = [
        f"--{key}={value} should be at least 1"
        for key, value in (("documents", given.documents), ("batch-size", given.batch_size))
        if value is not None and value < 1
    ]
    if given.json and not (file := paths.expand(given.json).absolute()).parent.is_dir():
        found.append(f"--json={given.json}: {file.parent} is not a folder")
    elif given.json and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        found.append(f"--json={given.json} {'is a folder' if file.is_dir() else 'is not writable'}")
    if given.seq_len < 0:
        found.append(f"--seq-len={given.seq_len} should be 0 (as in training) or more")
    if given.device == "cuda" and not torch.cuda.is_available():
        found.append("--device=cuda, but torch sees no GPU here; --device=cpu works")
    return found + tasks.problems(given)


def evaluate(given: argparse.Namespace, world: World) -> list[dict[str, Any]]:
    """Score and print all models, and write --json. Returns the figures of each. Collective.

    Raises:
        UserError: an option is wrong, or a model or text is missing, unusable, or does not suit the other. A task that
            can't be scored is raised after all others are scored and written.
    """
    if problems := _problems(given):
        raise ConfigError("\n  ".join(problems))
    given = in_common_windows(given) if len(given.models) > 1 else given
    results: list[dict[str, Any]] = []
    first: dict[str, Scores] = {}
    first_tasks: dict[str, TaskScore] = {}
    first_tokenizer, failed = "", list[str]()
    name_of_first = str(given.models[0])
    for path in given.models:
        model = open_one(path, world.device, getattr(torch, given.dtype), given.tokenizer, ema=given.ema)
        length = _length(model, given)
        on_tasks = tasks_of(model, length, given, world, failed)
        found = dict(scores_of(model, given, world)) if given.data or not given.tasks else {}
        found = with_total(found, first)
        rows = {name: figures(scores) for name, scores in found.items()}
        differences = compared(found, first)
        task_differences = tasks.compared(on_tasks, first_tasks)
        lines = [*model.opened.notes, model.opened.source, *(table(rows) if rows else [])]
        lines += difference_lines(differences, name_of_first)
        lines += [
            f"  no difference to {name_of_first}, {name}: the two were scored on different documents; --data TEXT "
            "names the same for both"
            for name in found
            if first and name not in (*differences, TOTAL)
        ]
        on_both = [name for name in on_tasks if name in first_tasks]
        lines += tasks.lines(on_tasks, task_differences, name_of_first, on_both, length)
        tokenizer = bpe.sha256(model.opened.tokenizer)
        first_tokenizer = first_tokenizer or tokenizer
        if (differences or task_differences) and tokenizer != first_tokenizer:
            lines.append("  (the tokenizers differ, so windows of equal length hold different amounts of text)")
        if world.rank == 0:
            print("\n".join(lines), flush=True)
        results.append({"model": str(path), "texts": rows} | ({"minus_first": differences} if differences else {}))
        if given.tasks:
            results[-1]["tasks"] = {name: tasks.row(one) | {"seq_len": length} for name, one in on_tasks.items()}
        if task_differences:
            results[-1]["tasks_minus_first"] = task_differences
        if len(results) == 1:
            first, first_tasks = found, on_tasks
    if given.json and world.rank == 0:
        text = json.dumps(_finite({"models": results}), indent=2)
        paths.expand(given.json).write_text(text + "\n", encoding="utf-8")
    if failed:
        raise ConfigError("\n  ".join(["not all tasks were scored:", *dict.fromkeys(failed)]))
    return results


def tasks_of(
    model: Model, length: int, given: argparse.Namespace, world: World, failed: list[str]
) -> dict[str, TaskScore]:
    """The scores of --tasks. Collective. Raises UserError: see `tasks.scores_of`."""
    if not given.tasks:
        return {}
    inputs = Inputs(_first_token(model), _prefix(model), length)
    return tasks.scores_of(model.opened, inputs, model.own_data, given, world, failed)


def _run(given: argparse.Namespace) -> int:
    with process_group(RunConfig(device=given.device)) as world:
        evaluate(given, world)
    return 0


def main(argv: Sequence[str]) -> NoReturn:
    """The command line. Ends the process: gloo's threads must not outlive the interpreter."""
    given = _parser().parse_args(argv)
    prepare_streams()
    exit_process(run_cli("evaluate", lambda: _run(given), info=lambda text: print_once(text, local_rank())))


if __name__ == "__main__":
    main(sys.argv[1:])
