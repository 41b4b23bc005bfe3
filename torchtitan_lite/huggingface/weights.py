"""Reads and writes Hugging Face models of the families in names.py.

A folder holds config.json and model.safetensors, or shards of it with an index; an export writes one file. Files are
memory-mapped: on import each rank reads only its own rows, and an export holds one tensor at a time.
"""

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.compatibility import saved_config
from torchtitan_lite.checkpointing.find import find
from torchtitan_lite.checkpointing.safetensors_file import LazyTensors, specs_of, write_tensors
from torchtitan_lite.checkpointing.shards import read_tensors
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import prefix
from torchtitan_lite.config import paths
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.registry import is_module_name
from torchtitan_lite.config.schema import Config, ModelConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.errors import CheckpointError, DataError, FormatError
from torchtitan_lite.huggingface.configs import from_hf_config, to_hf_config, variant
from torchtitan_lite.huggingface.names import from_hf, hf_names, to_hf
from torchtitan_lite.huggingface.stacks import stack_experts, unstack_experts
from torchtitan_lite.optim.average import KEY

INDEX = "model.safetensors.index.json"
_INSTEAD = {  # what a folder holds without the file that is read, and what works
    INDEX: "names it: download it again",
    "adapter_config.json": "is of a LoRA adapter: merge_and_unload and save_pretrained of peft write the whole model",
    **dict.fromkeys(
        ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack"),
        "has the weights in a different format: from_pretrained and save_pretrained of transformers convert them",
    ),
    **dict.fromkeys(
        ("consolidated*", "*-of-*.safetensors"), f"is not read, because there is no {INDEX}: download the folder again"
    ),
    **dict.fromkeys(("*/config.json", "snapshots/*/config.json"), "is of a model: name its folder"),
}


def find_weights(path: Path, config: ModelConfig, mode: str = "full") -> tuple[Path, list[str]]:
    """Find weights in a run (its newest complete checkpoint), a checkpoint or a Hugging Face folder.

    Args:
        mode: what to verify of a checkpoint, see storage.verify_file.

    Returns:
        the folder of the weights, and notes on newer damaged checkpoints.

    Raises:
        CheckpointError: the path is none of these, or its model's config differs.
    """
    folder = paths.expand(path)
    if (folder / "config.json").is_file():
        theirs, notes = keys_of(folder), list[str]()
    else:
        folder, notes = find(folder, mode)
        values = storage.read_state(folder).must_match
        theirs = {key.removeprefix("model."): value for key, value in values.items() if key.startswith("model.")}
    # vocab_size is compared later, by shape; computed positions have no end
    may_differ = "dropout", "vocab_size", *(["max_seq_len"] if config.family != "gpt" else [])
    theirs = {key: value for key, value in theirs.items() if key not in may_differ}
    ours = config.resolved()
    layers: dict[str, Any] = {key: theirs[key] for key in ("window", "layer_pattern", "rope_theta") if key in theirs}
    # the same layers may be spelled differently
    theirs |= {key: ours[key] for key in layers if variant(config.model_copy(update=layers)) == variant(config)}
    saved = {f"model.{key}": value for key, value in theirs.items()}
    expected = {f"model.{key}": ours[key] for key in theirs}
    storage.require_equal(
        folder, saved, expected, "model", "set [model] to the folder's values, or train from the beginning"
    )
    return folder, notes


def open_weights(folder: Path, config: ModelConfig) -> Mapping[str, Tensor]:
    """Open the weights of a checkpoint or a Hugging Face folder, under our names. Files are memory-mapped."""
    if (folder / "config.json").is_file():
        return stack_experts(
            {
                name: tensor
                for name, tensor in from_hf(_read_shards(folder), config).items()
                if name != "output.weight" or not config.tie_embeddings
            }
        )
    return read_weights(folder)


def check_source(config: Config) -> dict[str, str]:
    """Check that `model.init_from` holds this architecture, and has embeddings for the tokenizer that is used.

    Not if the run has already started from it.
    """
    if config.started_from_weights:
        return {}
    try:
        folder, _ = find_weights(Path(config.model.init_from), config.model, "size")
        if used := config.tokenizer.path or next(filter(paths.is_prepared, config.data.texts), ""):
            bpe.require_rows(
                bpe.load(Path(used)),
                specs_of(open_weights(folder, config.model)).get("tok_embeddings.weight", (None, (0,)))[1][0],
                used,
            )
        elif not (
            file := (folder.parent.parent if storage.is_checkpoint(folder) else folder) / "tokenizer.json"
        ).is_file():
            raise DataError(
                "it has no tokenizer.json, and a tokenizer trained on your text would not fit its embeddings: "
                + bpe.other_format(file, "name the model's own with --tokenizer.path=FILE")
            )
    except (CheckpointError, DataError, FormatError) as error:
        return {"model.init_from": f"model.init_from = {config.model.init_from}: {error}"}
    return {}


def read_weights(folder: Path, *, ema: bool = False) -> LazyTensors:
    """Return the model's tensors in a checkpoint that has been verified. They are read on access.

    Args:
        ema: read the averages (optim.ema_decay) instead of the trained parameters.

    Raises:
        CheckpointError: the checkpoint has no averages.
    """
    weights = read_tensors(folder, prefix(storage.MODEL))
    state = read_tensors(folder, f"{prefix(storage.OPTIMIZER)}state.") if ema else {}
    averages = {name: f"{name}.{KEY}" for name in weights if f"{name}.{KEY}" in state}
    if ema and not averages:
        raise CheckpointError(
            f"--ema: {folder} holds no averages of the weights: it was saved with optim.ema_decay = 0"
        )
    return LazyTensors(weights.specs, lambda name: state[averages[name]] if name in averages else weights[name])


def config_of(folder: Path) -> ModelConfig:
    """Return the [model] section for a Hugging Face folder. Raises CheckpointError: see keys_of."""
    return ModelConfig.model_validate(keys_of(folder))


def tokenizer_notes(source: Path, ours: Path, first: int | None = None) -> list[str]:
    """Return a note if the weights of a run, checkpoint or Hugging Face folder were trained on different tokens.

    Args:
        ours: the tokenizer.json of this run.
        first: the token before each of its documents, to compare with that of the weights.
    """
    source = paths.expand(source)
    file = (source if (source / "tokenizer.json").is_file() else source.parent.parent) / "tokenizer.json"
    try:
        tokenizer, theirs = bpe.load(file if file.is_file() else ours), file.is_file()
        lone = storage.read_state(source).must_match if not theirs and storage.is_checkpoint(source) else {}
        begin = (
            begin_tokens(source, tokenizer)
            if (source / "config.json").is_file()
            else storage.read_state(find(source, "size")[0]).begin_tokens
        )
    except (CheckpointError, DataError):
        return []
    used = bpe.load(ours)
    if tokenizer.get_vocab() != used.get_vocab() or lone.get("tokenizer") not in (None, bpe.sha256(used)):
        note = (
            f"the weights of {source} were trained with a different tokenizer, so most tokens mean different text here"
        )
        return [note + (f": --tokenizer.path={shlex.quote(str(file))} uses theirs" if theirs else "")]
    return [
        f"the weights of {source} were trained on documents that begin with {bpe.shown(tokenizer, token)}, and "
        f"these do not: --tokenizer.begin_token={shlex.quote(str(tokenizer.id_to_token(token)))} adds it to a text; "
        "prepare a folder again with --begin-token"
        for token in begin
        if first not in (None, token)
    ]


def keys_of(folder: Path) -> dict[str, Any]:
    """Return our [model] keys for a Hugging Face folder.

    Raises:
        CheckpointError: it has no config.json, its architecture is not supported, or a value is invalid.
    """
    if not (file := folder / "config.json").is_file():
        raise CheckpointError(
            f"there is no {file}: "
            + _instead(file, "name a folder of Hugging Face; hf download NAME --local-dir FOLDER fetches one")
        )
    keys = from_hf_config(storage.read_json(file))
    if keys["tie_embeddings"]:  # a T5's config.json does not say, and other models may still have a separate head
        weights = from_hf(_read_shards(folder), ModelConfig.model_validate(keys))
        head, embeddings = weights.get("output.weight"), weights.get("tok_embeddings.weight")
        keys["tie_embeddings"] = head is None or (embeddings is not None and head.equal(embeddings))
    return keys


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end tokens in the config.json of a Hugging Face folder."""
    named = storage.read_json(folder / "config.json").get("eos_token_id")
    return tuple(end for end in (named if isinstance(named, list) else [named]) if type(end) is int)


def begin_tokens(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Return the token that began each document in the pretraining of a Hugging Face folder's model; empty: none.

    It is the token that the tokenizer puts before a text. If it puts none there, it is the special token
    `bos_token_id`, if add_bos_token says so or, without that, if the model_type was pretrained with one: other models
    also name one in config.json, but their documents do not have it. GPT-2's tokenizer adds none (SmolLM2 is a Llama).
    """
    with_special, without = (tokenizer.encode("a", add_special_tokens=flag).ids[:1] for flag in (True, False))
    names = "tokenizer_config.json", "config.json", "generation_config.json"
    about, *configs = (storage.read_json(folder / name) if (folder / name).is_file() else {} for name in names)
    begins = about.get(
        "add_bos_token",
        configs[0].get("model_type") in ("llama", "mistral", "gemma3_text")
        and "GPT2" not in str(about.get("tokenizer_class")),
    )
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if begins and token.special]
    named = [one["bos_token_id"] for one in configs if one.get("bos_token_id") in special]
    return with_special if with_special != without else [i for i in named[:1] if i not in end_tokens(folder)]


def _instead(file: Path, otherwise: object) -> str:
    """Return what works instead of a file that is missing or can't be read."""
    works = (f"{path} {works}" for name, works in _INSTEAD.items() for path in sorted(file.parent.glob(name)))
    return bpe.other_format(file, str(otherwise)) if file.is_file() else next(works, str(otherwise))


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    weight_map = storage.read_json(index).get("weight_map", {}) if index.is_file() else {"": "model.safetensors"}
    weights: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        try:
            weights |= load_file(folder / name)
        except Exception as error:  # e.g. an incomplete download
            advice = _instead(folder / name, f"{error} (if it is cut off, download it again)")
            raise CheckpointError(f"{folder / name} can't be read: {advice}") from None
    return weights


def export(source: Path, out: Path, *, ema: bool = False) -> tuple[str, list[str]]:
    """Write a checkpoint, or a run's newest complete one, as a Hugging Face folder in float32.

    The folder is written under a temporary name and renamed at the end. Memory: one tensor.

    Args:
        ema: see `read_weights`.

    Returns:
        the transformers class that reads it, and notes on newer damaged checkpoints.

    Raises:
        CheckpointError: no checkpoint is complete, `out` is not empty, or it can't be written.
    """
    folder, notes = find(source)
    state = storage.read_state(folder)
    if is_module_name(family := state.config["model.family"]):
        raise CheckpointError(f"{folder}: there is no Hugging Face format for a family of your own, {family}")
    config = saved_config(folder, state.settings).model
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CheckpointError(f"{out} exists already; name a new folder")
    weights = read_weights(folder, ema=ema)
    content = to_hf_config(config, weights.specs["tok_embeddings.weight"][1][0])
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tokenizer = folder.parent.parent / "tokenizer.json"
        if tokenizer.is_file():
            _write_tokenizer(temporary, bpe.load(tokenizer), state, config)
        # readers would use the architecture's defaults, which are wrong for our vocabulary
        ends = state.imported.get("eos_token_id", [])
        content["eos_token_id"] = ends if state.end_token in ends else state.end_token
        if config.family != "t5":
            content["bos_token_id"] = [*state.begin_tokens, state.imported.get("bos_token_id", state.end_token)][0]
        (temporary / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        tensors = unstack_experts(weights) if config.has_experts else weights
        _write_model(temporary / "model.safetensors", tensors, config)
        temporary.rename(out)
        return str(content["architectures"][0]), notes
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, state: TrainState, config: ModelConfig) -> None:
    """Write a tokenizer that AutoTokenizer loads unchanged, and that gives the same ids as in training.

    Without a class name, transformers builds the model type's tokenizer, which may split text differently. Training
    adds no token to a text, except the begin token, if it has one, and the end token to an encoder's input.
    """
    name, *begin = [str(tokenizer.id_to_token(token)) for token in (state.end_token, *state.begin_tokens)]
    single = ["$A", name] if FAMILIES[config.family].encoder_decoder else [*begin, "$A"]
    added = [(token, tokenizer.token_to_id(token)) for token in single if token != "$A"]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=added) if added else None
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_seq_len,
        **({"bos_token": begin[0]} if begin else {}),
        # without it, `begin_tokens` goes by model_type and bos_token_id
        **({"add_bos_token": bool(begin)} if single[-1] == "$A" else {}),
        "eos_token": name,
        "pad_token": bpe.PAD if tokenizer.token_to_id(bpe.PAD) is not None else name,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_model(file: Path, weights: Mapping[str, Tensor], config: ModelConfig) -> None:
    specs, family = specs_of(weights), config.family
    parts = hf_names(specs, config)
    theirs = specs_of(
        {name: to_hf(ours, lambda n: torch.empty(specs[n][1], device="meta"), family) for name, ours in parts.items()}
    )
    write_tensors(file, theirs, lambda name: to_hf(parts[name], lambda ours: weights[ours].float(), family))
