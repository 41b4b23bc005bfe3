"""The API for notebooks and your own training loops: `import torchtitan_lite as ttl`. docs/notebook.md uses all of it.

Everything runs in this process, on a CPU or one GPU: there is no launcher, process group or run folder. A model is a
plain torch.nn.Module with float32 parameters. With the same config, data and number of CPU threads, the loop in
`build_optimizer` computes the same losses as train.py on one process, bit for bit (without dropout).

Mistakes in files and configs raise `ttl.UserError`, which says what is wrong and what works.
"""

import contextlib
import operator
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from torch import Tensor

from torchtitan_lite import cpu, models
from torchtitan_lite.checkpointing import compatibility, full_state
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import model_tensors
from torchtitan_lite.config import load, paths
from torchtitan_lite.config.schema import Config, default_of, known_keys
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import Batch, Loader
from torchtitan_lite.data.pairs import source_prefix
from torchtitan_lite.distributed import recompute_and_compile
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.errors import UserError as UserError
from torchtitan_lite.huggingface import weights
from torchtitan_lite.models import LossOptions, Transformer
from torchtitan_lite.models.generation import is_encoder_decoder, pieces
from torchtitan_lite.optim import optimizer as optim
from torchtitan_lite.optim.groups import freeze
from torchtitan_lite.optim.guarded import GuardedOptimizer, HostGuarded
from torchtitan_lite.optim.guarded import set_learning_rate as apply_learning_rate
from torchtitan_lite.run import checks, phases
from torchtitan_lite.run.start_and_end import prepared
from torchtitan_lite.tools import generate as generating
from torchtitan_lite.tools import load_model as loading
from torchtitan_lite.tools.evaluation import evaluate as scoring
from torchtitan_lite.tools.evaluation import tables
from torchtitan_lite.tools.evaluation.documents import Split, Texts

Text = str | os.PathLike[str]  # a path, or for data also a glob
Device = Literal["auto", "cpu", "cuda"]

# --- config, data, model ----------------------------------------------------------------------------------------


def load_config(file: Text | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load and check a config, as train.py does.

    >>> config = ttl.load_config(overrides={"data.path": "my_text", "model.size": "1M", "train.steps": 50})
    >>> config.train.steps, config.model.n_layers
    (50, 2)

    Args:
        file: a TOML file, e.g. from configs/, or a run's config.toml; [fsdp] is ignored. None: the defaults.
        overrides: values by "section.key", as on train.py's command line.

    Raises:
        UserError: lists every mistake, with what works.
    """
    # one process has no mesh, so a mesh for many GPUs is not a mistake here
    values = {key: default_of(key) for key in known_keys() if key.startswith("fsdp.")}
    values |= {
        key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in (overrides or {}).items()
    }
    loaded = load.load(
        Path(file) if file else None,
        values,
        origin="overrides",
        n_gpus=torch.cuda.device_count(),
        checks=[checks.check_patterns, checks.check_init_from],
    )
    for note in loaded.notes:
        warnings.warn(note, stacklevel=2)
    return loaded.config


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, and how a model's training text marks documents."""

    tokenizer: tokenizers.Tokenizer
    end_tokens: tuple[int, ...]  # each of them ends a document
    source_prefix: str = ""  # pairs: the text before each source
    config: Config | None = None  # from the run that trained the model; None: a Hugging Face folder
    begin_tokens: tuple[int, ...] = ()  # the token that begins each document and prompt, if any

    @property
    def vocab_size(self) -> int:
        """The number of entries."""
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end token."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Leave out masked targets (-100), which have no text."""
        return str(self.tokenizer.decode([*map(operator.index, tokens)]))


@dataclass(frozen=True, repr=False)
class Data:
    """The prepared data of a config."""

    config: Config  # with epochs converted to steps
    tokenizer: Tokenizer
    dataset: DataSet

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size."""
        return self.dataset.vocab_size

    def batches(self, first_step: int = 1) -> Iterator[tuple[int, Batch]]:
        """Yield each step and its global batch, up to train.steps, with the same samples in the same order as a run.

        A batch has `micro_batches`, and their total number of targets in `global_tokens`. `micro.on(device)` returns
        the model's keyword arguments.
        """
        for step, samples, phase, mixture in phases.steps(self.config, self.dataset, TrainState()):
            if step >= first_step:
                loader = Loader(
                    mixture,
                    micro_batch_size=phase.train.micro_batch_size,
                    rank=0,
                    world_size=1,
                    seed=phase.run.seed,
                    document_mask=phase.data.document_mask,
                )
                yield step, loader.batch(samples.start, len(samples))


def open_data(config: Config) -> Data:
    """Open the data of `[data]`. Text is first prepared, once, in the cache.

    >>> data = ttl.open_data(config)
    >>> step, batch = next(data.batches())
    >>> len(batch.micro_batches), batch.micro_batches[0].tokens.shape, batch.global_tokens
    (3, torch.Size([2, 32]), 192)

    Raises:
        UserError: the text is missing, unusable or too short, or prepared data is damaged.
    """
    loaded, dataset = prepared(Loaded(config, {}))
    tokenizer = tokenizers.Tokenizer.from_file(str(dataset.folder / "tokenizer.json"))
    prefix, begin = source_prefix(dataset.folder), dataset.sources[0].meta.marks[1:]
    return Data(loaded.config, Tokenizer(tokenizer, (dataset.end_token,), prefix, loaded.config, begin), dataset)


def build_model(config: Config, vocab_size: int = 0) -> Transformer:
    """Build the model of `[model]` on `run.device`, with a run's initial values: random, or from `init_from`.

    >>> model = ttl.build_model(config, data.vocab_size)
    >>> tokens = torch.tensor([data.tokenizer.encode("def main")])
    >>> model(tokens).shape[-1] == data.vocab_size
    True

    `model(tokens)` returns logits, (B, T, V). `model(tokens, targets)` returns the summed loss. The model also follows
    optim.freeze, the losses of [train], [speed] except float8, [activation_checkpointing] and [compile]. It computes in
    float32; use torch.autocast for bfloat16.

    Args:
        vocab_size: the data's; a nonzero model.vocab_size overrides it.

    Raises:
        UserError: the vocabulary size is missing or too small, or `init_from` does not fit the model.
    """
    size = config.model.vocab_size or vocab_size
    if size <= 0:
        raise ConfigError("the vocabulary size is missing, e.g. ttl.build_model(config, data.vocab_size)")
    if size < vocab_size:
        raise ConfigError(f"model.vocab_size = {size} is smaller than the tokenizer's {vocab_size}; 0 takes that")
    if config.fsdp.param_dtype != "float32":
        warnings.warn("the model computes in float32, not in fsdp.param_dtype: use torch.autocast", stacklevel=2)
    with torch.device("meta"):
        model = models.build(config.model, size, LossOptions.from_config(config))
    freeze(model, config.optim.freeze)
    cpu.apply(model, config.speed)
    recompute_and_compile.apply_activation_checkpointing(model, config.activation_checkpointing)
    recompute_and_compile.apply_compile(model, config.compile, dynamic_shapes=config.data.objective == "pairs" or None)
    materialize(model, loading.device_of(config.run.device), config.run.seed)
    if config.model.init_from:
        folder, notes = weights.find_weights(Path(config.model.init_from), config.model)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        source, targets = weights.open_weights(folder, config.model), model_tensors(model)
        compatibility.require_same_weights(source, targets)
        with torch.no_grad():
            full_state.copy_rows(source, targets)
        compatibility.require_finite(targets, folder)
    return model


def load_model(
    path: Text, *, device: Device = "auto", dtype: torch.dtype = torch.float32, tokenizer: Text | None = None
) -> tuple[Transformer, Tokenizer]:
    """Load a trained model from a run (its newest complete checkpoint), a checkpoint or a Hugging Face folder.

    >>> model, tokenizer = ttl.load_model("runs/default")
    >>> model.training
    False

    Args:
        device: auto (a GPU if there is one), cpu or cuda.
        dtype: the parameters' dtype.
        tokenizer: a tokenizer.json, if the folder has none.

    Raises:
        UserError: there is no such model or tokenizer, or it is damaged.
    """
    file = None if tokenizer is None else paths.expand(os.fspath(tokenizer))
    opened = loading.open_model(Path(path), loading.device_of(device), dtype, file)
    for note in opened.notes:
        warnings.warn(note, stacklevel=2)
    return opened.model.requires_grad_(), Tokenizer(
        opened.tokenizer, opened.ends, opened.prefix, opened.config, opened.begin
    )


# --- in the loop ------------------------------------------------------------------------------------------------


def build_optimizer(model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """Build the optimizer of `[optim]`, with its parameter groups. Its steps also update router biases
    (model.router_bias). This is a run's loop:

    >>> optimizer = ttl.build_optimizer(model, config)
    >>> for step, batch in data.batches():
    ...     for micro in batch.micro_batches:
    ...         loss = model(**micro.on(torch.device("cpu")))
    ...         (loss / batch.global_tokens).backward()
    ...     norm = ttl.clip_grad_norm(model, optimizer, config.optim.max_norm)
    ...     rate = ttl.set_learning_rate(optimizer, config, step)
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    """
    return optim.build_optimizer(model, config.optim)


def clip_grad_norm(model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Scale the gradients down to a total norm of at most `max_norm`. Returns the norm before clipping, () float32.

    Like torch.nn.utils.clip_grad_norm_, with a run's rounding.

    >>> model(tokens, tokens).backward()
    >>> norm = ttl.clip_grad_norm(model, optimizer, 1.0)
    >>> bool(norm > 1), bool(ttl.clip_grad_norm(model, optimizer, 1.0) < 1.001)
    (True, True)
    """
    norm = optim.squared_norm(optim.gradient_norms(model), 1).sqrt().float()
    factor = optim.clip_factor(norm, max_norm, torch.ones_like(norm))
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if isinstance(optimizer, GuardedOptimizer) and not isinstance(optimizer, HostGuarded):
        torch._foreach_div_(grads, 1 / factor)  # rounds as a step with `grad_scale`
    else:
        torch._foreach_mul_(grads, factor)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, step: int) -> float:
    """Set and return a step's learning rate (step is 1-based), by the schedule of `[optim]` over train.steps.

    >>> [round(ttl.set_learning_rate(optimizer, config, step), 6) for step in (1, 2, 5)]
    [0.002, 0.004, 0.0004]
    """
    if config.optim.schedule == "step" and not isinstance(config.optim.step_every, int):
        raise ConfigError(
            'optim.step_every = "epoch" is not in steps yet: use the config of ttl.open_data, data.config'
        )
    config = config.phase(sum(after < step for after in config.train.boundaries()))
    rate = optim.learning_rate(config.optim, step, config.train.steps)
    apply_learning_rate(optimizer, rate)
    return rate


# --- using a model ----------------------------------------------------------------------------------------------


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    beams: int = 1,
    length_penalty: float = 1.0,
) -> str:
    """Return a model's continuation of a prompt, or an encoder-decoder's answer to a source.

    >>> len(ttl.generate(model, tokenizer, "def ", max_tokens=5)) > 0
    True

    Args:
        max_tokens: maximum number of new tokens; a document's end or the model's context may end the text earlier.
        temperature: 0: always the likeliest token.
        top_k: draw from the k likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: the same seed gives the same text.
        beams: encoder-decoders: more than 1 replaces sampling by beam search.
        length_penalty: beam search: larger values prefer longer answers.

    Raises:
        UserError: an argument is out of range, or the prompt is too long.
    """
    options = generating.Options(max_tokens, temperature, top_k, top_p, seed, beams, length_penalty)
    if problems := options.problems():
        raise ConfigError("\n  ".join(problems))
    if beams > 1 and not is_encoder_decoder(model):
        raise ConfigError(f"beams={beams} is for encoder-decoders, and this is a decoder: beams=1 works")
    opened = _opened(model, tokenizer)
    ids = generating.encode(opened, prompt)
    with _evaluating(model):
        tokens = generating.tokens_of(opened, ids, options)
        return "".join(pieces(tokenizer.tokenizer, [] if is_encoder_decoder(model) else ids, tokens))


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    data: Data | Text | Sequence[Text],
    *,
    split: Split = "val",
    text_key: str | list[str] = "text",
    text_suffixes: Sequence[str] = (),
    documents: int | None = None,
    seq_len: int = 0,
    batch_size: int = 8,
) -> dict[str, dict[str, float]]:
    """Score a model on texts, with the figures of `python -m torchtitan_lite.evaluate` (docs/evaluate.md).

    >>> scores = ttl.evaluate(model, tokenizer, "my_text", documents=2)
    >>> sorted(scores["my_text"])[:4]
    ['bits_per_byte', 'bits_per_byte_stderr', 'bytes', 'documents']

    Args:
        data: `open_data`'s result, a text (file, folder or glob), a prepared folder, or a list of texts and folders.
        split: the part of prepared data: val or train.
        text_key: the key or column of .jsonl, .csv and .parquet files; a list is tried in order.
        text_suffixes: further suffixes of plain text, e.g. [".md"].
        documents: score at most this many documents of each text.
        seq_len: tokens per window; 0: as in training.
        batch_size: windows per batch.

    Returns:
        by text: documents, seq_len, tokens, bytes, loss, bits_per_byte, perplexity, and
        standard errors (NaN where undefined).

    Raises:
        UserError: an argument is out of range, or a text is missing, unusable, or does not fit the model.
    """
    names = _names_of(data)
    if not names or "" in names:
        raise ConfigError('no text to score, e.g. ttl.evaluate(model, tokenizer, "my_text")')
    wanted = Texts(list(names), split, text_key, text_suffixes, documents, seq_len, batch_size)
    if problems := wanted.problems():
        raise ConfigError("\n  ".join(problems))
    config = data.config if isinstance(data, Data) else tokenizer.config
    opened = replace(_opened(model, tokenizer), config=config)
    process = Process(0, 1, model.tok_embeddings.weight.device, torch.get_num_threads())
    notes: list[str] = []
    with _evaluating(model):
        scores = dict(scoring.scores_of(opened, wanted, process, notes.append))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return {names.get(text, text): tables.figures(part) for text, part in scores.items()}


def _names_of(data: Data | Text | Sequence[Text]) -> dict[str, str]:
    """Return the names of texts by path."""
    if isinstance(data, Data):
        return {str(source.folder): source.name for source in data.dataset.sources}
    texts = [data] if isinstance(data, str | os.PathLike) else data
    return {os.fspath(text): os.fspath(text) for text in texts}


def _opened(model: Transformer, tokenizer: Tokenizer) -> loading.Opened:
    return loading.Opened(
        source="the model",
        model=model,
        tokenizer=tokenizer.tokenizer,
        ends=tokenizer.end_tokens,
        notes=[],
        prefix=tokenizer.source_prefix,
        config=tokenizer.config,
        begin=tokenizer.begin_tokens,
    )


@contextlib.contextmanager
def _evaluating(model: Transformer) -> Iterator[None]:
    """Switch off dropout and gradients."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
