"""The tests of what has changed, for `make test-fast`: prints files of tests/.

These are changed ones, those of a changed module's room (tests/ mirrors the package), and those that import a changed
module; of the slowest (`LONGEST` in conftest.py) only that of the module's name, unless there are no others. Changes
are those of `git status` or, without any, those of the newest commit.
"""

import ast
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import LONGEST
from tests.helpers import ROOT


def changed() -> list[str]:
    """Changed files, relative to the repository."""
    found = ""
    for words in (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"]):
        found += subprocess.check_output(["git", *words], cwd=ROOT, text=True)
    last = ["git", "diff", "--name-only", "HEAD~1", "HEAD"]
    return (found or subprocess.check_output(last, cwd=ROOT, text=True)).split()


def imported(path: Path) -> set[str]:
    """The modules that a file imports, and the names that it imports from them, with dots."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def chosen(names: Sequence[str]) -> list[str]:
    """The files of tests/ for changes of these files."""
    paths = [Path(name) for name in names]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}
    rooms = {path.parts[1] for path in paths if len(path.parts) > 2}
    same = {f"test_{path.stem}.py" for path in paths}
    slow = {f"test_{name}.py" for name in LONGEST}
    touched = [
        path
        for path in (file.relative_to(ROOT) for file in sorted((ROOT / "tests").rglob("test_*.py")))
        if str(path) in names or path.name in same or path.parts[1] in rooms or modules & imported(ROOT / path)
    ]
    quick = [path for path in touched if str(path) in names or path.name in same or path.name not in slow]
    return [str(path) for path in quick or touched]


if __name__ == "__main__":
    print(*chosen(changed()) or ["tests/test_architecture.py"])
