"""Builds device.cpp once for each version of torch, next to the environment, and loads it. Does not import torch."""

import ctypes
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).with_name("device.cpp")


def unavailable() -> str:
    """Why the device can't be had here, or "" if it can."""
    if not sys.platform.startswith("linux"):
        return "the stand-in for a CUDA device is built on Linux only"
    if not re.search(r"^cuda\b.*= None$", (_torch() / "version.py").read_text(), re.MULTILINE):
        return "this torch was built with CUDA: tests/gpu/test_cuda.py tests the real device"
    if not _compiler():
        return "there is no g++, which builds the stand-in for a CUDA device (apt-get install g++)"
    return ""


def build() -> Path:
    """The library; built on the first call, which takes about ten seconds."""
    folder = _cache()
    key = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    library = folder / f"device-{key}.so"
    with FileLock(folder / "lock"):
        if not library.is_file():
            include = _torch() / "include"
            unfinished = library.with_suffix(f".{os.getpid()}")
            command = [_compiler(), "-std=c++20", "-O0", "-fPIC", "-shared", "-Wfatal-errors"]
            command += [f"-I{include}", f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(unfinished)]
            command += [f"-L{_torch()}/lib", "-lc10", "-ltorch_cpu"]
            subprocess.run(command, check=True)
            unfinished.rename(library)
    return library


def load() -> None:
    """Load the library into this process, which must not have imported torch: importing it looks for devices."""
    assert "torch" not in sys.modules
    ctypes.CDLL(str(_torch() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(build()))


def _compiler() -> str:
    return shutil.which(os.environ.get("CXX", "g++")) or ""


def _torch() -> Path:
    return Path(str(importlib.metadata.distribution("torch").locate_file("torch")))


def _cache() -> Path:
    """A folder that all processes share, and that later runs find."""
    folder = Path(sys.prefix) / "fake_cuda"
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"fake_cuda-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder
