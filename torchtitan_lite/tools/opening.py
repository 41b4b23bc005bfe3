"""Opens a trained model with its tokenizer, in one process: from a run, a checkpoint, or a Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config import paths
from torchtitan_lite.config.find_text import kind_of
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.config.sections.model import shape_rules
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.pairs import source_prefix
from torchtitan_lite.errors import CheckpointError, DataError
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.models.generation import answers


@dataclass(frozen=True)
class Opened:
    """A model that is ready to generate."""

    source: str  # a description of the model and its folder
    model: Transformer
    tokenizer: Tokenizer
    ends: tuple[int, ...]  # tokens that end a document
    notes: list[str]  # damaged checkpoints that were skipped
    prefix: str = ""  # of a source, as in training
    folder: Path = Path()  # the checkpoint or Hugging Face folder


def open_model(
    path: Path, device: torch.device, dtype: torch.dtype, tokenizer: Path | None = None, *, ema: bool = False
) -> Opened:
    """Open the newest complete checkpoint of a run, a checkpoint, or a Hugging Face folder.

    Args:
        dtype: of the parameters; rotary tables stay in float32.
        tokenizer: a tokenizer.json, if the folder has none.
        ema: the averaged weights of a checkpoint (optim.ema_decay).

    Raises:
        CheckpointError: there is none, it is damaged, or has no averages.
        DataError: there is no tokenizer.json, or it has more entries than the model.
    """
    folder = paths.expand(path)
    if (folder / "config.json").is_file():
        if ema:
            raise CheckpointError(f"--ema: {path} is a Hugging Face folder; the averages are in the run's checkpoints")
        config = hf.config_of(folder)
        return _ready(folder, config, hf.open_weights(folder, config), device, dtype, tokenizer or folder, [])
    folder, notes = newest_complete(folder)
    run = hf.folder_of_tokenizer(folder)
    config = hf.trained_config(folder)
    return _ready(folder, config, hf.read_weights(folder, ema=ema), device, dtype, tokenizer or run, notes)


def newest_complete(path: Path) -> tuple[Path, list[str]]:
    """A checkpoint's folder itself, or the newest checkpoint of a run that passes verification.

    Returns:
        the folder, and the problems of newer checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    candidates = storage.checkpoints_of(path)[::-1]
    if not candidates:
        others = sorted(p.parent for p in path.parent.glob("*/checkpoints")) if path.parent.is_dir() else []
        known = f"; other runs there: {', '.join(map(str, others[:8]))}" if others else ""
        if inside := sorted(p.parent for p in path.glob("*/checkpoints")):
            known = f", but of runs: {', '.join(map(str, inside[:8]))}"
        what = (
            "is not a run with a checkpoint, a checkpoint or a Hugging Face folder"
            if path.exists()
            else "does not exist"
        )
        raise CheckpointError(f"{path} {what}{known}")
    notes: list[str] = []
    for folder in candidates:
        problems = storage.verify(folder)
        if not problems:
            return folder, [f"damaged, skipped: {note}" for note in notes]
        notes += problems
    raise CheckpointError("\n  ".join(["no checkpoint is complete:", *notes]))


def _ready(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    tokenizer_in: Path,
    notes: list[str],
) -> Opened:
    tokenizer, ends = _tokenizer(tokenizer_in, folder)
    embeddings = weights.get("tok_embeddings.weight")
    if embeddings is None or embeddings.ndim != 2 or not len(embeddings):
        raise CheckpointError(f"{folder} has no token embeddings: it holds a different kind of model")
    if problems := dict(shape_rules(config)):
        raise CheckpointError("\n  ".join([f"{folder} describes a model that can't be built:", *problems.values()]))
    with torch.device("meta"):
        model = build(config, embeddings.shape[0])
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    storage.compare(folder, {name: tuple(t.shape) for name, t in weights.items()}, shapes, "model", "it can't be used")
    if bpe.size(tokenizer) > model.tok_embeddings.num_embeddings:
        raise DataError(
            f"{tokenizer_in}: its tokenizer has {bpe.size(tokenizer)} entries, and the model in {folder} has "
            f"{model.tok_embeddings.num_embeddings}: it belongs to another model"
        )
    placed = {name: weights[name].to(device, dtype) for name in shapes}
    model.load_state_dict(placed, strict=False, assign=True)
    model.tie_weights()
    for name, buffer in list(model.named_buffers()):
        setattr(model, name, torch.empty_like(buffer, device=device))
    model.reset_buffers()
    source = f"{folder} ({config.family}, {sum(p.numel() for p in model.parameters()):,} parameters)"
    prefix = "" if (folder / "config.json").is_file() else source_prefix(hf.folder_of_tokenizer(folder))
    if prefix and answers(model):
        notes = [*notes, f"each source begins with {prefix!r}, as in training"]
    return Opened(source, model.eval().requires_grad_(False), tokenizer, ends, notes, prefix, folder)


def _tokenizer(where: Path, folder: Path) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer in a file or folder, and the tokens that end a document, if known."""
    file = where / "tokenizer.json" if where.is_dir() else where
    if not file.is_file():
        what = f"is {kind_of(file)}" if file.exists() else "does not exist"
        raise DataError(f"{file} {what}: name the model's tokenizer.json with --tokenizer=FILE")
    tokenizer = bpe.load(file)
    if (folder / "config.json").is_file():
        return tokenizer, hf.end_tokens(folder)
    end = hf.end_token(storage.read_state(folder, named_by_step=False), tokenizer)
    return tokenizer, () if end is None else (end,)
