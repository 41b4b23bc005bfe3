"""What each rank, machine, device and platform does differently: recorded_places.json has the results of calls.

Nothing else holds: the second of each end in "the watchdog ends", the words of "an upload" and "one of several",
and "threads spin", "open files", "freed memory"; read their diffs. Real runs hold that hangs are named
(test_watchdog.py) and runs resume (test_interrupted.py).
"""

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch

import torchtitan_lite
import train
from tests.recorded import assert_recorded
from tests.run.test_recorded_lines import BF16, LAST, PAIRS, config_of, named, result
from tests.test_recorded_limits import CPU, Stub, patched
from torchtitan_lite import api, bucket, commands, environment, errors, progress, terminal
from torchtitan_lite.checkpointing import find, safetensors_file, save, storage
from torchtitan_lite.checkpointing.remote import Remote
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import cli, load
from torchtitan_lite.config.rules import local
from torchtitan_lite.config.schema import DataConfig, LogConfig, ModelConfig, RunConfig
from torchtitan_lite.cpu import apply_shared_memory, float32_matmuls, widens
from torchtitan_lite.data.prepare.cache import cache_folder
from torchtitan_lite.data.prepare.tokenizer import byte_level
from torchtitan_lite.distributed import evaluating, process_group
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import (
    attempts,
    between_steps,
    checks,
    metrics,
    mfu,
    next_phase,
    out_of_memory,
    phases,
    preemption,
    profiler,
    rank_seconds,
    resumed,
    run_folder,
    sampling,
    saving,
    spikes,
    start_and_end,
    tasks,
    trackers,
)
from torchtitan_lite.run.session import Periodic, Session, check_previous_step
from torchtitan_lite.run.watchdog import Place, RankState, Watchdog
from torchtitan_lite.scoring import likelihood
from torchtitan_lite.tools import checkpoints, dry_run, generate, load_model, modes, replay, status
from torchtitan_lite.tools.evaluation import documents, evaluate
from torchtitan_lite.tools.evaluation.documents import Texts

GPU, GONE, TENSOR = torch.device("cuda", 1), "Connection closed by peer", torch.tensor
OF_TRAIN: list[Any] = ["build", "train_step", "sharded_model"]
LOADED = Stub(notes=["n"], config=Stub(folder="runs/x", url="", run="run"))
FAILS, NO_MODE = (
    Mock(side_effect=errors.SaveError("failed")),
    {"check_config": False, "print_config": False, "dry_run": True},
)


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
            said.append(re.sub(r" at 0x\w+| id='\d+'", "", line))
            return instead(*args, **more) if callable(instead) else instead

        return listed

    others = {name: stand_in(name.rpartition("__")[2], (answers or {}).get(name)) for name in names}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        values = {"environment__os__environ": dict(env or {}), **(answers or {}), **others}
        found = patched(lambda: call(stand_in), **values)
    return [*said, *out.getvalue().splitlines(), found if isinstance(found, int | float | list) else str(found)]


# --- the watchdog -----------------------------------------------------------------------------------------------


STATES = {
    "starts": RankState(),
    "connects": RankState(Place(), [("connecting x: its first all-reduce", True)]),
    "fetches": RankState(Place(4)),
    **dict.fromkeys(("computes", "compiles"), RankState(Place(4, 1, 2))),
    "saves": RankState(Place(4, 1, 2), [("saving step 4", False)]),
    "writes": RankState(Place(4, 1, 2), [("saving step 4: writing x", True)]),
}


def ended(rank: int, *texts: str) -> list[Any]:
    """At which look a rank's watchdog ends the run, and what it says, by a played clock: one look each 1.5 s.

    The limit is 60 s, that of the start 15 s, so 40 and 10 looks. Two ranks are on a machine.

    Args:
        texts: of each rank, its state, and what it does before each look, the last one also from then on: "m" it moves
            bytes, "b" it uses more than a tenth of a processor, "q" less, "." nothing, "x" it publishes nothing. In
            the rank's own: "z" all ranks were stopped for 100 s, "?" the store does not answer. "m3" is "mmm".
    """
    states, played = [STATES[text.split()[0]] for text in texts], Stub(look=0, now=0.0, said=[])
    lines = [re.sub(r"(\D)(\d+)", lambda found: found[1] * int(found[2]), text.split()[1]) for text in texts]

    def seen(each: int = rank) -> str:
        return lines[each].ljust(150, lines[each][-1])[: played.look]

    def wait(seconds: float) -> bool:
        played.look += 1
        played.now += seconds + 100 * seen().endswith("z")
        return bool(played.said) or played.look == 150

    def within(seconds: float, action: Any, *given: Any) -> Any:
        played.now += seconds * seen().endswith("?")
        return None if seen().endswith("?") else action(*given)

    def value(key: str) -> str:
        each = int(key[-1])
        beat = [1 + played.look - seen(each).count("x"), states[each].operations, seen(each).count("m")]
        return json.dumps(states[each].place if "/at/" in key else beat)

    def watch() -> Any:
        watchdog = Watchdog(
            Path(os.environ["XDG_CACHE_HOME"], "watched"),
            Process(rank, len(texts), CPU, 1, 2, store=Mock()),
            RunConfig(timeout_minutes=1, start_timeout_minutes=0.25),
        )
        vars(watchdog).update(
            _at=states[rank].place,
            _thread_store=Stub(
                set=lambda *_: seen().endswith("?") and pytest.fail("it waits for the store without a limit"),
                multi_get=lambda keys: [*map(value, keys)],
            ),
            _end=lambda reason, _: played.said.extend([played.look, reason.split(". ")[0]]),
        )
        watchdog._watch()
        return played.said

    return patched(
        watch,
        run__watchdog__time=Stub(monotonic=lambda: played.now, strftime=str),
        run__watchdog__threading=Stub(Event=lambda: Stub(wait=wait), Thread=lambda **_: Stub(start=str)),
        run__watchdog__progress=Stub(
            operations=lambda: states[rank].operations,
            compiles=lambda: texts[rank].startswith("compiles"),
            moved=lambda: seen().count("m"),
        ),
        run__watchdog__os__times=lambda: [0.16 * seen().count("b"), 0.0, 0.0, 0.14 * seen().count("q"), played.now],
        run__watchdog__dist__barrier=str,
        run__watchdog__within=within,
        run__watchdog__local_rank=lambda: rank % 2,
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
        s.checkpointer = Stub(finished=lambda: stops == 4, remote=gc_every)
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
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    # ranks and machines
    "the watchdog ends": (
        ended,
        [
            *((0, f"writes {line}") for line in (".", ".40m.", ".41m.", ".20z.", "?", "m")),  # one process
            *((0, text) for text in ("starts .", "fetches .", "computes .")),
            # at the same place, on both sides of the limit
            *((0, f"computes {line}", "computes .") for line in (".", ".43m.", ".44m.", ".20z.", ".20z5.", "b", "m")),
            *((0, "computes .", f"computes {line}") for line in (".43m.", ".44m.", ".39x", ".40x", "x", "m")),
            *((0, f"compiles {line}", "computes .") for line in (".", "q", "b", ".43b.", ".44b.")),
            # at different places
            *(
                (0, *texts)
                for texts in (("computes .", "fetches ."), ("saves .", "computes ."), ("saves .", "writes ."))
            ),
            *((0, *texts) for texts in (("saves .", "writes m"), ("writes m", "saves ."))),
            # at the start
            *((0, f"starts {line}", "starts .") for line in (".", "q", "b", "m")),
            *((0, "starts .", f"starts {line}") for line in (".8x", "x", "m")),
            *((0, f"connects {line}", "connects .") for line in (".", ".13m.", ".14m.", "m")),
            # without an answer of the store, and with few
            *((1, "computes .", f"computes {line}") for line in ("?", ".20?", "?3m?", "?20.", "?21.", "?.3?.3?.3?.")),
            *((1, "starts .", "starts ?"), (2, "computes .", "computes x", "computes .30?")),
            # the first rank of a machine decides, unless it is stopped
            *((1, f"computes {line}", "computes .") for line in (".", ".20x", ".20x3.", "x", "m")),
            *((rank, *["computes ."] * 4) for rank in (2, 3)),
            (2, "computes .", "computes m", "computes .", "computes ."),
            *((3, "computes .", f"computes {line}", "computes x", "computes .") for line in (".", "m")),
        ],
    ),
    "the end of a rank": (
        lambda local, *lower: told(
            lambda stand_in: Watchdog._end(
                Stub(
                    **{"_file": Stub(write=stand_in("write")), "_path": Path("stacks/x"), "on_abort": stand_in("ends")},
                    **{"_world": Stub(rank=2), "_neighbours": dict(enumerate([*lower, False, True], 2 - len(lower)))},
                ),
                "a reason",
                2.5,
            ),
            *("run__watchdog__faulthandler__dump_traceback", "run__watchdog__report", "run__watchdog__os___exit"),
            answers={
                "run__watchdog__within": lambda _, action, *given: action(*given),
                "run__watchdog__write_traces": lambda *given: print("traces", *given),
                "run__watchdog__time": Stub(sleep=lambda seconds: print("waits", seconds)),
                "run__watchdog___died": bool,
                "run__watchdog__local_rank": lambda: local,
            },
        ),
        [(2, True, True), (2, True, False), (2,)],
    ),
    "files of a machine": (
        lambda died: told(
            lambda stand_in: str(
                Watchdog._open_files(
                    Stub(
                        _path=Stub(with_name=lambda name: Stub(open=stand_in(name, name))),
                        _first=2,
                        _world=Stub(local_world_size=3),
                    )
                )
            ),
            answers={"run__watchdog___died": lambda name: name in died},
        ),
        [("",), ("rank-3.txt",)],
    ),
    "a rank is lost": (
        lambda host, reason: told(
            lambda stand_in: Watchdog._why_closed(Stub(_on_host=host, _reason=stand_in("_reason", reason)))
        ),
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
    "checked": (
        lambda text, resume, steps, newest, more: told(
            lambda stand_in: patched(
                lambda: modes.check(
                    Stub(
                        config=Stub(
                            **{"folder": Path("runs/x"), "url": "", "data": Stub(is_prepared=text)},
                            checkpoint=Stub(resume=resume),
                            model=Stub(vocab_size=more.get("size", 0), resolved=lambda: {"dim": 8}),
                        )
                    )
                ),
                tools__modes__prepared=lambda loaded, folder: stand_in("prepared", (loaded, "data"))(folder),
                tools__modes__storage__find_steps=stand_in("steps", steps),
                tools__modes__find__candidates=stand_in("candidates", ["newest", "s3"]),
                tools__modes__find__newest_complete=lambda folders, verify: (
                    stand_in("verified")(*map(verify, folders)) or Stub(folder=newest)
                ),
                tools__modes__compatibility__require_same_run=lambda *given, fork: stand_in("compared")(*given, fork),
            ),
            answers={
                "tools__modes__is_locked": lambda _: more.get("job"),
                "tools__modes__run_folder__holder": lambda folder: f"who holds {folder}",
                "tools__modes__run_folder__is_of_another_job": lambda _: more["job"] == "another",
                "tools__modes__run_folder__why_not_again": lambda _, folder: more.get("why") and f"{folder} failed",
                "tools__modes__storage__incomplete_folders": lambda _: more.get("incomplete"),
                "tools__modes__phase_lines": lambda *_: ["a phase"],
                "tools__modes__phases__planned": lambda *_: None,
                "tools__modes__storage__bucket_of": lambda folder: folder == "s3",
                "tools__modes__storage__verify": lambda folder, how: [f"{folder} by {how}"],
                "tools__modes__storage__read_state": lambda folder: Stub(
                    of=folder, must_match={"model.vocab_size": 9, "model.dim": 7, "data": "d"}
                ),
                "tools__modes__compatibility__values_to_match": lambda _config, data: {"of": data},
                "tools__modes__flatten": lambda _: {"key": 1},
            },
        ),
        [
            *((False, "", [], None, more) for more in ({}, {"job": "mine"}, {"job": "another"}, {"why": True})),
            *((text, "", [4], "newest", {}) for text in (False, True)),
            (False, "y", [4], "newest", {"size": 5}),
            (False, "y", [], "newest", {}),
            *(
                (False, "y", steps, None, {"incomplete": incomplete})
                for steps, incomplete in (([], []), ([], [7]), ([4], []))
            ),
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
    "times of a dry run": (
        lambda *times: told(
            lambda _: dry_run.seconds_of(str),
            answers={
                "tools__dry_run__Timer": lambda _, **more: Stub(
                    timeit=lambda n, left=[*times]: Stub(mean=n * left.pop(0), of=more["globals"]["compute"])
                )
            },
        ),
        [(9.0, 1.0, 5.0, 2.0, 4.0)],
    ),
    "bytes of a dry run": (
        lambda n: told(lambda _: dry_run.own_bytes([a := torch.zeros(n), a[1:], torch.zeros(3, dtype=torch.int64)])),
        [(4,)],
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
            *(({"PET_NNODES": "1:4"}, flag) for flag in ("-h", "--help-all")),
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
    "operations": (
        doing,
        [(("saving step 5", True), ("writing x", False)), (("a", True),), (("a", False), ("b", True))],
    ),
    "seconds of a rank": (
        lambda marks: told(
            lambda _: rank_seconds.RankSeconds._parts(
                Stub(_before=marks, _process=Process(1, 3, CPU, 1), _meter=Stub(parts={"data_s": 0.5}))
            ).tolist()
        ),
        [
            ([],),
            ([(True, 1.0), (False, 3.0), (False, 4.0), (True, 6.0), (True, 7.0), (False, 7.5)],),
            ([(False, 1.0), (True, 3.0)],),
        ],
    ),
    "a call with a limit": (
        lambda seconds: told(
            lambda _: str(errors.within(seconds, str, 5)),
            "errors__threading__Thread",
            answers={"errors__threading__Thread": Stub(start=lambda: print("starts"), join=print)},
        ),
        [(2.5,)],
    ),
    "automatic collections": (
        lambda: told(
            lambda _: environment.disable_automatic_gc(),
            *(f"environment__gc__{name}" for name in ("collect", "freeze", "disable")),
        ),
        [()],
    ),
    "what is flushed": (
        lambda error: told(
            lambda stand_in: patch("sys.stdout", Stub(flush=stand_in("stdout", Mock(side_effect=error))))(
                lambda: patch("sys.stderr", Stub(flush=stand_in("stderr")))(terminal.flush)()
            )()
        ),
        [(None,), (OSError(28, "No space"),), (ValueError("closed"),)],
    ),
    "documents that are scored": (
        lambda theirs, files: told(
            lambda _: [
                str(each)
                for each in documents.documents(
                    Stub(tokenizer=theirs, source="a model"), "name", Texts(split="train", documents=2)
                )
            ],
            answers={
                "tools__evaluation__documents__paths__is_prepared": lambda _: True,
                "tools__evaluation__documents__read_meta": lambda _: Stub(files=files, marks="marks"),
                "tools__evaluation__documents__bpe__load": lambda _: Stub(
                    decode=lambda tokens, **more: f"{tokens} {more}"
                ),
                "tools__evaluation__documents__bpe__sha256": lambda one: one if isinstance(one, str) else "own",
                "tools__evaluation__documents__bytes_per_token": lambda *_: TENSOR([0, 10, 200, 3000]),
                "tools__evaluation__documents__token_files__documents": lambda _folder, _meta, split: (
                    [[1, 2], [3], [2]] if split == "train" else []
                ),
                "tools__evaluation__documents___encoded": lambda opened, texts: [opened.source, *texts],
            },
        ),
        [("own", []), ("another", []), ("own", ["pairs.json"])],
    ),
    "the first module that is not finite": (
        lambda: told(
            lambda _: [
                replay.first_not_finite(
                    s := Stub(model=torch.nn.Sequential(torch.nn.Identity()), scaler=[1], state="after", pending="it"),
                    lambda s, step: [print(step, s.state), s.scaler.append(2), s.model(TENSOR([torch.nan]))],  # type: ignore[arg-type,attr-defined,return-value]
                    5,
                    "before",  # type: ignore[arg-type]
                ),
                s.scaler,
                s.pending,
            ],
            answers={
                "tools__replay__values_of_ranks": lambda found: [[], found],
                "tools__replay__torch__compiler__set_stance": lambda stance: contextlib.nullcontext(print(stance)),
            },
        ),
        [()],
    ),
    "steps that are replayed": (
        lambda *found: told(
            lambda _: replay.compute(
                Stub(watchdog=Stub(step=print), state=4, log=Stub(info=print)),
                lambda s, step: (
                    vars(s).update(state=step)
                    or Stub(numbers=Stub(loss=1.5, grad_norm=0.5, rank_losses=[1.0, torch.nan if step == 6 else 2.0]))
                ),
                replay.Recorded(
                    4, 6, "", {"6": {"loss": 1.5, "grad_norm": 0.5, "rank_losses": [1.0, None]}}, (), "advice"
                ),
            ),
            answers={
                "tools__replay__check_previous_step": Mock(side_effect=found),
                "tools__replay__first_not_finite": lambda _s, _step, number, before: f"{number} after {before}",
            },
        ),
        [
            (None, None),
            (None, errors.SpikeError("a spike")),
            *((None, errors.NonFiniteError("not finite. More"))[::order] for order in (1, -1)),
        ],
    ),
    "evaluate on a rank": (
        lambda: told(
            lambda _: evaluate.main(["m"]),
            *(f"tools__evaluation__evaluate__{name}" for name in ("prepare_streams", "run_cli", "exit_process")),
            env={"LOCAL_RANK": "3"},
        ),
        [()],
    ),
    "an end token inside a document": (
        lambda *ends: told(
            lambda _: [
                each.tokens for each in documents._encoded(Stub(tokenizer=byte_level(), ends=ends), ["ab", "<eos>"])
            ]
        ),
        [(0,), (7, byte_level().token_to_id("s"))],
    ),
    "losses of a model": (
        lambda texts, tasks: told(
            lambda _: evaluate.evaluate(evaluate.options_of(["m", "--data=a", "--tasks=t"]), Process(0, 1, CPU, 1))[0][
                "model"
            ],
            answers={
                "tools__evaluation__evaluate__open_model": lambda *_, **__: Stub(
                    source="a model", notes=[], tokenizer=0, window=lambda _: 9
                ),
                "tools__evaluation__evaluate__scores_of": lambda *_: [(f"{n}", Stub(nats=[n])) for n in texts],
                "tools__evaluation__evaluate__tasks_of": lambda *_: {f"{n}": Stub(nats=[n]) for n in tasks},
                "tools__evaluation__evaluate__bpe__sha256": lambda _: "",
                "tools__evaluation__evaluate__tables__compare_with_first": lambda *_: (["table"], {"model": 1}),
            },
        ),
        [((1.0, 2.0), (3.0,)), ((1.0, torch.inf), (3.0,)), ((1.0,), (3.0, torch.nan))],
    ),
    "rows that a model is scored on": (
        lambda objective, length, *data: told(
            lambda _: [
                " ".join(map(str, each))
                for each in evaluate._scores_of_rows(
                    Stub(
                        config=objective
                        and config_of({"model.family": "t5", "data.objective": "span_corruption"}).changed(
                            {"data.objective": objective, "data.target_len": 7, "train.seq_len": 40}
                        ),
                        model=Stub(config=ModelConfig(family="t5")),
                        tokenizer=Stub(get_vocab=dict),
                        own_data=lambda: Stub(
                            sources=[
                                Stub(name=name, folder=Path(name), meta=Stub(marks=0)) for name in ("own", "others")
                            ]
                        ),
                    ),
                    Texts(data=data, seq_len=length, documents=3, batch_size=5),
                    Process(0, 1, CPU, 1),
                )
            ],
            answers={
                "tools__evaluation__evaluate__paths__is_prepared": lambda _: True,
                "tools__evaluation__evaluate__read_meta": lambda folder: Stub(
                    files=[vars(evaluate)["PAIRS"]] * (folder.name > "a")
                ),
                "tools__evaluation__evaluate__Tokenizer__from_file": lambda _: Stub(get_vocab=dict),
                "tools__evaluation__evaluate__DataSet": type(
                    "DataSet",
                    (tuple,),
                    {
                        "open": lambda folders: Stub(
                            sources=[Stub(name=name, folder=Path(name), meta=Stub(marks=0)) for name in folders]
                        )
                    },
                ),
                "tools__evaluation__evaluate__open_samples": lambda of, split, config: [
                    *(of[0].name, split, config.data.objective, config.data.target_len, config.train.seq_len)
                ],
                "tools__evaluation__evaluate__bytes_per_token": lambda *_: TENSOR([0]).numpy(),
                "tools__evaluation__evaluate__score_rows": lambda _model, samples, n, *_: f"{n} of {samples}",
            },
        ),
        [
            *(("span_corruption", 0), ("pairs", 0), ("span_corruption", 7, "b", "c"), ("pairs", 0, "b")),
            *(("span_corruption", 0, "b", "a"), (None, 0, "b")),
        ],
    ),
    "a replay that is refused": (
        lambda start, step, *hosts: told(
            lambda _: replay._require_same(
                7,
                range(start, 8),
                Stub(
                    **{"attempt": 3, "step": step, "hosts": hosts, "command": ["train.py", "--a=b"], "world_size": 16},
                    config={"data.sources": {"b": 1, "a": 2}, "model.init_from": "there", "log.every": 2},
                    must_match={"data": "hash"},
                    setting={"threads": 1},
                ),
                {"data.sources": ["b", "a"], "model.init_from": "", "data": "hash", "threads": 1 + len(hosts)},
            ),
            answers={"tools__replay__command_with": lambda *given: str(given)},
        ),
        [(1, 0, "a", "b"), (1, 4, "a"), (5, 0, "a"), (5, 4)],
    ),
    "another thread compiles": (
        lambda file: eval(
            compile("told()", f"/lib/torch/{file}.py", "eval"), {"told": lambda: errors.within(60, progress.compiles)}
        ),
        [("_dynamo/convert_frame",), ("_inductor/compile_fx",), ("nn/modules/module",)],
    ),
    "bytes that were moved": (
        lambda text: told(
            lambda _: [progress.advance(4), progress.moved()],  # type: ignore[func-returns-value]
            answers={"progress___bytes": 3, "progress__Path": lambda _: Stub(read_text=text)},
        ),
        [
            (lambda: "rchar: 5\nread_bytes: 70\nwrite_bytes: 1\n",),
            (lambda: "rchar: 5\n",),
            (lambda: Path("/no/such").read_text(),),
        ],
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
    "a step": (
        lambda step, explicit, norms: told(
            lambda stand_in: patch.multiple(
                train,
                forward_backward=lambda _s, step, batch: stand_in("forward_backward", "loss")(step, batch),
                check_previous_step=lambda s: stand_in("checked")(s.state.step),
                StepRecord=stand_in(
                    "StepRecord",
                    Stub(
                        loss_sum="sum", targets="targets", grad_norm="norm", finite=TENSOR(step > 3), squares={"a": 1}
                    ),
                ),
            )(
                lambda: train.train_step(
                    Stub(
                        **{"model": "model", "process": "process", "preemption": Stub(requested=lambda: "stops")},
                        config=Stub(train=Stub(boundaries=lambda phases: phases)),
                        phase=Stub(
                            fsdp=Stub(explicit_prefetching=explicit),
                            train=Stub(batch_size=lambda n: 10 * n, steps=8),
                            data=Stub(position=lambda at, size: at + size // 10),
                            log=Stub(every=3, norms=norms),
                            optim=Stub(max_norm=2.5),
                        ),
                        state=Stub(step=step - 1, phases=[4], samples_consumed=100, after_step=stand_in("after")),
                        meter=Stub(
                            timing=lambda part: contextlib.nullcontext(stand_in("time of")(part)),
                            add_loss=stand_in("add_loss"),
                        ),
                        loader=Stub(batch=stand_in("batch", Stub(global_tokens=7, source_tokens="of sources"))),
                        watchdog=Stub(computing=stand_in("computing")),
                        rank_seconds=Stub(step=lambda timed: contextlib.nullcontext(stand_in("timed")(timed))),
                        blocks=Stub(
                            **{"replicas": 2, "names": "names", "squares": stand_in("squares", "squares")},
                            of_update=stand_in("of_update", {"b": 2}),
                        ),
                        scaler=Stub(scale="scale", update=stand_in("scale")),
                        metrics=[Stub(parts=stand_in("parts", "parts"))],
                        guards=[Stub(withholds=lambda _, found=found: TENSOR(found)) for found in (True, False)],
                        optimizer=Stub(update=stand_in("update")),
                    ),
                    step,
                )
            )(),
            *("distributed__fsdp__unshard_first", "optim__optimizer__squared_norm", "optim__optimizer__learning_rate"),
            *("optim__optimizer__clip_factor", "optim__optimizer__gradient_norms"),
            answers={
                "optim__optimizer__gradient_norms": "norms",
                "run__next_phase__enter": lambda _s, step, *built: print(
                    "a phase at", step, *(f.__name__ for f in built)
                ),
                **{f"optim__optimizer__{name}": name for name in ("squared_norm", "learning_rate", "clip_factor")},
            },
        ),
        [(2, False, True), (3, True, True), (4, False, False), (5, False, True), (8, False, True)],
    ),
    "a run": (
        lambda missed, step, agreed, error: told(
            lambda stand_in: patch.multiple(
                train,
                build=lambda _config, *given: stand_in(
                    "build",
                    Stub(
                        close=stand_in("close"),
                        state=Stub(step=step),
                        preemption=MagicMock(agreed=agreed),
                        watchdog=Stub(training=contextlib.nullcontext),
                    ),
                )(*given[:2]),
                missed_evaluations=lambda _: missed,
                run_missed=lambda _, works: stand_in("run_missed")(works),
                train=lambda _: stand_in("train", Mock(side_effect=error))(),
            )(
                lambda: train.run(
                    Stub(config=Stub(log="of the log", train=Stub(steps=8, micro_batch_size=4))),
                    *("data", "process", Stub(track=lambda keys, _: stand_in("track")(keys), close=stand_in("end"))),  # type: ignore[arg-type]
                )
            )(),
            answers={
                "run__start_and_end__require_one_run": lambda *_: ["host"],
                "run__start_and_end__take_over": lambda hosts, *_: print(f"{hosts} take over"),
                "run__start_and_end__report_end": lambda _: 7,
                "run__start_and_end__report_failure": lambda _config, _process, _log, error, _: print(
                    f"failed: {error}"
                ),
            },
        ),
        [
            *(([], step, False, None) for step in (7, 8)),
            *((["tasks"], 8, agreed, None) for agreed in (False, True)),
            ([], 7, False, errors.SpikeError("a spike")),
            ([], 7, False, torch.OutOfMemoryError("CUDA out of memory")),
        ],
    ),
    "a sharded model": (
        lambda values, device: told(
            lambda _: str(
                type(train.sharded_model(config_of(values, 2), 517, Stub(device_type=device, ndim=1), widen=True))
            ),
            answers={
                "distributed__fsdp__apply_fsdp": lambda *_: print("shards"),
                "cpu__apply": lambda _model, _speed, widen: print("for a CPU", widen),
                "cpu__apply_shared_memory": lambda *_: print("shared memory"),
                "distributed__recompute_and_compile__apply_activation_checkpointing": lambda _, keys: print(keys.mode),
                "distributed__recompute_and_compile__apply_compile": lambda *_, dynamic_shapes: print(dynamic_shapes),
            },
        ),
        [
            ({}, "cpu"),
            (PAIRS | {"speed.shared_memory": False}, "cuda"),
            ({"data.path": "x", "train.phases": [{"from_step": 4, "optim": {"lr": 0.5}}]}, "cpu"),
        ],
    ),
    "a model with values": (
        lambda values: told(
            lambda stand_in: patch.multiple(
                train,
                sharded_model=lambda _config, size, mesh, widen: stand_in("sharded", "model")(size, mesh, widen),
                set_group_timeouts=stand_in("no time limit"),
                materialize=stand_in("materialize"),
            )(lambda: train.build_model(config_of(values), 517, "mesh", Process(1, 2, GPU, 1)))(),  # type: ignore[arg-type]
            answers={"cpu__widens": lambda *_: "widens"},
        ),
        [({"run.seed": 3},)],
    ),
    "the step before": (
        lambda found, asked, agreed: told(
            lambda stand_in: [
                s := Stub(
                    guards=[
                        Stub(check=lambda record, one=one: stand_in("check", one and Stub(**one))(record.step))
                        for one in found
                    ],
                    log=Stub(record=stand_in("record"), info=stand_in("info")),
                    preemption=Stub(agreed=agreed),
                    pending=Stub(step=5, numbers=Stub(stop_requests=asked)),
                ),
                *map(check_previous_step, [s, s]),
                s.preemption.agreed,
            ][3:]
        ),
        [
            *(([None], asked, agreed) for asked in (0.0, 2.0) for agreed in (False, True)),
            ([{"line": "a spike", "record": {"spike": 1}, "error": None}, None], 1.0, False),
            ([{"line": "", "record": {}, "error": errors.SpikeError("stops")}, None], 1.0, False),
        ],
    ),
    "a run of all ranks": (
        lambda refused: told(
            lambda _: start_and_end.require_one_run(LOADED, "data", Process(0, 2, CPU, 1)),  # type: ignore[arg-type]
            *(f"run__start_and_end__{name}" for name in ("require_agreement", "require_shared")),
            answers={
                "run__start_and_end__on_rank0": lambda action, _: action(),
                "run__start_and_end__run_folder__why_not_again": lambda loaded, folder: refused and f"{folder} failed",
                "run__start_and_end__require_agreement": ["host"],
            },
        ),
        [("",), ("yes",)],
    ),
    "notes of a start": (
        lambda rank, resumed, kept, begin_token: told(
            lambda stand_in: start_and_end.log_start(
                Stub(kept=kept),
                Stub(folder=Path("d"), sources=[Stub(meta=Stub(marks=[0, 9]))]),
                Stub(
                    config=config_of({"tokenizer.begin_token": begin_token}).model_copy(
                        update={"model": Stub(init_from="w", model_dump=dict)}
                    ),
                    log=Stub(info=stand_in("info")),
                    resumed=resumed,
                    process=Stub(rank=rank),
                    checkpointer=Stub(forked_from=None),
                ),
            ),
            "huggingface__weights__tokenizer_notes",
            answers={
                "run__start_and_end__start_lines": lambda _: "start",
                "run__start_and_end__flatten": lambda _: {"optim.lr": 0.5, "run.name": "x"},
                "huggingface__weights__tokenizer_notes": ["a note"],
            },
        ),
        [
            (0, False, [], ""),
            (0, False, [], "b"),
            (1, False, [], ""),
            (1, False, ["optim.lr"], ""),
            (0, True, ["optim.lr", "run.name"], ""),
        ],
    ),
    "a validation": (
        lambda ema, rank: told(
            lambda stand_in: between_steps.validate(
                Stub(n_samples=9),
                Stub(
                    **{"state": Stub(step=6), "process": Process(rank, 2, CPU, 1), "model": "m", "optimizer": "o"},
                    log=Stub(record=stand_in("record"), info=stand_in("info")),
                    config=Stub(folder="x", optim=Stub(ema_decay=ema)),
                ),
            ),
            *(f"run__between_steps__{name}" for name in ("evaluate", "evaluate_average", "eval_line")),
            answers={
                "run__between_steps__time": Stub(perf_counter=iter((3.0, 5.0)).__next__),
                "run__between_steps__evaluate": Stub(record=lambda: {"val_loss": 4.0}),
                "run__between_steps__evaluate_average": ({"ema_val_loss": 3.0}, "a line"),
                "run__between_steps__attempts__best_step": lambda folder, steps: max(steps) if folder == "x" else 0,
            },
        ),
        [(0.0, 0), (0.9, 0), (0.0, 1)],
    ),
    "tasks in between": (
        lambda: told(
            lambda stand_in: tasks.Tasks(["a", "b"], {}).score(  # type: ignore[list-item]
                Stub(
                    **{
                        "state": Stub(step=6),
                        "process": Process(1, 2, CPU, 1),
                        "model": "m",
                        "config": Stub(fsdp="fsdp"),
                    },
                    log=Stub(record=stand_in("record"), info=stand_in("info")),
                )
            ),
            *("run__tasks__generating", "run__tasks__score"),
            answers={
                "run__tasks__time": Stub(perf_counter=iter((7.0, 11.0)).__next__),
                "run__tasks__generating": contextlib.nullcontext(),
                "run__tasks__record": lambda one: {"scored": one},
                "run__tasks__line": lambda one: f"line {one}",
                "run__tasks__score": "score",
            },
        ),
        [()],
    ),
    "the end of its threads": (
        lambda remote: told(
            lambda stand_in: Session.close(
                Stub(
                    **{name: Stub(close=stand_in(name)) for name in ("loader", "watchdog")},
                    checkpointer=Stub(remote=Stub(close=stand_in("remote")) if remote else None),
                )
            )
        ),
        [(True,), (False,)],
    ),
    "a file of stacks": (
        lambda is_new, size, left: told(
            lambda stand_in: Watchdog.close(
                Stub(
                    **{"_closed": Stub(set=stand_in("closes")), "_is_new": is_new, "_size": 5, "_left": left},
                    _path=Stub(
                        stat=lambda: Stub(st_size=size),
                        unlink=stand_in("unlink"),
                        parent=Stub(rmdir=stand_in("rmdir", Mock(side_effect=OSError(39, "not empty")))),
                    ),
                    _file=Stub(write=stand_in("write"), close=stand_in("close")),
                )
            )
        ),
        [(True, 5, True), (True, 6, False), (False, 5, True)],
    ),
    "a line": (
        lambda cut, is_terminal: told(
            lambda stand_in: patch(
                "sys.stdout", Stub(write=stand_in("write"), flush=stand_in("flush"), isatty=lambda: is_terminal)
            )(
                lambda: patched(
                    lambda: metrics.Log(Path("runs"), enabled=True).info("a long line", cut=cut),
                    run__metrics__shutil=Stub(get_terminal_size=lambda: Stub(columns=6)),
                )
            )(),
            "run__metrics__append_line",
        ),
        [(False, True), (True, True), (True, False)],
    ),
    "a bar": (
        lambda enabled, is_terminal: told(
            lambda stand_in: patched(
                lambda: [*metrics.Log(Path("runs"), enabled=enabled).progress(4, 5)],
                run__metrics__sys=Stub(stderr=Stub(isatty=lambda: is_terminal)),
                run__metrics__tqdm=lambda **more: (
                    stand_in("bar")(**more) or Stub(update=stand_in("update"), close=stand_in("close"))
                ),
            )
        ),
        [(True, True), (True, False), (False, True)],
    ),
    "a phase": (
        lambda compiles: told(
            lambda stand_in: next_phase.enter(
                Stub(
                    **{name: name for name in ("data", "samples", "process", "scaler", "checkpointer")},
                    config=config_of(
                        {
                            **{
                                "data.path": "x",
                                "train.phases": [{"from_step": 4}, {"from_step": 6, "optim": {"lr": 0.5}}],
                            },
                            **{"train.steps": 9, "optim.warmup_steps": 2, "compile.enabled": compiles},
                            "compile.backend": "eager",
                        }
                    ),
                    state=TrainState(step=6, phases=[4], spikes={"losses": [1.0]}),
                    loader=Stub(close=stand_in("close")),
                    guards=[
                        Stub(state=lambda: {"skipped": [3]}),
                        Stub(state=lambda: {"skipped": [3, 7], "spikes": {"losses": [2.0]}}),
                    ],
                    source_losses=Stub(begin=stand_in("sources")),
                    model=Stub(use_context=stand_in("context")),
                    log=Stub(record=stand_in("record"), info=stand_in("info")),
                    meter=Stub(),
                ),
                7,
                stand_in("build_loader"),
                lambda phase, process, begun, *more: stand_in("build_guards")(phase.model, begun.skipped, begun.spikes),
            ),
            "run__next_phase__start_and_end__peak_tokens_per_second",
            answers={
                "run__next_phase__check_previous_step": lambda s: s.log.info(f"seen by {len(s.guards)} guards"),
                "run__next_phase__phases__place_lines": lambda state: [f"places of {state.phases}"],
                "run__next_phase__phases__open_phase": lambda _config, data, state, step: (
                    Stub(model=f"model of {step}, {data}"),
                    Stub(names=["a", "b"]),
                    replace(state, phases=[4, 6]),
                ),
            },
        ),
        [(False,), (True,)],
    ),
    "taking over": (
        lambda step, segments, remote: told(
            lambda stand_in: start_and_end.take_over(
                ["a", "c"],
                "loaded",  # type: ignore[arg-type]
                Stub(folder=Path("/no/such")),
                Stub(
                    config=Stub(folder=Path("/runs/x"), train=Stub(steps=8)),
                    process=Process(0, 2, CPU, 1),
                    log=Stub(info=stand_in("info")),
                    state=TrainState(step=step, samples_consumed=9, segments=[{}] * segments, phases=[4]),
                    resumed=TrainState(segments=[{}]) if step else None,
                    watchdog=Stub(loading=lambda what: contextlib.nullcontext(stand_in("while")(what))),
                    preemption=Stub(),
                    checkpointer=Stub(
                        folder="checkpoints",
                        forked_from=None,
                        require_space=stand_in("require_space"),
                        remote=Stub(claim="claim", upload_small_files=stand_in("upload")) if remote else None,
                    ),
                ),
            ),
            *(f"run__start_and_end__{name}" for name in ("storage__remove_leftovers", "write_durably")),
            *(f"run__start_and_end__{name}" for name in ("run_folder__record_start", "run_folder__facts")),
            answers={
                "run__start_and_end__attempts__read": lambda _: LAST,
                "run__start_and_end__log_start": lambda loaded, *_: print("the start of what is", loaded),
                "run__start_and_end__on_rank0": lambda action, _: action(),
                "run__start_and_end__to_toml_with_origins": str,
                "run__start_and_end__run_folder__facts": lambda _, hosts: {"hosts": hosts},
            },
        ),
        [(0, 1, False), (5, 1, True), (8, 1, False), (5, 2, False)],
    ),
    "prepared": (
        lambda values, folder: told(
            lambda _: [str(each)[:25] for each in start_and_end.prepared(Stub(config=config_of(values)), folder)],
            answers={
                "bucket__Bucket": lambda url: Stub(fetch_run=lambda folder: print("fetched", url, folder)),
                "run__start_and_end__attempts__read": lambda folder: (
                    [] if folder is None else print(folder) or [Stub(must_match={"data": n}) for n in "ab"]
                ),
                "run__start_and_end__prepare_all": lambda *given: f"data {given[3:]}",
                "run__epochs__resolved": lambda loaded, data: (f"{loaded.config.data.packing} in steps", data),
            },
        ),
        [
            ({"run.out_dir": "/runs"}, None),
            ({"run.out_dir": "/runs", "run.remote": "s3://x/", "eval.every": "epoch"}, None),
            ({"run.out_dir": "/runs", "run.remote": "s3://x/", "data.packing": "best_fit"}, Path("/moved")),
        ],
    ),
    "a folder to write to": (
        lambda may: told(
            lambda _: run_folder.require_writable(Path("/no/such/run")),
            "run__run_folder__os__access",
            answers={"run__run_folder__os__access": lambda *_: may},
        ),
        [(True,), (False,)],
    ),
    "who locked": (
        lambda text: run_folder.holder(
            MagicMock(**{"__truediv__.return_value.read_text": Mock(side_effect=[text])}),
        ),
        [(text,) for text in ("", "process 7", OSError(2, "No such file"))],
    ),
    "a guard against spikes": (
        lambda values: told(
            lambda _: str(
                spikes.build_guard(
                    config_of({"spike.action": "skip"} | values),
                    *("process", TrainState(spikes={"losses": [1.0]}), [3], "checkpointer", "log"),  # type: ignore[arg-type]
                )
            ),
            answers={"run__spikes__SpikeGuard": lambda keys, *given: print(keys.action, *given[:4])},
        ),
        [({"train.max_skipped": 7, "optim.warmup_steps": 5},)],
    ),
    "a config to resume": (
        lambda run, resume, url: told(
            lambda _: str(find.config_to_resume(Path(run), resume, url)),
            answers={
                "checkpointing__find__candidates": lambda path: (
                    refuse(path) if "new" in str(path) else [path / f"step-{n:08}" for n in (99999999, 100000000, 7)]
                ),
                "checkpointing__find__expand": Path,
                "checkpointing__find__storage__read_state": lambda folder: TrainState(
                    config={
                        "of": str(folder),
                        "optim.lr": 1.0,
                        "train.phases": [{"from_step": 4, "optim": {"lr": 0.5}}],
                    },
                    phases=[4],
                ),
            },
        ),
        [("run", "other", ""), ("new", "other", ""), ("new", "other", "bucket"), ("new", "", "new")],
    ),
    "a fork with damaged checkpoints": (
        lambda *wrong: told(
            lambda _: str(
                find.checkpoint_to_resume(Path("x"), Stub(resume="y", verify="size"), Process(0, 1, CPU, 1)).forked
            ),
            answers={
                "checkpointing__find__on_rank0": lambda action, _: action(),
                "checkpointing__find__storage__incomplete_folders": lambda _: [*wrong],
                "checkpointing__find__storage__find_steps": lambda _: [],
                "checkpointing__find__candidates": lambda path: [path],
                "checkpointing__find__verify_together": lambda *_: [],
            },
        ),
        [(), ("step-7 has no manifest.json",)],
    ),
    "runs that are there": (
        lambda n, file: told(
            lambda _: attempts.of_run(Path("none")) if "json" in file else find.candidates(Path("none/x")),
            answers={"run__attempts__Path__glob": lambda where, _: [where / f"r{i:02}" / file for i in range(n)]},
        ),
        [(n, file) for file, some in (("run.json", (0, 1, 10, 11)), ("checkpoints", (0, 4, 5))) for n in some],
    ),
    "an end on a full disk": (
        lambda name: told(
            lambda _: run_folder.record_end(Path("x"), Process(0, 2, CPU, 1), 3, "failed", 5, "why", repeats=True),
            *(f"run__run_folder__{each}" for each in ("attempts__add", "write_durably")),
            answers={
                "run__run_folder__time": Stub(time=lambda: 9.12345),
                "run__run_folder__socket__gethostname": lambda: "a",
                f"run__run_folder__{name}": Mock(side_effect=OSError(28, "No space")),
            },
        ),
        [("attempts__add",), ("write_durably",)],
    ),
    "a lock that fails": (
        lambda folder: told(
            lambda _: str(run_folder.lock(Path(folder))), answers={"run__run_folder__on_rank0": lambda action: action()}
        ),
        [("/dev/null/x",)],
    ),
    "a lock that is waited for": (
        lambda: told(
            lambda _: str(run_folder.lock(Path("runs/x"))),
            "run__run_folder__FileLock",
            answers={"run__run_folder__on_rank0": lambda _: None},
        ),
        [()],
    ),
    "a lock that is looked at": (
        lambda *error: told(
            lambda stand_in: patched(
                lambda: status.is_locked(Path("x")),
                tools__status__os=Stub(open=stand_in("open", 7), close=stand_in("close"), O_RDONLY=0),
                tools__status__fcntl=Stub(flock=stand_in("flock", Mock(side_effect=error)), LOCK_SH=1, LOCK_NB=4),
            )
        ),
        [(None,), (BlockingIOError(11, "locked"),), (OSError(37, "No locks"),)],
    ),
    "a line that is lost": (
        lambda error: told(
            lambda stand_in: patch("sys.stdout", Mock(write=Mock(side_effect=error), flush=stand_in("flush")))(
                lambda: patched(lambda: terminal.print_line("x"), terminal__print_error_once=stand_in("once"))
            )()
        ),
        [(OSError(28, "No space"),), (ValueError("closed"),), (None,)],
    ),
    "tokenizer and tasks": (
        lambda path, objective, names, found: told(
            lambda _: str(
                checks.check_tasks(Stub(tokenizer=Stub(path=path), data=Stub(objective=objective), tasks=names))
            ),
            *("data__spans__wrong_tokenizer", "run__tasks__wrong_tasks"),
            answers={"data__spans__wrong_tokenizer": found, "run__tasks__wrong_tasks": {"eval.tasks": "no such task"}},
        ),
        [
            (path, objective, names, found)
            for path, objective in (("", "span_corruption"), ("t.json", "causal"), ("t.json", "span_corruption"))
            for names in ([], ["x"])
            for found in ({}, {"tokenizer.path": "no pad"})
        ],
    ),
    "the cache": (
        lambda env, own: told(
            lambda _: [str(cache_folder(DataConfig(cache_dir=own))), *map(bucket.copy_of, ("s3://a", "s3://b"))],
            *(f"bucket__{name}" for name in ("copy_of_data", "copy_of_run")),
            env={"HOME": "/home/me", **env},
            answers={
                "bucket__Bucket": lambda url: Stub(
                    contents=lambda names: {names[0]: b'{"files": {"a": 1}}' if url == "s3://b" else b"{}"}
                ),
            },
        ),
        [({"XDG_CACHE_HOME": xdg}, own) for xdg in ("", "/cache", "~/c") for own in ("", "/own")],
    ),
    "without enough brackets": (
        lambda values: told(
            lambda _: str(tasks.Tasks.from_config(config_of(values), "data")),  # type: ignore[arg-type]
            answers={
                "run__tasks__find": Mock(side_effect=errors.DataError("too few brackets")),
                "run__tasks__values_of_ranks": lambda digests: [digests],
            },
        ),
        [({"eval.tasks": names},) for names in (["auto"], ["brackets"], ["auto", "brackets"])],
    ),
    "a state of version 1.0": (
        lambda n, known: told(
            lambda _: str(
                phases.open_phase(
                    config_of({"train.steps": 9}),
                    Stub(mixed=lambda _: None),
                    TrainState(step=4, tokens=n, samples_consumed=7, source_tokens=known),
                    5,
                )[2].source_tokens
            ),
            answers={
                "run__phases__open_segment": lambda *_: (Stub(positions=lambda n: {"a": n - 4, "b": 3, "c": 1}), [{}])
            },
        ),
        [(100, {}), (100, {"a": 5}), (0, {})],
    ),
    "a run of W&B": (
        lambda known: told(
            lambda stand_in: patch.dict(
                "sys.modules",
                wandb=Stub(init=stand_in("init", Stub(id="new", log=stand_in("log"), finish=stand_in("finish")))),
            )(
                lambda: [
                    tracker := trackers.weights_and_biases(
                        LogConfig(wandb_project="p"), Path("runs/mine"), TrainState(config={"a": 1})
                    ),
                    tracker.write({"step": 3, "loss": 2.0, "val_loss": 4, "time": 9.0}),
                    tracker.close(),
                ][3:]
            )(),
            "run__trackers__Path__write_text",
            answers={
                "run__trackers__Path__is_file": lambda _: known,
                "run__trackers__Path__read_text": lambda *_, **__: "old\n",
            },
        ),
        [(True,), (False,)],
    ),
    "periodic work": (
        lambda values: told(
            lambda _: [
                str([[work.name, work.every, work.at_stop, *work.keys] for work in found])
                if isinstance(found, list)
                else str(found)
                for found in between_steps.build_periodic_work(config_of(values), "data", Process(1, 2, CPU, 1))  # type: ignore[arg-type]
            ],
            answers={
                "run__between_steps__Validation__from_config": lambda _config, *given: Stub(
                    description=lambda: {"given": given}
                ),
                "run__tasks__Tasks__from_config": lambda *_: Stub(digests={"a": "1", "b": "2"}),
                "run__sampling__Prompts__from_config": lambda *_: "prompts",
            },
        ),
        [
            ({"log.every": 2, "eval.every": 3, "eval.tasks_every": 4, "checkpoint.every": 5, "sample.every": 6},),
            ({"optim.ema_decay": 0.9, "sample.every": 0},),
            ({"eval.every": 0, "eval.tasks": []},),
        ],
    ),
    "columns that ranks share": (
        lambda n: told(
            lambda _: str(
                checks.check_patterns(
                    config_of({"fsdp.shard_columns": ["*.wq.weight"], "fsdp.dp_replicate": 2, "model.dim": 128}, 6)
                )
            ),
            env={"WORLD_SIZE": n},
        ),
        [(n,) for n in ("4", "6")],
    ),
    "a save": (
        lambda ends, background, error, remote=False, agreed=False: told(
            lambda stand_in: saving.save(
                Stub(
                    state=TrainState(step=6),
                    config=Stub(train=Stub(steps=6 + (not ends)), checkpoint=Stub(async_save=background)),
                    preemption=Stub(agreed=agreed, agree=stand_in("agree")),
                    process=Stub(untimed=None),
                    model="m",
                    optimizer="o",
                    guards=[Stub(state=lambda: {"skipped": [3]}), Stub(state=lambda: {"spikes": {"norms": [1.0]}})],
                    scaler=Stub(state_dict=lambda: {"scale": 2.0}),
                    log="log",
                    meter=Stub(loss_since=torch.ones(2)),
                    checkpointer=Stub(
                        save=stand_in("save"),
                        remote=Stub(report=stand_in("uploaded"), require_newest=stand_in("newest")) if remote else None,
                    ),
                ),
            ),
            *(f"run__saving__{name}" for name in ("require_finite", "require_equal_replicas", "report_save")),
            answers={
                "run__saving__report_save": lambda *_, **__: error,
                "run__saving__on_rank0": lambda action, _: action(),
            },
        ),
        [
            *((False, False, "", True, agreed) for agreed in (False, True)),
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
    "an upload of a step": (
        lambda rank, kind, error: told(
            lambda stand_in: [
                Remote._upload_and_commit(
                    s := Stub(
                        **{"claim": "00000007-a", "_process": Stub(rank=rank), "_leaders": [0, 2], "_n_bytes": 9},
                        _rate=0.0,
                        **{"_steps": {}, "require_newest": stand_in("newest"), "_delete_old": stand_in("delete")},
                        _store=Stub(
                            set=lambda key, text: stand_in("said")(key, text, s._putting),  # type: ignore[has-type]
                            get=lambda key: stand_in("asked", (error * key.endswith("2")).encode())(key),
                        ),
                        _retried=lambda action, *given: stand_in("tried")(action, *given[1:], s._putting) or not error,  # type: ignore[has-type]
                        _commit="commit",
                        upload_small_files=stand_in("small files"),
                        bucket=Stub(url="s3://x", fs=Stub(put_file="put")),
                    ),
                    Path("/proc/self"),
                    "keep",  # type: ignore[arg-type]
                ),
                s._rate,
            ],
            answers={
                "checkpointing__remote__time": Stub(perf_counter=iter([5.0, 7.0, 9.0]).__next__),
                "checkpointing__remote__storage__read_manifest": lambda _: Stub(
                    files=["status", "of another machine"], claim="00000006-b", state_dict=kind
                ),
            },
        ),
        [
            *((0, kind, "") for kind in ("full", "sharded")),
            *((rank, "sharded", "no route") for rank in (0, 2)),
        ],
    ),
    "tries of an upload": (
        lambda n: told(
            lambda stand_in: Remote._retried(
                Stub(bucket=Stub(url="s3://x")),
                stand_in("put", Mock(side_effect=[OSError("no route")] * n + ["uploaded"])),
                "a file",
            ),
            answers={"checkpointing__remote__time": Stub(sleep=lambda seconds: print("waits", seconds))},
        ),
        [(n,) for n in (0, 2, 7, 8)],
    ),
    "the end of a claim": (
        lambda rank, displaced, error: told(
            lambda stand_in: Remote.close(
                Stub(
                    _process=Stub(rank=rank),
                    _ended=Stub(is_set=lambda: displaced, set=stand_in("ended")),
                    upload_small_files=stand_in("small files", Mock(side_effect=error)),
                    _write_claim=stand_in("claim"),
                )
            )
        ),
        [(0, False, None), (0, False, OSError("no route")), (0, True, None), (1, False, None)],
    ),
    "a checkpointer": (
        lambda kind, background, remote, *ranks: told(
            lambda _: [
                saver := save.Checkpointer(
                    *(Path("c"), Stub(parameters=lambda: [0, Stub(device_mesh="mesh")]), "optimizer"),  # type: ignore[arg-type]
                    Stub(state_dict=kind, async_save=background),
                    Process(ranks[0], 8, CPU, 1, ranks[1], "own" if len(ranks) > 2 else None),  # type: ignore[arg-type]
                    {},
                    remote=remote,
                ),
                *(str(each) for each in (saver.mesh, saver._share, saver._leads, saver.group)),
            ][1:],
            "checkpointing__save__untimed_group",
            answers={"checkpointing__save__DTensor": Stub, "checkpointing__save__untimed_group": "another group"},
        ),
        [
            *(("full", background, None, 0, 2, *given) for background in (False, True) for given in ((), ("",))),
            *((kind, False, Stub(leads=rank != 3), rank, 2) for kind in ("full", "sharded") for rank in (0, 2, 3)),
            ("sharded", False, None, 2, 2),
        ],
    ),
    "a profile": (
        lambda step, last, rank, error: told(
            lambda stand_in: profiler.Profile.stop(
                Stub(
                    **{"_active": True, "_first": 2, "_last": 4, "_folder": "x", "_rank": rank, "_ranks": [0, 8]},
                    **{"_write": stand_in("written", Mock(side_effect=error)), "_end_history": stand_in("no stacks")},
                ),
                step,
                last=last,
            )
        ),
        [(3, False, 0, None), (3, True, 0, None), (4, False, 8, None), (4, True, 4, None), (4, False, 0, OSError(5))],
    ),
    "files of a profile": (
        lambda on_gpu: told(
            lambda stand_in: profiler.Profile._write(
                Stub(
                    **{"_on_gpu": on_gpu, "_rank": 8, "_snapshot": on_gpu, "_folder": Path("/no/such")},
                    _trace=Stub(
                        stop=stand_in("stop"),
                        export_chrome_trace=stand_in("trace"),
                        key_averages=lambda: Stub(table=stand_in("table", "a table")),
                    ),
                )
            ),
            *(f"run__profiler__{name}" for name in ("Path__mkdir", "Path__write_text")),
            "run__profiler__torch__cuda__memory___dump_snapshot",
        ),
        [(False,), (True,)],
    ),
    "an attempt's line": (
        lambda: told(
            lambda _: attempts.add(Path("runs/x"), {"attempt": 3}),
            *(f"run__attempts__{name}" for name in ("append_line", "sync_folder")),
        ),
        [()],
    ),
    "the newest claim": (
        lambda found: told(
            lambda stand_in: Remote.require_newest(
                Stub(
                    _newest_claim=Mock(side_effect=[found]),
                    _about={"id": "a"},
                    _ended=Stub(set=stand_in("ended")),
                    bucket=Stub(url="s3://x"),
                )
            )
        ),
        [(OSError("no route"),), (("7", {"id": "a", "by": "this one"}),), (("8", {"id": "b", "by": "job y"}),)],
    ),
    "a renewed claim": (
        lambda error: told(
            lambda stand_in: Remote._write_claim(
                Stub(
                    **{"_writing": contextlib.nullcontext(), "claim": "00000007-a", "_content": lambda: "about"},
                    bucket=Stub(fs=Stub(pipe_file=stand_in("put", Mock(side_effect=error)))),
                )
            )
        ),
        [(None,), (OSError("no route"),)],
    ),
    "a step that only the disks have": (
        lambda leads, pending: told(
            lambda stand_in: Remote.refresh(
                Stub(
                    **{"folder": Path("/no/such"), "leads": leads, "_leaders": [0], "_pending": lambda: pending},
                    **{"_process": Stub(untimed=None), "_wait": stand_in("wait"), "upload": stand_in("upload")},
                    bucket=Stub(fetch_run=lambda _: ({"step-7": b"{}"}, ["a problem"])),
                )
            ),
            answers={
                "checkpointing__remote__on_all": lambda action, _: [action()],
                "checkpointing__remote__on_rank0": lambda action, _: action(),
                "checkpointing__remote__storage__read_manifest": lambda _: Stub(bytes=9),
            },
        ),
        [(leads, pending) for leads in (True, False) for pending in ("", "/proc/self")],
    ),
    "retention in a bucket": (
        lambda *kept: told(
            lambda stand_in: Remote._delete_old(
                Stub(
                    claim="00000007-cccccccc",
                    _probes={"probes/b"},
                    bucket=Stub(
                        fs=Stub(
                            rm_file=stand_in("deleted"),
                            cat_file=lambda key: json.dumps({"claim": f"0000000{key[-15]}-bbbbbbbb"}).encode(),
                            find=lambda _: [
                                *(f"0000000{n}-{c}/log" for n, c in enumerate(("a" * 8, "b" * 8, "c" * 8, "d" * 8), 5)),
                                "00000006-aaaaaaaa/log",
                                *(
                                    f"checkpoints/step-0000000{n}/{name}"
                                    for n in (2, 4, 6, 8)  # the first is not named by its manifest, the third too new
                                    for name in (
                                        *("00000001-aaaaaaaa/x", f"0000000{n}-bbbbbbbb/x", "00000009-eeeeeeee/x"),
                                        "manifest.json",
                                    )
                                ),
                                *("claims/00000005", "probes/a", "probes/b"),
                            ],
                        )
                    ),
                ),
                lambda steps: {*kept, max(steps), 1},
            )
        ),
        [(), (6,), (2, 4, 6)],
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
    "clipped by the API": (
        lambda most: told(
            lambda _: [
                p := torch.nn.Parameter(torch.ones(2)),
                (p * TENSOR([3.0, 4.0])).sum().backward(),
                api.clip_grad_norm(torch.nn.ParameterList([p]), torch.optim.SGD([p]), most).item(),
                str(p.grad),
            ][2:]
        ),
        [(2.5,), (9.0,)],
    ),
    "data of the API": (
        lambda: told(
            lambda _: str(vars(vars(api.open_data("config"))["tokenizer"])),  # type: ignore[arg-type]
            answers={
                "api__prepared": lambda loaded: (
                    Stub(config=f"{loaded.config} in steps"),
                    Stub(folder=Path("d"), end_token=7, sources=[Stub(meta=Stub(marks=[7, 9]))]),
                ),
                "api__tokenizers__Tokenizer": Stub(from_file=str),
                "api__source_prefix": lambda folder: f"prefix of {folder}",
            },
        ),
        [()],
    ),
    "batches of the API": (
        lambda first: told(
            lambda _: [*api.Data(Stub(), Stub(), "data").batches(first)],  # type: ignore[arg-type]
            answers={
                "api__phases__steps": lambda _, data, state: [
                    (
                        *(step, range(5 * step, 9 * step)),
                        config_of(
                            {"train.micro_batch_size": step, "run.seed": 7 - step, "data.document_mask": step > 1}
                        ),
                        f"{data} of step {state.step}",
                    )
                    for step in (1, 2, 3)
                ],
                "api__Loader": lambda mixture, **how: Stub(batch=lambda *given: [mixture, how, *given]),
            },
        ),
        [(1,), (3,)],
    ),
    "tokens of the API": (
        lambda text: api.Tokenizer(Stub(encode=lambda *given, **how: Stub(ids=[*given, how])), ()).encode(text),
        [("a text",)],
    ),
    "a model that the API opens": (
        lambda more: told(
            lambda _: str(api.load_model("run", **more)),
            answers={
                "api__loading__open_model": lambda *given: Stub(
                    model=Stub(requires_grad_=lambda: given),
                    **{"tokenizer": "t", "ends": (7, 8), "notes": [], "prefix": "to: ", "config": "c", "begin": (9,)},
                ),
                **{"api__loading__device_of": str, "api__paths__expand": Path},
            },
        ),
        [({},), ({"device": "cuda", "dtype": torch.bfloat16, "tokenizer": Path("t.json")},)],
    ),
    "a copy of a run": (
        lambda url: told(
            lambda _: str(bucket.copy_of_run(url, Path("/no/such"))),
            answers={
                "bucket__Bucket": lambda url: Stub(
                    fetch_run=lambda *given, **more: print(url, *given, more) or ({}, ["a is damaged", "b is gone"])
                )
            },
        ),
        [("s3://x/run/",), ("s3://x/run/checkpoints/step-00000007",)],
    ),
    "a copy of data": (
        lambda problem: told(
            lambda stand_in: [
                bucket.copy_of_data(
                    "s3://x",
                    b'{"files": {"a": {"bytes": 3, "sha256": "f"}, "meta.json": '
                    b'{"bytes": 9, "sha256": "e"}, "c": {"bytes": 4, "sha256": "d"}}}',
                    Path(os.environ["COPIES"]),
                ).name
                for _ in "ab"
            ],
            env={"COPIES": f"{os.environ['XDG_CACHE_HOME']}/{problem}"},
            answers={
                "bucket__Bucket": lambda url: Stub(
                    fetch=lambda name, folder, *given: (
                        print(url, name, folder.name, *given, sorted(left.name for left in folder.glob(".*.part")))
                        or (folder / f".{name}.part").touch()
                        or problem * (name == "c")
                    )
                ),
                "bucket__tqdm": lambda **how: print(how) or contextlib.nullcontext(Stub(update="update")),
            },
        ),
        [("",), ("it is gone",)],
    ),
    "fetched": (
        lambda n: told(
            lambda stand_in: bucket.Bucket.fetch(
                Stub(url="s3://x", fs=Stub(open=stand_in("open", Mock(side_effect=FileNotFoundError)))),
                *("a/b", Path("f"), n, "hash"),
            ),
            answers={"bucket__shutil__disk_usage": lambda _: Stub(free=5120)},
        ),
        [(5120,), (5121,)],
    ),
    "rate of the API": (
        lambda step: told(
            lambda _: api.set_learning_rate(
                Stub(param_groups=[]),
                config_of(
                    {
                        "data.path": "x",
                        "optim.warmup_steps": 2,
                        "train.steps": 9,
                        "train.phases": [{"from_step": 4, "optim": {"lr": 0.5}}],
                    }
                ),
                step,
            )
        ),
        [(step,) for step in (1, 4, 5, 9)],
    ),
    "a model of the API": (
        lambda values: told(
            lambda _: api.build_model(config_of({"run.device": "cpu"} | values), 517),
            *(f"api__{name}" for name in ("freeze", "cpu__apply", "materialize", "full_state__copy_rows")),
            *(f"api__recompute_and_compile__{name}" for name in ("apply_activation_checkpointing", "apply_compile")),
            *(f"api__compatibility__{name}" for name in ("require_same_weights", "require_finite")),
            answers={
                "api__models__build": lambda _config, size, _losses: f"model of {size}",
                "api__model_tensors": lambda model: f"tensors of {model}",
                "api__weights__find_weights": lambda path, _config: (path.parent, []),
                "api__weights__open_weights": lambda folder, _config: f"weights in {folder}",
            },
        ),
        [
            ({"model.init_from": "runs/x"},),
            ({"optim.freeze": ["layers.0.*"], "activation_checkpointing.mode": "full", "run.seed": 3},),
            (PAIRS | {"model.family": "t5", "compile.enabled": True, "speed.fused_functions": False},),
        ],
    ),
    "own data of a model": (
        lambda config, state: told(
            lambda _: str(load_model.Opened.own_data(Stub(config=config, state=state, source="x"))),
            *("tools__load_model__prepare_all", "tools__load_model__require_same_data"),
            answers={"tools__load_model__prepare_all": lambda *given: [given[0], given[1], given[3]]},
        ),
        [
            (Stub(data="data", tokenizer="tokenizer"), Stub(must_match="hashes")),
            *((None, Stub(must_match="hashes")), (Stub(data="data", tokenizer="tokenizer"), None)),
        ],
    ),
    "data of another hash": (
        lambda *hashes: told(
            lambda _: load_model.require_same_data(
                "runs/x",
                Stub(tokenizer_sha256=hashes[0], hashes=lambda: {"data": hashes[1], "order": hashes[2]}),
                Stub(must_match={"tokenizer": "a", "data": "b", "order": "c", "model.dim": 8}),
            )
        ),
        [("a", "b", "c"), ("x", "b", "c"), ("a", "x", "y")],
    ),
    "a command line": (
        lambda words, others: told(
            lambda stand_in: commands.run(
                "data.prepare",
                words,
                {"--name -n": {"default": "d"}, "--several": commands.SEVERAL},
                lambda given: stand_in("main", 5)(given.name, given.several, given.first, given.rest),
                exclusive=[{"--first": {}, "--second": {}}],
                others=others,
            ),
            "commands__prepare_streams",
            answers={
                "commands__run_cli": lambda name, main: [name, main()],
                "commands__argparse__ArgumentParser__error": lambda _, text: refuse(text),
            },
        ),
        [
            *(([], False), (["-n", "x", "--several", "a", "b", "--several", "c"], False), (["--nam", "x"], True)),
            *((["--first", "1", "--second", "2"], True), (["word"], False)),
        ],
    ),
    "asked for prompts": (
        lambda is_terminal: told(
            lambda stand_in: patched(
                lambda: patch("builtins.input", stand_in("input", lambda _, left=["a", ""]: left.pop(0)))(
                    lambda: generate.converse("opened", generate.Options())  # type: ignore[arg-type]
                )(),
                tools__generate__sys=Stub(stdin=Stub(isatty=lambda: is_terminal)),
                tools__generate__answer=lambda opened, prompt, options: stand_in("answer")(opened, prompt),
            )
        ),
        [(True,), (False,)],
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
                else Stub(),  # without the functions that only Linux has
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
        folder=Path("x"),
        damaged=[7],
        remote=None,
        forked_from=None,
        group=None,
        _share=0.25,
        _n_bytes=lambda: 40 + rank,
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
        prompts: Any = Stub(texts=["", "a" * 121], ids=[[9], [1, 2]], end=8, references=references)
        prompts.config = Stub(temperature=0.5, max_tokens=3)
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
                    "run__sampling__time": Stub(perf_counter=iter((3.0, 5.0, 6.0, 7.0)).__next__),
                    "run__sampling__generating": lambda *_: contextlib.nullcontext(),
                    "run__sampling__Sampler": lambda heat, seed: lambda _: 40 + rank + round(100 * heat) + seed % 1000,
                    "run__sampling__new_tokens": lambda _model, ids, n, agreed, end: [
                        agreed(ids),
                        agreed(ids) + 1,
                        n,
                        *end,
                    ],
                    "run__sampling__is_encoder_decoder": lambda _, references=references: bool(references),
                },
            )
            for name, references in (("sampled", ["", "b"]), ("continued", []))
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
            lambda: [
                [vars(session.preemption).update(reason=why), start_and_end.report_end(session), *said[-2:]][1:]
                for why in (reasons[rank], run_folder.JOINS * (rank == 1))
            ],
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
                lambda values=values, text=text: start_and_end.require_agreement(config_of(values, 4), text, one),
                {"run__start_and_end__socket__gethostname": lambda: host},
            )
            for key, values, text in (
                ("seed", {"run.seed": int(rank == 3)}, data),
                ("folder", {"run.out_dir": f"runs{rank // 2}"}, data),
                ("text", {}, Stub(**vars(data) | {"hashes": lambda: {"data": "b" if rank else "a"}})),
                *(
                    ("later text", {}, Stub(**vars(data) | {"later": [Stub(name="y", meta=Stub(tokens_sha256=text))]}))
                    for text in "ab"[rank // 3]
                ),
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
        "too few entries": (
            lambda: start_and_end.require_agreement(config_of({"model.vocab_size": 8}, 4), data, one),
            {"run__start_and_end__socket__gethostname": lambda: host},
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
