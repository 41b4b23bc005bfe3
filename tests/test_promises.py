"""PROMISES.md names a test that exists for each promise."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
WITHOUT = "## Promises without a test"


def test_each_promise_has_a_test_that_exists() -> None:
    table, without = (TESTS / "PROMISES.md").read_text().split(WITHOUT)
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    rows = [row for row in lines if row[0] != "Promise" and set(row[0]) != set("-|")]
    wrong: list[str] = []
    for promise, *held_by in rows:
        named = re.findall(r"`(\S+?)::(\w+)`", " ".join(held_by))
        if not 1 <= len(named) <= 2:
            wrong.append(f"{len(named)} tests, not one or two: {promise}")
        wrong += [f"no {file}::{name}: {promise}" for file, name in named if name not in _functions(TESTS / file)]
    assert not wrong, "\n".join(wrong)
    assert len(rows) > 150
    assert len(without.splitlines()) < 20, "write a test, rather than a long list of promises without one"


@cache
def _functions(file: Path) -> set[str]:
    """The tests of a file, and the cases that a test of the same folder runs on several ranks."""
    if not file.exists():
        return set()
    return {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("test_", "case_"))
    }
