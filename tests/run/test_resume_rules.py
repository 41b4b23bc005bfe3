"""Compares the table of docs/resume.md with the behaviour."""

import fnmatch
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import (
    ROOT,
    TINY,
    assert_same_end,
    forget_after,
    losses,
    options,
    ranks,
    records,
    refused,
    run_of,
    succeeded,
    tiny,
)
from torchtitan_lite.checkpointing import compatibility
from torchtitan_lite.config import load, schema
from torchtitan_lite.config.schema import Config, FsdpConfig
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.run import resumed
from torchtitan_lite.run.attempts import newest_status
from torchtitan_lite.tools import config_reference

ROWS = [
    (re.findall(r"`([^`]+)`", keys), verdict.split(",")[0].split(":")[0].strip())
    for keys, verdict in re.findall(
        r"^\| (`.+?) \| ((?:allowed|kept|refused|fork).*?) \|$", (ROOT / "docs/resume.md").read_text(), re.M
    )
]


WORLD = Process(0, 4, torch.device("cpu"), 1, local_world_size=4)


def verdict_of(key: str) -> str:
    """What the first row that matches says."""
    return next(verdict for patterns, verdict in ROWS for p in patterns if fnmatch.fnmatchcase(key, p))


def test_the_table_is_made_from_the_keys() -> None:
    page = (ROOT / "docs/resume.md").read_text()
    table = "\n".join(config_reference.resume_table())
    assert f"\n{table}\n\n" in page, "python -m torchtitan_lite.tools.config_reference resume"
    assert len(ROWS) == len(config_reference.resume_table()) - 2
    for key in schema.known_keys():
        assert verdict_of(key) == schema.resume_rule(key).rule, key


@pytest.fixture(scope="module")
def first(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps."""
    return run_of(1, text, tmp_path_factory.mktemp("rules"), train__steps=3, optim__schedule="wsd")


def setting(values: dict[str, Any]) -> dict[str, Any]:
    return compatibility.bitwise_setting(load.load(None, values, world_size=4).config, WORLD)


def test_what_changes_the_last_bits_is_part_of_the_setting() -> None:
    """The line "not bit for bit" is made of it."""
    by_gloo = {"speed.shared_memory": False}
    changes: list[dict[str, Any]] = [
        *({"fsdp.dp_shard": 1}, {"fsdp.param_dtype": "bfloat16"}, {"fsdp.reduce_dtype": "bfloat16"}),
        {"fsdp.shard_columns": ["*.wk.weight"]},
        *({"fsdp.output_dtype": "bfloat16"}, {"fsdp.cast_forward_inputs": True}, {"fsdp.grad_sync": "last"}),
        {"fsdp.precision_overrides": [{"match": "layers.0.*", "param_dtype": "bfloat16"}]},
        *({"compile.enabled": True, "compile.backend": "eager"}, {"train.micro_batch_size": 3}, by_gloo),
        *({"speed.chunked_loss": False}, {"speed.block_attention": False}, {"speed.fused_functions": False}),
    ]
    for change in changes:
        assert resumed.changed_values(setting({}), setting(change)), change
    offloaded = Config().model_copy(update={"fsdp": FsdpConfig(cpu_offload=True)})  # a rule wants a GPU for it
    assert compatibility.bitwise_setting(offloaded, WORLD)["cpu_offload"]
    by_the_machine = {
        "fsdp.cpu_offload",
        "run.device",
        "run.threads",
        "run.deterministic",
        "run.tf32",
        "speed.widen_matmuls",
        "speed.float8",
    }
    # what is computed again is compiled into the backward pass: bfloat16 was rounded elsewhere with "selective"
    compiled = {"compile.enabled": True, "compile.backend": "eager"}
    recomputed = {"activation_checkpointing.mode": "full", "activation_checkpointing.every": 1}
    assert resumed.changed_values(setting(compiled), setting(compiled | recomputed))
    changed = {key for change in (*changes, recomputed) for key in change} - {"fsdp.dp_shard"}
    assert schema.bitwise_keys().keys() == {*changed, "fsdp.blocks_per_group", "fsdp.dp_replicate", *by_the_machine}
    same = {"fsdp.reshard_after_forward": False, "activation_checkpointing.mode": "full", "run.name": "x"}
    assert not resumed.changed_values(setting({}), setting(same | {"speed.gc_every": 0}))


def test_the_whole_setting_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and on a GPU, which has none of the fast paths, and may sum in any order."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    config = load.load(None, {"run.tf32": True, "run.threads": 3, "fsdp.blocks_per_group": 2}, world_size=4).config
    on_cpu, on_gpu = (
        compatibility.bitwise_setting(config, Process(1, 4, torch.device(device), 2, local_world_size=4))
        for device in ("cpu", "cuda")
    )
    cpu = re.search(r"^model name\s+: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    assert on_cpu == {
        **{"world_size": 4, "device": "cpu", "cpu": cpu[1] if cpu else "", "threads": 2, "torch": torch.__version__},
        **{"instructions": torch.backends.cpu.get_cpu_capability(), "tf32": False, "deterministic": True},
        **{"micro_batch_size": 4, "dp_replicate": 1, "shard_columns": [], "blocks_per_group": 1, "grad_sync": "every"},
        **{"param_dtype": "float32", "reduce_dtype": "float32", "output_dtype": "", "cast_forward_inputs": False},
        **{"precision_overrides": [], "cpu_offload": False, "activation_checkpointing": "any", "compile": "off"},
        **{"chunked_loss": True, "block_attention": True, "fused_functions": True, "widen_matmuls": False},
        **{"shared_memory": True, "shared_memory_copies": False, "float8": False},
    }
    assert on_gpu == on_cpu | {
        **{"device": "Some GPU", "cpu": "", "instructions": "", "tf32": True, "deterministic": False},
        **{"blocks_per_group": 2, "block_attention": False, "fused_functions": False, "shared_memory": False},
    }


# --- keys that are not given --------------------------------------------------------------------------------------


def test_a_run_keeps_its_values_of_keys_that_are_not_given(text: Path, tmp_path: Path) -> None:
    """Today's defaults are others, and one rank that took them would be refused."""
    own = {"optim.betas": "[0.8, 0.9]", "train.steps": 4, "data.document_mask": "true", "data.val_fraction": 0.1}
    command = TINY | {"data.path": text, "run.out_dir": tmp_path, "checkpoint.every": 2} | own
    succeeded(ranks(2, *options(command), "--run.name=straight"))
    forget_after(shutil.copytree(tmp_path / "straight", tmp_path / "run"), 2)
    given = {key: value for key, value in command.items() if not schema.keeps_value(key)} | {"run.name": "run"}
    assert own.keys().isdisjoint(given)

    asked = refused(ranks(1, *options(given | {"optim.lr": 1e-3})))  # a key that is given
    assert [line for line in asked.splitlines() if " in the checkpoint" in line] == [
        "  optim.lr is 0.004 in the checkpoint and 0.001 here"
    ]

    output = succeeded(ranks(2, *options(given)))
    (line,) = (line for line in output.splitlines() if line.startswith("resume "))
    for expected in ("optim.betas = [0.8, 0.9]", "model.dim = 32", "train.steps = 4", "tokenizer.vocab_size = 517"):
        assert expected in line
    assert "muon" not in line, "adamw does not read its keys"
    assert "changed since then: run.name straight -> run\n" in output
    assert_same_end(tmp_path / "run", tmp_path / "straight", 4)
    assert (
        "betas = [0.8, 0.9]                           # the run so far\n" in (tmp_path / "run/config.toml").read_text()
    )


FORK: dict[str, Any] = {
    **{"optim.lr": 1e-3, "optim.weight_decay": 0.0, "optim.schedule": "constant", "train.global_batch_size": 9},
    **{"optim.groups": '[{match = "*norm*", lr_factor = 0.5}]', "run.seed": 3, "train.seq_len": 16},
    **{"data.document_mask": "true", "model.norm_eps": 1e-6},
}
ALLOWED: dict[str, Any] = {
    **{"train.steps": 5, "train.micro_batch_size": 3, "eval.every": 1, "checkpoint.every": 1},
    **{"checkpoint.api": "dcp", "fsdp.param_dtype": "bfloat16", "activation_checkpointing.mode": "full"},
    "run.threads": 2,
}


def test_values_that_mean_the_same_are_the_same(first: Path, text: Path, tmp_path: Path) -> None:
    """0 stands for a number. What the run started from may be gone."""
    gone = shutil.copytree(first, tmp_path / "gone")
    more = {"run__name": "run", "model__init_from": gone, "optim__schedule": "wsd"}
    succeeded(ranks(1, *tiny(text, tmp_path, **more, train__steps=3)))
    shutil.rmtree(gone)
    output = succeeded(ranks(1, *tiny(text, tmp_path, **more, train__steps=4, model__vocab_size=517)))
    assert "resumed after step 3" in output
    assert "init_from" not in output.split("\ndone ")[0]


def test_allowed_changes_are_logged_and_a_fork_may_change_the_rest(first: Path, text: Path, tmp_path: Path) -> None:
    assert all(verdict_of(key) in ("allowed", "kept") for key in ALLOWED)
    assert all(verdict_of(key) == "fork" for key in FORK)
    shutil.copytree(first, tmp_path / "run")
    more = {key.replace(".", "__"): value for key, value in (ALLOWED | FORK).items()}
    refused(ranks(1, *tiny(text, tmp_path, run__name="run", **more)), *(f"{key} is " for key in FORK))
    fork = {"run__name": "fork", "checkpoint__resume": tmp_path / "run"}
    output = succeeded(ranks(1, *tiny(text, tmp_path, **fork, **more)))
    said = next(line for line in output.splitlines() if "changed since then" in line)
    for key in ALLOWED | FORK:
        assert f"{key} " in said
    assert "optim.lr 0.004 -> 0.001" in said
    assert "train.global_batch_size 6 -> 9" in said
    after = [r for r in records(tmp_path / "fork") if r["step"] > 3 and "lr" in r]
    assert [r["lr"] for r in after] == [1e-3, 1e-3]
    assert [r["tokens"] for r in after] == [3 * 6 * 32 + 9 * 16, 3 * 6 * 32 + 18 * 16]


def test_a_longer_run_follows_the_longer_schedule(first: Path, text: Path, tmp_path: Path) -> None:
    """Before it decays, it takes the steps of a fork whose rate is constant."""
    shutil.copytree(first, tmp_path / "run")
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="run", train__steps=12, optim__schedule="wsd")))
    rates = {r["step"]: r["lr"] for r in records(tmp_path / "run") if "lr" in r}
    assert rates[3] == pytest.approx(0.1 * 4e-3)  # the end of the short one
    assert rates[4] == rates[9] == 4e-3  # back at its height
    assert rates[12] == pytest.approx(0.1 * 4e-3)
    constant = {"checkpoint__resume": first, "train__steps": 9, "optim__schedule": "constant"}
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="fork", **constant)))
    long, fork = losses(tmp_path / "run"), losses(tmp_path / "fork")
    assert {step: long[step] for step in range(4, 10)} == fork


def test_the_original_command_drops_the_steps_of_a_longer_run_that_was_killed(
    first: Path, text: Path, tmp_path: Path
) -> None:
    """The longer run has not saved. The model is that of the shorter one, so its folder describes that one."""
    shutil.copytree(first, tmp_path / "run")
    command = tiny(text, tmp_path, run__name="run", optim__schedule="wsd", checkpoint__every=0)
    before = losses(tmp_path / "run")
    assert ranks(1, *command, "--train.steps=9", fault="kill:0:6").returncode
    assert losses(tmp_path / "run").keys() > before.keys()
    assert "finished: step 3 of train.steps = 3" in succeeded(ranks(1, *command, "--train.steps=3"))
    assert losses(tmp_path / "run") == before
    status = newest_status(tmp_path / "run")
    assert (status["status"], status["step"]) == ("complete", 3)
