"""What is said in cases that no small run comes to: recorded_lines.json has the results of calls.

Nothing else holds: the words of almost all lines, above all "machines_line", "on_gpu" and "migrated", and the numbers
of "recipe" and "figures"; read their diffs. test_console.py has the usual lines of a run, test_replay.py what differs.
"""

import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pydantic_core import to_json

from tests.helpers import meta_model
from tests.recorded import assert_recorded
from torchtitan_lite import environment, errors, hints, terminal
from torchtitan_lite.checkpointing import compatibility
from torchtitan_lite.checkpointing.save import Saved
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import load
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import Config, ModelConfig, flatten
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import UserError
from torchtitan_lite.run import (
    checks,
    console,
    epochs,
    mfu,
    out_of_memory,
    phases,
    preemption,
    resumed,
    saving,
    start_and_end,
    trackers,
    watchdog,
)
from torchtitan_lite.run.phases import Part
from torchtitan_lite.run.watchdog import Place, RankState
from torchtitan_lite.scoring.questions import Question, Task
from torchtitan_lite.scoring.statistics import Array
from torchtitan_lite.scoring.task_scores import TaskScore
from torchtitan_lite.terminal import columns
from torchtitan_lite.tools import checkpoints, migrate_accelerate, replay
from torchtitan_lite.tools.evaluation import tables
from torchtitan_lite.tools.evaluation.documents import Scores
from torchtitan_lite.tools.evaluation.tables import Scored


def config_of(values: dict[str, Any], world_size: int = 8) -> Config:
    return load.load(None, values, world_size=world_size, n_gpus=8, elsewhere=True).config


# --- the start of a run -----------------------------------------------------------------------------------------

T5 = {"model.family": "t5", "data.objective": "span_corruption", "data.path": "x"}
PAIRS = {
    "data.path": "x",
    "data.objective": "pairs",
    "data.target_len": 7,
    "data.source_key": "a",
    "data.target_key": "b",
}
BF16 = {"fsdp.param_dtype": "bfloat16"}
LARGE = {"model.dim": 1024, "model.n_layers": 8, "model.max_seq_len": 2000, "train.seq_len": 1000, "run.peak_tflops": 2}
CONFIGS: list[tuple[dict[str, Any], int]] = [
    ({}, 8),
    ({"model.tie_embeddings": True, "model.family": "llama", "run.tf32": True, "run.device": "auto"}, 1),
    ({"model.layer_pattern": ["window", "full"], "model.window": 64, "model.n_layers": 1}, 3),
    ({"model.family": "qwen3_moe", "train.global_batch_size": 24, "train.micro_batch_size": 5}, 8),
    ({"model.family": "olmo_hybrid", "train.global_batch_size": 9, "train.micro_batch_size": 5}, 2),
    ({"model.family": "gemma3", "train.batch_schedule": [[0, 8], [4, 16]]} | BF16, 2),
    ({"model.family": "resformer", "train.batch_schedule": [[0, 12], [4, 20]], "train.micro_batch_size": 8}, 1),
    (T5 | {"sample.prompts": ["q"]}, 2),
    (PAIRS | {"model.family": "t5", "run.name": "a b"}, 2),
    (PAIRS | {"sample.prompts": ["", "it's", "b"]}, 5),
    (
        {
            **{"fsdp.reshard_after_forward": False, "fsdp.reduce_dtype": "bfloat16", "fsdp.blocks_per_group": 2},
            **{"fsdp.explicit_prefetching": True, "fsdp.forward_prefetch": 2, "fsdp.backward_prefetch": 3},
            **{"fsdp.reshard_after_backward": False, "fsdp.output_dtype": "bfloat16"},
            **{"fsdp.grad_sync": "last", "fsdp.shard_columns": ["*.wk.weight", "*.wq.weight"]},
            "fsdp.precision_overrides": [{"match": m, "param_dtype": "float32"} for m in ("norm*", "layers.0.*")],
            **{"fsdp.separate_reduce_scatter_group": True, "fsdp.reduce_scatter_buffers": 2},
            **{"activation_checkpointing.mode": "selective", "activation_checkpointing.every": 3},
            **{"compile.enabled": True, "compile.backend": "eager", "optim.freeze": ["a*", "b*"]},
            "fsdp.cast_forward_inputs": True,
        },
        8,
    ),
    (
        {
            **{"fsdp.reshard_after_forward": 2, "fsdp.explicit_prefetching": True, "fsdp.cpu_offload": True},
            **{"optim.name": "adamw", "activation_checkpointing.mode": "full", "fsdp.forward_prefetch": 1},
            **{"fsdp.pin_memory": False, "fsdp.grad_sync": "every"},
        },
        8,
    ),
    ({"fsdp.cpu_offload": True, "optim.name": "adamw", "speed.float8": False, "compile.enabled": True}, 4),
    (BF16 | {"speed.float8": True, "fsdp.grad_sync": "all_reduce_last", "fsdp.dp_replicate": 2}, 8),
    ({"fsdp.dp_shard": 1, "train.global_batch_size": 64}, 4),
    ({"fsdp.dp_shard": 1, "train.global_batch_size": 16}, 4),
]


# two of three samples are of the first source
SOURCES = [
    SimpleNamespace(mean_tokens=m, n_samples=n, notes=notes) for m, n, notes in ((32, 40, []), (31.5, 2, ["cut"]))
]
SAMPLES: Any = SimpleNamespace(names=["a", "b" * 201], sources=SOURCES, consumed=lambda n: [n - n // 3, n // 3])
ONE_SOURCE: Any = SimpleNamespace(names=["a"], sources=SOURCES[:1], consumed=lambda n: [n])
STEP: dict[str, Any] = {"step": 7, "loss": 2.5, "mean_loss": 2.25, "grad_norm": 1.5, "lr": 0.00125}
STEP |= {"tokens_per_second": 12345.6, "peak_memory_gib": 1.25}
MORE = {"loss_scale": 65536.0, "skipped_steps": 3, "mfu": 0.4126}
SAVED = TrainState(
    config={"optim.lr": 0.1, "log.every": 5, "model.init_from": "a", "gone": 1},
    must_match={"data": "x", "model.dim": 8},
    bitwise_setting={"threads": 1, "torch": "2.9", "cpu": "X"},
    validation={"samples": 5, "of": 9, "seed": 0},
    tasks={"quiz": "a", "other": "b"},
)
CHANGED = TrainState(
    config={"optim.lr": 0.2, "log.every": 5, "model.init_from": "b", "new": 2},
    must_match={"data": "y", "model.dim": 8},
    bitwise_setting={"threads": 2, "torch": "2.10", "cpu": "X"},
    validation={"samples": 7, "of": 9, "seed": 0},
    tasks={"quiz": "c", "third": "b"},
)
# a is cut anew, b continues, and another text has its name; c is not read anymore
READ = TrainState(
    segments=[
        {
            "sample": n,
            "sources": {
                key: {"name": name, "tokens": size, "cut": cut, "weight": int(not n or name != "c")}
                for key, (name, size, cut) in places.items()
            },
        }
        for n, places in enumerate(
            (
                {"1": ("a", 100, 8), "2": ("b", 200, 8), "3": ("c", 300, 8)},
                {"1": ("a", 110, 16), "2": ("b", 200, 8), "3": ("c", 300, 8), "4": ("b", 400, 16), "5": ("d", 500, 16)},
            )
        )
    ],
    source_tokens={"1": 1550, "2": 70, "3": 30, "4": 20},
)
LAST = [SimpleNamespace(attempt=n, hosts=hosts) for n, hosts in ((1, ["x"]), (2, ["a", "b"]))]
HOSTS = ["a", "a", "b"] * 9
SAVING = RankState(Place(7, 1, 2), [("saving step 7: writing x", True), ("loading", False)])
SAVES = RankState(Place(7, 1, 2), [("saving step 7", False)])
LIMIT = "run.timeout_minutes = 3"
THEN = [(1, 2, [3, 4, 5]), (1, 2, None), (1, None, [3])]
NOW = [
    (1, 2, [3, 4, 5]),
    (5, 6, [3, 4, 5]),
    (5, 2, [6, 4, 8]),
    (9, 2, [7, 8, 9]),
    (9, math.nan, [3, 8, 9]),
    (1, 2, [6]),
]
KNOWN = [
    *("train.steps", "train.seq_len", "eval.every", "log.every", "optim.lr", "data.path", "world-size", "per-node"),
]
TYPED = [
    "--nproc=2",
    "--train.stepz=5",
    "--retri",
    "train.steps=5",
    "my.toml",
    "word",
    "--x",
    "value",
    "--x=1",
    "y",
    "--NPROC=2",
    "config=my.toml",
]
NAMES = ["layers.0.attention.wq.weight", "layers.1.attention.wq.weight", "norm.weight"]
KEYS: dict[str, Any] = {f"key{i:02}": i for i in range(20)} | {"hash": "ab" * 32, "gone": 1, "same": 2}


def start_of(values: dict[str, Any], n: int) -> list[str]:
    """The lines that a config decides, on n ranks."""
    config = config_of(values, n)
    layout = derive(config, n)
    return [
        console.model_line(config, "9,999 parameters", widened=n == 2),
        console.batch_line(config, layout, n),
        console.fsdp_line(config),
        console.what_next(config).splitlines()[1].replace(environment.python_command(), "PYTHON"),
        f"out of memory: {out_of_memory.advice(config)}",
    ]


def data_lines(values: dict[str, Any], weights: Sequence[float], samples: Any) -> list[str]:
    config = config_of({"train.steps": 11, "train.global_batch_size": 6} | values, 1)
    return console.data_lines(config, data_of(*weights), samples, planned(samples, config.train.samples()))


def planned(samples: Any, n: int) -> list[Part]:
    """A run that has consumed n of these samples."""
    each = [*zip(samples.names, samples.sources, samples.consumed(n), strict=True)]
    sources = {name: {"name": name, "tokens": source.n_samples * source.mean_tokens} for name, source, _ in each}
    tokens = {name: round(consumed * source.mean_tokens) for name, source, consumed in each}
    state = TrainState(segments=[{"sample": 0, "sources": sources}], source_tokens=tokens)
    return [(range(1), config_of({}, 1), tokens, state)]


def data_of(*weights: float) -> Any:
    sources = [
        SimpleNamespace(name=name, weight=w, meta=SimpleNamespace(train_tokens=t))
        for name, w, t in zip(SAMPLES.names, weights, (8000, 1000), strict=False)
    ]
    tokens = {"train": 9000, "val": 1234}.__getitem__
    return SimpleNamespace(sources=sources, notes=["a note"], vocab_size=517, tokens=tokens)


def origin(saved: TrainState | None, fork: str, damaged: list[int]) -> str:
    saver: Any = SimpleNamespace(forked_from=fork, damaged=damaged)
    return console._origin(saved, saver)


def outcome(background: bool, done: bool, wait: bool, ends: bool, **saved: Any) -> list[Any]:
    """The error of a save of which this is known, what is recorded, and what is logged."""
    log: Any = Mock()
    saver: Any = Mock(
        config=Mock(async_save=background),
        remote=saved.pop("remote", None) and Mock(report=lambda _, wait: f"not in the bucket, waited: {wait}"),
        finished=lambda: done,
    )
    saver.wait.return_value = Saved(5, Path("c/step-5"), 3 << 19, 2.25, 0.5, **saved)
    error = saving.report_save(saver, log, wait=wait, ends=ends)
    return [error, *(call.args[0] for call in log.record.mock_calls + log.info.mock_calls)]


def differs(then: Any, now: Any, equal: int) -> str:
    """A replay of the steps 3 to 7, of which the run recorded only 7 and one before, which is equal."""
    last, here, before = (dict(zip(replay._COMPARED, values, strict=True)) for values in (then, now, (8.0, 9.0, [7.0])))
    return replay.compute(
        SimpleNamespace(watchdog=SimpleNamespace(step=str), state=None, pending=None),  # type: ignore[arg-type]
        lambda _, step: SimpleNamespace(numbers=SimpleNamespace(**(here if step == 7 else before))),  # type: ignore[arg-type, return-value]
        replay.Recorded(2, 7, "", {f"{equal}": before, "7": last}, [], "ADVICE"),
    )


def wrong(values: dict[str, Any]) -> list[str]:
    """What only the model's parameters or the text show."""
    config = config_of(values)
    looked_at = checks.check_patterns, checks.check_tasks
    return [problem for look in looked_at for problem in look(config).values()]


def in_steps(values: dict[str, Any], epoch: int = 31) -> list[Any]:
    found = epochs.in_steps(config_of(values), epoch)
    return [found.train.steps, found.train.epochs, found.checkpoint.every, found.eval.every]


def peak_tokens(values: dict[str, Any], world_size: int) -> float:
    config = config_of(LARGE | values, world_size)
    model = meta_model(config.model, 517)
    return start_and_end.peak_tokens_per_second(config, model, Process(0, world_size, torch.device("cpu"), 1))


MINE = flatten(Config()) | {"data.path": "my_text", "tokenizer.path": "t.json"}
CONTENT = {"tokenizer": "t", "data": "a" * 64, "order of data.sources": ["a", "b"]}


OTHER_TEXT: dict[str, Any] = {"data": "b" * 64}
OTHER_TOKENS: dict[str, Any] = {"tokenizer": "u", "tokenizer.path": "", "model.vocab_size": 9}
RESUMED_WITH: dict[str, Any] = {
    **{"optim.lr": 1e-3, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.0, "optim.warmup_steps": 1},
    **{"optim.schedule": "constant", "optim.groups": [{"match": "*norm*"}], "optim.max_norm": 2.0},
    **{"train.global_batch_size": 32, "train.batch_schedule": [[3, 4]], "train.z_loss": 1e-4, "run.seed": 3},
    "train.seq_len": 64,
    **{"model.norm_eps": 1e-6, "data.objective": "pairs", "data.skip_samples": [[0, 8]]},
    **{"model.dim": 256, "model.n_heads": 8, "model.qk_norm": True, "model.family": "gpt"},
    **{"optim.name": "sgd", "optim.freeze": ["norm.*"], "model.init_from": "runs/other"},
    **{"train.steps": 9, "train.micro_batch_size": 2, "fsdp.param_dtype": "bfloat16", "run.threads": 2},
    **{"log.every": 1, "checkpoint.every": 1, "sample.prompts": ["x"], "eval.samples": 3},
    **{"speed.chunked_loss": False, "compile.enabled": True, "data.path": "moved", "run.out_dir": "elsewhere"},
}


def resumed_with(changes: dict[str, Any], *, fork: bool) -> None:
    """What a resume, or a fork, with these values says."""
    saved = TrainState(step=7, config=MINE, must_match=CONTENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "this_command", lambda **given: " ".join(["FORK", *given.values()]))
        folder = Path("runs/run/checkpoints/step-00000007")
        compatibility.require_same_run(folder, saved, MINE | CONTENT | changes, fork=fork)


def exit_codes() -> dict[str, int]:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, UserError)]
    return {value.__name__: value.exit_code for value in found}


def forked(env: dict[str, str], resume: str) -> list[Any]:
    """The command of a fork, where the threads come from, and what is said of a launcher."""
    argv = ["train.py", "--run.name", "old", "--optim.lr=0.1", "--checkpoint.resume=x", "--data.path", "a b", "--retry"]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"):
            patch.delenv(name, raising=False)
        for name, value in ({"OMP_NUM_THREADS": "3,1"} | env).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "executable", "/usr/bin/python")
        threads = environment.cpu_threads(0)
        return [
            environment.this_command(run__name="new", checkpoint__resume=resume),
            threads if threads[1] == "OMP_NUM_THREADS" else "cores",
            *(preemption.launcher_note(why) for why in ("SIGTERM", LIMIT)),
        ]


def on_gpu(driver: str, capability: tuple[int, int]) -> list[Any]:
    """The peak of three, and what a start says about it."""
    cuda, lines = Process(0, 3, torch.device("cuda"), 1), [getattr(mfu.named(driver), "name", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda _=None: driver)
        patch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        for values in ({}, BF16, {"run.tf32": True}, {"fsdp.param_dtype": "float16"}, {"run.peak_tflops": 7.0}):
            config = config_of(values)
            lines += [f"{values}: {mfu.peak_flops(config, cuda) / 1e12:g} TFLOP/s", *mfu.start_lines(config, cuda)]
    return lines


def start_on(device: str, saved: TrainState | None, values: dict[str, Any]) -> list[str]:
    """The start on a busy machine, without its first line."""
    state = TrainState(bitwise_setting={"widen_matmuls": False, "deterministic": False})
    saver: Any = SimpleNamespace(forked_from=None, damaged=[9, 8])
    model: Any = SimpleNamespace(parameters=list)
    config = config_of({"eval.every": 0, "run.threads": 2, "fsdp.param_dtype": "float16"} | values, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        patch.setattr("torchtitan_lite.run.phases.planned", lambda *_: planned(ONE_SOURCE, config.train.samples()))
        s: Any = SimpleNamespace(config=config, data=data_of(3), samples=ONE_SOURCE, model=model, connected_s=0.0)
        s.process = Process(0, 1, torch.device(device), config.run.threads)
        vars(s).update(state=state, resumed=saved, checkpointer=saver)
        return console.start_lines(s).splitlines()[1:]


def migrated(content: dict[str, Any]) -> str:
    sets, others = migrate_accelerate.translate(content)
    return ", ".join([*(f"{key} = {value}" for key, (value, _) in sets.items()), *others.values()])


def launched(content: dict[str, Any]) -> str:
    return migrate_accelerate.to_toml(content, "x.yaml").splitlines()[-1]


BLOCK_CLASSES = [
    *("BertLayer", "LlamaDecoderLayer", "A, GPT2Block", "T5Block,Other", "Qwen3MoeDecoderLayer", "Qwen2DecoderLayer"),
    *("Qwen3DecoderLayer", "MistralDecoderLayer", "SmolLM3DecoderLayer", "Olmo2DecoderLayer", "Olmo3DecoderLayer"),
    *("OlmoHybridAttentionDecoderLayer", "OlmoHybridLinearAttentionDecoderLayer", "Gemma3DecoderLayer"),
    "OlmoeDecoderLayer",
]
# each value of each key of an Accelerate config
ACCELERATE = [
    {key: value}
    for key, rule in migrate_accelerate.RULES.items()
    for value in (
        [*filter(None, rule), "other", False, 3]
        if isinstance(rule, Mapping)
        else BLOCK_CLASSES
        if "_to_wrap" in key
        else ["auto", 0, 0.5]
        if key == "gradient_clipping"
        else [2]
    )
]

# --- scores whose figures can be computed by hand -----------------------------------------------------------------


def of(*values: float) -> Array:
    return np.array(values)


NEWS = Scores(of(20, 30, 70), of(10, 10, 30), of(40, 50, 110), of(1, 2, 3), seq_len=1024)
SAME = replace(NEWS, nats=of(22, 31, 75))
CODE = Scores(of(22, 31), of(10, 10), of(40, 50), of(1, 4), seq_len=16)
QUESTIONS = [Question(("a",) * n, ("b", "c", "d", "e")[:n], answer) for n, answer in ((2, 0), (4, 1), (2, 1))]
QUIZ, WORDS = Task("quiz", "multiple choice", QUESTIONS, "per_byte"), [Question(("a",), ("b",))] * 3
NATS = of(3, 4, 5), of(4, 4, 8)
FIRST_QUIZ = TaskScore(QUIZ, {"plain": of(1, 0, 0), "per_byte": of(1, 1, 0), "per_token": of(0, 0, 0)}, *NATS)
SECOND_QUIZ = replace(FIRST_QUIZ, correct=FIRST_QUIZ.correct | {"per_byte": of(1, 0, 0)})
WORD = TaskScore(Task("word", "last word", WORDS), {"accuracy": of(1, 0, 1)}, *NATS)
OTHER_WORD = TaskScore(Task("word", "last word", WORDS[:1]), {"accuracy": of(0)}, of(3), of(4))
FIRST = Scored("first", {"news": NEWS, "code": CODE}, {"quiz": FIRST_QUIZ, "word": WORD}, 1024, "x")
# the same documents as the first model's news, as other tokens, and others
TEXTS = {"web": SAME, "more": replace(SAME, tokens=of(11, 10, 30)), "gone": replace(CODE, hashes=of(8, 9))}
SECOND = Scored("second", TEXTS, {"quiz": SECOND_QUIZ, "word": OTHER_WORD, "new": WORD}, 512, "y")
ALONE = replace(SECOND, texts={"a": CODE}, tasks={}, tokenizer="x")
HUGE = replace(CODE, nats=of(1e5, 1e5), n_bytes=of(0, 0))


def compared(*scored: Any) -> Any:
    return json.loads(to_json(tables.compare_with_first(*scored), inf_nan_mode="null"))


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    # terminal.py, errors.py, environment.py, hints.py
    "counted": (terminal.counted, [(n, "file") for n in (0, 1, 2, 1_234_567)]),
    "duration": (
        terminal.duration,
        [(s,) for s in (0, 0.4, 1, 59.4, 59.6, 252, 3599.4, 3599.6, 7499, 86399, 86400, 86401, 273_599, 1_234_567)],
    ),
    "size": (
        terminal.size,
        [(n,) for n in (0, 1, 511, 10_485, 10_486, 2**20, 21_234_567, 2**30 - 1, 2**30, 5.5e12)],
    ),
    "shortened": (
        errors.shortened,
        [*(("x" * n, 5) for n in (5, 6, 1200)), (range(1, 5), 3), ("x" * 200,), ("x" * 201,)],
    ),
    "exit_codes": (exit_codes, [()]),
    "columns": (columns, [([("a", "bb", "c"), ("aaa", "b", "")], (1,))]),
    "forked": (
        forked,
        [
            ({}, "runs/a b"),
            ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ""),
            ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_MAX_RESTARTS": "3"}, "x"),
        ],
    ),
    "cpu_threads": (environment.cpu_threads, [(5,)]),
    "nearest": (
        lambda word: hints.nearest(word, KNOWN),
        [
            *(("train.step",), ("every",), ("EVAL.EVERYY",), ("lr",), ("nproc",), ("learning_rate",), ("log.steps",)),
            *(("seq-len",), ("gpus_per_node",), ("log.dataset",), ("zzzz.every",)),
        ],
    ),
    "meant": (lambda: {word: hints.nearest(word, sorted({*hints._MEANT.values()})) for word in hints._MEANT}, [()]),
    "not_options": (lambda *known: [*hints.not_options(TYPED, known)], [("train.steps", "retry"), ("world-size",)]),
    "unknown_keys": (hints.unknown_keys, [(TYPED,)]),
    "option": (
        hints.option,
        [
            *(("a.b", [1, "x y"], "?"), ("sample.prompts", ["a"], '["a"]'), ("a", [], "[]"), ("a", "it's", "?")),
            *(("a", True, "true"), ("a", [[1, 2]], "[[1, 2]]"), ("a", (0.5, 1), "?")),
        ],
    ),
    "pattern": (hints.pattern, [("layer.0.*", NAMES), ("*.wq", NAMES), ("norm", NAMES), ("a", [])]),
    "differences": (
        hints.differences,
        [
            (KEYS, {f"key{i:02}": i * (i % 9 > 1) for i in range(21)} | {"same": 2}),
            ({"hash": "ab" * 32, "gone": None}, {"hash": "cd" * 32}),
            (KEYS, {}),
            ({"path": "ab" * 33}, {"path": "ab" * 31}),
            *((dict.fromkeys(range(n), 0), {}) for n in (16, 17)),
        ],
    ),
    # run/
    "start": (start_of, CONFIGS),
    "start on": (
        start_on,
        [
            ("cpu", None, {"model.init_from": "w"}),
            ("cpu", None, {"run.threads": 1, "run.remote": "s3://x/"}),
            ("cuda", TrainState(step=7), {"model.init_from": "w"}),
            ("cuda", None, {"data.path": "x", "data.objective": "pairs", "data.target_len": 7}),
        ],
    ),
    "origin": (origin, [(None, "", []), (TrainState(step=7), "x/y", []), (TrainState(step=7), "", [9, 8])]),
    "data_lines": (
        data_lines,
        [
            ({"data.document_mask": True, "data.packing": "best_fit"}, (3, 1), SAMPLES),
            ({"train.steps": 100}, (3,), ONE_SOURCE),
            ({"train.steps": 110}, (3, 1), SAMPLES),
        ],
    ),
    "phase_lines": (
        lambda first, last, values: console.phase_lines(
            config_of({"train.steps": 40, "data.path": "x", "train.phases": [{"from_step": 9}]}, 1),
            [(range(first, last + 1), config_of(values, 1), *planned(SAMPLES, 60)[0][2:])],
        ),
        [(1, 9, {"optim.warmup_steps": 20}), (1000, 1001, {"train.batch_schedule": [[0, 8], [1000, 16]]})],
    ),
    "place_lines": (phases.place_lines, [(replace(READ, segments=READ.segments[n:]),) for n in (0, 1)]),
    "seen_of_sources": (console.seen_of_sources, [(READ,)]),
    "step_line": (
        console.step_line,
        [
            (STEP, [], 400, 0.25, 252.0),
            (STEP | {"loss": None, "grad_norm": None}, [], 9, 0.251, 4 * 3600),
            (STEP | MORE, ["loads 0.50-1.75"], 12345, 0.0, 100.4),
        ],
    ),
    "resume_lines": (
        lambda values, now: resumed.resume_lines(config_of(values), SAVED, now),
        [({}, CHANGED), ({"eval.every": 0}, CHANGED), ({}, SAVED)],
    ),
    "continued_by": (
        lambda saved, fresh: asdict(saved.continued_by(fresh)),
        [
            (
                replace(SAVED, step=7, tokens=5, samples_consumed=3, skipped=[2], end_token=1, begin_tokens=[5]),
                replace(CHANGED, end_token=4, begin_tokens=[6, 7]),
            )
        ],
    ),
    "machines_line": (
        lambda n, hosts: start_and_end.machines_line(LAST[:n], hosts),  # type: ignore[arg-type]
        [(2, ["b", "c"]), (2, ["a"]), (2, ["b", "a"]), (1, ["x", "y"]), (0, ["a"])],
    ),
    "ranks": (
        start_and_end._ranks,
        [([2], HOSTS), ([1, 3, 5], HOSTS), (range(8), HOSTS), (range(9), HOSTS), (range(27), HOSTS)],
    ),
    "explain_hang": (
        watchdog.explain_hang,
        [
            ({0: RankState(Place(7, 1, 3)), 1: RankState(Place(7, 1, 3))}, {}, LIMIT),
            (
                {0: RankState(Place(7, 1, 3)), 1: RankState(Place(7, 1, 2)), 2: RankState(Place(7)), 3: RankState()},
                {4: 61.6},
                LIMIT,
            ),
            ({0: RankState(), 1: RankState()}, {1: 200.4}, LIMIT),
            ({0: RankState(), 1: RankState()}, {}, LIMIT),
            ({0: RankState(), 1: RankState(Place(1)), 2: RankState(Place(2))}, {}, LIMIT),
            ({0: RankState(Place(7, 1, 2)), 1: RankState(Place(7, 1, 2))}, {1: 63.4}, LIMIT),
            ({0: SAVING, 1: SAVES}, {}, LIMIT),
            ({0: SAVES, 1: RankState(Place(7, 1, 2))}, {}, LIMIT),
            ({0: RankState(Place(7, 1, 2)), 1: SAVES}, {}, LIMIT),
            (
                {0: SAVING, 1: RankState(Place(7, 1, 2), [("saving step 7", False)]), 2: RankState(Place(7, 1, 2))},
                {},
                LIMIT,
            ),
        ],
    ),
    "wrong": (
        wrong,
        [
            ({"optim.freeze": ["nothing.*", "layers.0.*"]},),
            ({"optim.freeze": ["*"]},),
            ({"optim.groups": [{"match": "layer.*", "lr_factor": 0.5}]},),
            ({"fsdp.precision_overrides": [{"match": "layers.9.*", "param_dtype": "float32"}]},),
            ({"fsdp.shard_columns": ["*.w7.weight"]},),
            ({"eval.tasks": ["piqa"]},),
            (T5 | {"eval.tasks": ["brackets"]},),
        ],
    ),
    "in_steps": (
        in_steps,
        [
            *(({"train.epochs": 0.3},), ({"train.epochs": 2.05},)),
            ({"checkpoint.every": "epoch", "train.epochs": 1.0},),
            *(({"train.epochs": given}, epoch) for given, epoch in ((3.0, 7), (0.1, 30), (0.7, 10), (0.01, 7))),
        ],
    ),
    "on_gpu": (
        on_gpu,
        [
            *((name, (9, 0)) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA RTX A6000", "Some GPU")),
            *(("AMD Instinct MI300X", (9, 4)), ("Tesla V100-SXM2-32GB", (7, 0)), ("Tesla T4", (7, 5))),
        ],
    ),
    "peak tokens": (
        peak_tokens,
        [
            ({}, 3),
            ({"run.peak_tflops": 0}, 3),
            ({"data.path": "x", "data.objective": "pairs", "data.target_len": 7}, 3),
        ],
    ),
    "scalars": (
        trackers.scalars,
        [({"step": 3, "time": 9.5, "loss": 2, "grad_norm": None, "attempt": 1, "sources": {"a": 1}, "on": True},)],
    ),
    "grouped": (
        trackers.grouped,
        [
            *(("loss",), ("lr",), ("seconds",), ("mfu",), ("tokens_per_second",), ("save_s",), ("task_s",)),
            *(("val_loss",), ("ema_val_loss",), ("val_bits_per_byte",), ("unigram_bits_per_byte",)),
            *(("eval_samples",), ("task/x",), ("task_stderr/x",), ("task/in_s",)),
        ],
    ),
    "tasks": (
        lambda values: config_of(values).tasks,
        [
            *(({},), (T5,), ({"data.path": "mine"},), ({"data.sources": {"mine": 1.0}},), ({"eval.tasks": []},)),
            *(({"eval.tasks": ["auto", "a.jsonl"]},), ({"eval.tasks": ["auto", "a.jsonl"], "data.path": "mine"},)),
            ({"eval.tasks": ["brackets"], "data.path": "mine"},),
        ],
    ),
    # what a resume needs, and what contradicts the tensors
    **{
        name: (
            functools.partial(resumed_with, fork=fork),
            [
                ({"optim.lr": 0.5, "run.seed": 4, "log.every": 3},),
                ({"optim.lr": 0.5, "model.dim": 256},),
                *(({key: value},) for key, value in RESUMED_WITH.items()),
                *(
                    (values,)
                    for values in (
                        OTHER_TEXT | {"data.path": ""},
                        OTHER_TEXT | {"data.path": "other"},
                        OTHER_TEXT | {"data.path": "", "data.sources": {"x": 1.0}},
                        OTHER_TEXT | OTHER_TOKENS,
                        OTHER_TEXT | OTHER_TOKENS | {"data.path": "", "data.sources": {"x": 1.0}},
                        {"order of data.sources": ["b", "a"]},
                    )
                ),
            ],
        )
        for name, fork in (("a resume", False), ("a fork", True))
    },
    "read": (
        lambda key, value: flatten(config_of({key: value}))[key],
        [
            *(("train.batch_schedule", value) for value in ([[0, 1]], [[0]], [[0, 0]], [[-1, 4]], [[5, 4], [5, 8]])),
            *(("train.batch_schedule", value) for value in ([[9, 4], [5, 8]], [3, 4])),
            *(("data.skip_samples", value) for value in ([[0, 1], [1, 3]], [[3]], [[5, 5]], [[5, 3]], [[1, 2, 3]])),
            *(("data.skip_samples", value) for value in ([[0, 4], [3, 9]], [[8, 9], [1, 2]], [[-1, 4]])),
            *(("profile.steps", value) for value in ([1, 1], [3], [4, 3], [0, 1])),
            *(("train.epochs", value) for value in (-1, math.nan)),
            *(("eval.every", value) for value in ("epochs", "EPOCH", 0, -1)),
        ],
    ),
    "outcome of a save": (
        lambda more, *how: outcome(*how, **more),
        [
            *(({}, *how, False) for how in itertools.product((False, True), repeat=3)),
            ({"note": "disk"}, True, True, False, False),
            *(({"remote": True}, False, True, True, ends) for ends in (False, True)),
            ({"remote": True, "error": "disk"}, False, True, True, True),
            *(({"error": "disk"}, background, True, True, background) for background in (False, True)),
        ],
    ),
    # tools/
    "recipe": (
        checkpoints.recipe,
        [
            (ModelConfig(family="gpt", dim=32, n_layers=2, n_heads=2, max_seq_len=20, vocab_size=517),),
            (ModelConfig(family="gpt", dim=256, n_layers=2, n_heads=2, max_seq_len=240, vocab_size=5000),),
            (ModelConfig(dim=1024, n_layers=12, n_heads=8, max_seq_len=8192, vocab_size=32000),),
            (
                ModelConfig(
                    family="t5", dim=512, n_layers=6, n_decoder_layers=6, n_heads=8, max_seq_len=512, vocab_size=32000
                ),
            ),
        ],
    ),
    "differs": (
        differs,
        [*((then, now, equal) for then in THEN for now in NOW for equal in (6, 4)), (THEN[0], NOW[3], 2)],
    ),
    "compared": (
        compared,
        [
            (FIRST, None),
            (SECOND, FIRST),
            (ALONE, replace(FIRST, tasks={})),
        ],
    ),
    "figures": (lambda scores: json.loads(to_json(tables.figures(scores), inf_nan_mode="null")), [(HUGE,)]),
    "migrated": (
        migrated,
        [
            *((content,) for content in ACCELERATE),
            ({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"},),
            ({"fsdp_config": {"sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "NO_SHARD"}},),
            (
                {
                    "deepspeed_config": {
                        "zero_stage": 3,
                        "offload_param_device": "none",
                        "offload_optimizer_device": "cpu",
                    }
                },
            ),
        ],
    ),
    "launched": (
        launched,
        [
            ({},),
            ({"num_machines": 4, "num_processes": 4, "debug": None},),
            ({"num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1", "main_process_port": 29500},),
        ],
    ),
}


def result(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return call(*arguments)
    except UserError as error:
        return f"{type(error).__name__}: {error}"


def named(rows: list[tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Rows by their arguments, if they are short and the same on each run."""
    texts = [", ".join(map(repr, row)) for row in rows]
    return {
        text if " at 0x" not in text and len(text) < 100 else f"row {i}": row
        for i, (text, row) in enumerate(zip(texts, rows, strict=True))
    }


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now, local = time.mktime((2026, 3, 5, 20, 30, 0, 0, 0, -1)), time.localtime
    monkeypatch.setattr("time.localtime", lambda when=None: local(now if when is None else when))
    monkeypatch.setattr("time.time", lambda: now)
    found = {name: {key: result(call, row) for key, row in named(rows).items()} for name, (call, rows) in CALLS.items()}
    assert_recorded(found, Path(__file__).with_name("recorded_lines.json"))
