"""Shared by all tests: a small text, a cache of its own, and one tiny model."""

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forkserver
from tests.forkserver import ADDRESS, Server

os.environ["HF_HUB_OFFLINE"] = "1"
# several workers share the cores: threads of one would only wait for those of others. Before torch is imported
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# some containers set it; then each process compiles the package again, and each worker the tests
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# nohup, and shells that start it in the background, leave signals ignored, which the runs that it starts would inherit
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Caches of this test run only; with several workers (-n), one server that forks them and their ranks."""
    if hasattr(config, "workerinput"):
        return  # they have the environment of the one that starts them
    # what names a path may have too little room for it: each test run has paths of a length of its own
    made = vars(config)["_tmp_path_factory"]
    made._basetemp = made.getbasetemp() / ("t" * (1 + int(time.time()) % 64))
    made._basetemp.mkdir()
    caches = tempfile.TemporaryDirectory()
    config.add_cleanup(caches.cleanup)
    # by default in folders named after $HOME and $USER, which may be read-only, or missing
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches.name}/inductor", "HF_HOME": f"{caches.name}/huggingface"}
    if getattr(config.option, "tx", None):  # the workers of -n
        server = Server()
        os.environ[ADDRESS] = server.address
        config.add_cleanup(server.close)
        fork = f"popen//python={shlex.quote(sys.executable)} {shlex.quote(forkserver.__file__)}"
        config.option.tx = [fork if spec == "popen" else spec for spec in config.option.tx]


# those that take longest, which are begun first: whoever is done early then has something short to do
LONGEST = (
    *("remote", "recorded_plans", "distributed", "knob_effects", "knobs", "key_effects", "faults", "resume"),
    *("recorded_commands", "float8", "fake_cuda", "watchdog", "average", "replay", "ways", "evaluate", "spikes"),
    *("plan", "cluster", "readme", "imports", "lm_eval", "hostile_input"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that no other run has written to."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def _handlers_restored() -> Iterator[None]:
    """A handler that a test leaves behind changes what signals do in later tests of the same worker."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


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


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with checkpoints at 2 and 4, on one rank. Tests only read it, or change a copy."""
    from tests.helpers import run_of

    return run_of(1, text, tmp_path_factory.mktemp("finished"), train__steps=4, checkpoint__every=2)


@pytest.fixture(scope="session")
def sharded(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sharded on two ranks, with tied embeddings."""
    from tests.helpers import run_of

    return run_of(
        2,
        text,
        tmp_path_factory.mktemp("sharded"),
        train__steps=4,
        checkpoint__every=2,
        checkpoint__state_dict="sharded",
        model__tie_embeddings=True,
    )
