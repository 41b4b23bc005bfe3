"""Shared by all tests: a small text, a cache of its own, and one tiny model."""

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that no other run has written to."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three .txt files of a few hundred KiB: the source of some modules that every Python has."""
    import argparse
    import inspect
    import tarfile
    import typing

    folder = tmp_path_factory.mktemp("text")
    for module in (argparse, tarfile, typing):
        (folder / f"{module.__name__}.txt").write_text(inspect.getsource(module), encoding="utf-8")
    return folder
