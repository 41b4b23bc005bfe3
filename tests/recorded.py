"""Texts and numbers that are recorded in a file: `RECORD=1 pytest FILE` writes what was found; read the differences.

They show what no single test looks at: that a change alters only what it means to.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\d)")


def assert_recorded(found: Mapping[str, Any], file: Path, rel: float = 1e-4) -> None:
    """Compare a mapping of names to JSON values, texts by line, with the file's.

    Args:
        rel: tolerance of a float, and of a number with decimals in a text; all else has to be equal.
    """
    found = json.loads(json.dumps(by_line(found)))
    if os.environ.get("RECORD"):
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    expected = json.loads(file.read_text(encoding="utf-8"))
    if different := list(differences(expected, found, "", rel)):
        pytest.fail("\n".join([f"{file.name} (RECORD=1 writes it anew):", *different[:40]]))


def by_line(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: by_line(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(by_line, value)]
    return value.splitlines() if isinstance(value, str) and "\n" in value else value


def differences(expected: Any, found: Any, name: str, rel: float) -> list[str]:
    """What differs, with its name."""
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            lost, new = (
                [item for item in one if item not in other] for one, other in ((expected, found), (found, expected))
            )
            return [f"{name}: {len(found)}, not {len(expected)}", *(f"- {x}" for x in lost), *(f"+ {x}" for x in new)]
        expected, found = dict(enumerate(expected)), dict(enumerate(found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            line
            for key in dict.fromkeys([*expected, *found])
            for line in differences(expected.get(key, "missing"), found.get(key, "missing"), f"{name}.{key}", rel)
        ]
    return [] if equal(expected, found, rel) else [f"{name}:", f"- {expected}", f"+ {found}"]


def equal(expected: Any, found: Any, rel: float) -> bool:
    """Equal, but for the last digits of numbers with decimals."""
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=rel, abs_tol=1e-6)
    if not (isinstance(expected, str) and isinstance(found, str)):
        return [type(expected), expected] == [type(found), found]
    if NUMBER.sub("#", expected) != NUMBER.sub("#", found):
        return False
    return all(close(*pair, rel) for pair in zip(NUMBER.findall(expected), NUMBER.findall(found), strict=True))


def close(expected: str, found: str, rel: float) -> bool:
    if "." not in expected + found:
        return expected == found
    digits = max(len(text.partition(".")[2].partition("e")[0]) for text in (expected, found))
    one, other = (float(text.replace(",", "")) for text in (expected, found))
    return math.isclose(one, other, rel_tol=rel, abs_tol=1.01 * 10.0**-digits if "e" not in expected else 0.0)
