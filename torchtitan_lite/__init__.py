"""torchtitan_lite: pretraining of Transformers with PyTorch FSDP2, from a laptop to a cluster.

`import torchtitan_lite as ttl` gives the API for notebooks and training loops of your own: docs/notebook.md.
"""

import importlib

__version__ = "0.4.0"

_TRAINING = ("load_config", "open_data", "build_model", "build_optimizer", "clip_grad_norm", "set_learning_rate")
__all__ = (*_TRAINING, "load_model", "generate", "evaluate", "UserError")  # types: __init__.pyi


def __getattr__(name: str) -> object:
    """A name of the API, imported when it is first used: it needs torch."""
    if name in __all__:
        return getattr(importlib.import_module("torchtitan_lite.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
