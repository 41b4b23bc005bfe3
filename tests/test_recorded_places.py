"""What each rank, machine, device and platform does differently: recorded_places.json has the results of calls."""

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import torchtitan_lite
import train
from tests.recorded import assert_recorded
from tests.run.test_recorded_lines import BF16, PAIRS, config_of, named, result
from tests.test_recorded_limits import CPU, Stub, patched
from torchtitan_lite import api, environment, errors, progress
from torchtitan_lite.checkpointing import find, safetensors_file, save, storage
from torchtitan_lite.checkpointing.remote import Remote
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import cli, load
from torchtitan_lite.config.rules import local
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.cpu import apply_shared_memory, float32_matmuls, widens
from torchtitan_lite.distributed import evaluating, process_group
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import (
    metrics,
    mfu,
    out_of_memory,
    preemption,
    resumed,
    run_folder,
    sampling,
    saving,
    spikes,
    start_and_end,
    tasks,
)
from torchtitan_lite.run.session import Periodic
from torchtitan_lite.run.watchdog import Place, RankState, Watchdog
from torchtitan_lite.scoring import likelihood
from torchtitan_lite.tools import checkpoints, dry_run, generate, load_model, modes, replay
from torchtitan_lite.tools.evaluation import evaluate
from torchtitan_lite.tools.evaluation.documents import Texts

GPU, GONE, TENSOR = torch.device("cuda", 1), "Connection closed by peer", torch.tensor
OF_TRAIN: list[Any] = ["build", "train_step", "sharded_model"]
LOADED = Stub(notes=["n"], config=Stub(folder="runs/x", url=""))
NO_MODE = {"check_config": False, "print_config": False, "dry_run": True}


def told(
    call: Callable[..., Any],
    *names: str,
    env: Mapping[str, str] | None = None,
    answers: Mapping[str, Any] | None = None,
) -> list[Any]:
    """The calls in between with their arguments, what is printed, and what a call returns or raises.

    Args:
        call: gets the function that makes a stand-in whose calls are listed.
        names: of functions, as in `patched`, that do nothing; `answers`: those that return this, and other values.
    """
    said = list[Any]()

    def stand_in(name: str, instead: Any = None) -> Any:
        def listed(*args: Any, **more: Any) -> Any:
            line = " ".join([name, *map(str, args), *(f"{key}={value}" for key, value in more.items())])
            said.append(re.sub(r" at 0x\w+", "", line))
            return instead(*args, **more) if callable(instead) else instead

        return listed

    others = {name: stand_in(name.rpartition("__")[2], (answers or {}).get(name)) for name in names}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        values = {"environment__os__environ": dict(env or {}), **(answers or {}), **others}
        found = patched(lambda: call(stand_in), **values)
    return [*said, *out.getvalue().splitlines(), found if isinstance(found, int | float | list) else str(found)]


# --- the watchdog -----------------------------------------------------------------------------------------------


def watched(way: str, rank: int, world_size: int, local: int, n_local: int, *given: Any, **more: Any) -> list[Any]:
    """A method of the watchdog of rank `rank`, which is number `local` of the `n_local` of its machine."""

    def call(stand_in: Any) -> str:
        one = object.__new__(Watchdog)
        vars(one).update(_world=Process(rank, world_size, CPU, 1, n_local), _at=Place(5, 1), _first=rank - local)
        vars(one).update({key: stand_in(key, value) if callable(value) else value for key, value in more.items()})
        return f"{getattr(Watchdog, way)(one, *given)} {[*vars(one).get('_own', '')] or ''}".strip()

    clock = Stub(monotonic=iter([100.0, 100.0, 103.0]).__next__, sleep=lambda _: None)
    return told(
        call,
        env={"LOCAL_RANK": str(local)},
        answers={"run__watchdog__time": clock, "run__watchdog__os__times": lambda: (5.0, 1.0, 0.5, 0.5, 9.0)},
    )


def doing(*given: tuple[str, bool]) -> list[Any]:
    """What this thread does within operations, which wait for other ranks or work, and after them."""
    with contextlib.ExitStack() as stack:
        for name, waiting in given:
            stack.enter_context(progress.doing(name, waiting=waiting))
        found = progress.operations()
    return [found, progress.operations()]


# --- the loop ---------------------------------------------------------------------------------------------------


def looped(stops: int, gc_every: int = 0, **every: int) -> list[Any]:
    """What is done from step 4 to 8. In step `stops` it is known that a rank was asked to leave."""

    def call(stand_in: Any) -> None:
        def alone(name: str) -> Callable[..., Any]:
            return lambda *_, **more: stand_in(name)(**more)

        asked, config = Stub(agreed=False), Stub(train=Stub(steps=8), speed=Stub(gc_every=gc_every))
        work = [Periodic(key, n, alone(key), at_stop=key in ("log", "save")) for key, n in every.items()]
        s = Stub(config=config, periodic=work, state=Stub(step=3), preemption=asked)
        s.checkpointer = Stub(finished=lambda: True, remote=None)
        s.profile = Stub(start=stand_in("profile"), stop=lambda step, last: f"profiled {step}" * last)
        s.watchdog, s.meter = Stub(step=stand_in("at")), Stub(paused=contextlib.nullcontext)
        s.log = Stub(progress=lambda first, last: range(first, last + 1), info=stand_in("info"))

        def train_step(_s: Any, step: int) -> None:
            stand_in("step")(step)
            asked.agreed |= step == stops

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "train_step", train_step)
            for name in ("check_previous_step", "report_save"):
                patch.setattr(train, name, alone(name))
            patch.setattr(train, "disable_automatic_gc", stand_in("no automatic gc"))
            patch.setattr("gc.collect", stand_in("gc"))
            train.train(s)

    return [" ".join(told(call)).replace(" step", "\nstep")]


def opened(values: dict[str, Any], has_gpu: bool | str, *ranks: int) -> list[Any]:
    """A process group, and the process in it: of a rank, its number on its machine, and the sizes of both."""
    name = "distributed__process_group__"
    done = "dist__init_process_group torch__set_num_threads torch__use_deterministic_algorithms keep_freed_memory"
    done += " allow_open_files die_with_launcher untimed_group set_group_timeouts torch__cuda__set_device"
    done += " torch__set_float32_matmul_precision dist__barrier dist__destroy_process_group"
    rendezvous = "distributed__rendezvous__join_store"
    answers: dict[str, Any] = {
        f"{name}torch__cuda__is_available": lambda: has_gpu,
        f"{name}dist__HashStore": lambda: "HashStore",
    }
    answers[f"{name}torch__cuda__device_count"] = lambda: 1 if has_gpu == "one" else 8
    answers |= {rendezvous: lambda _: ("store", ranks[0], ranks[2]), f"{name}dist__is_initialized": lambda: True}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

    def call(_: Any) -> str:
        with process_group.process_group(RunConfig.model_validate({"threads": 3} | values)) as one:
            return f"{one} {os.environ.get('TORCH_GLOO_LAZY_INIT', '')}".strip()

    env = {key: str(value) for key, value in zip(names, ranks, strict=False)}
    return told(call, *(name + each for each in done.split()), rendezvous, env=env, answers=answers)


def on_machine(values: dict[str, Any], *machine: int) -> str:
    """What is said of a config on this many ranks and GPUs, and ranks of the machine."""
    config = load.load(None, values, world_size=machine[0], n_gpus=machine[1], local_world_size=machine[2]).config
    return f"{config.fsdp.mesh_shape(machine[0])} {config.fsdp.cpu_offload}"


WORK = "log", "validation", "tasks", "save", "samples"


def refuse(*given: Any, **more: Any) -> Any:
    raise errors.ConfigError(f"{given} {more}")


def dry(rank: int, values: dict[str, Any]) -> list[Any]:
    """A dry run of rank `rank` of 8: what it builds from which values, and what is printed."""
    return told(
        lambda _: dry_run.run(
            Stub(config=config_of(values)),
            Stub(vocab_size=300),
            lambda config, _data, *given: Stub(
                train=[config.train.global_batch_size, config.train.batch_schedule, config.train.steps, *given],
                resumed=config.checkpoint.resume,
                close=lambda: print("closed"),
            ),
            str,  # type: ignore[arg-type]
        ),
        env={"RANK": str(rank), "WORLD_SIZE": "8"},
        answers={
            "tools__dry_run__process_group": lambda _: contextlib.nullcontext("process"),
            "tools__dry_run__require_agreement": lambda config, *_: print("agreement", config.train.batch_schedule),
            "tools__dry_run__speed_lines": lambda process: [f"speeds of {process}"],
            "tools__dry_run__Log": lambda folder, enabled: ["runs" in folder.parts, enabled],
            "tools__dry_run__planned": lambda config, *given: [config.train.batch_schedule, *given],
            "tools__dry_run__measure": lambda session, _: print("of", session.train, session.resumed) or (5, 0.5),
            "tools__dry_run__check_machines": lambda folder, *_, **__: f"machines of {folder}",
            "tools__dry_run__compare": lambda *given: str(given),
        },
    )


def replayed(rank: int, checkpoint: str, *notes: str) -> list[Any]:
    """A replay of rank `rank` of 2: where it begins, and what it says."""
    return told(
        lambda _: replay.run(
            5,
            Stub(config=config_of({})),
            Stub(),
            lambda given, *_: Stub(
                given=given.change,
                watchdog=Stub(training=contextlib.nullcontext),
                close=lambda: print("closed"),
            ),
            str,  # type: ignore[arg-type]
        ),
        answers={
            "tools__replay__process_group": lambda _: contextlib.nullcontext(Process(rank, 2, CPU, 1)),
            "tools__replay__require_agreement": lambda *_: print("agreement"),
            **{f"tools__replay__{name}": lambda *_: {} for name in ("bitwise_setting", "values_to_match")},
            "tools__replay__numbers_of": lambda *_: {},
            "tools__replay__on_rank0": lambda *_: {
                **{"start": 3, "last": 5, "checkpoint": checkpoint, "steps": {}, "notes": notes, "advice": ""}
            },
            "tools__replay__in_temporary_folder": lambda _, change: contextlib.nullcontext(
                Stub(folder="temporary", change=change)
            ),
            "tools__replay__Log": lambda folder, enabled: Stub(info=lambda line: print(folder, enabled, line)),
            "tools__replay__compute": lambda session, *_: session.given,
        },
    )


def spins(running: list[int], n_cores: int | None, env: dict[str, str], torch_is_loaded: bool = False) -> list[Any]:
    """Whether threads spin only briefly while so many processes run, and the environment then."""
    texts = iter([f"ctxt 7\nprocs_running {n}\nprocs_blocked 9\n" for n in running] or [""])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "open": lambda _: io.StringIO(next(texts)),
            "sys": Stub(modules=["torch"] * torch_is_loaded),
            "os": Stub(environ=env, cpu_count=lambda: n_cores),
            "time": Stub(sleep=str),
        }.items():
            patch.setattr(torchtitan_lite, name, value, raising=False)
        return [vars(torchtitan_lite)["_spin_briefly_on_a_busy_machine"](), env]


MODES = [
    flag
    for flag in cli._parser(True)._option_string_actions
    if "." not in flag and flag not in (*cli.SHORTHANDS, "-h", "--help", "--help-all", "--config")
]  # the last one has a value
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
WITHOUT: Any = Stub()  # a module of the standard library without the functions that only Linux has
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    # ranks and machines
    "beats that are read": (
        lambda rank, local, quiet_s, silent_s: watched(
            "_exchange",
            rank,
            6,
            local,
            3,
            _number=7,
            _own=RankState(),
            _quiet_s=quiet_s,
            _interval_s=5.0,
            _others={},
            _beats={3: (7, 100.0 - silent_s)},
            _answered=100.0,
            _thread_store=Stub(
                set=lambda key, _: print(f"set {key}"),
                multi_get=lambda keys: print(*keys) or len(keys) // 2 * ["[5, 1, 0]"] + len(keys) // 2 * ["[7, [], 0]"],
            ),
        ),
        [(3, 0, 9.0, 60.0), (3, 0, 10.0, 0.0), (4, 1, 10.0, 0.0), (4, 1, 10.0, 20.0), (1, 1, 10.0, 0.0)],
    ),
    "a rank is lost": (
        lambda host, reason: watched("_why_closed", 5, 8, 1, 4, _on_host=host, _reason=lambda *_: reason),
        [(" on x", "rank 6 died"), (" on x", ""), ("", "")],
    ),
    "printed by a mode": (
        lambda local, values: told(
            lambda _: modes.run(Stub(loaded=LOADED, modes=NO_MODE | values), *OF_TRAIN),
            *(
                "tools__modes__check",
                "tools__modes__dry_run__run",
                "tools__modes__replay__run",
                "tools__modes__inspect",
            ),
            *("tools__modes__prepared", "tools__modes__to_toml_with_origins"),
            env={"LOCAL_RANK": str(local)},
            answers={
                "tools__modes__prepared": lambda _: (LOADED, Stub(vocab_size=9)),
                "tools__modes__to_toml_with_origins": lambda _: "toml",
            },
        ),
        [
            (local, values)
            for values in ({}, {"check_config": True}, {"print_config": True}, {"dry_run": False, "replay": 4})
            for local in (0, 2)
        ],
    ),
    "printed by --inspect": (
        lambda rank: told(
            lambda _: modes.inspect(config_of({}), 517, lambda *given: given[1:2]),  # type: ignore[arg-type]
            answers={
                "tools__modes__process_group": lambda _: contextlib.nullcontext(Process(rank, 4, GPU, 1)),
                "tools__modes__build_mesh": lambda _, device: str(device),
                "tools__modes__describe": lambda model, _: str(model),
            },
        ),
        [(0,), (2,)],
    ),
    "dry run": (
        dry,
        [
            (0, {"train.steps": 2, "checkpoint.resume": "x", "train.global_batch_size": 16}),
            (1, {"train.steps": 9, "train.batch_schedule": [[0, 16], [4, 32]]}),
        ],
    ),
    "measured by a dry run": (
        lambda rank, device: told(
            lambda stand_in: dry_run.measure(
                Stub(
                    config=config_of({}),
                    process=Process(rank, 2, device, 1),
                    optimizer=Stub(state={1: {"a": torch.zeros(3)}}),
                    model=Stub(parameters=lambda: [torch.zeros(5)], buffers=lambda: [torch.zeros(2)]),
                    watchdog=Stub(step=stand_in("watched"), training=contextlib.nullcontext),
                ),
                lambda _, n: Stub(loss=Stub(item=lambda: stand_in("step")(n))),
            ),
            "tools__dry_run__torch__cuda__reset_peak_memory_stats",
            answers={
                "tools__dry_run__time": Stub(perf_counter=iter([1.0, 3.5]).__next__),
                "tools__dry_run__peak_of": lambda compute: compute() or 1000,
                "tools__dry_run__torch__cuda__max_memory_allocated": lambda: 77,
                "tools__dry_run__check_previous_step": lambda _: print("checked"),
            },
        ),
        [(0, CPU), (1, CPU), (1, GPU)],
    ),
    "plan of a dry run": (
        lambda device, has_gpu, size: told(
            lambda _: dry_run.planned(config_of({"run.device": device, "model.vocab_size": size}), 517, 4),
            answers={
                "tools__dry_run__torch__cuda__is_available": lambda: has_gpu,
                "tools__dry_run__torch__cuda__get_device_name": lambda: "NVIDIA H100 80GB HBM3",
                "tools__dry_run__make_plan": lambda config, n, device, on_gpu: [
                    *(config.model.vocab_size, n, device and device.name, on_gpu)
                ],
            },
        ),
        [("auto", True, 0), ("cpu", True, 600), ("auto", False, 0)],
    ),
    "replay": (replayed, [(0, "checkpoint", "one is damaged", "another"), (1, "")]),
    "shared folder": (
        lambda sees, others, state_dict, job, remote="": told(
            lambda stand_in: patched(
                lambda: start_and_end.require_shared(
                    Path("/no/such"), Stub(checkpoint=Stub(state_dict=state_dict), run=Stub(remote=remote))
                ),
                run__start_and_end__Path=lambda _: Stub(name="x", exists=lambda: sees, unlink=stand_in("unlink")),
                run__start_and_end__values_of_ranks=lambda own: [
                    own,
                    *([h, len(h) < 2, not h.strip()] for h in others),
                ],
                run__start_and_end__socket__gethostname=lambda: "a",
            ),
            "run__start_and_end__tempfile__mkstemp",
            env={"TORCHELASTIC_RUN_ID": job},
            answers={"run__start_and_end__tempfile__mkstemp": (0, "file")},
        ),
        [
            *((True, ["b", "", "c", "b"], kind, job) for kind in ("full", "sharded") for job in ("none", "7")),
            *((True, ["", ""], "sharded", "7"), (False, ["", "b"], "full", "7"), (True, [], "full", "none")),
            *((False, others, "sharded", "7", "bucket") for others in ([""], ["", "  "], ["", ""])),
        ],
    ),
    "job": (
        lambda env: told(lambda _: run_folder.job(), env=env),
        [({},), *(({"TORCHELASTIC_RUN_ID": name},) for name in ("none", "a-b", "a-12", "a-1-2", "7", "a-2b", ""))],
    ),
    "batches of a rank": (
        lambda rank, n: [*likelihood.batches_of_rank(range(n), Process(rank, 3, CPU, 1))],
        [(rank, n) for n in (0, 2, 3, 7) for rank in (0, 1, 2)],
    ),
    "shared memory": (
        lambda size, device, n_local: told(
            lambda _: apply_shared_memory("model", Stub(size=lambda: size, device_type=device)),  # type: ignore[arg-type]
            "cpu__shared_memory__apply",
            env={"LOCAL_WORLD_SIZE": str(n_local)} if n_local else {},
        ),
        [(4, "cpu", 4), (4, "cpu", 2), (4, "cuda", 4), (1, "cpu", 1), (1, "cpu", 0), (2, "cpu", 0), (2, "cpu", 4)],
    ),
    "one of several": (
        lambda env, *argv: patched(
            lambda: environment.world_size(argv, int(env.get("GPUS", "1"))), environment__os__environ=env
        ),
        [
            ({},),
            *(({name: "4"},) for name in environment._ALONE),
            *(({"PET_NNODES": "1:4"}, flag) for flag in ("--dry-run", "--check-config", "--print-config", "--help")),
            *((LAUNCHED | {"GPUS": n},) for n in ("1", "2")),
            ({**LAUNCHED, "GPUS": "2", "SLURM_STEP_NUM_TASKS": "2", "LOCAL_RANK": "1"},),
            ({**LAUNCHED, "GPUS": "2", "WORLD_SIZE": "1"},),
        ],
    ),
    "command": (
        lambda env, python, resume: told(
            lambda _: environment.this_command(run__name="new", checkpoint__resume=resume, a__skip="[2]"),
            env=env,
            answers={
                "environment__sys__executable": python if python[0] == "/" else str(Path(python).absolute()),
                "environment__sys__argv": [
                    "train.py",
                    "--run.name",
                    "old",
                    "--config",
                    "a b.toml",
                    "--checkpoint.resume=runs/x",
                    "--a.skip=[1]",
                    "--optim.lr=1",
                    *MODES,
                    "7",
                ],
            },
        ),
        [
            ({}, ".venv/bin/python", "runs/y"),
            ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, ".venv/bin/python", ""),
            ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "/elsewhere/bin/python", ""),
            ({"RANK": "1", "WORLD_SIZE": "2"}, "/elsewhere/bin/python", ""),
            (
                {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHTITAN_LITE_LAUNCHER": "run -n NODES x"},
                ".venv/bin/python",
                "",
            ),
            ({"WORLD_SIZE": "4"}, ".venv/bin/python", ""),
        ],
    ),
    "parent": (
        lambda env, parents: told(
            lambda stand_in: patched(
                environment.die_with_launcher,
                environment__ctypes__CDLL=lambda _: Stub(prctl=stand_in("prctl")),
            ),
            "environment__os__kill",
            env=env,
            answers={"environment__os__getppid": iter(parents).__next__, "environment__os__getpid": lambda: 77},
        ),
        [({}, []), *(({"RANK": "2"}, parents) for parents in ([1, 1], [5, 1]))],
    ),
    "silent": (
        lambda answered: watched(
            *("_silent", 5, 12, 1, 4),
            **{"_answered": answered, "_silent_s": 30.0, "_beats": {1: (3, 99.0), 2: (4, 40.0), 3: (9, 70.0)}},
        ),
        [(at,) for at in (95.0, 70.1, 70.0, 20.0)],
    ),
    "looks": (
        lambda step, operations, compiles, before_s: patched(
            lambda: watched("_look", 0, 2, 0, 2, 8.0, _at=Place(step, 1), _worked=3, _processor_s=before_s),
            run__watchdog__progress=Stub(operations=lambda: operations, compiles=lambda: compiles, moved=lambda: 40),
        ),
        [
            *((step, [], compiles, 4.9) for step in (0, 2) for compiles in (False, True)),
            *((0, [], False, 5.0), (0, [("saving", False)], False, 3.0), (3, [("saving", True)], True, 3.0)),
        ],
    ),
    "operations": (
        doing,
        [(("saving step 5", True), ("writing x", False)), (("a", True),), (("a", False), ("b", True))],
    ),
    "a second Ctrl-C": (
        lambda rank: told(
            lambda stand_in: patched(
                lambda: preemption.Preemption(0, Path("none"))._end_at_once(),
                run__preemption__os___exit=stand_in("end"),
                run__preemption__os__write=stand_in("write"),
            ),
            env={"LOCAL_RANK": rank},
        ),
        [("0",), ("1",)],
    ),
    # the loop, and what ends it
    "loop": (
        lambda *given: looped(*given[:2], **dict(zip(WORK, given[2:], strict=True))),
        [
            (0, 3, 1, 2, 3, 4, 5),
            (0, 0, 3, 0, 0, 0, 0),
            *((step, 0, 3, 5, 0, 6, 4) for step in (4, 7, 8)),
        ],
    ),
    "a save": (
        lambda ends, background, error: told(
            lambda stand_in: saving.save(
                Stub(
                    state=TrainState(step=6),
                    config=Stub(train=Stub(steps=6 + (not ends)), checkpoint=Stub(async_save=background)),
                    preemption=Stub(agreed=False, agree=stand_in("agree")),
                    process="p",
                    model="m",
                    optimizer="o",
                    guards=[Stub(state=lambda: {"skipped": [3]}), Stub(state=lambda: {"spikes": {"norms": [1.0]}})],
                    scaler=Stub(state_dict=lambda: {"scale": 2.0}),
                    log="log",
                    meter=Stub(loss_since=torch.ones(2)),
                    checkpointer=Stub(save=stand_in("save"), remote=None),
                ),
            ),
            *(f"run__saving__{name}" for name in ("require_finite", "require_equal_replicas", "report_save")),
            answers={"run__saving__report_save": lambda *_, **__: error},
        ),
        [
            (True, False, ""),
            (True, True, "no space"),
            (False, True, ""),
            (False, False, "no space"),
            (False, False, ""),
        ],
    ),
    "whether a save has finished": (
        lambda saved, alive: save.Checkpointer.finished(
            Stub(_saved=saved, _thread=Stub(is_alive=lambda: alive) if alive is not None else None)
        ),
        [(saved, alive) for saved in (None, "an outcome") for alive in (None, True, False)],
    ),
    "an upload": (
        lambda wait, outcome, rate, steps, waited_s: told(
            lambda _: Remote.report(
                Stub(
                    uploading=lambda: True,
                    _waiting_line=lambda: Remote._waiting_line(
                        Stub(_steps=steps, _n_bytes=3 << 20, _rate=rate, _step=9)
                    ),
                    _outcome=lambda wait=False: outcome and {"step": 9, **outcome, "waited": wait},
                    _process=Stub(untimed=None),
                    bucket=Stub(url="s3://x/run"),
                ),
                Stub(info=print, record=print),
                wait=wait,
            ),
            answers={
                "checkpointing__remote__on_all": lambda action, _: [action()],
                "checkpointing__remote__time": Stub(perf_counter=iter([5.0, 5.0 + waited_s]).__next__),
            },
        ),
        [
            *((wait, {}, 0.0, {}, 0.0) for wait in (False, True)),
            *(
                (wait, {"upload_error": "no route"}, 2**19, {"step-7": "", "step-12": ""}, 9.0)
                for wait in (False, True)
            ),
            *((True, {"upload_s": 1.25, "upload_bytes": 3 << 19}, 0.0, {"step-7": ""}, s) for s in (0.09, 0.11)),
        ],
    ),
    "small files": (
        lambda *names: told(
            lambda _: Remote.upload_small_files(
                Stub(
                    folder=Stub(iterdir=lambda: [Stub(name=n, suffix=Path(n).suffix, read_bytes=bytes) for n in names]),
                    bucket=Stub(fs=Stub(pipe_file=print)),
                    claim="00000007-a",
                )
            )
        ),
        [("attempts.jsonl", ".new.json", "metrics.jsonl", "lock", "page.html", "config.toml", "log.txt")],
    ),
    "a file, and what the bucket has": (
        lambda mode, problem, lacking: told(
            lambda _: storage.intact(
                *(Path("c"), "f", "record", mode),  # type: ignore[arg-type]
                Stub(fetch_file=lambda *given: print(*given) or lacking) if lacking is not None else None,
                "claim",
            ),
            "checkpointing__storage__verify_file",
            answers={"checkpointing__storage__verify_file": problem},
        ),
        [
            *((mode, "", lacking) for mode in ("off", "size", "full") for lacking in (None, "")),
            *(("full", "cut off", lacking) for lacking in (None, "", "it is gone")),
        ],
    ),
    "waiting for an upload": (
        lambda putting, done: told(
            lambda stand_in: patched(
                lambda: Remote._wait(Stub(_upload=Stub(done=iter(done).__next__), _step=9, _putting=putting)),
                checkpointing__remote__futures=Stub(wait=lambda *_, **more: print(more)),
                checkpointing__remote__progress=Stub(working=progress.working, advance=stand_in("advance")),
            ),
        ),
        [(True, [False, True]), (False, [False, True]), (True, [True])],
    ),
    "a failure": (
        lambda error, begun: told(
            lambda _: start_and_end.report_failure(
                Stub(folder="x"),
                *("process", Stub(attempt=2), error),  # type: ignore[arg-type]
                Stub(checkpointer=Stub(remote=None), state=Stub(step=6)) if begun else None,
            ),
            *("run__start_and_end__report_save", "run__start_and_end__run_folder__record_end"),
        ),
        [
            *((error("a"), True) for error in (errors.DataError, errors.SpikeError, errors.StuckError, ValueError)),
            *((errors.SpikeError("a"), False), (AssertionError(), True)),
        ],
    ),
    "bar": (
        lambda first, last: told(
            lambda stand_in: patched(
                lambda: [*metrics.Log(Path("x"), enabled=True).progress(first, last)],
                run__metrics__sys=Stub(stderr=Stub(isatty=lambda: True)),
                run__metrics__tqdm=stand_in("tqdm", Stub(update=stand_in("update"), close=stand_in("close"))),
            )
        ),
        [(4, 6)],
    ),
    # a device
    "process group": (
        opened,
        [
            ({"device": "cpu"}, True),
            ({"device": "auto", "tf32": True}, False),
            ({"device": "auto", "tf32": True, "timeout_minutes": 7, "start_timeout_minutes": 9}, True, 5, 1, 8, 4),
            ({"device": "cuda", "deterministic": True}, True, 6, 2, 8, 4),
            ({"device": "cpu", "deterministic": True}, False, 3, 0, 4, 3),
            ({"device": "cpu"}, False, 3, 0, 1024, 8),
            ({"device": "auto"}, "one", 6, 2, 8, 4),
        ],
    ),
    "mesh": (
        lambda values, n, device: told(
            lambda _: process_group.build_mesh(config_of(values, n).fsdp, device),
            "distributed__process_group__init_device_mesh",
            answers={"distributed__process_group__dist__get_world_size": lambda: n},
        ),
        [
            ({}, 6, GPU),
            ({"fsdp.dp_replicate": 2}, 6, CPU),
            ({"fsdp.dp_shard": 1}, 3, GPU),
            ({"fsdp.dp_shard": 2}, 6, GPU),
        ],
    ),
    "on a machine": (
        on_machine,
        [
            *(({"run.device": device}, 8, gpus, 4) for device in ("auto", "cuda", "cpu") for gpus in (0, 1, 2, 4, 5)),
            *(
                ({"run.device": device, "fsdp.cpu_offload": True, "optim.name": "adamw"}, 2, gpus, 2)
                for device in ("auto", "cuda", "cpu")
                for gpus in (0, 2)
            ),
            *(({"fsdp.sharding_strategy": "HYBRID_SHARD"}, 8, gpus, 2) for gpus in (0, 8)),
        ],
    ),
    "compiler": (
        lambda device, n_gpus, triton, gxx: told(
            lambda _: local.missing_for_inductor(device, n_gpus),
            *("config__rules__local__importlib__util__find_spec", "config__rules__local__shutil__which"),
            answers={
                "config__rules__local__importlib__util__find_spec": lambda _: triton,
                "config__rules__local__shutil__which": lambda _: gxx,
                "config__rules__local__Path": lambda _: Path("/no/such"),
            },
        ),
        [
            (device, n, found, not found)
            for device in ("auto", "cuda", "cpu")
            for n in (0, 2)
            for found in (True, False)
        ],
    ),
    "memory": (
        lambda device: told(
            lambda _: out_of_memory.peak_memory_gib(device),
            "run__out_of_memory__torch__cuda__max_memory_reserved",
            answers={
                "run__out_of_memory__torch__cuda__max_memory_reserved": lambda _: 3 * 2**30,
                "run__out_of_memory__resource__getrusage": lambda _: Stub(ru_maxrss=2**21),
            },
        ),
        [(GPU,), (CPU,)],
    ),
    "peak": (
        lambda device, values: told(
            lambda _: mfu.peak_flops(config_of(BF16 | values), Process(5, 8, device, 1, 4)) / 1e12,
            "run__mfu__torch__cuda__get_device_name",
            answers={"run__mfu__torch__cuda__get_device_name": "NVIDIA H100 80GB HBM3"},
        ),
        [(GPU, {}), (CPU, {}), (GPU, {"run.peak_tflops": 3}), (CPU, {"run.peak_tflops": 3})],
    ),
    "facts": (
        lambda rank, device: told(
            lambda _: [
                str(run_folder.facts(Process(rank, 4, device, 1), ["a", "b"])[key])
                for key in ("device", "hosts", "world_size")
            ],
            *("run__run_folder__torch__cuda__get_device_name", "run__run_folder__platform__processor"),
            answers={
                "run__run_folder__torch__cuda__get_device_name": "a GPU",
                "run__run_folder__platform__processor": "",
                "run__run_folder__git_state": lambda _: {},
            },
        ),
        [(2, GPU), (0, CPU)],
    ),
    "a model that a tool opens": (
        lambda name, *words: told(
            lambda _: (
                generate.main(words)
                if name == "generate"
                else evaluate.evaluate(evaluate.options_of(words), Process(0, 1, GPU, 1))
            ),
            answers={
                "tools__generate__open_model": refuse,
                "tools__generate__device_of": str,
                "tools__evaluation__evaluate__open_model": refuse,
            },
        ),
        [
            *((name, "run", *more) for name, more in (("generate", ["--prompt=x"]), ("evaluate", []))),
            ("generate", "run", "--prompt=x", "--dtype=bfloat16", "--device=cuda", "--ema", "--tokenizer=t.json"),
            ("evaluate", "run", "--dtype=bfloat16", "--ema", "--tokenizer=t.json"),
        ],
    ),
    "what a model is scored on": (
        lambda objective, is_encoder_decoder, *data: told(
            lambda _: [
                *evaluate.scores_of(
                    Stub(model=None, config=objective and Stub(data=Stub(objective=objective)), window=refuse),
                    Texts(data=data),
                    Process(0, 1, CPU, 1),
                    print,
                )
            ],
            answers={
                "tools__evaluation__evaluate__is_encoder_decoder": lambda _: is_encoder_decoder,
                "tools__evaluation__evaluate__paths__is_prepared": lambda name: name != "text",
                "tools__evaluation__evaluate__read_meta": lambda folder: Stub(
                    files=[vars(evaluate)["PAIRS"]] * (folder.name > "a")
                ),
                "tools__evaluation__evaluate___scores_of_rows": lambda *_: ["rows"],
            },
        ),
        [
            *((objective, False) for objective in ("pairs", "causal", None)),
            *(("pairs", False, "text"), ("causal", False, "a", "b"), ("causal", False, "a"), (None, True)),
        ],
    ),
    "export": (
        lambda model_class: told(
            lambda _: checkpoints._run(Stub(command="export", source="run", out="out", best=False, ema=True)),
            answers={"tools__checkpoints__weights__export": lambda *given, **more: (model_class, [f"{given} {more}"])},
        ),
        [("Qwen2ForCausalLM",), ("Qwen3ForCausalLM",)],
    ),
    "beams": (
        lambda beams, penalty: told(
            lambda _: generate.tokens_of(
                Stub(model="model", ends=(7, 8)), [5], generate.Options(9, beams=beams, length_penalty=penalty)
            ),
            "tools__generate__beam_search",
            answers={"tools__generate__new_tokens": lambda *_: "sampled"},
        ),
        [(1, 1.0), (2, 0.5)],
    ),
    "a model of the API": (
        lambda values: told(
            lambda _: api.build_model(config_of({"run.device": "cpu"} | values), 517),
            *(f"api__{name}" for name in ("freeze", "cpu__apply", "materialize")),
            *(f"api__recompute_and_compile__{name}" for name in ("apply_activation_checkpointing", "apply_compile")),
            answers={"api__models__build": lambda _config, size, _losses: f"model of {size}"},
        ),
        [
            ({"optim.freeze": ["layers.0.*"], "activation_checkpointing.mode": "full", "run.seed": 3},),
            (PAIRS | {"model.family": "t5", "compile.enabled": True, "speed.fused_functions": False},),
        ],
    ),
    "device of a tool": (
        lambda name, has_gpu: told(
            lambda _: load_model.device_of(name),
            answers={"tools__load_model__torch__cuda__is_available": lambda: has_gpu},
        ),
        [(name, has) for name in ("auto", "cpu", "cuda") for has in (True, False)],
    ),
    "widens": (
        lambda dtype, given, device, *slow: told(
            lambda _: widens(
                config_of({"fsdp.param_dtype": dtype, "speed.widen_matmuls": given}), Process(1, 4, device, 1)
            ),
            "cpu__float32_matmuls__slow_on_rank0",
            answers={"cpu__float32_matmuls__slow_on_rank0": lambda: [*slow]},
        ),
        [
            *((dtype, True, CPU, "float16") for dtype in ("float32", "bfloat16", "float16")),
            *(
                ("bfloat16", True, CPU, "float16", "bfloat16"),
                ("bfloat16", False, CPU, "bfloat16"),
                ("bfloat16", True, GPU, "bfloat16"),
            ),
        ],
    ),
    "kept gathered": (
        lambda device, n, offload=False, reshard=True: told(
            lambda _: evaluating._kept_gathered(
                Stub(named_parameters=lambda: [("w", Stub(numel=lambda: n)), ("v", Stub(numel=lambda: 100))]),
                Stub(cpu_offload=offload, reshard_after_forward=reshard),
                device,
            ),
            "distributed__evaluating__dist__all_reduce",
            answers={
                f"distributed__evaluating__{name}": value
                for name, value in {
                    "groups_of": lambda *_: [
                        Stub(param_dtype=torch.bfloat16, parameters=["w"], modules=[1], reshard_after_forward=True)
                    ],
                    "torch__tensor": lambda fits, dtype, device: TENSOR(fits, dtype=dtype),
                    "FSDPModule": int,
                    "torch__cuda__memory_reserved": lambda _: 900,
                    "torch__cuda__memory_allocated": lambda _: 200,
                    "torch__cuda__mem_get_info": lambda _: (1300, 9999),
                }.items()
            },
        ),
        [
            *((CPU, n) for n in (2**29, 2**29 + 1)),
            *((GPU, n) for n in (500, 501)),
            *((CPU, 1, True), *((CPU, 1, False, reshard) for reshard in (2, False, "default"))),
        ],
    ),
    # a platform
    "write-back": (
        lambda has: told(
            lambda stand_in: patched(
                lambda: safetensors_file._start_writeback(3, 40, 50),
                checkpointing__safetensors_file__os=Stub(posix_fadvise=stand_in("fadvise"), POSIX_FADV_DONTNEED=4)
                if has
                else WITHOUT,
            )
        ),
        [(True,), (False,)],
    ),
    "threads spin": (
        spins,
        [
            *(
                ([5] * 5, 8, {}),
                ([5, 5, 4, 5, 5], 8, {}),
                ([7] * 5, 8, {"LOCAL_WORLD_SIZE": "3"}),
                ([3] * 5, 2, {}, True),
            ),
            *(([9] * 5, 2, {name: "1"}) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")),
            *(([n] * 5, None, {}) for n in (1, 2)),
            ([], 1, {}),
        ],
    ),
    "open files": (
        lambda soft, hard: told(
            lambda _: environment.allow_open_files(),
            "environment__resource__setrlimit",
            answers={"environment__resource__getrlimit": lambda _: (soft, hard)},
        ),
        [(1024, 4096), (4096, 4096), (1024, -1), (-1, -1), (2**20, 2**21), (1024, 2**21), (2**20, -1)],
    ),
    "freed memory": (
        lambda: told(
            lambda stand_in: patched(
                environment.keep_freed_memory,
                environment__ctypes__CDLL=lambda _: Stub(mallopt=stand_in("mallopt")),
            )
        ),
        [()],
    ),
}


def test_places() -> None:
    found = {name: {key: result(call, row) for key, row in named(rows).items()} for name, (call, rows) in CALLS.items()}
    assert_recorded(found, Path(__file__).with_name("recorded_places.json"))


# --- on four ranks, see tests/distributed ------------------------------------------------------------------------

FILES = {
    **{f"f{n}": safetensors_file.FileRecord(n, "") for n in (3, 1, 4, 15, 9, 2, 6)},
    "state.json": safetensors_file.FileRecord(5, ""),
}


def together(rank: int) -> dict[str, Any]:
    """What rank `rank` of 4 on two machines finds where its disk, its clock or its text is not that of the others."""
    one, host = Process(rank, 4, CPU, 1), f"node{rank // 3}"
    config, said = config_of({"run.preempted_exit_code": 5, "train.steps": 9}, 4), list[Any]()
    data: Any = Stub(folder=Path("d"), tokenizer_sha256="t", vocab_size=9, hashes=dict, later=())
    reasons = ("", "run.max_minutes", "SIGTERM", "")
    log = Stub(info=lambda line, **_: said.append(line), record=lambda *r: said.append(r[0]), attempt=2)
    checkpointer: Any = Stub(
        folder=Path("x"), damaged=[7], remote=None, forked_from=None, group=None, _share=1.0, _n_bytes=lambda: 40 + rank
    )
    checkpointer._on_leaders = lambda action: save.Checkpointer._on_leaders(checkpointer, action)
    checkpointer.process, checkpointer.require_space = one, lambda: None
    session = Stub(
        state=Stub(step=6, tokens=0), process=one, config=config, log=log, checkpointer=checkpointer, model=None
    )
    session.preemption, session.meter = Stub(agreed=False, reason=reasons[rank]), None
    session.periodic = [Periodic(name, n, Mock(), keys=[key]) for name, n, key in (("0", 3, "a"), ("1", 2, "b"))]
    task = Stub(name="t", digest=str(rank == 2))
    request: Any = preemption.Preemption(0, Path("none"))
    asked: Any = Stub(process=one, state=session.state, preemption=request, watchdog=Mock(), meter=Mock())
    record = StepRecord(
        *(7, (8, 16), 4, torch.tensor(1.0 + rank), torch.tensor([9.0, 0.5, 3.0, 0.0][rank]), torch.tensor(2.0)),
        *(rank == 2, ["inputs"], {"grad_norm": torch.ones(1)}, [torch.tensor([[rank, 1.0]])], one),
    )

    def sampled(references: list[str]) -> Any:
        prompts: Any = Stub(texts=["a" * 121], ids=[[1, 2]], end=0, references=references)
        prompts.config = Stub(temperature=0.0, max_tokens=3)
        prompts.tokenizer = Stub(decode=lambda ids: " ".join(map(str, ids)))
        sampling.sample(prompts, session)
        return [{**each, "seconds": 0} if isinstance(each, dict) else each for each in said[-2:]]

    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        **{
            f"verified {kind}": (
                lambda n=n, tensors=tensors: find.verify_together(
                    Path("x"), "full", replace(one, local_world_size=n), None, tensors
                ),
                {
                    "checkpointing__find__storage__check_manifest": lambda _, kind=kind: (
                        storage.Manifest(5, kind.split()[0] if rank == 0 else "none", 4, 7, Stub(never="sent"), FILES),
                        "",
                    ),
                    "checkpointing__find__read_places": lambda _: Stub(specs={"a": 0}),
                    "checkpointing__find__Reads": lambda *given: Stub(
                        files=[f"f{n}" for n in ((3, 1), (1, 15), (4, 9), (2, 6, 9))[rank]] * (given[2] == {"a": 1})
                    ),
                    "checkpointing__find__local_rank": lambda: rank % 2,
                    "checkpointing__find__storage__verify_file": lambda _folder, name, *_: f"{name} by {rank}",
                },
            )
            for kind, n, tensors in (
                ("full", 3 if rank == 0 else 1, None),
                ("sharded", 2, None),
                ("sharded on two disks", 2, {"a": 1, "new": 2}),
            )
        },
        "no manifest": (
            lambda: find.verify_together(Path("x"), "full", one),
            {"checkpointing__find__storage__check_manifest": lambda _: (None, f"of {rank}")},
        ),
        "checkpoints": (
            lambda: str(find.checkpoint_to_resume(Path("x"), Stub(resume="y", verify="size"), one)),
            {
                "checkpointing__find__storage__incomplete_folders": lambda _: [f"wrong {rank}"],
                "checkpointing__find__storage__find_steps": lambda _: [rank, rank + 10],
                "checkpointing__find__newest_complete": lambda folders, _: Stub(notes=[], folder=[*map(str, folders)]),
            },
        ),
        "step": (
            lambda: [*record.numbers, record.loss_sum.item(), record.metrics[0].tolist()],
            {},
        ),
        **{
            name: (
                lambda references=references: sampled(references),
                {
                    "run__sampling__time": Stub(perf_counter=iter((6.0, 7.0)).__next__),
                    "run__sampling__generating": lambda *_: contextlib.nullcontext(),
                    "run__sampling__Sampler": lambda *_, seed: lambda _: 40 + rank,
                    "run__sampling__new_tokens": lambda _model, ids, _n, agreed, _end: [agreed(ids), agreed(ids) + 1],
                    "run__sampling__is_encoder_decoder": lambda _, references=references: bool(references),
                },
            )
            for name, references in (("sampled", ["b"]), ("continued", []))
        },
        "tasks": (
            lambda: str(tasks.Tasks.from_config(config, data)),
            {"run__tasks__find": lambda *_: [task]},
        ),
        "tasks of a tool": (
            lambda: evaluate.tasks_of(
                Stub(model=None, first_token=list, beginning=list, tokenizer=0, ends=(), own_data=0),
                Stub(tasks=["t"], questions=0),
                9,
                one,
            ),
            {
                f"tools__evaluation__evaluate__{name}": value
                for name, value in {
                    "is_encoder_decoder": lambda _: False,
                    "find_tasks__find": lambda *_: [task],
                    "text_encoder": lambda *_: None,
                    "encode_task": lambda one, *_: Stub(task=one),
                    "score": lambda *_: 0,
                }.items()
            },
        ),
        "stopped": (
            lambda: [start_and_end.report_end(session), *said[-2:]],
            {"run__start_and_end__run_folder__record_end": lambda *given: said.append(str(given[2:]))},
        ),
        "missed": (
            lambda: [each.name for each in resumed.missed_evaluations(session)],
            {
                "run__resumed__attempts__records": lambda _, file: [
                    {"step": 6, "ab"[rank > 0]: 1} if file == "metrics.jsonl" else {"step": 5, "b": 1}
                ]
            },
        ),
        "fork": (
            lambda: [
                spikes.build_guard(config, one, TrainState(), [], checkpointer, log)._fork(
                    Stub(step=9, samples=(8, 16))
                ),
                said[-1],
            ],
            {
                "run__spikes__report_save": lambda *_, wait: said.append(f"waits for a save: {wait}"),
                "run__spikes__storage__find_steps": lambda _: [4 - rank, 6 - rank, 7, 9],
                "run__spikes__this_command": lambda **given: given,
            },
        ),
        "space": (
            lambda: save.Checkpointer.require_space(checkpointer),
            {
                "checkpointing__save__storage__require_space": lambda folder, n: (_ for _ in ()).throw(
                    errors.SaveError(f"{folder}: {n}")
                )
            },
        ),
        "slow": (
            lambda: float32_matmuls.slow_on_rank0.__wrapped__(),
            {"cpu__float32_matmuls__slow_dtypes": lambda: [f"of {rank}"]},
        ),
        "gathered": (
            lambda: evaluating._kept_gathered(
                Stub(named_parameters=lambda: [("w", Stub(numel=lambda: 100))]),
                Stub(cpu_offload=False, reshard_after_forward=True),
                CPU,
            ),
            {
                "distributed__evaluating__GATHERED_BYTES": 400 if rank != 2 else 399,
                "distributed__evaluating__groups_of": lambda *_: [
                    Stub(param_dtype=torch.float32, parameters=["w"], modules=[1], reshard_after_forward=True)
                ],
                "distributed__evaluating__FSDPModule": int,
            },
        ),
        "not shared": (
            lambda: start_and_end.require_shared(
                Path("/no/such"), Stub(checkpoint=Stub(state_dict="sharded"), run=Stub(remote=""))
            ),
            {
                "run__start_and_end__Path": lambda _: Stub(exists=lambda: rank != 2, unlink=str),
                "run__start_and_end__tempfile__mkstemp": lambda **_: (0, "f"),
                "run__start_and_end__socket__gethostname": lambda: host,
            },
        ),
        "hosts": (
            lambda: start_and_end.require_agreement(config, data, one),
            {"run__start_and_end__socket__gethostname": lambda: host},
        ),
        **{
            f"another {key}": (
                lambda seed=seed, text=text: start_and_end.require_agreement(
                    config_of({"run.seed": seed}, 4), text, one
                ),
                {"run__start_and_end__socket__gethostname": lambda: host},
            )
            for key, seed, text in (
                ("seed", 0 if rank != 3 else 1, data),
                ("text", 0, Stub(**vars(data) | {"hashes": lambda: {"data": "b" if rank else "a"}})),
            )
        },
        "asked to stop": (
            lambda: [
                ran := list[Any](),
                patched(
                    lambda: resumed.run_missed(
                        asked, [Stub(run=lambda *_: [ran.__iadd__([1]), rank == 2 and request.received(15)])] * 3
                    )
                ),
                request.agreed,
                *(str(each.mock_calls) for each in (asked.watchdog, asked.meter)),
            ],
            {},
        ),
        "versions": (
            lambda: start_and_end.require_agreement(config, data, replace(one, device=GPU if rank == 2 else CPU)),
            {
                "run__start_and_end__socket__gethostname": lambda: host,
                "run__start_and_end__torch": Stub(
                    __version__=f"2.{rank == 2}", cuda=Stub(get_device_properties=lambda _: Stub(uuid="a"))
                ),
                "run__start_and_end__platform__python_version_tuple": lambda: ("3", f"{rank == 2}"),
            },
        ),
        "again": (
            lambda: start_and_end.require_one_run(Stub(config=config), data, one),
            {"run__start_and_end__run_folder__why_not_again": lambda *_: f"of {rank}"},
        ),
        "clocks": (
            lambda: dry_run.check_machines(Path("x"), session),
            {
                "tools__dry_run__require_shared": lambda *_: None,
                "tools__dry_run__socket__gethostname": lambda: host,
                "tools__dry_run__time": Stub(time=lambda: 100.0 + rank * 1.5),
            },
        ),
    }
    found = {name: patched(call, **values) for name, (call, values) in calls.items()}
    return dict(json.loads(json.dumps(found, default=str)))
