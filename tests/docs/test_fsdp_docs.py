"""Compares the tables of docs/fsdp.md with torch and the code."""

import dataclasses
import inspect
import re

from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, wrap

from tests.distributed.knob_table import CASES
from tests.helpers import ROOT
from torchtitan_lite.config import schema
from torchtitan_lite.config.sections.fsdp import STRATEGIES

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
    keys = [key for key in schema.known_keys() if key.startswith(sections)] + ["optim.freeze", "optim.name"]
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


def test_every_argument_and_policy_of_fsdp1_has_a_row() -> None:
    table = TEXT.split("## From FSDP1")[1].split("## Every public method")[0]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^\| (.+?) \| ", table, re.M))))
    arguments = inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters.keys()
    same = {"self", "module", "sharding_strategy", "cpu_offload", "backward_prefetch", "mixed_precision"}
    wanted = (arguments - same) | {"CPUOffload", "MixedPrecision", "FullStateDictConfig", "T5Block"}
    for kinds in (fsdp.ShardingStrategy, fsdp.BackwardPrefetch, fsdp.StateDictType):
        wanted |= {kind.name for kind in kinds}
    wanted |= {name for name in vars(wrap) if name.endswith(("_policy", "Policy")) and not name.startswith("_")}
    wanted |= {field.name for field in dataclasses.fields(fsdp.MixedPrecision) if not field.name.startswith("_")}
    assert not wanted - named


def test_every_test_that_stands_for_one_of_torch_exists() -> None:
    text = (ROOT / "docs/torch_tests.md").read_text()
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert all(len(row) == 2 for row in rows)
    named = {pair for row in rows for pair in re.findall(r"`(\w+\.py)::([^`]+)`", row[1])}
    assert len(named) > 30
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(file)
        known = name in CASES if file == "knob_table.py" else f"def {name}(" in path.read_text()
        assert known, f"{file}::{name}"
    for row in rows[1:]:  # each is answered in one of the three ways
        assert row[0].strip().startswith("**") or re.search(r"`\w+\.py::|GPU only|not ours|newer than", row[1]), row
