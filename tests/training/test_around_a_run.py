"""What surrounds a run: the gate before it, the folder that it leaves, the block that ends it, and its tools' paths."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from tests.helpers import HANGS_S, ROOT, checkpoint, python, ranks, run_python, succeeded, tiny
from torchtitan_lite.config.schema import Config, DataConfig, OptimConfig, SampleConfig
from torchtitan_lite.monitoring import console
from torchtitan_lite.terminal import counted
from torchtitan_lite.tools import checkpoints
from torchtitan_lite.training import preemption


@pytest.fixture(scope="module")
def first(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 2 steps, with OMP_NUM_THREADS=1."""
    folder = tmp_path_factory.mktemp("around")
    more = {"run__name": "run", "run__threads": 0, "train__steps": 2, "optim__warmup_steps": 1}
    succeeded(ranks(1, *tiny(text, folder, **more)))
    return folder / "run"


# --- the gate -----------------------------------------------------------------------------------------------------


def gate(*argv: str) -> tuple[int, str]:
    """What scripts/slurm.sbatch runs first."""
    result = python("--check-config", *argv)
    return result.returncode, result.stdout + result.stderr


def test_the_gate_refuses_weights_that_are_not_there(first: Path, text: Path, tmp_path: Path) -> None:
    """Also if the run has a checkpoint already: it has never started from them."""
    shutil.copytree(first, tmp_path / "run")
    for name in ("run", "new"):
        code, output = gate(*tiny(text, tmp_path, run__name=name, model__init_from="runs/nosuch"))
        assert code == 2, output
        assert "model.init_from: nothing at runs/nosuch" in output


def test_the_gate_refuses_weights_of_another_model(first: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, output = gate(*tiny(text, tmp_path, run__name="new", model__init_from=tmp_path / "empty"))
    assert code == 2
    assert "is not a run with a checkpoint, a checkpoint or a Hugging Face folder" in output
    code, output = gate(*tiny(text, tmp_path, run__name="new", model__init_from=first, model__dim=64))
    assert code == 2
    assert "dim is 32 in the checkpoint and 64 here" in output
    code, output = gate(*tiny(text, tmp_path, run__name="new", model__init_from=first))
    assert code == 0, output


def test_weights_of_another_tokenizer_are_reported(first: Path, text: Path, tmp_path: Path) -> None:
    """`tiny` trains a tokenizer on each text: that of another text has other tokens of the same number."""
    (tmp_path / "other.txt").write_text("".join(file.read_text() for file in text.glob("*.txt"))[::-1])
    more = {"run__name": "new", "model__init_from": first, "train__steps": 3}
    other = ranks(1, *tiny(tmp_path / "other.txt", tmp_path, **more))
    file = first / "tokenizer.json"
    assert f"another tokenizer, so most tokens stand for other text here: --tokenizer.path={file}" in other.stdout
    again = succeeded(ranks(1, *tiny(tmp_path / "other.txt", tmp_path, **more | {"train__steps": 4})))
    assert "another tokenizer" not in again, "a resume does not read them"
    theirs = tiny(tmp_path / "other.txt", tmp_path, **more | {"run__name": "theirs", "tokenizer__path": file})
    kept = [option for option in theirs if not option.startswith("--tokenizer.vocab_size")]
    assert "another tokenizer" not in succeeded(ranks(1, *kept))


def test_the_gate_lets_a_run_resume_whose_source_is_gone(first: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(first, tmp_path / "run")
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace('init_from = ""', 'init_from = "runs/gone"'))
    code, output = gate(*tiny(text, tmp_path, run__name="run", model__init_from="runs/gone"))
    assert code == 0, output


# --- the folder ---------------------------------------------------------------------------------------------------


def test_refused_data_leaves_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    result = python(*tiny(tmp_path / "short.txt", tmp_path / "runs", run__name="mine"))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs/mine").exists()


def test_refused_data_keeps_a_run_that_is_there(first: Path, tmp_path: Path) -> None:
    shutil.copytree(first, tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "short.txt").write_text("too short")
    assert python(*tiny(tmp_path / "short.txt", tmp_path, run__name="run")).returncode == 2
    assert [path for path in before if not path.exists()] == []


def test_run_json_names_every_config_file(text: Path, tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[train]\nsteps = 1\n")
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n[train]\nsteps = 2\n')
    options = [o for o in tiny(text, tmp_path, optim__warmup_steps=1) if not o.startswith("--train.steps")]
    succeeded(ranks(1, "--config", str(tmp_path / "mine.toml"), *options))
    recorded = json.loads((tmp_path / "mine/run.json").read_text())
    assert recorded["config_files"] == [str(tmp_path / "mine.toml"), str(tmp_path / "base.toml")]


# --- the end ------------------------------------------------------------------------------------------------------


def test_the_closing_block_repeats_the_command(text: Path, tmp_path: Path) -> None:
    """Its "train longer" trained another run: without the file, the text and the name."""
    (tmp_path / "mine.toml").write_text("[optim]\nlr = 1e-3\n")
    options = tiny(text, tmp_path, run__name="mine", train__steps=2, optim__warmup_steps=1)
    more = ["--config", str(tmp_path / "mine.toml"), *options, "--checkpoint.resume", "never"]
    output = succeeded(ranks(1, *more))
    (line,) = re.findall(r"train longer: +(.*)", output)
    words = shlex.split(line, comments=True)  # as a shell reads it
    assert words[1] == "train.py"
    kept = [word for word in more if not word.startswith("--train.steps")][:-2]
    assert words[2:] == [*kept, "--train.steps=4"]
    assert "resumed after step 2" in succeeded(run_python(words[1:]))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--train.steps=5", "--run.name=a"], ["--run.name=a"]),
        (["--train.steps", "5", "--run.name", "a"], ["--run.name", "a"]),
        (["--resume-with-changes", "--optim.lr=1"], ["--optim.lr=1"]),
        (["--checkpoint.resume=step-3", "--config", "x.toml"], ["--config", "x.toml"]),
        ([], []),
    ],
)
def test_what_is_for_one_time_is_not_repeated(argv: list[str], expected: list[str]) -> None:
    assert console.lasting_options(argv, "--train.steps") == expected


def test_the_closing_block_fits_the_launcher_and_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [
        "train.py",
        "--config",
        "configs/t5.toml",
        "--run.name=old",
        '--sample.prompts=["a $b"]',
        "--train.steps=10",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    config = Config(sample=SampleConfig(prompts=["a $b"]))
    text = console.what_next(config, 10)
    kept = "torchrun --nproc-per-node 4 train.py --config configs/t5.toml '--sample.prompts=[\"a $b\"]' --train.steps="
    assert f"on your own text: {kept}10 --run.name=NAME --data.path=FOLDER_OF_TXT_FILES" in text.replace(
        ".venv/bin/", ""
    )
    assert "--prompt 'a $b'" in text
    own = config.model_copy(update={"data": DataConfig(path="my_text")})
    after = console.what_next(own, 10)
    assert "your own text" not in after
    assert kept.replace("'--sample", "--run.name=old '--sample") + "20  # the learning" in after
    for each in (text, after):
        assert len(each.splitlines()) == 4, "the folder, and three commands"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "... train.py" in console.what_next(config, 10), "the launcher of two machines is not known"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert "torchrun" not in console.what_next(Config(), 10)
    monkeypatch.setattr(sys, "executable", "/opt/an env/bin/python3")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "'/opt/an env/bin/python3' -m torchtitan_lite.report" in console.what_next(config, 10), "not activated"
    monkeypatch.setenv("RANK", "0")
    assert "'/opt/an env/bin/torchrun' --nproc-per-node 1 train.py" in console.what_next(config, 10)
    monkeypatch.delenv("RANK")
    assert "--prompt 'def '" in console.what_next(Config(), 10)
    assert "--interactive" in console.what_next(Config(data=DataConfig(path="my_text")), 10)
    constant = Config(optim=OptimConfig(schedule="constant"), data=DataConfig(path="my_text"))
    assert "rises again" not in console.what_next(constant, 10)


# --- Ctrl-C -------------------------------------------------------------------------------------------------------


def test_torchrun_s_traceback_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preemption.launcher_note("SIGINT") == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert preemption.launcher_note("SIGINT") == "", "tools.elastic prints none"
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert "torchrun now prints a traceback of its own" in preemption.launcher_note("SIGINT")
    assert preemption.launcher_note("run.max_minutes = 1") == "", "every rank exits with 0"


@pytest.mark.extended
def test_ctrl_c_under_torchrun_says_what_comes(text: Path, tmp_path: Path) -> None:
    options = tiny(text, tmp_path, run__name="run", train__steps=100_000)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launcher, "train.py", *options], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[str] = []
    end = time.monotonic() + HANGS_S
    for line in process.stdout:
        lines.append(line)
        assert time.monotonic() < end
        if line.startswith("step ") and not any("left " in said for said in lines):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: launcher and ranks
            break
    lines += process.stdout.readlines()
    process.wait(HANGS_S)
    output = "".join(lines)
    announced, traceback = output.index("note    torchrun now prints a traceback"), output.index("Traceback")
    assert output.index("stopped after step") < announced < traceback
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "preempted"


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_what_convert_writes_can_be_used_by_its_name(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert checkpoints.main(["convert", str(first), str(out)]) == 0
    assert (out / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert checkpoints.main(["verify", str(out)]) == 0
    assert f"complete {out / 'step-00000002'}" in capsys.readouterr().out
    assert checkpoints.main(["inspect", str(out)]) == 0
    assert checkpoints.main(["export", str(out), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf/tokenizer.json").is_file()
    words = ["-m", "torchtitan_lite.generate", str(out), "--prompt", "def ", "--max-tokens", "2"]
    assert "2 tokens" in run_python(words).stderr
    # into a run's own folder, as before
    assert checkpoints.main(["convert", str(first), str(tmp_path / "copy/checkpoints")]) == 0
    assert checkpoint(tmp_path / "copy", 2).is_dir()


def test_verify_takes_a_folder_of_runs(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        shutil.copytree(first, tmp_path / "runs" / name)
    (tmp_path / "runs/started").mkdir()
    assert checkpoints.main(["verify", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert said.count("complete ") == 2
    (checkpoint(tmp_path / "runs/b", 2) / "model.safetensors").write_bytes(b"x")
    assert checkpoints.main(["verify", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr().out
    assert said.count("complete ") == 1
    assert "DAMAGED" in said
    capsys.readouterr()
    (tmp_path / "runs/started/run.json").write_text("{}")
    for name, problem in (("started", "is a run without a checkpoint"), ("none", "does not exist")):
        assert checkpoints.main(["verify", str(tmp_path / "runs" / name)]) == 2
        assert capsys.readouterr().err == f"checkpoint.py: {tmp_path / 'runs' / name} {problem}\n"


def test_generate_names_the_runs_of_a_folder_of_runs(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchtitan_lite.tools import generate

    assert generate.main([str(first.parent), "--prompt=a"]) == 2
    assert f"but of runs: {first}" in capsys.readouterr().err


# --- counts -------------------------------------------------------------------------------------------------------


def test_one_is_singular(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [counted(n, "file") for n in (0, 1, 2, 1234)] == ["0 files", "1 file", "2 files", "1,234 files"]
    assert checkpoints.main(["inspect", str(first)]) == 0
    assert "saved by 1 rank;" in capsys.readouterr().out
    log = (first / "train.log").read_text()
    assert "1 thread per rank (OMP_NUM_THREADS)" in log
    assert " x 1 rank x " in log
    wrong = re.findall(r"(?<![\d,.])1 (?:ranks|threads|files|steps|groups|layers|heads|documents|sequences)\b", log)
    assert not wrong
    config = Config.model_validate({"fsdp": {"explicit_prefetching": True, "forward_prefetch": 1}})
    assert "prefetches 1 group in forward" in console.fsdp_line(config)


def test_threads_that_spin_on_a_busy_machine_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for load, threads, policy, busy in (
        (1.5, 2, "", True),
        (1.5, 1, "", False),
        (0.9, 2, "", False),
        (2, 2, "PASSIVE", False),
    ):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load * cores, 0, 0))
        if policy:
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        assert ("OMP_WAIT_POLICY=PASSIVE" in console.spinning_line(threads)) == busy, (load, threads, policy)
    assert console.spinning_line(2) == ""


def test_a_checked_config_names_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--check-config", "--run.name=mine"]) == 0
    assert "its run is in runs/mine" in capsys.readouterr().out
