"""The last lines of a run are commands that work, with its own options, launcher and text; other lines of its log."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import train
from tests.helpers import ranks, run_python, succeeded, tiny
from torchtitan_lite.config.derive import Layout
from torchtitan_lite.config.schema import Config, DataConfig, OptimConfig, SampleConfig
from torchtitan_lite.monitoring import console
from torchtitan_lite.terminal import counted
from torchtitan_lite.tools import checkpoints


def test_the_closing_block_repeats_the_command(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its "train longer" trained another run: without the file, the text and the name."""
    (tmp_path / "mine.toml").write_text("[optim]\nlr = 1e-3\n")
    options = tiny(text, tmp_path, run__name="mine", train__steps=2, optim__warmup_steps=1, run__threads=0)
    more = ["--config", str(tmp_path / "mine.toml"), *options, "--checkpoint.resume", ""]
    output = succeeded(ranks(1, *more))
    (line,) = re.findall(r"train longer: +(.*)", output)
    words = shlex.split(line, comments=True)  # as a shell reads it
    assert words[1] == "train.py"
    kept = [word for word in more if not word.startswith("--train.steps")][:-2]
    assert words[2:] == [*kept, "--train.steps=4"]
    assert "resumed after step 2" in succeeded(run_python(words[1:]))
    # one is singular
    assert checkpoints.main(["inspect", str(tmp_path / "mine")]) == 0
    assert "saved by 1 rank;" in capsys.readouterr().out
    assert "1 thread per rank (OMP_NUM_THREADS)" in output
    assert " x 1 rank x " in output
    assert not re.findall(
        r"(?<![\d,.])1 (?:ranks|threads|files|steps|groups|layers|heads|documents|sequences)\b", output
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--train.steps=5", "--run.name=a"], ["--run.name=a"]),
        (["--train.steps", "5", "--run.name", "a"], ["--run.name", "a"]),
        (["--resume-with-changes", "--optim.lr=1"], ["--optim.lr=1"]),
        (["--checkpoint.resume=runs/other", "--config", "x.toml"], ["--config", "x.toml"]),
        ([], []),
    ],
)
def test_what_is_for_one_time_is_not_repeated(argv: list[str], expected: list[str]) -> None:
    assert console.lasting_options(argv, "--train.steps") == expected


def test_the_closing_block_fits_the_launcher_and_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    own_text = DataConfig(path="my_text")

    def said(config: Config, world: str = "", local: str = "") -> str:
        for name, value in (("RANK", "0" * bool(world)), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local or world)):
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        return console.what_next(config, 10).replace(".venv/bin/", "")

    kept = ["--config", "configs/t5.toml", '--sample.prompts=["a $b"]']
    monkeypatch.setattr(sys, "argv", ["train.py", *kept, "--run.name=old", "--train.steps=10"])
    quoted = "torchrun --nproc-per-node 4 train.py --config configs/t5.toml '--sample.prompts=[\"a $b\"]'"
    config = Config(sample=SampleConfig(prompts=["a $b"]))
    shipped = said(config, "4")
    assert f"on your own text: {quoted} --train.steps=10 --run.name=NAME --data.path=FOLDER_OF_TXT_FILES" in shipped
    assert "--prompt 'a $b'" in shipped
    own = said(config.model_copy(update={"data": own_text}), "4")
    assert "your own text" not in own
    assert f"{quoted} --run.name=old --train.steps=20  # the learning" in own
    assert len(shipped.splitlines()) == len(own.splitlines()) == 4, "the folder, and three commands"
    assert "... train.py" in said(config, "4", "2"), "the launcher of two machines is not known"
    assert "torchrun" not in said(Config())
    monkeypatch.setattr(sys, "executable", "/opt/an env/bin/python3")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "'/opt/an env/bin/python3' -m torchtitan_lite.report" in said(config), "not activated"
    assert "'/opt/an env/bin/torchrun' --nproc-per-node 1 train.py" in said(config, "1")
    assert "--prompt 'def '" in said(Config())
    assert "--interactive" in said(Config(data=own_text))
    assert "rises again" not in said(Config(optim=OptimConfig(schedule="constant"), data=own_text))


def test_one_is_singular() -> None:
    assert [counted(n, "file") for n in (0, 1, 2, 1234)] == ["0 files", "1 file", "2 files", "1,234 files"]
    config = Config.model_validate({"fsdp": {"explicit_prefetching": True, "forward_prefetch": 1}})
    assert "prefetches 1 group in forward" in console.fsdp_line(config)


@pytest.mark.parametrize(
    ("load", "threads", "policy", "busy"),
    [(1.5, 2, "", True), (1.5, 1, "", False), (0.9, 2, "", False), (2, 2, "PASSIVE", False)],
)
def test_threads_that_spin_on_a_busy_machine_are_mentioned(
    load: float, threads: int, policy: str, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load * (os.cpu_count() or 1), 0, 0))
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert ("OMP_WAIT_POLICY=PASSIVE" in console.spinning_line(threads)) == busy


@pytest.mark.parametrize(
    ("fsdp", "layout", "named"),
    [
        ({}, Layout(1, 1, 1, 0, 0), "false would save"),
        ({}, Layout(4, 1, 2, 0, 0), 'fsdp.grad_sync = "last" (sums in another order) would'),
        ({}, Layout(1, 2, 2, 0, 0), None),
        ({"reshard_after_forward": False}, Layout(1, 1, 1, 0, 0), None),
    ],
)
def test_where_nothing_is_sharded_the_start_says_what_saves_copies(
    fsdp: dict[str, bool], layout: Layout, named: str | None
) -> None:
    lines = console.copies_lines(Config.model_validate({"fsdp": fsdp}), layout)
    assert [line for line in lines if named in line] if named else not lines, lines


def test_a_checked_config_names_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--check-config", "--run.name=mine"]) == 0
    assert "its run is in runs/mine" in capsys.readouterr().out
