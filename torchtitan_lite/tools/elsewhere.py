"""A run in a temporary folder, for `--dry-run` and `--replay`."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import StuckError
from torchtitan_lite.run import run_folder


@contextlib.contextmanager
def elsewhere(config: Config, **changes: dict[str, Any]) -> Iterator[Config]:
    """The run with other values by section. The folder is kept only if a rank hangs: it then holds the stacks."""
    folder = tempfile.mkdtemp(prefix="torchtitan-lite-")
    changes = {"run": {"out_dir": folder}, **changes}
    there = config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in changes.items()}
    )
    try:
        run_folder.make(there.folder)
        yield there
    finally:
        if not isinstance(sys.exception(), StuckError):
            shutil.rmtree(folder, ignore_errors=True)
