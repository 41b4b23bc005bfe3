"""Compares the tables of docs/fsdp.md with torch and the code."""

import dataclasses
import inspect
import re

import torch
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, wrap

from tests.distributed.knob_table import CASES
from tests.helpers import ROOT
from torchtitan_lite.config import schema

TEXT = (ROOT / "docs/fsdp.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line.startswith("|")]


def public_options() -> set[str]:
    """FSDP2's public names, the arguments of `fully_shard` and of its policies, and the methods of FSDPModule."""
    names = {name for name in fsdp.__all__ if getattr(fsdp, name).__module__ == fsdp.__name__}  # the others are FSDP1's
    of = ["fully_shard", *(name for name in names if name.endswith("Policy"))]
    arguments = {f"{name}({argument})" for name in of for argument in inspect.signature(getattr(fsdp, name)).parameters}
    methods = {name for name in dir(FSDPModule) if not name.startswith("_")}
    return names | arguments - {"fully_shard(module)"} | methods


def test_every_public_option_is_offered_or_explained() -> None:
    table = TEXT.split("## Every public option")[1]
    rows = re.findall(r"^\| (`[\w()]+`(?:, `[\w()]+`)*) \| (.+) \|$", table, re.M)
    listed = {name: what for names, what in rows for name in re.findall(r"`([\w()]+)`", names)}
    installed = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    since = {name: (2, int((re.findall(r"since torch 2\.(\d+)\)$", what) or [0])[0])) for name, what in listed.items()}
    assert public_options() == {name for name in listed if since[name] <= installed}
    keys = {key.removeprefix("fsdp.") for key in schema.known_keys() if key.startswith("fsdp.")}
    for name, what in listed.items():
        offered = re.match(r"used|not needed|not offered|not used|`MixedPrecisionPolicy`, below", what)
        assert offered or set(re.findall(r"^`([a-z_]+)", what)) & keys, f"{name}: {what}"


def test_every_key_is_explained() -> None:
    sections = "fsdp.", "activation_checkpointing.", "compile.", "grad_scaler.", "speed."
    keys = [key for key in schema.known_keys() if key.startswith(sections)] + ["optim.freeze", "optim.name"]
    assert {key for row in ROWS for key in re.findall(r"`([a-z_]+\.[a-z_0-9]+)`", row[0])} == set(keys)
    for row in ROWS:
        if re.match(r"`[a-z_]+\.[a-z_0-9]+`", row[0]):
            assert len(row) == 3, row[0]
            assert all(row), row[0]


def test_what_is_called_used_is_used_outside_of_the_tests() -> None:
    files = [*(ROOT / "torchtitan_lite").rglob("*.py"), ROOT / "train.py", ROOT / "checkpoint.py"]
    code = "\n".join(file.read_text() for file in files)
    pairs = [row for row in ROWS if len(row) == 2]
    methods = {
        name: what for names, what in pairs for name in re.findall(r"`(\w+)`", names) if hasattr(FSDPModule, name)
    }
    assert len(methods) > 15
    for method, what in methods.items():
        assert bool(re.search(rf"\.{method}\(", code)) != what.startswith(("not ", "in the tests")), f"{method}: {what}"


def test_every_argument_and_policy_of_fsdp1_has_a_row() -> None:
    table = TEXT.split("## From FSDP1")[1].split("## Every public option")[0]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^\| (.+?) \| ", table, re.M))))
    arguments = inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters.keys()
    same = {"self", "module", "sharding_strategy", "cpu_offload", "backward_prefetch", "mixed_precision"}
    wanted = (arguments - same) | {"CPUOffload", "MixedPrecision", "FullStateDictConfig", "T5Block"}
    for kinds in (fsdp.ShardingStrategy, fsdp.BackwardPrefetch, fsdp.StateDictType):
        wanted |= {kind.name for kind in kinds}
    wanted |= {name for name in vars(wrap) if name.endswith(("_policy", "Policy")) and not name.startswith("_")}
    wanted |= {field.name for field in dataclasses.fields(fsdp.MixedPrecision) if not field.name.startswith("_")}
    assert not wanted - named


def unknown_tests(cells: list[str]) -> list[str]:
    """What these cells name as `file.py::test` and is neither a function of that file nor a row of knob_table.py."""
    named = {pair for cell in cells for pair in re.findall(r"`(\w+\.py)::([^`]+)`", cell)}
    unknown = []
    for file, name in sorted(named):
        (path,) = (ROOT / "tests").rglob(file)
        if not (name in CASES if file == "knob_table.py" else f"def {name}(" in path.read_text()):
            unknown.append(f"{file}::{name}")
    return unknown


def test_every_common_mistake_has_a_thread_and_a_test() -> None:
    table = TEXT.split("## Common mistakes")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        assert len(row) == 3, row
        for number, link in re.findall(r"\[[\w-]+ #(\d+)\]\((.+?)\)", row[1]):
            assert re.fullmatch(rf"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/{number}", link), row
        assert "github.com" in row[1], row
        assert "::" in row[2], row
    assert not unknown_tests([row[2] for row in rows])
