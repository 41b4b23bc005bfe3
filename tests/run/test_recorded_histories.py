"""What is said about runs with rare histories, made by hand: recorded_histories.json has it, by history and tool."""

import fcntl
import json
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.recorded import assert_recorded
from torchtitan_lite.checkpointing import compatibility, find, storage
from torchtitan_lite.checkpointing.safetensors_file import write_text
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.config.toml import Loaded, to_toml
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import UserError
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import attempts, resumed, run_folder, spikes, start_and_end
from torchtitan_lite.tools import checkpoints, load_model, status
from torchtitan_lite.tools.incidents import record, replay, which
from torchtitan_lite.tools.report import runs

T0 = 1_700_000_000.0
NOW = T0 + 500_000
LOADING_S, SAVING_S = 11.0, 3.0  # from a launch to its first step; of a save
CONFIG: dict[str, Any] = {
    **{"model.family": "gpt", "model.dim": 32, "model.n_layers": 2, "model.n_heads": 2, "model.max_seq_len": 37},
    **{"train.seq_len": 32, "train.micro_batch_size": 2, "train.global_batch_size": 8, "train.steps": 20},
    **{"data.path": "x", "optim.lr": 4e-3, "optim.warmup_steps": 2, "log.every": 2, "run.device": "cpu"},
    **{"eval.every": 4, "checkpoint.every": 4, "spike.action": "stop"},
}
SETTING = {"world_size": 1, "compile": "off", "deterministic": True, "threads": 1, "torch": "2.0"}
CONTENT = {"tokenizer": "t" * 64, "data": "d" * 64}


@dataclass(frozen=True)
class Start:
    """An attempt. Times are in seconds: `at` since T0, all others since the launch."""

    at: float
    after: int  # the step that it begins after
    logged: Sequence[int] = ()
    step_s: float = 2.0
    validated: Mapping[int, float | None] = field(default_factory=dict)
    saved: Sequence[int] = ()
    end: tuple[str, int, float, str] | None = None  # status, last step, time, reason; None: killed, or it runs
    fork: str = ""  # a path below FOLDER
    spike: int = 0
    skipped: int = 0  # a spike, too
    world_size: int = 1
    hosts: Sequence[str] = ("node1",)
    config: Mapping[str, Any] = field(default_factory=dict)
    version: str = "1.0"
    samples: int = -1  # 8 for each step


@dataclass(frozen=True)
class History:
    """A run: its attempts, its checkpoints, and the steps to ask about."""

    starts: Sequence[Start]
    kept: Sequence[int] = ()  # checkpoints that are left
    damaged: Sequence[int] = ()  # of these
    torn: Sequence[int] = ()  # folders without a manifest
    asked: Sequence[int] = ()  # steps
    others: Mapping[str, Sequence[int]] = field(default_factory=dict)  # checkpoints of other runs
    locked: bool = False  # a process trains
    repeats: bool = False
    lock: bool = True  # whether the lock can be seen here


def complete(last: int, at: float) -> tuple[str, int, float, str]:
    return "complete", last, at, ""


LR, SPIKE = {"optim.lr": 2e-3}, "step 11: loss 9.0000 above 4.0000; run samples 88 to 95. The update was withheld\nmore"
SOURCE = {"source": [6, 8]}
FROM_6, FROM_8 = (f"source/checkpoints/step-{step:08d}" for step in (6, 8))

HISTORIES: dict[str, History] = {
    "killed between checkpoints, resumed": History(
        [
            Start(0, 0, [2, 4, 6, 8, 10], validated={4: 8.0, 8: 7.5}, saved=[4, 8]),
            Start(
                600, 8, [10, 12, 14, 16, 18, 20], 3.0, {12: 7.0, 16: 7.25, 20: 7.125}, [12, 16, 20], complete(20, 90)
            ),
        ],
        [12, 16, 20],
        asked=[9, 11, 13, 20, 21],
    ),
    "a fork before its first save: killed, begun again from a later checkpoint, a spike": History(
        [
            Start(0, 6, [8, 10], validated={8: 6.0}, fork=FROM_6, config=LR),
            Start(300, 8, [10], 5.0, {8: 7.0}, fork=FROM_8, config=LR, spike=11, end=("failed", 10, 40, SPIKE)),
        ],
        asked=[7, 8, 9, 11, 12],
        others=SOURCE,
        repeats=True,
    ),
    "a fork whose source is gone": History(
        [Start(0, 6, [8, 10], fork=FROM_6), Start(100, 6, [8, 10, 12], 3.0, saved=[10], fork=FROM_6)],
        [10],
        asked=[7, 10, 12],
        others={"source": [8]},
    ),
    "a fork of a fork, killed after its first save, resumed": History(
        [
            Start(0, 10, [12, 14, 16], validated={12: 6.5, 16: 6.0}, saved=[14], fork="fork/checkpoints/step-00000010"),
            Start(400, 14, [16, 18], 4.0, {16: 6.25}, [18], ("preempted", 19, 60, "SIGTERM")),
        ],
        [14, 18],
        asked=[10, 11, 15, 19],
        others=SOURCE | {"fork": [10]},
    ),
    "killed, failed, preempted, complete": History(
        [
            Start(0, 0, [2, 4, 6], validated={4: 8.0}, saved=[4]),
            Start(200, 4, [6, 8, 10], 3.0, {8: 7.5}, [8], ("failed", 11, 50, "a bug")),
            Start(500, 8, [10, 12, 14], 2.5, {12: 7.25}, [12, 14], ("preempted", 14, 45, "SIGTERM")),
            Start(900, 14, [16, 18, 20], 4.0, {16: 7.0, 20: 7.125}, [16, 20], complete(20, 70)),
        ],
        [14, 16, 20],
        asked=[5, 9, 13, 15],
    ),
    "preempted, failed before a step, failed, killed": History(
        [
            Start(0, 0, [2, 4, 6], saved=[4, 6], end=("preempted", 6, 40, "SIGTERM")),
            Start(100, 6, end=("failed", 6, 30, "out of memory")),
            Start(250, 6, [8, 10], 3.0, {8: 6.0}, end=("failed", 11, 60, "a process died: rank 1")),
            Start(400, 6, [8], 5.0, {8: 7.0}, [8]),
        ],
        [4, 6, 8],
        asked=[7, 8, 9],
    ),
    "failed, then failed before a step": History(
        [
            Start(0, 0, [2, 4, 6], validated={4: 8.0}, saved=[4], end=("failed", 7, 60, "a bug")),
            Start(500, 4, end=("failed", 4, 20, "out of memory")),
        ],
        [4],
        asked=[3, 5],
    ),
    "longer, on other machines and with other values": History(
        [
            Start(0, 0, [2, 4, 6, 8, 10], 2.0, {4: 8.0, 8: 7.0}, [4, 8], complete(10, 50), config={"train.steps": 10}),
            Start(
                *(2000, 10, [12, 15, 18], 1.5, {12: 7.5, 16: 7.25}, [14, 18]),
                world_size=4,
                hosts=["node2", "node3"],
                config={"train.steps": 30, "log.every": 3, "train.micro_batch_size": 1, "eval.samples": 9},
                version="1.1",
            ),
        ],
        [8, 14, 18],
        asked=[9, 12, 16, 30, 31],
    ),
    "a fork with larger batches, which skips samples": History(
        [
            Start(0, 8, [10, 12], 2.0, {12: 6.0}, [12], fork=FROM_8, config={"train.global_batch_size": 16} | LR),
            Start(
                *(900, 12, [14, 16], 3.0, {16: 5.5}, [16], complete(16, 50)),
                config={"train.global_batch_size": 16, "train.steps": 16, "data.skip_samples": [[150, 170]]} | LR,
                samples=64 + 4 * 16,
            ),
        ],
        [12, 16],
        asked=[8, 9, 13, 14, 15],
        others=SOURCE,
    ),
    "the newest checkpoints are damaged": History(
        [
            Start(0, 0, [2, 4, 6, 8, 10, 12], validated={4: 8.0, 8: 7.0, 12: 6.5}, saved=[4, 8, 12]),
            Start(700, 4, [6, 8], 3.0, {8: 7.75}),
        ],
        [4, 8, 12],
        damaged=[8, 12],
        asked=[5, 8, 9],
    ),
    "all checkpoints are damaged": History(
        [Start(0, 0, [2, 4, 6, 8], validated={4: 8.0}, saved=[4, 8], end=("failed", 9, 50, "a process died: rank 1"))],
        [4],
        damaged=[4],
        torn=[8],
        asked=[3, 7],
    ),
    "no checkpoint: killed, begun again, and killed": History(
        [Start(0, 0, [2, 4, 6], 2.0, {4: 6.0}), Start(50, 0, [2], 7.0), Start(130, 0, [2, 4], 3.0, {4: 8.0}, spike=5)],
        asked=[1, 4, 5],
    ),
    "in its first steps, before a record": History([Start(499_990, 0)], asked=[1], locked=True),
    "records without losses": History(
        [
            Start(0, 0, [2, 4], validated={4: 8.0}, saved=[4], end=("preempted", 5, 30, "SIGTERM")),
            Start(100, 0, validated={0: 9.0}, end=("failed", 0, 40, "a bug")),
        ],
        torn=[4],
        asked=[1],
        lock=False,
    ),
    "the best checkpoint is deleted": History(
        [
            Start(0, 0, [2, 4, 6, 8, 10, 12], 2.0, {4: 6.5, 8: 7.0, 12: 7.0, 10: None}, [4, 8, 10, 12]),
            Start(300, 12, [14], 3.0, {13: 6.75}),
        ],
        [8, 10, 12],
        asked=[5, 9, 14],
        lock=False,
    ),
    "finished, begun again a day later, then longer, with clocks set back": History(
        [
            Start(1000, 0, [2, 4, 6], 20.0, {4: 7.0, 6: 6.5}, [4, 6], complete(6, 150), config={"train.steps": 6}),
            Start(88_000, 6, end=complete(6, 20), config={"train.steps": 6}),
            Start(500, 6, [8, 10], 30.0, {8: 6.75}, [10], complete(10, 140), config={"train.steps": 10}),
        ],
        [6, 10],
        asked=[7, 10],
    ),
    "a spike is skipped, then a step is not finite; begun again": History(
        [
            Start(0, 0, [2, 4, 6, 8], saved=[4], skipped=7, end=("failed", 8, 60, "step 9: the loss is not finite.")),
            Start(800, 4, [6, 8], 2.5, skipped=6, end=("failed", 8, 70, "step 9: the loss is not finite.")),
        ],
        [4],
        asked=[8, 9, 10],
        repeats=True,
    ),
}


# --- making a run -----------------------------------------------------------------------------------------------


def config_of(folder: Path, values: Mapping[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".", 1)
        tree.setdefault(section, {})[name] = value
    tree["run"] |= {"out_dir": str(folder.parent), "name": folder.name}
    return Config.model_validate(tree)


def lines_of(start: Start) -> list[dict[str, Any]]:
    """The records of an attempt, in the order of its steps: losses, spikes, validations, saves."""
    found, now, before = [], T0 + start.at + LOADING_S, start.after
    for step in sorted({*start.logged, *start.validated, *start.saved, start.spike, start.skipped}):
        if step in start.logged:
            seconds = start.step_s * (step - before)
            now, before = now + seconds, step
            loss = 9.0 if step == start.skipped else 9 - step / 10 + start.at / 1e5
            values = {"loss": loss, "mean_loss": loss, "grad_norm": 1.0, "rank_losses": [loss] * start.world_size}
            values |= {"tokens_per_second": 256 / start.step_s, "seconds": seconds, "tokens": 256 * step}
            found.append({"step": step, **values, "time": now})
        if step and step in (start.spike, start.skipped):
            spike = {"loss": 9.0, "grad_norm": 3.0, "rank_losses": [9.0], "loss_limit": 4.0, "norm_limit": None}
            action = "stop" if step == start.spike else "skip"
            samples = [8 * step - 8, 8 * step]
            found.append({"step": step, "spike": spike | {"samples": samples, "action": action}, "time": now + 1})
        if step in start.validated:
            found.append({"step": step, "val_loss": start.validated[step], "eval_s": 1.0, "time": (now := now + 1)})
        if step in start.saved:
            found.append({"step": step, "save_s": SAVING_S, "bytes": 5, "time": (now := now + SAVING_S)})
    return found


def save(folder: Path, step: int, start: Start, values: Mapping[str, Any]) -> Path:
    """A complete checkpoint."""
    state = TrainState(
        step=step,
        samples_consumed=8 * step,
        validation={"samples": values["eval.samples"], "of": 100, "seed": 0},
        must_match=CONTENT,
        bitwise_setting=SETTING | {"world_size": start.world_size},
        config=values,
    )
    made = storage.new_folder(folder / "checkpoints", step)
    found = storage.commit(made, state, "full", start.world_size, {"model": write_text(made / "model", f"{step:05d}")})
    when = T0 + start.at + 100 + step
    os.utime(found, (when, when))
    return found


def write(folder: Path, base: Mapping[str, Any], history: History) -> None:
    """The folder of the run, and of the runs that it was forked from."""
    for name, steps in history.others.items():
        (folder.parent / name).mkdir()
        for step in steps:
            save(folder.parent / name, step, Start(0, 0), base)
    folder.mkdir()
    number, about, values = 0, dict[str, Any](), {**base}
    saved: dict[int, tuple[Start, Mapping[str, Any]]] = {}
    lines = []
    for number, start in enumerate(history.starts, 1):
        values = {**base, **start.config}
        started = {"attempt": number, "time": T0 + start.at, "command": ["train.py"], "step": start.after}
        started |= {"samples": 8 * start.after if start.samples < 0 else start.samples, "config": values}
        started |= {"setting": SETTING | {"world_size": start.world_size}, "tasks": {}, "must_match": CONTENT}
        started |= {"versions": {"torchtitan_lite": start.version}, "git": {"commit": "c", "dirty": False}}
        started |= {"world_size": start.world_size, "hosts": [*start.hosts], "device": "cpu"}
        attempts.add(folder, started | {"forked_from": str(folder.parent / start.fork) if start.fork else ""})
        about = {"status": "running", "step": start.after, "reason": "", "time": T0 + start.at}
        if start.end:
            ended, last, after_s, reason = start.end
            end = {"ended": ended, "last_step": last, "reason": reason, "end_time": T0 + start.at + after_s}
            attempts.add(folder, {"attempt": number, **end})
            about = {"status": ended, "step": last, "reason": reason, "time": T0 + start.at + after_s}
        lines += [line | {"attempt": number} for line in lines_of(start)]
        saved |= dict.fromkeys(start.saved, (start, values))
    about |= {"format_version": attempts.FORMAT_VERSION, "attempt": number, "repeats": history.repeats}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "config.toml").write_text(to_toml(config_of(folder, values)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    for step in history.kept:
        file = save(folder, step, *saved[step]) / "model"
        if step in history.damaged:
            file.write_text("wrong")
    for step in history.torn:
        (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    if history.lock:
        (folder / ".lock").touch()


# --- what is said -----------------------------------------------------------------------------------------------


def tried(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except UserError as error:
        return f"{type(error).__name__}: {error}"


def named(each: attempts.Attempt | None) -> int | None:
    return each.attempt if each else None


def of_attempts(folder: Path, history: History) -> dict[str, Any]:
    """The functions of run/attempts.py."""
    made, counting = attempts.read(folder), attempts.records(folder)
    steps = [step for step in range(21) if folder.joinpath(f"checkpoints/step-{step:08d}/manifest.json").exists()]
    return {
        "counting": [f"{line['attempt']}: {line['step']} {[*line][1]}" for line in counting],
        "since_fork": [named(each) for each in attempts.since_fork(made)],
        "that_count": [named(each) for each in attempts.that_count(made)],
        "of_step": {str(step): named(attempts.of_step(attempts.since_fork(made), step)) for step in history.asked},
        "best_step": [attempts.best_step(folder, which) for which in (steps, range(30))],
        "goodput": attempts.goodput(made, counting),
        "goodput_line": attempts.goodput_line(folder),
    }


def of_checkpoints(folder: Path, history: History, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The choice of a checkpoint: of a tool, of an export, and of the same command."""
    config = config_of(folder, attempts.read(folder)[-1].config)
    resume = str(folder.parent / history.starts[-1].fork) if history.starts[0].fork else ""
    choice = config.checkpoint.model_copy(update={"resume": resume and str(Path(resume).parent.parent)})
    process = Process(0, 1, torch.device("cpu"), 1)
    capsys.readouterr()
    complete = tried(checkpoints.verify, [folder])
    return {
        "verify": [complete, capsys.readouterr().out.splitlines()],
        "find": tried(lambda: [str(part) for part in find.find(folder)]),
        "best": tried(lambda: str(load_model.best_checkpoint(folder))),
        "resume": tried(lambda: asdict(find.checkpoint_to_resume(folder / "checkpoints", choice, process))),
        "config_to_resume": find.config_to_resume(folder, choice.resume).get("train.steps"),
    }


def of_the_end(folder: Path, history: History, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the next attempt says: refused or changed values, machines, and the command that it prints to fork."""
    made = attempts.read(folder)
    values = made[-1].config
    config = config_of(folder, values)
    resume = [f"--checkpoint.resume={folder.parent / 'source'}"] if history.starts[0].fork else []
    monkeypatch.setattr("sys.argv", ["train.py", "--run.name=run", *resume, "--optim.lr", "0.001"])
    choice = config.checkpoint.model_copy(update={"resume": "".join(resume).partition("=")[2]})
    process = Process(0, 1, torch.device("cpu"), 1)
    found: dict[str, Any] = {"why_not_again": tried(run_folder.why_not_again, Loaded(config, {}))}
    found["machines"] = start_and_end.machines_line(made, ["node1", "node4"], 2)
    chosen = tried(find.checkpoint_to_resume, folder / "checkpoints", choice, process)
    if isinstance(chosen, str):
        return found
    saver = SimpleNamespace(
        folder=folder / "checkpoints",
        forked_from=chosen.folder if chosen.forked else None,
        damaged=[] if chosen.forked else [int(path.name.removeprefix("step-")) for path in chosen.damaged],
        wait=lambda: None,
    )
    monkeypatch.setattr(spikes, "SpikeGuard", lambda *arguments: arguments[-1])
    state, log = TrainState(), SimpleNamespace()
    without: Any = spikes.build_guard(config, process, state, [], saver, log)  # type: ignore[arg-type]
    began = int(chosen.folder.name.removeprefix("step-")) if chosen.folder else 0
    for step in [step for step in history.asked if step > began] or [began + 1, began + 2]:
        last: Any = SimpleNamespace(step=step, samples=(8 * step - 8, 8 * step))
        asked: StepRecord = last
        found[f"without step {step}"] = without(asked)
    if chosen.folder:
        saved = storage.read_state(chosen.folder)
        other = {**values, "optim.lr": 1e-3, "eval.samples": 7}
        expected, fork = {**other, **CONTENT}, chosen.forked
        found["other values"] = tried(
            partial(compatibility.require_same_run, chosen.folder, saved, expected, fork=fork)
        )
        setting, validation = {**SETTING, "world_size": 2}, {"samples": 7, "of": 100, "seed": 0}
        now = replace(saved, config={**values}, bitwise_setting=setting, validation=validation)
        found["resumed"] = resumed.resume_lines(config, saved, now)
    return found


def of_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """The exit code and the lines of `status`."""
    capsys.readouterr()
    return [status.main([str(folder)]), *capsys.readouterr().out.splitlines()]


def of_report(folder: Path) -> Any:
    """What the report reads."""
    run = tried(runs.read_run, folder)
    if isinstance(run, str):
        return run
    page = pytest.importorskip("torchtitan_lite.tools.report.page")
    return {
        "status": [run.status.text, run.status.active, run.reason],
        "attempts": [each.attempt for each in run.attempts],
        "steps": [f"{step['attempt']}: {step['step']}" for step in run.steps],
        "best": run.best and [run.best["step"], run.best["val_loss"], run.best["attempt"]],
        "goodput": run.goodput,
        "of": run.config["train.steps"],
        "changes": [list(map(str, change)) for change in run.changes],
        "events": {str(step): text for step, text in run.events.items()},
        "seconds": {kind: seconds for kind, seconds in page.seconds_of(run).items() if seconds},
        "table": runs.table([run]),
    }


def of_incidents(folder: Path, history: History) -> dict[str, Any]:
    """The samples of each step, and where a replay of it begins."""
    found: dict[str, Any] = {}
    made = tried(record.read_record, folder)
    if isinstance(made, record.Record):
        ends = min(made.samples), max(made.samples)
        found["steps"] = [f"{step}: {made.samples[step].start} to {made.samples[step].stop - 1}" for step in ends]
        for step in history.asked:
            options = Namespace(run=folder, step=step, to=None)
            steps = tried(which._steps, options, made)
            if isinstance(steps, range):
                steps = f"{steps}: {made.samples[step]}, skipped {[*made.skipped(step)]}"
            found[f"which {step}"] = steps
    else:
        found["steps"] = made
    last = attempts.read(folder)[-1]
    config = config_of(folder, last.config)
    here = replay.numbers_of(last.config, last.must_match, last.setting)
    for step in history.asked:
        again = tried(replay.read, config, step, here)
        if isinstance(again, replay.Recorded):
            shown = {number: values.get("loss", values.get("stopped")) for number, values in again.steps.items()}
            advice = again.advice.partition(".")[0]
            again = [f"{again.start + 1} to {again.last}", again.checkpoint, shown, *again.notes, advice]
        found[f"replay {step}"] = again
    return found


def of_another_start(folder: Path) -> list[Any]:
    """One more attempt, which begins where the last one did: its number, run.json, and what still counts."""
    about = {"step": attempts.read(folder)[-1].step, "samples": 0, "command": [], "config": {}, "setting": {}}
    about |= {"tasks": {}, "world_size": 1, "hosts": ["node1"], "versions": {}, "git": {}, "device": "cpu"}
    number = run_folder.record_start(folder, about)
    steps = [line["step"] for line in attempts.records(folder) if "loss" in line]
    status_of_it = {key: value for key, value in attempts.newest_status(folder).items() if key != "format_version"}
    return [number, steps, status_of_it]


def said_of(
    folder: Path, history: History, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    found: dict[str, Any] = {"attempts": of_attempts(folder, history)}
    with (folder / (".lock" if history.lock else "run.json")).open() as file:
        if history.locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        found |= {"status": of_status(folder, capsys), "report": of_report(folder)}
    found["checkpoints"] = of_checkpoints(folder, history, capsys)
    found["incidents"] = of_incidents(folder, history)
    found["the next attempt"] = of_the_end(folder, history, monkeypatch)
    found["begun again"] = of_another_start(folder)
    return found


def test_what_is_said_of_each_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = SimpleNamespace(tokenizer_sha256=CONTENT["tokenizer"], hashes=lambda: {"data": CONTENT["data"]})
    monkeypatch.setattr(record, "prepared", lambda loaded: (loaded, data))
    monkeypatch.setattr("time.time", lambda: NOW)
    monkeypatch.setattr(run_folder, "process_age_s", lambda: 5.0)
    monkeypatch.setattr(run_folder, "git_state", lambda _: {"commit": "c", "dirty": False})
    monkeypatch.setattr(find, "on_all", lambda action, _: [action()])  # a world of one
    monkeypatch.setattr(replay, "__version__", "1.0")
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr("torchtitan_lite.process.python_command", lambda: "python")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    base = json.loads(json.dumps(flatten(load.load(None, CONFIG, world_size=1, n_gpus=1, elsewhere=True).config)))
    found = {}
    for number, (name, history) in enumerate(HISTORIES.items()):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        write(folder, base, history)
        said = json.dumps(said_of(folder, history, capsys, monkeypatch), default=str)
        found[name] = json.loads(said.replace(str(folder.parent), "FOLDER"))
    assert_recorded(found, Path(__file__).with_name("recorded_histories.json"))
