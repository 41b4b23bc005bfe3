"""Compares the tables of docs/fsdp.md with torch and the code."""

import re

from torch.distributed.fsdp import FSDPModule

from tests.helpers import ROOT
from torchtitan_lite.config import schema
from torchtitan_lite.config.presets import STRATEGIES

TEXT = (ROOT / "docs/fsdp.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line.startswith("|")]


def test_every_public_method_of_fsdp_module_is_listed() -> None:
    listed = {row[0].strip("`"): row[1] for row in ROWS if re.fullmatch(r"`[a-z_]+`", row[0]) and len(row) == 2}
    listed = {name: what for name, what in listed.items() if name in TEXT.split("## Every public method")[1]}
    public = {name for name in dir(FSDPModule) if not name.startswith("_")}
    assert not public - listed.keys(), "not in the table"
    gone = listed.keys() - public
    assert all("since torch 2.1" in listed[name] for name in gone), f"not in torch: {gone}"


def test_every_key_is_explained() -> None:
    sections = "fsdp.", "activation_checkpointing.", "compile.", "grad_scaler.", "speed."
    keys = [key for key in schema.known_keys() if key.startswith(sections)] + ["optim.freeze"]
    explained = {key for row in ROWS for key in re.findall(r"`([a-z_]+\.[a-z_]+)`", row[0])}
    assert explained == set(keys)
    for row in ROWS:
        if re.match(r"`[a-z_]+\.[a-z_]+`", row[0]):
            assert len(row) == 3, row[0]
            assert all(row), row[0]


def test_the_table_of_strategies_is_that_of_the_code() -> None:
    found = {}
    for row in ROWS:
        if len(row) == 3 and row[0].strip("`") in STRATEGIES:
            pairs = re.findall(r"`(\w+) = (\w+)`", row[1])
            found[row[0].strip("`")] = {
                key: {"true": True, "false": False}.get(v) if v.isalpha() else int(v) for key, v in pairs
            }
    assert found == STRATEGIES


def test_what_is_called_used_is_used_outside_of_the_tests() -> None:
    files = [*(ROOT / "torchtitan_lite").rglob("*.py"), ROOT / "train.py", ROOT / "checkpoint.py"]
    code = "\n".join(file.read_text() for file in files)
    methods = {row[0].strip("`"): row[1] for row in ROWS if len(row) == 2 and row[0].strip("`") in dir(FSDPModule)}
    assert len(methods) > 15
    for method, what in methods.items():
        assert bool(re.search(rf"\.{method}\(", code)) != what.startswith(("not ", "in the tests")), f"{method}: {what}"
