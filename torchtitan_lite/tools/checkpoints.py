"""Commands on checkpoints, in one process: `python checkpoint.py COMMAND`.

verify RUN...        hash every file of every checkpoint and report problems; also for a folder of runs
inspect FOLDER       list the files and tensors of a checkpoint, or of a run's newest complete one
export RUN OUT       write a Hugging Face folder; --ema: from the averaged weights, --best: from the best checkpoint
import FOLDER [OUT]  print, or write to OUT, a config for continued pretraining of a Hugging Face folder
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpointing import shards, storage
from torchtitan_lite.checkpointing.find import candidates, find
from torchtitan_lite.commands import Options, add_options
from torchtitan_lite.config import paths, toml
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.errors import CheckpointError, FormatError, UnreadableError, run_cli
from torchtitan_lite.huggingface import weights
from torchtitan_lite.models import build
from torchtitan_lite.terminal import counted, size
from torchtitan_lite.tools.load_model import best_checkpoint, open_model


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
    manifest, state = storage.read_manifest(folder), storage.read_state(folder)
    print(
        f"step {state.step}, {counted(state.tokens, 'token')}, {counted(state.samples_consumed, 'sample')}; "
        f"{manifest.state_dict} state"
    )
    print(
        f"saved by {counted(manifest.world_size, 'rank')}; {size(manifest.bytes)} in "
        f"{counted(len(manifest.files), 'file')}"
    )
    for name, record in manifest.files.items():
        print(f"  {record.bytes:>15,}  {record.sha256[:12]}...  {name}")
    for name, (_, shape) in shards.read_places(folder).specs.items():
        print(f"  {list(shape)!s:>20}  {name}")


def import_config(folder: Path, out: Path | None, tokenizer: Path | None) -> None:
    """Print or write a config that starts from a Hugging Face folder. Opens its weights, but reads only their headers.

    Args:
        tokenizer: the model's tokenizer.json, if the folder has none.

    Raises:
        CheckpointError: this is not a Hugging Face folder, its weights do not match its config, or `out` exists.
        DataError: there is no tokenizer, or it has too many entries for the model.
    """
    text = "\n".join(section(folder.expanduser().absolute(), tokenizer and tokenizer.absolute())) + "\n"
    if out is None:
        print(text, end="")
        return
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise CheckpointError(f"{out} exists already; name a new file") from None
    print(
        f"wrote {out}: train.py --config {out} --data.path=my_text starts from these weights, step 0, with a new "
        "optimizer. Its comments give the reasons of the recipe"
    )


def section(folder: Path, tokenizer: Path | None = None) -> list[str]:
    """Return the lines of a config that starts from a Hugging Face folder: [model], [tokenizer], and a recipe for
    continued pretraining.
    """
    keys = weights.keys_of(folder)
    opened = open_model(folder, torch.device("meta"), torch.float32, tokenizer)  # refuses what the start would refuse
    name_of = opened.tokenizer.id_to_token
    ends = [name for token in opened.ends if 0 <= token < 2**32 and (name := name_of(token))][:1]
    begins = [name for name in map(name_of, weights.begin_tokens(folder, opened.tokenizer)) if name not in ends]
    return [
        "[model]",
        *(f"{key} = {toml.format_value(value)}" for key, value in keys.items()),
        f"init_from = {toml.format_value(str(folder))}",
        "",
        "[tokenizer]",
        f"path = {toml.format_value(str(tokenizer or folder / 'tokenizer.json'))}",
        *(f"end_token = {toml.format_value(name)}" for name in ends),
        *(f"begin_token = {toml.format_value(name)}  # as in its pretraining" for name in begins),
        recipe(opened.model.config),
    ]


BATCH_TOKENS = 65_536  # tokens per optimizer step in the recipe


def recipe(model: ModelConfig) -> str:
    """Return the lines of [data], [train] and [optim] for continued pretraining; docs/models.md has the reasons."""
    with torch.device("meta"):
        n_parameters = sum(parameter.numel() for parameter in build(model, 1).parameters())
    # Float32 activations per token, within a quarter of what `plan` simulates. A sequence may take the same memory as
    # weights, gradients and AdamW's moments, which one process needs anyway: 16 bytes per parameter.
    token_bytes = 4 * sum(model.stacks) * (12 * model.dim + 4 * model.dim_of_ffn)
    fits = max(16 * n_parameters // token_bytes, 256)
    seq_len = min(model.max_seq_len, 1 << (fits.bit_length() - 1))
    batch = max(BATCH_TOKENS // seq_len, 1)
    limit = (
        f"the model takes {model.max_seq_len}, if there is memory" if seq_len < model.max_seq_len else "as the model"
    )
    lr, source, data = "2e-5", "that of Code Llama's continued training on long sequences, arXiv:2308.12950", ""
    if FAMILIES[model.family].encoder_decoder:
        lr, source = "1e-4", "the lower value for AdamW on transformers' T5 page"
        data = '[data]\nobjective = "span_corruption"  # or "pairs", with target_len\n\n'
    return f"""
# Continued pretraining; docs/models.md has the reasons and the sources.
{data}[train]
seq_len = {seq_len}  # {limit}
micro_batch_size = {min(max(fits // seq_len, 1), 8, batch)}  # sequences per rank and forward pass
global_batch_size = {batch}  # {batch * seq_len:,} tokens per step; for 4 times the tokens, double lr
steps = 500  # {500 * batch * seq_len:,} tokens; or epochs = 1 instead

[optim]
name = "adamw"
lr = {lr}  # {source}
# A larger lr learns the new text faster and forgets more of the old (Ibrahim et al., arXiv:2403.08763).
betas = [0.9, 0.95]
weight_decay = 0.1
schedule = "cosine"  # warm up again, then decay again to a tenth
warmup_steps = 20
min_lr_ratio = 0.1"""


FOLDER: dict[str, Any] = {"type": paths.expand}
COMMANDS: dict[str, Options] = {
    "verify": {"paths": FOLDER | {"nargs": "+"}},
    "inspect": {"folder": FOLDER},
    "export": {
        "source": FOLDER | {"help": "a run (its newest complete checkpoint) or a checkpoint"},
        "out": FOLDER | {"help": "the Hugging Face folder to write: new or empty"},
        "--ema": {"action": "store_true", "help": "export the averaged weights, see optim.ema_decay"},
        "--best": {"action": "store_true", "help": "of a run: the checkpoint with the lowest validation loss"},
    },
    "import": {
        "folder": FOLDER,
        "out": FOLDER | {"nargs": "?"},
        "--tokenizer": FOLDER | {"help": "the model's tokenizer.json, if the folder has none"},
    },
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="checkpoint.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, options in COMMANDS.items():
        add_options(commands.add_parser(name), options)
    return run_cli("checkpoint.py", lambda: _run(parser.parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "verify":
        return 0 if verify(arguments.paths) else 1
    if arguments.command == "inspect":
        folder, notes = find(arguments.folder)
        inspect(folder)
    elif arguments.command == "export":
        source = best_checkpoint(arguments.source) if arguments.best else arguments.source
        model_class, notes = weights.export(source, arguments.out, ema=arguments.ema)
        print(f"exported to {arguments.out}: transformers.{model_class}.from_pretrained reads it")
        if model_class == "Qwen2ForCausalLM":  # transformers 5 ignores the class that tokenizer_config.json names
            notes.append(
                "for this class AutoTokenizer builds Qwen2's own tokenizer; "
                "load a different one with transformers.PreTrainedTokenizerFast.from_pretrained"
            )
    else:
        import_config(arguments.folder, arguments.out, arguments.tokenizer)
        notes = []
    for note in notes:
        print(f"note    {note}")
    return 0
