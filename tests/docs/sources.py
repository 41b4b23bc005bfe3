"""A copy of the sources, for the pages that change them."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.forkserver import Server
from tests.helpers import HANGS_S, ROOT, succeeded


def apply(diff: str, folder: Path) -> None:
    """Apply a diff to the sources in a folder, unless a reader has done so."""
    undo = subprocess.run(["git", "apply", "--reverse", "--check", "-"], cwd=folder, input=diff, text=True)
    if undo.returncode:
        subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)


class Copy:
    """A copy with the new files and the diffs of a page, read by `git apply`, and a server that runs it."""

    def __init__(self, folder: Path, files: dict[str, str], diffs: list[str]) -> None:
        folder.mkdir()
        for name in ("train.py", "checkpoint.py"):
            shutil.copyfile(ROOT / name, folder / name)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "torchtitan_lite", folder / "torchtitan_lite", ignore=ignored)
        for name, code in files.items():
            (folder / name).write_text(code)
        for diff in diffs:
            apply(diff, folder)
        self.server = Server(root=folder)

    def run(self, n: int, entry: str, *words: str) -> str:
        cache = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
        return succeeded(self.server.run(n, words, cache, entry, "", HANGS_S))

    def close(self) -> None:
        self.server.close()
