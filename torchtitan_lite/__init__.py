"""torchtitan_lite: pretraining Transformers with PyTorch FSDP2, from a laptop to a cluster.

`import torchtitan_lite as ttl` gives the API for notebooks and your own training loops: docs/notebook.md.
"""

import contextlib
import importlib
import os
import sys
import time

__version__ = "1.0.0"
LAUNCHED = time.time()  # of this process, in seconds since the epoch

_TRAINING = ("load_config", "open_data", "build_model", "build_optimizer", "clip_grad_norm", "set_learning_rate")
__all__ = (*_TRAINING, "load_model", "generate", "evaluate", "UserError")  # types: __init__.pyi


def __getattr__(name: str) -> object:
    """Return a name of the API, imported on first use, because it needs torch."""
    if name in __all__:
        return getattr(importlib.import_module("torchtitan_lite.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]


def _spin_briefly_on_a_busy_machine() -> None:
    """Make OpenMP's threads spin only briefly if other processes use this machine.

    Spinning is the fastest way to wait on idle cores, but 3 to 10 times slower on busy ones (docs/traps.md). OpenMP
    reads the variable when torch loads it, so this runs first.
    """
    if "torch" in sys.modules or not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}.isdisjoint(os.environ):
        return
    running = []
    with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux
        for _ in range(5):
            with open("/proc/stat") as file:
                running.append(int(file.read().split("procs_running")[1].split()[0]))
            time.sleep(0.005)
        ours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's ranks start at the same time
        if 2 * (sum(running) / len(running) - ours) >= (os.cpu_count() or 1):
            os.environ["GOMP_SPINCOUNT"] = "1000"


_spin_briefly_on_a_busy_machine()
