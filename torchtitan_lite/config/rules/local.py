"""Rules of this machine: its files, packages and compiler."""

import importlib.util
import os
import shutil
import sysconfig
from importlib.metadata import version
from pathlib import Path

from torchtitan_lite.config.paths import expand, is_prepared, not_downloaded, problem, unfound
from torchtitan_lite.config.schema import Config, Machine, Rules
from torchtitan_lite.config.sections.log import TRACKERS


def path_rules(config: Config, machine: Machine) -> Rules:
    """Yield the broken rules of weights, tokenizers, texts, prepared folders and checkpoints."""
    data, model, tokenizer, resume = config.data, config.model, config.tokenizer, config.checkpoint.resume
    if model.init_from and not config.started_from_weights and (wrong := problem(model.init_from)):
        yield "model.init_from", f"model.init_from: {wrong}{not_downloaded(model.init_from)}"
    prepared = [path for path in data.texts if is_prepared(path)]
    if tokenizer.path and (wrong := problem(tokenizer.path)):
        yield "tokenizer.path", f"tokenizer.path: {wrong}{not_downloaded(tokenizer.path)}"
    if missing := [why for path in data.texts if (why := unfound(path))]:
        key = "data.sources" if data.sources else "data.path"
        yield key, f"{key}: {'; '.join(missing)}"
    if prepared and isinstance(data.path, list):
        yield (
            "data.path",
            f"data.path: {prepared[0]} is a prepared folder, which can't be in a list; use "
            f'path = "{prepared[0]}", or mix it with [data.sources] "{prepared[0]}" = 1.0',
        )
    if resume and (wrong := problem(resume)):
        if not config.has_checkpoint:  # after its first save, a fork no longer needs it
            yield (
                "checkpoint.resume",
                f'checkpoint.resume = "{resume}" should be the path of a run or checkpoint: {wrong}',
            )
    elif resume and expand(resume).resolve().is_relative_to(config.folder.resolve()):
        yield (
            "checkpoint.resume",
            f'checkpoint.resume = "{resume}": a run does not go back within its folder, and resumes from its newest '
            "checkpoint without this key; start a new run with --run.name=NEW, from an earlier checkpoint with "
            f"--checkpoint.resume={config.folder}/checkpoints/step-N",
        )


def package_rules(config: Config, machine: Machine) -> Rules:
    """Yield what torch, torchao, torch.compile and the trackers lack."""
    if config.fsdp.comm_memory != "default" and (
        machine.n_gpus == 0
        or config.run.device == "cpu"
        or (config.fsdp.comm_memory == "symmetric" and [*map(int, version("torch").split(".")[:2])] < [2, 12])
    ):
        yield (
            "fsdp.comm_memory run.device",
            f'fsdp.comm_memory = "{config.fsdp.comm_memory}" needs GPUs ("symmetric" also torch 2.12 or newer); '
            'fsdp.comm_memory = "default" works',
        )
    if config.speed.float8 and importlib.util.find_spec("torchao") is None:
        yield (
            "speed.float8",
            'speed.float8 = true needs torchao, which is not installed; run pip install -e ".[float8]", or set '
            "speed.float8 = false",
        )
    uses_inductor = config.compile.enabled and config.compile.backend == "inductor"
    if uses_inductor and (lacking := missing_for_inductor(config.run.device, machine.n_gpus)):
        yield (
            "compile.enabled compile.backend run.device",
            f"compile.enabled = true needs {lacking}, not found here; install that, or set compile.enabled = false",
        )
    for name in config.log.trackers:
        package = TRACKERS[name].package
        if package and importlib.util.find_spec(package) is None:
            yield (
                f"log.trackers {name}",
                f'log.trackers = ["{name}"]: {package} is not installed; run pip install -e ".[{package}]"',
            )


def missing_for_inductor(device: str, n_gpus: int) -> str:
    """Return what torch.compile's inductor backend lacks on this machine; empty if nothing."""
    if device != "cpu" and n_gpus:
        return "" if importlib.util.find_spec("triton") else "the package triton"
    named = os.environ.get("CXX", "")
    if not shutil.which(named or "g++"):  # what torch looks for
        return f"the C++ compiler {named} (of $CXX)" if named else "the C++ compiler g++ (or $CXX)"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else f"Python's headers ({headers}; python3-dev or similar)"
