"""What is said about runs with rare histories, made by hand: recorded_histories.json has it, by history and tool.

Nothing else holds: which attempts count, "goodput", the "report", the steps that `which` and --replay accept, and the
notes of the next attempt, in these histories; read their diffs. Simpler ones are real in test_attempts.py,
test_status.py and test_replay.py.
"""

import fcntl
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
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
from torchtitan_lite.run import attempts, resumed, run_folder, spikes
from torchtitan_lite.tools import checkpoints, load_model, past_steps, replay, status, which
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
NOTHING: Mapping[Any, Any] = {}
ALONE = Process(0, 1, torch.device("cpu"), 1)
End = tuple[str, int, float, str]  # status, last step, time, reason


def start(
    at: float,
    after: int,
    logged: Sequence[int] = (),
    step_s: float = 2.0,
    validated: Mapping[int, float | None] = NOTHING,
    saved: Sequence[int] = (),
    end: End | None = None,
    **more: Any,
) -> Namespace:
    """An attempt. Times are in seconds: `at` since T0, all others since the launch.

    Args:
        after: the step that it begins after.
        end: None: it was killed, or it runs.
        more: `fork`: a path below FOLDER; `spike`, `skipped`: the step of one, which stops the run or is skipped.
    """
    rest = {"fork": "", "spike": 0, "skipped": 0, "world_size": 1, "hosts": ["node1"], "config": {}, "version": "1.0"}
    own = Namespace(at=at, after=after, logged=logged, step_s=step_s, validated=validated, saved=saved, end=end)
    return Namespace(**vars(own) | rest | {"samples": 8 * after} | more)


def history(starts: Sequence[Namespace], kept: Sequence[int] = (), **more: Any) -> Namespace:
    """A run: its attempts, the checkpoints that are left, and the steps to ask about.

    Args:
        more: `damaged`: of the checkpoints; `torn`: steps of folders without a manifest; `others`: the checkpoints of
            other runs; `locked`: a process trains; `repeats`: as in run.json; `lock`: whether it can be seen here.
    """
    rest = {"damaged": (), "torn": (), "others": {}, "locked": False, "repeats": False, "lock": True}
    return Namespace(starts=starts, kept=kept, **rest | more)


LR, SPIKE = {"optim.lr": 2e-3}, "step 11: loss 9.0000 above 4.0000; run samples 88 to 95. The update was withheld\nmore"
SOURCE = {"source": [6, 8]}
FROM_6, FROM_8 = (f"source/checkpoints/step-{step:08d}" for step in (6, 8))

HISTORIES: dict[str, Namespace] = {
    "killed between checkpoints, resumed": history(
        [
            start(0, 0, [2, 4, 6, 8, 10], validated={4: 8.0, 8: 7.5}, saved=[4, 8]),
            start(
                600,
                8,
                [10, 12, 14, 16, 18, 20],
                3.0,
                {12: 7.0, 16: 7.25, 20: 7.125},
                [12, 16, 20],
                ("complete", 20, 90, ""),
            ),
        ],
        [12, 16, 20],
        asked=[9, 11, 13, 20, 21],
    ),
    "a fork before its first save: killed, begun again from a later checkpoint, a spike": history(
        [
            start(0, 6, [8, 10], validated={8: 6.0}, fork=FROM_6, config=LR),
            start(300, 8, [10], 5.0, {8: 7.0}, fork=FROM_8, config=LR, spike=11, end=("failed", 10, 40, SPIKE)),
        ],
        asked=[7, 8, 9, 11, 12],
        others=SOURCE,
        repeats=True,
    ),
    "a fork whose source is gone": history(
        [start(0, 6, [8, 10], fork=FROM_6), start(100, 6, [8, 10, 12], 3.0, saved=[10], fork=FROM_6)],
        [10],
        asked=[7, 10, 12, 21],
        others={"source": [8]},
    ),
    "a fork that has nothing to do": history(
        [start(0, 8, fork=FROM_8, config={"train.steps": 8}, end=("complete", 8, 20, ""))],
        asked=[8, 9],
        others=SOURCE,
    ),
    "a fork of a fork, killed after its first save, resumed": history(
        [
            start(0, 10, [12, 14, 16], validated={12: 6.5, 16: 6.0}, saved=[14], fork="fork/checkpoints/step-00000010"),
            start(400, 14, [16, 18], 4.0, {16: 6.25}, [18], ("preempted", 19, 60, "SIGTERM")),
        ],
        [14, 18],
        asked=[10, 11, 15, 19],
        others=SOURCE | {"fork": [10]},
    ),
    "killed, failed, preempted, complete": history(
        [
            start(0, 0, [2, 4, 6], validated={4: 8.0}, saved=[4]),
            start(200, 4, [6, 8, 10], 3.0, {8: 7.5}, [8], ("failed", 11, 50, "a bug")),
            start(500, 8, [10, 12, 14], 2.5, {12: 7.25}, [12, 14], ("preempted", 14, 45, "SIGTERM")),
            start(900, 14, [16, 18, 20], 4.0, {16: 7.0, 20: 7.125}, [16, 20], ("complete", 20, 70, "")),
        ],
        [14, 16, 20],
        asked=[5, 9, 13, 15],
    ),
    "preempted, failed before a step, failed, killed": history(
        [
            start(0, 0, [2, 4, 6], saved=[4, 6], end=("preempted", 6, 40, "SIGTERM")),
            start(100, 6, end=("failed", 6, 30, "out of memory")),
            start(250, 6, [8, 10], 3.0, {8: 6.0}, end=("failed", 11, 60, "a process died: rank 1")),
            start(400, 6, [8], 5.0, {8: 7.0}, [8]),
        ],
        [4, 6, 8],
        asked=[7, 8, 9],
    ),
    "failed, then failed before a step": history(
        [
            start(0, 0, [2, 4, 6], validated={4: 8.0}, saved=[4], end=("failed", 7, 60, "a bug")),
            start(500, 4, end=("failed", 4, 20, "out of memory"), config={"train.steps": 30}),
        ],
        [4],
        asked=[3, 5],
    ),
    "longer, on other machines and with other values": history(
        [
            start(
                0,
                0,
                [2, 4, 6, 8, 10],
                2.0,
                {4: 8.0, 8: 7.0},
                [4, 8],
                ("complete", 10, 50, ""),
                config={"train.steps": 10},
            ),
            start(
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
    "a fork with larger batches, which skips samples": history(
        [
            start(0, 8, [10, 12], 2.0, {12: 6.0}, [12], fork=FROM_8, config={"train.global_batch_size": 16} | LR),
            start(
                *(900, 12, [14, 16], 3.0, {16: 5.5}, [16], ("complete", 16, 50, "")),
                config={"train.global_batch_size": 16, "train.steps": 16, "data.skip_samples": [[150, 170]]} | LR,
                samples=64 + 4 * 16,
            ),
        ],
        [12, 16],
        asked=[8, 9, 13, 14, 15],
        others=SOURCE,
    ),
    "the newest checkpoints are damaged": history(
        [
            start(0, 0, [2, 4, 6, 8, 10, 12], validated={4: 8.0, 8: 7.0, 12: 6.5}, saved=[4, 8, 12]),
            start(500, 8, [10], validated={8: 7.25}),  # damaged later on
            start(700, 4, [6, 8], 3.0, {4: 8.25, 8: 7.75}),
        ],
        [4, 8, 12],
        damaged=[8, 12],
        asked=[5, 8, 9],
    ),
    "all checkpoints are damaged": history(
        [start(0, 0, [2, 4, 6, 8], validated={4: 8.0}, saved=[4, 8], end=("failed", 9, 50, "a process died: rank 1"))],
        [4],
        damaged=[4],
        torn=[8],
        asked=[3, 7],
    ),
    "no checkpoint: killed, begun again, and killed": history(
        [start(0, 0, [2, 4, 6], 2.0, {4: 6.0}), start(50, 0, [2], 7.0), start(130, 0, [2, 4], 3.0, {4: 8.0}, spike=5)],
        asked=[1, 4, 5],
    ),
    "in its first steps, before a record": history([start(499_990, 0)], asked=[1], locked=True),
    "records without losses": history(
        [
            start(0, 0, [2, 4], validated={4: 8.0}, saved=[4], end=("preempted", 5, 30, "SIGTERM")),
            start(100, 0, validated={0: 9.0}, end=("failed", 0, 40, "a bug")),
        ],
        torn=[4],
        asked=[1],
        lock=False,
    ),
    "the best checkpoint is deleted": history(
        [
            start(498_000, 0, [2, 4, 6, 8, 10, 12], 2.0, {4: 6.5, 8: 7.0, 12: 7.0, 10: None}, [4, 8, 10, 12]),
            start(499_600, 12, [14], 3.0, {13: 6.5}),
        ],
        [8, 10, 12],
        asked=[5, 9, 14],
        lock=False,
    ),
    "finished, begun again a day later, then longer, with clocks set back": history(
        [
            start(
                1000, 0, [2, 4, 6], 20.0, {4: 7.0, 6: 6.5}, [4, 6], ("complete", 6, 150, ""), config={"train.steps": 6}
            ),
            start(88_000, 6, end=("complete", 6, 20, ""), config={"train.steps": 6}),
            start(500, 6, [8, 10], 30.0, {8: 6.75}, [10], ("complete", 10, 140, ""), config={"train.steps": 10}),
        ],
        [6, 10],
        asked=[7, 10],
    ),
    "a spike is skipped, then a step is not finite; begun again": history(
        [
            start(0, 0, [2, 4, 6, 8], saved=[4], skipped=7, end=("failed", 8, 60, "step 9: the loss is not finite.")),
            start(800, 4, [6, 8], 2.5, skipped=6, end=("failed", 8, 70, "step 9: the loss is not finite.")),
        ],
        [4],
        asked=[8, 9, 10],
        repeats=True,
    ),
}


# --- making a run -----------------------------------------------------------------------------------------------


def config_of(values: dict[str, Any]) -> Config:
    return load.load(None, values, world_size=1, n_gpus=1, elsewhere=True).config


def write(folder: Path, base: Mapping[str, Any], told: Namespace) -> Config:
    """The folder of the run, and of the runs that it was forked from. Returns the newest config."""
    folder.mkdir(parents=True)
    saves = [(folder.parent / run, step, start(0, 0), base) for run in told.others for step in told.others[run]]
    saved: dict[int, tuple[Namespace, Mapping[str, Any]]] = {}
    lines: list[dict[str, Any]] = []
    for number, each in enumerate(told.starts, 1):
        values, ranks, begun = {**base, **each.config}, each.world_size, T0 + each.at
        line = {
            **{"attempt": number, "time": begun, "command": ["train.py"], "step": each.after, "config": values},
            **{"samples": each.samples, "setting": SETTING | {"world_size": ranks}, "tasks": {}, "device": "cpu"},
            **{"versions": {"torchtitan_lite": each.version}},
            **{"git": {"commit": "c" if each is told.starts[-1] else "b", "dirty": False}},
            **{"world_size": ranks, "hosts": each.hosts, "must_match": CONTENT},
        }
        attempts.add(folder, line | {"forked_from": str(folder.parent / each.fork) if each.fork else ""})
        ended, last, after_s, reason = each.end or ("running", each.after, 0, "")
        about = {"status": ended, "step": last, "reason": reason, "time": begun + after_s}
        if each.end:
            end = {"ended": ended, "last_step": last, "reason": reason, "end_time": begun + after_s}
            attempts.add(folder, {"attempt": number, **end})
        now = begun + LOADING_S
        for step in sorted({*each.logged, *each.validated, *each.saved, each.spike, each.skipped}):
            seconds = each.step_s * (step - max([n for n in each.logged if n < step], default=each.after))
            loss = 9.0 if step == each.skipped else 9 - step / 10 + each.at / 1e5
            logged = {
                **{"loss": loss, "mean_loss": loss - 0.25, "grad_norm": 1.0, "rank_losses": [loss] * ranks},
                **{"tokens_per_second": 256 / each.step_s, "seconds": seconds, "tokens": 256 * step},
            }
            spike = {
                **{"loss": 9.0, "grad_norm": 3.0, "rank_losses": [9.0], "loss_limit": 4.0, "norm_limit": None},
                **{"samples": [8 * step - 8, 8 * step], "action": "stop" if step == each.spike else "skip"},
            }
            for is_there, takes_s, content in (
                (step in each.logged, seconds, logged),
                (step and step in (each.spike, each.skipped), 0, {"spike": spike}),
                (step in each.validated, 1, {"val_loss": each.validated.get(step), "eval_s": 1.0}),
                (step in each.saved, SAVING_S, {"save_s": SAVING_S, "bytes": 5}),
            ):
                if is_there:
                    now += takes_s
                    lines.append({"step": step, **content, "time": now + ("spike" in content), "attempt": number})
        saved |= dict.fromkeys(each.saved, (each, values))
    for run, step, each, then in [*saves, *((folder, step, *saved[step]) for step in told.kept)]:
        run.mkdir(exist_ok=True)
        state = TrainState(
            step=step,
            samples_consumed=8 * step,
            validation={"samples": then["eval.samples"], "of": 100, "seed": 0},
            must_match=CONTENT,
            bitwise_setting=SETTING | {"world_size": each.world_size},
            config=then,
        )
        made = storage.new_folder(run / "checkpoints", step)
        found = storage.commit(
            made, state, "full", each.world_size, {"model": write_text(made / "model", f"{step:05d}")}
        )
        os.utime(found, (T0 + each.at + 100 + step,) * 2)
        (found / "model").write_text("wrong" if run == folder and step in told.damaged else f"{step:05d}")
    for step in told.torn:
        (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    config = config_of(values | {"run.out_dir": str(folder.parent), "run.name": folder.name})
    about |= {"format_version": attempts.FORMAT_VERSION, "attempt": number, "repeats": told.repeats}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    return config


# --- what is said -----------------------------------------------------------------------------------------------


def tried(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return call(*arguments, **options)
    except UserError as error:
        return f"{type(error).__name__}: {error}"


def said_of(
    folder: Path, told: Namespace, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What the tools say, by tool, and what the same command would say and do next."""
    made, counting = attempts.read(folder), attempts.records(folder)
    since, last = attempts.since_fork(made), made[-1]
    of_steps = {step: attempts.of_step(since, step) for step in told.asked}
    steps = [step for step in range(21) if folder.joinpath(f"checkpoints/step-{step:08d}/manifest.json").exists()]
    found: dict[str, Any] = {}
    found["attempts"] = {
        "counting": [f"{line['attempt']}: {line['step']} {[*line][1]}" for line in counting],
        "since_fork": [each.attempt for each in since],
        "that_count": [each.attempt for each in attempts.that_count(made)],
        "of_step": {str(step): each and each.attempt for step, each in of_steps.items()},
        "best_step": [attempts.best_step(folder, which) for which in (steps[::-1], range(30))],
        "goodput": attempts.goodput(made, counting),
        "goodput_line": attempts.goodput_line(folder),
    }
    with (folder / (".lock" if told.lock else "run.json")).open("a") as file:
        if told.locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        found["status"] = [
            *(status.main([str(folder), *more]) for more in ([], ["--json"])),
            *capsys.readouterr().out.splitlines(),
        ]
        found["report"] = run = tried(runs.read_run, folder)
    if isinstance(run, runs.Run):
        page = pytest.importorskip("torchtitan_lite.tools.report.page")
        found["report"] = {
            "status": [run.status.text, run.status.active, run.reason],
            "attempts": [each.attempt for each in run.attempts],
            "steps": [f"{step['attempt']}: {step['step']}" for step in run.steps],
            "best": run.best and [run.best["step"], run.best["val_loss"], run.best["attempt"]],
            "goodput": run.goodput,
            "of": run.config["train.steps"],
            "changes": [list(map(str, change)) for change in run.changes],
            "events": {str(step): text for step, text in run.events.items()},
            "table": runs.table([run]),
            "on the page": page._status(run),
        }

    monkeypatch.setenv("HOME", str(folder.parent))
    resume = "~/source" if told.starts[0].fork else ""
    choice = config.checkpoint.model_copy(update={"resume": resume})
    chosen = tried(find.checkpoint_to_resume, folder / "checkpoints", choice, ALONE)
    found["checkpoints"] = {
        "verify": [tried(checkpoints.verify, [folder]), capsys.readouterr().out.splitlines()],
        "find": tried(lambda: [str(part) for part in find.find(folder)]),
        "best": tried(lambda: str(load_model.best_checkpoint(folder))),
        "resume": asdict(chosen) if isinstance(chosen, find.Found) else chosen,
        "config_to_resume": find.config_to_resume(folder, resume).get("train.steps"),
    }

    found["incidents"] = incidents = dict[str, Any]()
    of_run, here = tried(past_steps.read_record, folder), replay.numbers_of(last.config, last.must_match, last.setting)
    incidents["steps"] = of_run
    if isinstance(of_run, past_steps.Record):
        samples = {n: made.samples for n, made in of_run.steps.items()}
        incidents["steps"] = [
            *(f"{n}: {samples[n].start} to {samples[n].stop - 1}" for n in (min(samples), max(samples))),
            of_run.config.train.steps,
        ]
        for step in told.asked:
            which_ones = tried(which._steps, Namespace(run=folder, step=step, to=None), of_run)
            if isinstance(which_ones, range):
                which_ones = f"{which_ones}: {samples[step]}, skipped {[*of_run.skipped(step)]}"
            incidents[f"which {step}"] = which_ones
    for step in told.asked:
        again = tried(replay.read, config, step, here)
        if isinstance(again, replay.Recorded):
            shown = {number: values.get("loss", values.get("stopped")) for number, values in again.steps.items()}
            again = [
                *(f"{again.start + 1} to {again.last}", again.checkpoint, shown),
                *(*again.notes, again.advice.partition(".")[0]),
            ]
        incidents[f"replay {step}"] = again

    argv = ["train.py", "--run.name=run", *([f"--checkpoint.resume={resume}"] if resume else []), "--optim.lr", "0.001"]
    monkeypatch.setattr("sys.argv", argv)
    found["the next attempt"] = following = {
        "why_not_again": tried(run_folder.why_not_again, Loaded(config, {}), config.folder),
    }
    if isinstance(chosen, find.Found):
        saver: Any = Namespace(
            remote=None,
            folder=folder / "checkpoints",
            forked_from=chosen.folder if chosen.forked else None,
            damaged=[] if chosen.forked else [int(path.name.removeprefix("step-")) for path in chosen.damaged],
            wait=lambda: None,
        )
        guard: Any = spikes.build_guard(config, ALONE, TrainState(), [], saver, Namespace())  # type: ignore[arg-type]
        began = int(chosen.folder.name.removeprefix("step-")) if chosen.folder else 0
        for step in [step for step in told.asked if step > began] or [began + 1, began + 2]:
            following[f"without step {step}"] = guard._fork(Namespace(step=step, samples=(8 * step - 8, 8 * step)))
    if isinstance(chosen, find.Found) and chosen.folder:
        state = storage.read_state(chosen.folder)
        expected = {**last.config, "optim.lr": 1e-3, "eval.samples": 7, **CONTENT}
        following["other values"] = tried(
            compatibility.require_same_run, chosen.folder, state, expected, fork=chosen.forked
        )
        now: dict[str, Any] = {
            "bitwise_setting": {**SETTING, "world_size": 2},
            "validation": {"samples": 7, "of": 100, "seed": 0},
        }
        following["resumed"] = resumed.resume_lines(config, state, replace(state, config={**last.config}, **now))

    begins = {"step": last.step, "samples": 0, "command": [], "config": {}, "setting": {}, "tasks": {}, "world_size": 1}
    number = run_folder.record_start(folder, begins | {"hosts": ["node1"], "versions": {}, "git": {}, "device": "cpu"})
    launched = attempts.read(folder)[-1].time - NOW
    counted = [line["step"] for line in attempts.records(folder) if "loss" in line]
    about = {key: value for key, value in attempts.newest_status(folder).items() if key != "format_version"}
    run_folder.record_end(folder, ALONE, number, "preempted", last.step)
    goodput = attempts.newest_status(folder)["goodput"]
    return found | {"begun again": [number, counted, about, launched], "goodput at its end": goodput}


def test_what_is_said_of_each_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Namespace(
        tokenizer_sha256=CONTENT["tokenizer"], hashes=lambda: {"data": CONTENT["data"]}, sources=[], later=[]
    )
    stubs: dict[str, Any] = {
        "torchtitan_lite.tools.past_steps.prepared": lambda loaded, _: (loaded, data),
        "torchtitan_lite.run.phases.open_phase": lambda config, _, state, __: (config, None, state),
        "torchtitan_lite.tools.replay.__version__": "1.0",
        "torchtitan_lite.run.run_folder.git_state": lambda _: {"commit": "c", "dirty": False},
        "torchtitan_lite.environment.python_command": lambda: "python",
        "torchtitan_lite.run.run_folder.LAUNCHED": NOW - 7.5,
        "torchtitan_lite.checkpointing.find.on_all": lambda action, _: [action()],  # a world of one
        "os.fsync": lambda _: None,
        "time.time": lambda: NOW,
        "socket.gethostname": lambda: "node1",
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(name, stub)
    base = json.loads(json.dumps(flatten(config_of(CONFIG))))
    found = {}
    for number, (name, told) in enumerate(HISTORIES.items()):
        folder = tmp_path / str(number) / "run"
        said = json.dumps(said_of(folder, told, write(folder, base, told), capsys, monkeypatch), default=str)
        found[name] = json.loads(said.replace(str(folder.parent), "FOLDER"))
    assert_recorded(found, Path(__file__).with_name("recorded_histories.json"))
