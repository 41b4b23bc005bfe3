"""Opens a trained model with its tokenizer, in one process: from a run, a checkpoint, or a Hugging Face folder.

From a checkpoint, also its config, and its data if unchanged.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.compatibility import require_finite, saved_config, shapes_of
from torchtitan_lite.checkpointing.find import find
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import model_tensors
from torchtitan_lite.commands import Options
from torchtitan_lite.config import paths
from torchtitan_lite.config.rules.model import shape_rules
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.data.pairs import source_prefix
from torchtitan_lite.errors import CheckpointError, ConfigError, DataError
from torchtitan_lite.huggingface import weights as hf
from torchtitan_lite.models import Transformer, build
from torchtitan_lite.models.generation import is_encoder_decoder
from torchtitan_lite.run.attempts import Attempt, best_step

LONGEST = 2048  # default maximum tokens in a window of a Hugging Face model
OWN_FAMILY: Options = {
    "--model.family": {"dest": "family", "default": "", "metavar": "module:Name", "help": "import your own model"}
}
OPTIONS: Options = {  # of the commands that open models
    "--device": {"choices": ["auto", "cpu", "cuda"], "default": "auto", "help": "device to compute on"},
    "--dtype": {"choices": ["float32", "bfloat16"], "default": "float32", "help": "dtype of the parameters"},
    "--best": {"action": "store_true", "help": "of a run: the checkpoint with the lowest validation loss"},
    "--ema": {"action": "store_true", "help": "use the averaged weights, see optim.ema_decay"},
    "--tokenizer": {"type": paths.expand, "help": "a tokenizer.json, instead of the model's own"},
    **OWN_FAMILY,
}


@dataclass(frozen=True)
class Opened:
    """A model that is ready to generate."""

    source: str  # a description of the model and its folder
    model: Transformer
    tokenizer: Tokenizer
    ends: tuple[int, ...]  # tokens that end a document
    notes: list[str]  # on skipped damaged checkpoints
    prefix: str = ""  # of sources, as in training
    config: Config | None = None  # of the training run; None: a Hugging Face folder
    state: TrainState | None = None  # of its checkpoint
    begin: tuple[int, ...] = ()  # the token that begins each document and prompt, if any

    def first_token(self) -> list[int]:
        """Return the begin token, else a run's end token; empty for a Hugging Face folder without a begin token."""
        return list(self.begin or (self.ends[:1] if self.config else ()))

    def beginning(self) -> list[int]:
        """Return the token before a document: the first token, else the end token if the model has it."""
        size = self.model.tok_embeddings.num_embeddings
        return self.first_token() or [end for end in self.ends[:1] if end < size]

    def window(self, seq_len: int = 0) -> int:
        """Return the tokens of a window to score: seq_len, or 0 for the length of training.

        Raises:
            ConfigError: the model's maximum is shorter.
        """
        limit = self.model.config.max_seq_len
        length = seq_len or (self.config.train.seq_len if self.config else min(limit, LONGEST))
        if length > limit:
            raise ConfigError(f"--seq-len={length}: {self.source} takes at most {limit} tokens (max_seq_len)")
        return length

    def own_data(self) -> DataSet:
        """Open the data that the run was trained on. Prepares it again if it is no longer in the cache.

        Raises:
            ConfigError: there is no data, or it has changed since the checkpoint was saved.
        """
        if self.config is None or self.state is None:
            raise ConfigError(
                f"{self.source} is a Hugging Face folder, which has no text of its own: give --data, or --tasks"
            )
        data = prepare_all(self.config.data, self.config.tokenizer, lambda _: None, self.state.must_match)
        require_same_data(self.source, data, self.state)
        return data


def open_model(
    path: Path, device: torch.device, dtype: torch.dtype, tokenizer: Path | None = None, *, ema: bool = False
) -> Opened:
    """Open the newest complete checkpoint of a run, a checkpoint, or a Hugging Face folder.

    Args:
        device: "meta" checks all but the values, and reads no weights.
        dtype: of the parameters; rotary tables stay float32.
        tokenizer: a tokenizer.json, if the folder has none.
        ema: use a checkpoint's averaged weights (optim.ema_decay).

    Raises:
        CheckpointError: there is no checkpoint, it is damaged or not finite, or it has no averages.
        DataError: there is no tokenizer.json, or it has too many entries for the model.
    """
    folder, notes, trained, state, prefix = paths.expand(path), list[str](), None, None, ""
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        if ema:
            raise CheckpointError(f"--ema: {path} is a Hugging Face folder; the averages are in the run's checkpoints")
        run, config, ends = folder, hf.config_of(folder), hf.end_tokens(folder)
        weights = hf.open_weights(folder, config)
    else:
        folder, notes = find(folder)
        run, state = folder.parent.parent, storage.read_state(folder)
        trained, ends = saved_config(folder, state.config), (state.end_token,)
        config, weights = saved_config(folder, state.settings).model, hf.read_weights(folder, ema=ema)
        prefix = source_prefix(run)
    entries = _tokenizer(tokenizer or run)
    begin = tuple(state.begin_tokens if state else hf.begin_tokens(folder, entries))
    if problems := dict(shape_rules(config)):
        raise CheckpointError("\n  ".join([f"{folder} describes a model that can't be built:", *problems.values()]))
    theirs = shapes_of(weights)
    with torch.device("meta"):
        model = build(config, max(theirs.get("tok_embeddings.weight", (1,))[0], 1))
    shapes = shapes_of(model_tensors(model))
    storage.require_equal(folder, theirs, shapes, "model", "its config and its weights do not match")
    bpe.require_rows(entries, model.tok_embeddings.num_embeddings, tokenizer or run)
    buffers = dict(model.named_buffers())
    for name in buffers.keys() - shapes.keys():
        setattr(model, name, torch.empty_like(buffers[name], device=device))
    model.reset_buffers()
    # saved buffers (biases of routers) stay float32
    placed = {name: weights[name].to(device, None if name in buffers else dtype) for name in shapes}
    require_finite(placed, folder)
    model.load_state_dict(placed, strict=False, assign=True)
    model.tie_weights()
    source = f"{folder} ({config.family}, {sum(p.numel() for p in model.parameters()):,} parameters)"
    if prefix and is_encoder_decoder(model):
        notes = [*notes, f"each source begins with {prefix!r}, as in training"]
    return Opened(source, model.eval().requires_grad_(False), entries, ends, notes, prefix, trained, state, begin)


def device_of(name: str) -> torch.device:
    """Return the device of --device; auto is the GPU, if there is one. Raises ConfigError if a GPU is missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda, but torch sees no GPU here; --device=cpu works")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def out_of_range(options: object, **rules: tuple[bool, str]) -> list[str]:
    """Return a line for each option that breaks its rule: whether the value is fine, and what works."""
    return [
        f"--{name.replace('_', '-')}={getattr(options, name)} should be {works}"
        for name, (fine, works) in rules.items()
        if not fine
    ]


def best_checkpoint(run: Path) -> Path:
    """Return the checkpoint of a run with the lowest validation loss.

    Raises:
        CheckpointError: no step of its checkpoints was validated.
    """
    step = best_step(run, storage.find_steps(run / "checkpoints"))
    if step is None:
        raise CheckpointError(f"--best: {run} is not a run with a checkpoint of a validated step")
    return storage.step_folder(run / "checkpoints", step)


def _tokenizer(where: Path) -> Tokenizer:
    """Load the tokenizer in a file or folder."""
    file = where / "tokenizer.json" if where.is_dir() else where
    if not file.is_file():
        raise DataError(
            f"there is no file {file}: "
            + bpe.other_format(file, "name the model's tokenizer.json with --tokenizer=FILE")
        )
    return bpe.load(file)


def require_same_data(name: str, data: DataSet, state: TrainState | Attempt) -> None:
    """Raise ConfigError if a checkpoint or an attempt was trained on different data."""
    here = {"tokenizer": data.tokenizer_sha256, **data.hashes()}
    if changed := [key for key, value in here.items() if state.must_match.get(key) != value]:
        raise ConfigError(
            f"the data of {name} has changed since it was trained ({', '.join(changed)}); restore that text "
            "(evaluate can score other text: --data TEXT)"
        )
