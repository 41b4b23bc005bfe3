"""Commands on checkpoints, in one process: `python checkpoint.py COMMAND`.

verify RUN...        hash every file of every checkpoint and report problems; also a folder of runs
inspect FOLDER       list a checkpoint's files and tensors, and the step of its run
convert FOLDER OUT   turn a sharded checkpoint into a full one, or the reverse (runs load both)
export RUN OUT       write a Hugging Face folder; --ema: of the averaged weights, --best: of its best checkpoint
import FOLDER [OUT]  print, or write to OUT, a config for continued pretraining of a Hugging Face folder
"""

import argparse
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from torchtitan_lite.checkpointing import dcp_storage, storage
from torchtitan_lite.checkpointing.find import candidates, find
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, write_tensors
from torchtitan_lite.config import paths, toml
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.token_files import PAIRS
from torchtitan_lite.errors import CheckpointError, FormatError, UnreadableError, run_cli
from torchtitan_lite.huggingface import weights
from torchtitan_lite.models import build
from torchtitan_lite.monitoring import attempts
from torchtitan_lite.terminal import counted, size
from torchtitan_lite.tools.load_model import best_checkpoint

PARTS = ("model.", storage.MODEL), ("optimizer.", storage.OPTIMIZER)  # name prefix in shards, file of the full state


def verify(folders: Sequence[Path]) -> bool:
    """Print the problems of each checkpoint of runs, or of folders of runs. Returns whether all are complete."""
    all_complete = True
    runs_in = {path: sorted(f.parent for f in path.glob("*/checkpoints") if storage.find_steps(f)) for path in folders}
    for path in itertools.chain.from_iterable(runs or [path] for path, runs in runs_in.items()):
        for folder in reversed(candidates(path)):
            try:
                problems = storage.verify(folder)
            except (UnreadableError, FormatError) as error:
                all_complete = False
                print(f"UNREADABLE {error}")
                continue
            all_complete &= not problems
            print("\n".join(f"DAMAGED {problem}" for problem in problems) or f"complete {folder}")
        for text in storage.incomplete_folders(path / "checkpoints"):
            print(f"note    {text}")
    return all_complete


def inspect(folder: Path) -> None:
    """Print a checkpoint's state, files and tensors."""
    manifest, state = storage.read_manifest(folder), storage.read_state(folder, named_by_step=False)
    print(
        f"step {state.step}, {counted(state.tokens, 'token')}, {counted(state.samples_consumed, 'sample')}; "
        f"{manifest.state_dict} state"
    )
    best = attempts.best_step(folder.parent.parent, storage.find_steps(folder.parent))
    if best is not None:
        print(f"the run's best checkpoint, by validation loss: step {best}")
    files = counted(len(manifest.files), "file")
    print(f"saved by {counted(manifest.world_size, 'rank')}; {size(manifest.bytes)} in {files}")
    for name, record in manifest.files.items():
        print(f"  {record.bytes:>15,}  {record.sha256[:12]}...  {name}")
    if manifest.state_dict == "sharded":
        shapes = dcp_storage.shapes(folder)
    else:
        shapes = {
            f"{prefix}{name}": shape
            for prefix, file in PARTS
            for name, shape in storage.read_shapes(folder / file).items()
        }
    for name, shape in shapes.items():
        print(f"  {list(shape)!s:>20}  {name}")


def convert(path: Path, out: Path) -> Path:
    """Convert a sharded checkpoint, or a run's newest complete one, to a full one, or the reverse.

    From sharded to full, it holds one tensor at a time. `out` is a folder of checkpoints. It may belong to a run that
    is training; otherwise it gets the run's tokenizer.json, so that generate, export and verify take it.

    Raises:
        CheckpointError: none is complete, or `out` has a checkpoint of this step.
    """
    folder, notes = find(path)
    for note in notes:
        print(f"note    {note}")
    manifest, state = storage.read_manifest(folder), storage.read_state(folder, named_by_step=False)
    if storage.step_folder(out, state.step).exists():
        raise CheckpointError(f"{storage.step_folder(out, state.step)} exists already")
    temporary = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        temporary = storage.begin(out, state.step, locked=False)
        if manifest.state_dict == "full":
            converted = storage.commit(temporary, state, "sharded", 1, _one_shard(folder, temporary), replace=False)
        else:
            records = {}
            for prefix, file in PARTS:
                tensors = dcp_storage.WholeTensors(folder, prefix)
                records[file] = write_tensors(temporary / file, tensors.specs(), tensors.__getitem__)
            converted = storage.commit(temporary, state, "full", manifest.world_size, records, replace=False)
        source = weights.folder_of_tokenizer(folder)
        if not (weights.folder_of_tokenizer(converted) / "tokenizer.json").is_file():
            for name in ("tokenizer.json", PAIRS):  # so that `out` can be used as a run is
                if (source / name).is_file():
                    shutil.copyfile(source / name, out / name)
        return converted
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # a committed folder has been renamed


def _one_shard(folder: Path, out: Path) -> dict[str, FileRecord]:
    """Write the tensors of a full checkpoint as the shards of a single rank."""
    try:
        tensors = {prefix + name: t for prefix, file in PARTS for name, t in load_file(folder / file).items()}
    except SafetensorError as error:
        raise CheckpointError(f"{folder} can't be read: {error}") from None
    return dcp_storage.write_whole(out, tensors)


def import_config(folder: Path, out: Path | None) -> None:
    """Print or write a config that starts from a Hugging Face folder.

    Raises:
        CheckpointError: it is no such folder, or `out` exists.
    """
    text = "\n".join(section(folder.expanduser().absolute())) + "\n"
    if out is None:
        print(text, end="")
        return
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise CheckpointError(f"{out} exists already; name a new file") from None
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {error}") from None
    print(
        f"wrote {out}: train.py --config {out} --data.path=my_text starts from these weights, step 0, with a new "
        "optimizer. Its comments give the reasons of the recipe"
    )


def section(folder: Path) -> Iterator[str]:
    """The lines of a config that starts from a Hugging Face folder: [model], [tokenizer] if there is one, and a recipe
    for continued pretraining."""
    keys = weights.keys_of(folder)
    yield "[model]"
    for key, value in keys.items():
        yield f"{key} = {toml.format_value(value)}"
    yield f"init_from = {toml.format_value(str(folder))}"
    if (folder / "tokenizer.json").is_file():
        yield ""
        yield "[tokenizer]"
        yield f"path = {toml.format_value(str(folder / 'tokenizer.json'))}"
        tokenizer = bpe.load(folder / "tokenizer.json")
        ids = (token for token in weights.end_tokens(folder) if 0 <= token < 2**32)
        if end := next(filter(None, map(tokenizer.id_to_token, ids)), None):
            yield f"end_token = {toml.format_value(end)}"
    yield recipe(ModelConfig.model_validate(keys))


BATCH_TOKENS = 65_536  # of the recipe, per optimizer step


def recipe(model: ModelConfig) -> str:
    """The lines of [data], [train] and [optim] for continued pretraining; docs/models.md has the reasons."""
    with torch.device("meta"):
        n_parameters = sum(parameter.numel() for parameter in build(model, 1).parameters())
    # Float32 activations of a token, within a quarter of what `plan` simulates. A sequence may take as much memory as
    # weights, gradients and the moments of AdamW, which one process needs anyway: 16 bytes a parameter.
    token_bytes = 4 * sum(model.stacks) * (12 * model.dim + 4 * model.dim_of_ffn)
    fits = max(16 * n_parameters // token_bytes, 256)
    seq_len = min(model.max_seq_len, 1 << (fits.bit_length() - 1))
    batch = max(BATCH_TOKENS // seq_len, 1)
    limit = (
        f"the model takes {model.max_seq_len}, if there is memory" if seq_len < model.max_seq_len else "as the model"
    )
    lr, source, data = "2e-5", "that of Code Llama's continued training on long sequences, arXiv:2308.12950", ""
    if FAMILIES[model.family].encoder_decoder:
        lr, source = "1e-4", "the lower one that transformers' page on T5 gives for AdamW"
        data = '[data]\nobjective = "span_corruption"  # or "pairs", with target_len\n\n'
    return f"""
# Continued pretraining; docs/models.md has the reasons and the sources.
{data}[train]
seq_len = {seq_len}  # {limit}
micro_batch_size = {min(max(fits // seq_len, 1), 8, batch)}  # sequences per rank and forward pass
global_batch_size = {batch}  # {batch * seq_len:,} tokens per step; with 4 times as many, lr times 2
steps = 500  # {500 * batch * seq_len:,} tokens; or epochs = 1 in its place

[optim]
name = "adamw"
lr = {lr}  # {source}
# A larger rate learns the new text faster and forgets more of the old (Ibrahim et al., arXiv:2403.08763).
betas = [0.9, 0.95]
weight_decay = 0.1
schedule = "cosine"  # warm up again, then decay again to a tenth
warmup_steps = 20
min_lr_ratio = 0.1"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="checkpoint.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verify").add_argument("paths", type=paths.expand, nargs="+")
    commands.add_parser("inspect").add_argument("folder", type=paths.expand)
    for name, first, what, written in (
        ("convert", "folder", "a run (its newest checkpoint) or a checkpoint", "the folder in which step-N is written"),
        (
            "export",
            "source",
            "a run (its newest checkpoint) or a checkpoint",
            "the Hugging Face folder to write: new or empty",
        ),
    ):
        command = commands.add_parser(name)
        command.add_argument(first, type=paths.expand, help=what)
        command.add_argument("out", type=paths.expand, help=written)
    command.add_argument("--ema", action="store_true", help="the averaged weights, see optim.ema_decay")
    command.add_argument("--best", action="store_true", help="of a run: the checkpoint with the lowest validation loss")
    command = commands.add_parser("import")
    command.add_argument("folder", type=paths.expand)
    command.add_argument("out", type=paths.expand, nargs="?")
    arguments = parser.parse_args(argv)
    return run_cli("checkpoint.py", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "verify":
        return 0 if verify(arguments.paths) else 1
    if arguments.command == "inspect":
        inspect(candidates(arguments.folder)[0])
    elif arguments.command == "convert":
        print(f"converted to {convert(arguments.folder, arguments.out)}")
    elif arguments.command == "export":
        source = best_checkpoint(arguments.source) if arguments.best else arguments.source
        model_class = weights.export(source, arguments.out, ema=arguments.ema)
        print(f"exported to {arguments.out}: transformers.{model_class}.from_pretrained reads it")
        if model_class == "Qwen2ForCausalLM":  # transformers 5 ignores the class that tokenizer_config.json names
            print(
                "note    for this class AutoTokenizer builds Qwen2's own tokenizer; "
                "load another one with transformers.PreTrainedTokenizerFast.from_pretrained"
            )
    else:
        import_config(arguments.folder, arguments.out)
    return 0
