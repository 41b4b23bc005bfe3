"""Reads and writes Hugging Face models of the families in names.py.

A folder holds config.json and model.safetensors, or shards of it with an index. Files are memory-mapped: on import each
rank reads only its own rows, and an export holds one tensor at a time.
"""

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from torchtitan_lite.checkpointing import dcp_storage, storage
from torchtitan_lite.checkpointing.find import candidates
from torchtitan_lite.checkpointing.safetensors_file import TensorSpecs, specs_of, write_tensors
from torchtitan_lite.config import paths
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, ModelConfig
from torchtitan_lite.config.sections.model import started_from
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.errors import CheckpointError, DataError, FormatError
from torchtitan_lite.huggingface.configs import from_hf_config, to_hf_config
from torchtitan_lite.huggingface.names import drop_tied, from_hf, hf_names, to_hf
from torchtitan_lite.huggingface.stacks import stacked, unstacked
from torchtitan_lite.optim.average import KEY

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000  # of an exported file, as in transformers


def open_weights(path: Path, config: ModelConfig, verify: bool = True) -> Mapping[str, Tensor]:
    """The weights of a run (its newest checkpoint), a checkpoint or a Hugging Face folder, under our names.

    Files are memory-mapped. Tensors of a sharded checkpoint are assembled on access.

    Args:
        verify: hash a checkpoint's files first.

    Raises:
        CheckpointError: it is none of those, is damaged, or holds a different model.
    """
    folder = find_weights(path, config)
    if (folder / "config.json").is_file():
        return stacked(drop_tied(from_hf(_read_shards(folder), config.family), config))
    return whole_weights(folder) if verify else read_weights(folder)


def find_weights(path: Path, config: ModelConfig) -> Path:
    """The checkpoint or Hugging Face folder that `open_weights` reads, which holds a model of this config.

    Raises:
        CheckpointError: as `open_weights`; damaged weights are not noticed.
    """
    folder = paths.expand(path)
    if (folder / "config.json").is_file():
        theirs = keys_of(folder)
        del theirs["vocab_size"]  # compared later, by shape
        if config.family == "t5" or (config.family != "gpt" and config.max_seq_len < theirs["max_seq_len"]):
            del theirs["max_seq_len"]  # positions are computed: a shorter context is fine; T5's are relative
        _compare(folder, theirs, config)
        return folder
    folder = candidates(folder)[0]
    state = storage.read_state(folder, named_by_step=False)
    saved = {key.removeprefix("model."): v for key, v in state.identity.items() if key.startswith("model.")}
    for key in ("dropout", "vocab_size", *(["max_seq_len"] if config.family != "gpt" else [])):
        saved.pop(key, None)
    _compare(folder, saved, config)
    return folder


def check_source(config: Config) -> dict[str, str]:
    """Checks that `model.init_from` holds this architecture. Nothing, if the run has started from it before."""
    if started_from(config):
        return {}
    try:
        find_weights(Path(config.model.init_from), config.model)
    except (CheckpointError, FormatError) as error:
        return {"model.init_from": f"model.init_from = {config.model.init_from}: {error}"}
    return {}


def whole_weights(folder: Path, *, ema: bool = False) -> Mapping[str, Tensor]:
    """Verify a checkpoint and return the model's tensors.

    Raises:
        CheckpointError: it is damaged, or see `read_weights`.
    """
    if problems := storage.verify(folder):
        raise CheckpointError("; ".join(problems))
    return read_weights(folder, ema=ema)


def read_weights(folder: Path, *, ema: bool = False) -> Mapping[str, Tensor]:
    """The model's tensors of a verified checkpoint. Those of a sharded one are assembled on access.

    Args:
        ema: the averages (optim.ema_decay) in place of the parameters that were trained.

    Raises:
        CheckpointError: it can't be read, or has no averages.
    """
    weights = _tensors(folder, storage.MODEL)
    if not ema:
        return weights
    averages = _tensors(folder, storage.OPTIMIZER, f"{KEY}.")
    if not averages:
        raise CheckpointError(
            f"--ema: {folder} holds no averages of the weights: it was saved with optim.ema_decay = 0"
        )
    return weights | averages


def _tensors(folder: Path, file: str, prefix: str = "") -> Any:
    """The tensors of a file of a full state dict, or the same of a sharded one, whose names start with a prefix."""
    if storage.read_manifest(folder).state_dict == "sharded":
        return dcp_storage.WholeTensors(folder, file.removesuffix("safetensors") + prefix)
    try:
        tensors = load_file(folder / file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / file} can't be read: {error}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def config_of(folder: Path) -> ModelConfig:
    """The [model] section for a Hugging Face folder. Raises CheckpointError: see keys_of."""
    return ModelConfig.model_validate(keys_of(folder))


def folder_of_tokenizer(checkpoint: Path) -> Path:
    """Where a checkpoint's tokenizer.json should be: in its run, or next to it, where `convert` puts it."""
    checkpoints = checkpoint.parent
    return checkpoints if (checkpoints / "tokenizer.json").is_file() else checkpoints.parent


def tokenizer_notes(source: Path, ours: Path) -> list[str]:
    """A note if the weights in a run, checkpoint or Hugging Face folder were trained with another vocabulary."""
    source = paths.expand(source)
    file = (source if (source / "tokenizer.json").is_file() else folder_of_tokenizer(source)) / "tokenizer.json"
    try:
        if not file.is_file() or bpe.load(file).get_vocab() == bpe.load(ours).get_vocab():
            return []
    except DataError:
        return []
    return [
        f"the weights of {source} were trained with another tokenizer, so most tokens stand for other text here: "
        f"--tokenizer.path={shlex.quote(str(file))} uses theirs"
    ]


def trained_config(folder: Path) -> ModelConfig:
    """The [model] section that a checkpoint was trained with.

    Raises:
        CheckpointError: it is damaged.
    """
    state = storage.read_state(folder, named_by_step=False)
    values = {key.removeprefix("model."): value for key, value in state.config.items() if key.startswith("model.")}
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(f"model.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{folder / storage.STATE} can't be used: {problems}") from None


def keys_of(folder: Path) -> dict[str, Any]:
    """Our [model] keys for a Hugging Face folder.

    Raises:
        CheckpointError: its architecture is not supported, or a value is invalid.
    """
    keys = from_hf_config(storage.read_json(folder / "config.json"))
    if keys["tie_embeddings"]:  # for a T5 config.json does not say, and others may have a head of their own nonetheless
        weights = from_hf(_read_shards(folder), keys["family"])
        head, embeddings = weights.get("output.weight"), weights.get("tok_embeddings.weight")
        keys["tie_embeddings"] = head is None or (embeddings is not None and head.equal(embeddings))
    return keys


def end_tokens(folder: Path) -> tuple[int, ...]:
    """The end tokens in the config.json of a Hugging Face folder."""
    named = storage.read_json(folder / "config.json").get("eos_token_id")
    return tuple(end for end in (named if isinstance(named, list) else [named]) if type(end) is int)


def _compare(folder: Path, theirs: dict[str, Any], config: ModelConfig) -> None:
    """Compare a folder's model keys with the config's."""
    ours = config.resolved()
    saved = {f"model.{key}": value for key, value in theirs.items()}
    expected = {f"model.{key}": ours[key] for key in theirs}
    storage.compare(folder, saved, expected, "model", "set [model] to the folder's values, or train from the beginning")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    weight_map = storage.read_json(index).get("weight_map", {}) if index.is_file() else {"": "model.safetensors"}
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: its weight_map should give the file of each tensor")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or ((folder / name).is_symlink() and not (folder / name).exists()):
            raise CheckpointError(f"{index} names {name}, which is not a file of this folder")
        try:
            weights |= load_file(folder / name)
        except Exception as error:
            raise CheckpointError(f"{folder / name} can't be read: {error}") from None
    return weights


def export(source: Path, out: Path, max_shard_bytes: int = MAX_SHARD_BYTES, *, ema: bool = False) -> str:
    """Write a checkpoint, or a run's newest one, as a Hugging Face folder in float32. Returns the class that reads it.

    The folder is written under a temporary name and renamed at the end. Memory: one tensor.

    Args:
        ema: see `read_weights`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, `out` is not empty, or it can't be written.
    """
    folder = candidates(source)[0]
    run = folder_of_tokenizer(folder)
    state, config = storage.read_state(folder, named_by_step=False), trained_config(folder)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CheckpointError(f"{out} exists already; name a new folder")
    weights = whole_weights(folder, ema=ema)
    specs = dcp_storage.specs(weights)
    if len(specs.get("tok_embeddings.weight", ("", ()))[1]) != 2:
        raise CheckpointError(f"{folder} has no token embeddings: it is not a model's checkpoint")
    content = to_hf_config(config, specs["tok_embeddings.weight"][1][0])
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if (run / "tokenizer.json").is_file():
            _write_tokenizer(temporary, bpe.load(run / "tokenizer.json"), state.end_token, config)
        # without these, readers use the architecture's defaults, which are wrong for our vocabulary
        content["eos_token_id"] = state.end_token
        if config.family != "t5":
            content["bos_token_id"] = state.end_token
        (temporary / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        weights, specs = with_head(weights, specs, config)
        if config.has_experts:
            weights = unstacked(weights)
            specs = dcp_storage.specs(weights)
        _write_shards(temporary, weights, specs, config.family, max_shard_bytes)
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
        return str(content["architectures"][0])
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, end: int, config: ModelConfig) -> None:
    """Write a tokenizer that AutoTokenizer loads as it is, and that gives the ids of training.

    Without the name of a class, transformers builds that of the model type, which may split text in another way.
    Training adds no token to a text, except the end token to what an encoder reads.
    """
    name = tokenizer.id_to_token(end)
    ends = FAMILIES[config.family].encoder_decoder
    tokenizer.post_processor = TemplateProcessing(single=["$A", name], special_tokens=[(name, end)]) if ends else None
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_seq_len,
        "eos_token": name,
        "pad_token": bpe.PAD if tokenizer.token_to_id(bpe.PAD) is not None else name,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def with_head(
    weights: Mapping[str, Tensor], specs: TensorSpecs, config: ModelConfig
) -> tuple[Mapping[str, Tensor], TensorSpecs]:
    """The tensors to export, by our names: those of a T5 with tied embeddings that are not scaled have a head as well.

    See names.to_hf_config.

    Raises:
        CheckpointError: no version of transformers reads such a T5.
    """
    if config.family != "t5" or config.tie_embeddings == config.scale_output:
        return weights, specs
    if config.scale_output:
        raise CheckpointError(
            "transformers can't read a T5 with model.scale_output = true and a head of its own (tie_embeddings = false)"
        )
    head, table = "output.weight", "tok_embeddings.weight"
    return dict(weights) | {head: weights[table]}, dict(specs) | {head: specs[table]}


def _write_shards(folder: Path, weights: Mapping[str, Tensor], specs: TensorSpecs, family: str, max_bytes: int) -> None:
    """Write model.safetensors, or files of at most max_bytes (unless one tensor is larger) with an index."""
    parts = hf_names(specs, family)
    theirs = specs_of(
        {name: to_hf(ours, lambda n: torch.empty(specs[n][1], device="meta"), family) for name, ours in parts.items()}
    )
    files: list[list[str]] = [[]]
    room = max_bytes
    for name, (dtype, shape) in theirs.items():
        size = dtype.itemsize * torch.Size(shape).numel()
        if files[-1] and size > room:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        write_tensors(
            folder / file,
            {name: theirs[name] for name in names},
            lambda name: to_hf(parts[name], lambda ours: weights[ours].float(), family),
        )
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        total = sum((folder / file).stat().st_size for file in set(weight_map.values()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
