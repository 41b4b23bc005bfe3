"""The structure of the package: rooms, and the directions of imports."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.weight import n_lines, recipe
from tests.helpers import ROOT

PACKAGE = ROOT / "torchtitan_lite"
# Each room imports only from rooms above it, and from itself. Rooms on one line do not import from each other.
ROOMS = [
    ["terminal", "files"],
    ["errors"],
    ["hints", "environment", "progress", "commands"],
    ["bucket"],
    ["config"],
    ["models"],
    ["data", "distributed"],
    ["cpu"],
    ["optim"],
    ["checkpointing"],
    ["huggingface"],
    ["scoring"],
    ["run"],
    ["tools"],
    ["api"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
# `python -m torchtitan_lite.NAME`: two lines each, which stand for a module of tools/
COMMANDS = {"generate", "evaluate", "report", "plan", "migrate", "which", "status"}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
EXEMPT = {"torchtitan_lite", *(f"torchtitan_lite.{name}" for name in COMMANDS)}
CHECKED = {name: path for name, path in MODULES.items() if name not in EXEMPT}


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, also inside functions, and for annotations only."""
    ours = MODULES.keys() | {"train", "checkpoint"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found = (name if name in ours else name.rpartition(".")[0] for name in names)
        yield from (name for name in found if name in ours)


@pytest.mark.parametrize("name", CHECKED)
def test_a_module_imports_only_from_rooms_before_its_own(name: str) -> None:
    room = name.split(".")[1]
    for module in imports(CHECKED[name]):
        if module == "torchtitan_lite":
            continue  # the version
        ours, _, rest = module.partition(".")
        assert ours == "torchtitan_lite", f"{name} imports the front door {module}"
        other = rest.split(".")[0]
        assert other in LEVEL, f"{name} imports {module}, which is in no room"
        assert other == room or LEVEL[other] < LEVEL[room], f"{name} imports {module}: {room} comes before {other}"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Not for annotations either."""
    graph = {name: {*imports(path)} - {"torchtitan_lite"} for name, path in CHECKED.items()}
    graphlib.TopologicalSorter(graph).prepare()  # an error names the circle


def test_models_do_not_use_torch_distributed() -> None:
    for path in (PACKAGE / "models").rglob("*.py"):
        assert not re.search(r"\btorch(\.| import .*\b)distributed\b", path.read_text(encoding="utf-8")), path


def test_the_readme_names_the_recipe_and_its_sum() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    of_step, of_save = recipe(ROOT)
    assert {"train.py", "loader.py", "fsdp.py", "attention.py", "muon.py"} <= {Path(file).name for file in of_step}
    assert {"checkpoint.py", "save.py"} <= {Path(file).name for file in of_save}
    said = re.findall(r"about ([\d,]+) lines", readme)
    for number, files in zip(said, (of_step, of_save), strict=True):
        total = n_lines(ROOT, files)
        assert abs(int(number.replace(",", "")) - total) <= 50, f"README.md says {number}, the files have {total} lines"
